// Attention of folded query rows over one sequence's keys and values.
//
// A row sees logical positions: the committed ones, then its own path through the block. It goes
// over them in chunks that begin at fixed positions, each chunk by itself and in ascending order,
// wherever they lie, and adds the chunks up in that order, too. So a row's result depends on
// what it sees and on nothing else: neither on the rows beside it, nor on how far the slot is
// filled, nor on where in a tree its ancestors stand, nor on which thread took which chunk.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

constexpr int QUERIES = 6;          // query rows that are computed together, at most
constexpr int GROUP = 8 * QUERIES;  // query rows that share a walk over keys and values, at most
constexpr int64_t CHUNK = 128;      // positions that are summed up before they are added
constexpr int64_t LANES = 16;       // positions whose keys lie side by side

// One row's view: positions [begin, end); those from `committed` on lie at committed + path[i].
struct View {
    const float *query;  // [dim], scaled
    const int32_t *path;
    int64_t begin, end, committed;

    int64_t at(int64_t position) const {
        return position < committed || !path ? position : committed + path[position - committed];
    }
    // The end of what the rows of a block see alike.
    int64_t common() const { return path ? std::min(committed, end) : end; }
    // What of it lies in the chunk from this position on.
    View within(int64_t from) const {
        return {query, path, std::max(begin, from), std::min(end, from + CHUNK), committed};
    }
};

// What a row has seen of some positions: the largest score and, relative to it, the sums of the
// weights and of the weighted values [dim]. Without mass it has seen nothing.
struct Seen {
    float most, mass, *sum;
};

// A row's work in one chunk.
struct Row : View {
    float *weights;  // [CHUNK]
    float *sum;      // [dim]
    int64_t from;

    float *weight(int64_t position) const { return weights + (position - from); }
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
void score_vectors(const Row *rows, const Head<Kind> &head, int64_t begin) {
    const typename Kind::Item *keys[P];
    for (int p = 0; p < P; p++) keys[p] = head.key(begin + p * WIDTH);
    Floats acc[R][P] = {};
    for (int64_t d = 0; d < head.dim; d++) {
        Floats k[P];
        for (int p = 0; p < P; p++) k[p] = Kind::load(keys[p] + d * LANES);
        for (int r = 0; r < R; r++) {
            const Floats q = fill(rows[r].query[d]);
            for (int p = 0; p < P; p++) acc[r][p] = fma(q, k[p], acc[r][p]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) Fp32::store(rows[r].weight(begin + p * WIDTH), acc[r][p]);
}

// The same for positions [begin, end), rounded to whole vectors: what a row does not see of
// them is corrected afterwards.
template <class Kind, int R>
void score(const Row *rows, const Head<Kind> &head, int64_t begin, int64_t end) {
    constexpr int P = R == 1 ? 8 : R == 2 ? 4 : R == 3 ? 3 : 2;
    int64_t p = begin / WIDTH * WIDTH;
    for (; p + P * WIDTH <= end; p += P * WIDTH) score_vectors<Kind, R, P>(rows, head, p);
    for (; p < end; p += WIDTH) score_vectors<Kind, R, 1>(rows, head, p);
}

// The same for one row's path.
template <class Kind>
void score_path(const Row &row, const Head<Kind> &head) {
    const int64_t first = std::max(row.begin, row.committed);
    for (int64_t p = first; p < row.end; p += WIDTH) {
        const int some = (int)std::min<int64_t>(WIDTH, row.end - p);
        typename Kind::Item items[WIDTH] = {};
        Floats acc = {};
        for (int64_t d = 0; d < head.dim; d++) {
            for (int i = 0; i < some; i++) items[i] = head.key(row.at(p + i))[d * LANES];
            acc = fma(fill(row.query[d]), Kind::load(items), acc);
        }
        store_some(row.weight(p), acc, some);
    }
}

// Turns scores into e^(score - largest).
inline void soften(const Row &row, Seen &seen) {
    const Floats none = fill(-std::numeric_limits<float>::infinity());
    const int64_t first = row.begin / WIDTH * WIDTH, last = (row.end - 1) / WIDTH * WIDTH;
    float *weights = row.weight(first), *end = row.weight(last) + WIDTH;
    const Floats begins = read<Floats>(weights);
    Fp32::store(weights, lanes() < fill_ints(row.begin - first) ? none : begins);
    const Floats ends = read<Floats>(end - WIDTH);
    Fp32::store(end - WIDTH, lanes() < fill_ints(row.end - last) ? ends : none);
    Floats most = none;
    for (float *w = weights; w < end; w += WIDTH) {
        const Floats s = read<Floats>(w);
        most = s > most ? s : most;
    }
    seen.most = largest(most);
    Floats total = {};
    for (float *w = weights; w < end; w += WIDTH) {
        const Floats e = exp(read<Floats>(w) - seen.most);
        Fp32::store(w, e);
        total += e;
    }
    seen.mass = sum(total);
}

// sum += weights[p] * value over positions [begin, end), in D vectors of the head from `first` on.
template <class Kind, int R, int D>
void mix_part(const Row *rows, const Head<Kind> &head, int64_t first, int64_t begin,
              int64_t end) {
    const float *weights[R];
    for (int r = 0; r < R; r++) weights[r] = rows[r].weight(begin);
    Floats acc[R][D];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) acc[r][d] = read<Floats>(rows[r].sum + first + d * WIDTH);
    for (int64_t p = begin; p < end; p++) {
        const typename Kind::Item *value = head.values + rows[0].at(p) * head.dim + first;
        Floats v[D];
        for (int d = 0; d < D; d++) v[d] = Kind::load(value + d * WIDTH);
        for (int r = 0; r < R; r++) {
            const Floats weight = fill(weights[r][p - begin]);
            for (int d = 0; d < D; d++) acc[r][d] = fma(weight, v[d], acc[r][d]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) Fp32::store(rows[r].sum + first + d * WIDTH, acc[r][d]);
}

template <class Kind, int R>
void mix(const Row *rows, const Head<Kind> &head, int64_t begin, int64_t end) {
    constexpr int D = WIDTH == 16 ? 4 : 2;
    int64_t d = 0;
    for (; d + D * WIDTH <= head.dim; d += D * WIDTH)
        mix_part<Kind, R, D>(rows, head, d, begin, end);
    for (; d < head.dim; d += WIDTH) mix_part<Kind, R, 1>(rows, head, d, begin, end);
}

// The positions that rows [n] of a tile see alike, and those that any of them does.
struct Range {
    int64_t begin, end;
};

inline Range alike(const Row *rows, int64_t n) {
    Range r = {rows[0].begin, rows[0].common()};
    for (int64_t i = 1; i < n; i++) {
        r.begin = std::max(r.begin, rows[i].begin);
        r.end = std::min(r.end, rows[i].common());
    }
    return {r.begin, std::max(r.begin, r.end)};
}

template <class Kind>
void score_tile(const Row *rows, int64_t n, const Head<Kind> &head) {
    Range any = {rows[0].begin, rows[0].common()};
    for (int64_t i = 1; i < n; i++) {
        any.begin = std::min(any.begin, rows[i].begin);
        any.end = std::max(any.end, rows[i].common());
    }
    with_count(n, [&]<int R>(Count<R>) { score<Kind, R>(rows, head, any.begin, any.end); });
}

template <class Kind>
void mix_tile(const Row *rows, int64_t n, const Head<Kind> &head) {
    const Range all = alike(rows, n);
    for (int64_t i = 0; i < n; i++)
        mix<Kind, 1>(rows + i, head, rows[i].begin, std::min(all.begin, rows[i].end));
    with_count(n, [&]<int R>(Count<R>) { mix<Kind, R>(rows, head, all.begin, all.end); });
    for (int64_t i = 0; i < n; i++)
        mix<Kind, 1>(rows + i, head, std::max(all.end, rows[i].begin), rows[i].end);
}

// What up to GROUP rows see of the chunk from position `from` on.
template <class Kind>
void attend(const View *views, int64_t n, const Head<Kind> &head, int64_t from, Seen *seen) {
    alignas(64) float weights[GROUP * CHUNK];
    Row rows[GROUP];
    Seen *of[GROUP];
    int64_t some = 0;
    for (int64_t i = 0; i < n; i++) {
        const View part = views[i].within(from);
        seen[i].mass = 0;
        if (part.begin >= part.end) continue;
        rows[some] = {part, weights + some * CHUNK, seen[i].sum, from};
        of[some++] = seen + i;
    }
    const int64_t tiles = (some + QUERIES - 1) / QUERIES;
    auto each_tile = [&](auto f) {
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = t * some / tiles;
            f(rows + first, (t + 1) * some / tiles - first);
        }
    };
    each_tile([&](const Row *tile, int64_t m) { score_tile(tile, m, head); });
    for (int64_t i = 0; i < some; i++) {
        if (rows[i].path) score_path(rows[i], head);
        soften(rows[i], *of[i]);
        for (int64_t d = 0; d < head.dim; d += WIDTH) Fp32::store(rows[i].sum + d, Floats{});
    }
    each_tile([&](const Row *tile, int64_t m) { mix_tile(tile, m, head); });
}

// Adds what a row has seen of a chunk to what it has seen before it.
inline void add(Seen &total, const Seen &part, int64_t dim) {
    if (part.mass == 0) return;
    if (total.mass == 0) {
        total.most = part.most, total.mass = part.mass;
        std::copy(part.sum, part.sum + dim, total.sum);
        return;
    }
    const float most = part.most > total.most ? part.most : total.most;
    const float before = exp(fill(total.most - most))[0], now = exp(fill(part.most - most))[0];
    total.most = most;
    total.mass = total.mass * before + part.mass * now;
    for (int64_t d = 0; d < dim; d += WIDTH) {
        const Floats scaled = read<Floats>(total.sum + d) * before;
        Fp32::store(total.sum + d, fma(read<Floats>(part.sum + d), fill(now), scaled));
    }
}
