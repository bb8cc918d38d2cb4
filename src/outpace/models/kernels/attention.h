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

constexpr int QUERIES = 8;  // query rows that share a walk over keys and values, at most

// One row's view: positions [begin, end); those from `committed` on lie at committed + path[i].
struct View {
    const float *query;  // [dim], scaled
    float *weights;      // [end rounded up], by logical position
    float *out;          // [dim]
    const int32_t *path;
    int64_t begin, end, committed;
    int64_t at(int64_t position) const {
        return position < committed || !path ? position
                                             : committed + path[position - committed];
    }
};

// Keys or values of one head: item i of position p at data[p * stride + i].
template <class Kind>
struct Head {
    const typename Kind::Item *data;
    int64_t stride;
    const typename Kind::Item *operator[](int64_t p) const { return data + p * stride; }
};

// weights[p] = query . key for R views and positions [begin, end), which all of them see alike.
template <class Kind, int R>
void score(const View *views, Head<Kind> keys, int64_t dim, int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p += WIDTH) {
        const int some = (int)std::min<int64_t>(WIDTH, end - p);
        Floats products[R][WIDTH] = {};
        for (int i = 0; i < some; i++) {
            const typename Kind::Item *key = keys[views[0].at(p + i)];
            Floats acc[R] = {};
            for (int64_t d = 0; d < dim; d += WIDTH) {
                const Floats k = Kind::load(key + d);
                for (int r = 0; r < R; r++)
                    acc[r] = fma(read<Floats>(views[r].query + d), k, acc[r]);
            }
            for (int r = 0; r < R; r++) products[r][i] = acc[r];
        }
        for (int r = 0; r < R; r++) store_some(views[r].weights + p, sums(products[r]), some);
    }
}

// out += weights[p] * value over positions [begin, end), in D vectors of the head from `first` on.
template <class Kind, int R, int D>
void mix_part(const View *views, Head<Kind> values, int64_t first, int64_t begin, int64_t end) {
    Floats acc[R][D];
    for (int r = 0; r < R; r++)
        for (int d = 0; d < D; d++) acc[r][d] = read<Floats>(views[r].out + first + d * WIDTH);
    for (int64_t p = begin; p < end; p++) {
        const typename Kind::Item *value = values[views[0].at(p)] + first;
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
void mix(const View *views, Head<Kind> values, int64_t dim, int64_t begin, int64_t end) {
    constexpr int D = WIDTH == 16 && R <= 4 ? 4 : WIDTH == 16 ? 2 : 1;
    int64_t d = 0;
    for (; d + D * WIDTH <= dim; d += D * WIDTH)
        mix_part<Kind, R, D>(views, values, d, begin, end);
    for (; d < dim; d += WIDTH) mix_part<Kind, R, 1>(views, values, d, begin, end);
}

// Calls f with the number of views as a type, so that loops over them unroll.
template <int N>
struct Count {};

template <class F>
void with_count(int n, F f) {
    static_assert(QUERIES == 8, "one case for each number of query rows");
    switch (n) {
        case 1: return f(Count<1>());
        case 2: return f(Count<2>());
        case 3: return f(Count<3>());
        case 4: return f(Count<4>());
        case 5: return f(Count<5>());
        case 6: return f(Count<6>());
        case 7: return f(Count<7>());
        default: return f(Count<8>());
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

// Attention of up to QUERIES views of one head. `dim` is a multiple of the vectors' width.
template <class Kind>
void attend(const View *views, int n, Head<Kind> keys, Head<Kind> values, int64_t dim) {
    int64_t begin = 0, end = std::numeric_limits<int64_t>::max();  // what all of them see alike
    for (int r = 0; r < n; r++) {
        begin = std::max(begin, views[r].begin);
        end = std::min({end, views[r].end, views[r].path ? views[r].committed : views[r].end});
    }
    end = std::max(begin, end);
    auto before = [&](int r) { return std::min(begin, views[r].end); };
    for (int r = 0; r < n; r++) score<Kind, 1>(views + r, keys, dim, views[r].begin, before(r));
    with_count(n, [&]<int R>(Count<R>) { score<Kind, R>(views, keys, dim, begin, end); });
    for (int r = 0; r < n; r++) score<Kind, 1>(views + r, keys, dim, end, views[r].end);
    float totals[QUERIES];
    for (int r = 0; r < n; r++) {
        totals[r] = soften(views[r]);
        std::fill(views[r].out, views[r].out + dim, 0.0f);
        mix<Kind, 1>(views + r, values, dim, views[r].begin, before(r));
    }
    with_count(n, [&]<int R>(Count<R>) { mix<Kind, R>(views, values, dim, begin, end); });
    for (int r = 0; r < n; r++) {
        mix<Kind, 1>(views + r, values, dim, end, views[r].end);
        for (int64_t d = 0; d < dim; d++) views[r].out[d] /= totals[r];
    }
}
