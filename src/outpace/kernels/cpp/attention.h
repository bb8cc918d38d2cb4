// Attention of folded query rows over one sequence's keys and values.
//
// A row sees logical positions: the committed ones, then its own path through the block. It
// visits them in ascending order wherever they lie, alone or with other rows. So a row's
// result depends on what it sees and on nothing else: neither on the rows beside it, nor on
// how far the slot is filled, nor on where in a tree its ancestors stand.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

constexpr int QUERIES = 6;          // query rows that are computed together, at most
constexpr int GROUP = 8 * QUERIES;  // query rows that share a walk over keys and values, at most
constexpr int64_t WALK = 256;       // positions they walk over before the next rows' turn
constexpr int64_t LANES = 16;       // positions whose keys lie side by side

// One row's view: positions [begin, end); those from `committed` on lie at committed + path[i].
struct View {
    const float *query;  // [dim], scaled
    float *weights;      // by logical position, with room for a vector behind the last
    float *out;          // [dim]
    const int32_t *path;
    int64_t begin, end, committed;

    int64_t at(int64_t position) const {
        return position < committed || !path ? position : committed + path[position - committed];
    }
    // The end of what the rows of a block see alike.
    int64_t common() const { return path ? committed : end; }
};

// Keys [positions / 16, dim, 16] and values [positions, dim] of one head; dim is padded with zeros
// to whole vectors.
template <class Kind>
struct Head {
    const typename Kind::Item *keys, *values;
    int64_t dim;

    const typename Kind::Item *key(int64_t position) const {
        return keys + position / LANES * LANES * dim + position % LANES;
    }
};

// Calls f with a number as a type, so that loops over so many rows unroll.
template <int N>
struct Count {};

template <class F>
void with_count(int64_t n, F f) {
    static_assert(QUERIES == 6, "one case for each number of query rows");
    switch (n) {
        case 1: return f(Count<1>());
        case 2: return f(Count<2>());
        case 3: return f(Count<3>());
        case 4: return f(Count<4>());
        case 5: return f(Count<5>());
        default: return f(Count<6>());
    }
}

// weights[p] = query . key for R rows and P vectors of positions from `begin` on.
template <class Kind, int R, int P>
void score_vectors(const View *views, const Head<Kind> &head, int64_t begin) {
    const typename Kind::Item *keys[P];
    for (int p = 0; p < P; p++) keys[p] = head.key(begin + p * WIDTH);
    Floats acc[R][P] = {};
    for (int64_t d = 0; d < head.dim; d++) {
        Floats k[P];
        for (int p = 0; p < P; p++) k[p] = Kind::load(keys[p] + d * LANES);
        for (int r = 0; r < R; r++) {
            const Floats q = fill(views[r].query[d]);
            for (int p = 0; p < P; p++) acc[r][p] = fma(q, k[p], acc[r][p]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) Fp32::store(views[r].weights + begin + p * WIDTH, acc[r][p]);
}

// The same for positions [begin, end), rounded to whole vectors: what a row does not see of
// them is corrected afterwards.
template <class Kind, int R>
void score(const View *views, const Head<Kind> &head, int64_t begin, int64_t end) {
    constexpr int P = R == 1 ? 8 : R == 2 ? 4 : R == 3 ? 3 : 2;
    int64_t p = begin / WIDTH * WIDTH;
    for (; p + P * WIDTH <= end; p += P * WIDTH) score_vectors<Kind, R, P>(views, head, p);
    for (; p < end; p += WIDTH) score_vectors<Kind, R, 1>(views, head, p);
}

// The same for one row's path.
template <class Kind>
void score_path(const View &view, const Head<Kind> &head) {
    const int64_t first = std::max(view.begin, view.committed);
    for (int64_t p = first; p < view.end; p += WIDTH) {
        const int some = (int)std::min<int64_t>(WIDTH, view.end - p);
        typename Kind::Item items[WIDTH] = {};
        Floats acc = {};
        for (int64_t d = 0; d < head.dim; d++) {
            for (int i = 0; i < some; i++) items[i] = head.key(view.at(p + i))[d * LANES];
            acc = fma(fill(view.query[d]), Kind::load(items), acc);
        }
        store_some(view.weights + p, acc, some);
    }
}

// Turns scores into e^(score - largest); returns their sum.
inline float soften(const View &view) {
    const float none = -std::numeric_limits<float>::infinity();
    const int64_t first = view.begin / WIDTH * WIDTH;
    const int64_t last = (view.end + WIDTH - 1) / WIDTH * WIDTH;
    std::fill(view.weights + first, view.weights + view.begin, none);
    std::fill(view.weights + view.end, view.weights + last, none);
    Floats most = fill(none);
    for (int64_t p = first; p < last; p += WIDTH) {
        const Floats s = read<Floats>(view.weights + p);
        most = s > most ? s : most;
    }
    const Floats top = fill(largest(most));
    Floats total = {};
    for (int64_t p = first; p < last; p += WIDTH) {
        const Floats e = exp(read<Floats>(view.weights + p) - top);
        Fp32::store(view.weights + p, e);
        total += e;
    }
    return sum(total);
}

// out += weights[p] * value over positions [begin, end), in D vectors of the head from `first` on.
template <class Kind, int R, int D>
void mix_part(const View *views, const Head<Kind> &head, int64_t first, int64_t begin,
              int64_t end) {
    Floats acc[R][D];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) acc[r][d] = read<Floats>(views[r].out + first + d * WIDTH);
    for (int64_t p = begin; p < end; p++) {
        const typename Kind::Item *value = head.values + views[0].at(p) * head.dim + first;
        Floats v[D];
        for (int d = 0; d < D; d++) v[d] = Kind::load(value + d * WIDTH);
        for (int r = 0; r < R; r++) {
            const Floats weight = fill(views[r].weights[p]);
            for (int d = 0; d < D; d++) acc[r][d] = fma(weight, v[d], acc[r][d]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) Fp32::store(views[r].out + first + d * WIDTH, acc[r][d]);
}

template <class Kind, int R>
void mix(const View *views, const Head<Kind> &head, int64_t begin, int64_t end) {
    constexpr int D = WIDTH == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + D * WIDTH <= head.dim; d += D * WIDTH)
        mix_part<Kind, R, D>(views, head, d, begin, end);
    for (; d < head.dim; d += WIDTH) mix_part<Kind, R, 1>(views, head, d, begin, end);
}

// Rows of a tile and the positions that all of them see alike.
struct Tile {
    const View *views;
    int64_t rows, begin, end;

    Tile(const View *views, int64_t rows) : views(views), rows(rows), begin(0) {
        end = std::numeric_limits<int64_t>::max();
        for (int64_t r = 0; r < rows; r++) {
            begin = std::max(begin, views[r].begin);
            end = std::min(end, views[r].common());
        }
        end = std::max(begin, end);
    }
};

template <class Kind>
void score_tile(const Tile &t, const Head<Kind> &head, int64_t from, int64_t to) {
    int64_t begin = t.begin, end = t.end;  // widened to what any row sees of it
    for (int64_t r = 0; r < t.rows; r++) {
        begin = std::min(begin, t.views[r].begin);
        end = std::max(end, t.views[r].common());
    }
    begin = std::max(begin, from), end = std::min(end, to);
    with_count(t.rows, [&]<int R>(Count<R>) { score<Kind, R>(t.views, head, begin, end); });
}

template <class Kind>
void mix_tile(const Tile &t, const Head<Kind> &head, int64_t from, int64_t to) {
    auto within = [&](int64_t p) { return std::min(std::max(p, from), to); };
    for (int64_t r = 0; r < t.rows; r++) {
        const View &v = t.views[r];
        mix<Kind, 1>(&v, head, within(v.begin), within(std::min(t.begin, v.end)));
    }
    with_count(t.rows, [&]<int R>(Count<R>) {
        mix<Kind, R>(t.views, head, within(t.begin), within(t.end));
    });
    for (int64_t r = 0; r < t.rows; r++) {
        const View &v = t.views[r];
        mix<Kind, 1>(&v, head, within(t.end), within(v.end));
    }
}

// Attention of up to GROUP rows over one head.
template <class Kind>
void attend(const View *views, int64_t n, const Head<Kind> &head) {
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t r = 0; r < n; r++) {
        begin = std::min(begin, views[r].begin);
        end = std::max(end, views[r].end);
    }
    begin = begin / WALK * WALK;
    const int64_t tiles = (n + QUERIES - 1) / QUERIES;
    auto each_tile = [&](auto f) {
        for (int64_t from = begin; from < end; from += WALK) {
            for (int64_t t = 0; t < tiles; t++) {
                const int64_t first = t * n / tiles;
                f(Tile(views + first, (t + 1) * n / tiles - first), from, from + WALK);
            }
        }
    };
    each_tile([&](const Tile &t, int64_t from, int64_t to) { score_tile(t, head, from, to); });
    float totals[GROUP];
    for (int64_t r = 0; r < n; r++) {
        if (views[r].path) score_path(views[r], head);
        totals[r] = soften(views[r]);
        std::fill(views[r].out, views[r].out + head.dim, 0.0f);
    }
    each_tile([&](const Tile &t, int64_t from, int64_t to) { mix_tile(t, head, from, to); });
    for (int64_t r = 0; r < n; r++)
        for (int64_t d = 0; d < head.dim; d++) views[r].out[d] /= totals[r];
}
