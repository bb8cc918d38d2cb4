// From logits to tokens: softmax with a temperature and filters, draws and races.
//
// A draw inverts the distribution function in double precision, adding up in ascending order.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.h"

// Elements [i, i + WIDTH) of a row of n, filled up behind its end.
inline Floats row_vector(const float *x, int64_t n, int64_t i, float behind) {
    if (i + WIDTH <= n) return read<Floats>(x + i);
    Floats some = fill(behind);
    std::memcpy(&some, x + i, (n - i) * sizeof(float));
    return some;
}

inline float largest_of(const float *x, int64_t n) {
    Floats most = fill(x[0]);
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Floats some = row_vector(x, n, i, x[0]);
        most = some > most ? some : most;
    }
    return largest(most);
}

// The first of these; 0 where there is none, as among what are not numbers.
inline int64_t first_of(const float *x, int64_t n, float value) {
    const float *at = std::find(x, x + n, value);
    return at == x + n ? 0 : at - x;
}

// The first of the largest logits, and how far it is above the logarithm of all mass.
inline void find_top(const float *logits, int64_t n, int64_t *token, float *logprob) {
    const float most = largest_of(logits, n);
    Floats mass = {};
    for (int64_t i = 0; i < n; i += WIDTH)
        mass += exp(row_vector(logits, n, i, -std::numeric_limits<float>::infinity()) - most);
    *token = first_of(logits, n, most);
    *logprob = -std::log(sum(mass));
}

// p = softmax(logits / temperature); all of it on the first largest where that is 0.
inline void softmax(const float *logits, int64_t n, float temperature, float *p) {
    const float most = largest_of(logits, n);
    if (temperature == 0) {
        std::fill(p, p + n, 0.0f);
        p[first_of(logits, n, most)] = 1;
        return;
    }
    Floats mass = {};
    const float by = 1.0f / temperature;
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Floats x = row_vector(logits, n, i, -std::numeric_limits<float>::infinity());
        const Floats e = exp((x - most) * by);
        if (i + WIDTH <= n) Fp32::store(p + i, e);
        else store_some(p + i, e, n - i);
        mass += e;
    }
    const float scale = 1.0f / sum(mass);
    for (int64_t i = 0; i < n; i++) p[i] *= scale;
}

// What is left of a law: its k likeliest tokens, the smallest set of most likely ones with mass
// top_p, those at least min_p times as likely as the likeliest. In this order, as in
// sampling/warp.py; k = n, top_p = 1 and min_p = 0 leave it as it is.
struct Filter {
    int64_t k;
    float top_p, min_p;
};

// A law's entries that pass, scaled to a sum of 1.
template <class Passes>
void keep(float *p, int64_t n, Passes passes) {
    double mass = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!passes(i)) p[i] = 0;
        mass += p[i];
    }
    for (int64_t i = 0; i < n; i++) p[i] = float(p[i] / mass);
}

inline void filter_top_p(float *p, int64_t n, float top_p) {
    // Tokens below this have less mass together than what may be left out.
    const float least = (1 - top_p) / float(n) * 0.999f;
    static thread_local std::vector<std::pair<float, int64_t>> ranked;
    ranked.clear();
    for (int64_t i = 0; i < n; i++)
        if (p[i] > least) ranked.emplace_back(-p[i], i);
    std::sort(ranked.begin(), ranked.end());  // of equals the first
    double before = 0;
    size_t kept = 0;
    while (kept < ranked.size() && (kept == 0 || before < top_p)) before -= ranked[kept++].first;
    const auto last = ranked[kept - 1];
    keep(p, n, [&](int64_t i) { return std::make_pair(-p[i], i) <= last; });
}

// The law of logits under a temperature and a filter.
inline void warp(const float *logits, int64_t n, float temperature, Filter filter, float *p) {
    const bool number = std::none_of(logits, logits + n, [](float x) { return std::isnan(x); });
    if (temperature == 0 || !number) return softmax(logits, n, temperature, p);
    if (filter.k < n) {
        static thread_local std::vector<float> ranked;
        ranked.assign(logits, logits + n);
        const auto at = ranked.begin() + (filter.k - 1);
        std::nth_element(ranked.begin(), at, ranked.end(), std::greater<float>());
        for (int64_t i = 0; i < n; i++)  // ties with the k-th stay
            p[i] = logits[i] < *at ? -std::numeric_limits<float>::infinity() : logits[i];
        logits = p;
    }
    softmax(logits, n, temperature, p);
    if (std::isnan(p[0])) return;  // of infinite logits
    if (filter.top_p < 1) filter_top_p(p, n, filter.top_p);
    if (filter.min_p > 0) {
        const float least = filter.min_p * largest_of(p, n);
        keep(p, n, [&](int64_t i) { return p[i] >= least; });
    }
}

// Filters of a batch, or none.
struct Filters {
    const int64_t *k;  // [batch], or null
    const float *top_p, *min_p;

    Filter of(int64_t b, int64_t n) const {
        return k ? Filter{k[b], top_p[b], min_p[b]} : Filter{n, 1, 0};
    }
};

// Draws an index by the masses p(0), p(1), ...; the last where they are not numbers.
template <class P>
int64_t draw(P p, int64_t n, double u) {
    double mass = 0, sum = 0;
    for (int64_t i = 0; i < n; i++) mass += p(i);
    // Below 1 by more than an ulp, u times the mass never rounds up to the mass.
    const double point = std::min(u, 1 - 0x1p-52) * mass;
    for (int64_t i = 0; i < n; i++)
        if ((sum += p(i)) > point) return i;
    return n - 1;
}

inline int64_t draw_row(const float *p, int64_t n, double u) {
    return draw([p](int64_t i) { return p[i]; }, n, u);
}

// Philox4x32-10 (Salmon et al., 2011), by the same counters and keys as in sampling/noise.py: the
// first two words for each index. All are lower words; upper ones hold anything.
template <class Word>
inline void random_words(uint64_t seed, uint64_t position, uint32_t stream, Word index, Word *low,
                         Word *high) {
    Word c0 = index, c1 = Word{} + uint32_t(position), c2 = Word{} + stream;
    Word c3 = Word{} + (position >> 32);
    uint32_t k0 = seed, k1 = seed >> 32;
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++) {
        const Word a = multiply_lower(c0, 0xD2511F53), b = multiply_lower(c2, 0xCD9E8D57);
        c0 = (b >> 32) ^ c1 ^ k0, c1 = b;
        c2 = (a >> 32) ^ c3 ^ k1, c3 = a;
        k0 += 0x9E3779B9, k1 += 0xBB67AE85;
    }
    *low = c0, *high = c1;
}

// 53 random bits.
inline uint64_t random_bits(uint64_t seed, uint64_t position, uint32_t stream, uint32_t index) {
    uint64_t low, high;
    random_words(seed, position, stream, uint64_t{index}, &low, &high);
    return uint64_t{uint32_t(high)} << 21 ^ uint32_t(low) >> 11;
}

// The first 24 of these, for each index.
inline Floats first_bits(uint64_t seed, uint64_t position, uint32_t stream, Ints index) {
    const Longs pairs = bits<Longs>(index);
    Longs rest, lower, upper;
    random_words(seed, position, stream, pairs, &rest, &lower);
    random_words(seed, position, stream, pairs >> 32, &rest, &upper);
    const Words words = bits<Words>((lower & 0xFFFFFFFF) | upper << 32);
    return __builtin_convertvector((Ints)(words >> 8), Floats);
}

// Calls f(token, time) in ascending order, of all tokens whose exponential times for their
// probability are below `best`, and of some more. f makes it smaller; see sampling/races.py.
//
// A time is -log1p(-u) / p, no less than u / p, and u is known to 24 bits, `some`, before the rest
// and the logarithm are computed. A token is passed over if some > reach * p in floats. Neither
// rounding nor underflow (reach is normal, and some > 0) takes more than 2^-22 off the product, so
// u >= some * 2^-24 > best * p * (1 + 2^-21), and its time in doubles, with a logarithm within
// some units in the last place, is above the best: it neither wins nor ties.
template <class F>
void race(const float *p, int64_t n, uint64_t seed, uint64_t position, const double &best, F f) {
    constexpr uint32_t RACE = 4;
    float reach = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; i += WIDTH) {
        const Floats mass = row_vector(p, n, i, 0.0f);
        if (!any(mass > 0.0f)) continue;
        const Floats some = first_bits(seed, position, RACE, lanes() + int32_t(i));
        if (!any(some <= reach * mass)) continue;
        for (int64_t j = 0; j < WIDTH; j++) {
            if (!(mass[j] > 0 && some[j] <= reach * mass[j])) continue;
            const double u = double(int64_t(random_bits(seed, position, RACE, i + j))) * 0x1p-53;
            f(i + j, -std::log1p(-u) / mass[j]);
            reach = std::max(float(best * (0x1p24 + 0x1p4)), std::numeric_limits<float>::min());
        }
    }
}

// The token whose time is the shortest, of equals the first.
inline int64_t race_row(const float *p, int64_t n, uint64_t seed, uint64_t position) {
    double best = std::numeric_limits<double>::infinity();
    int64_t winner = 0;
    race(p, n, seed, position, best, [&](int64_t token, double time) {
        if (time < best) best = time, winner = token;
    });
    return winner;
}

// The first `count` of the tokens in the order of their times, as far as they have probability.
inline void race_children(const float *p, int64_t n, int64_t count, uint64_t seed,
                          uint64_t position, int64_t *tokens) {
    if (count == 0) return;
    std::vector<double> times(count, std::numeric_limits<double>::infinity());
    race(p, n, seed, position, times.back(), [&](int64_t token, double time) {
        const int64_t j = std::upper_bound(times.begin(), times.end(), time) - times.begin();
        if (j == count) return;
        for (int64_t k = count - 1; k > j; k--) times[k] = times[k - 1], tokens[k] = tokens[k - 1];
        times[j] = time, tokens[j] = token;
    });
}

// Draws children of a row without replacement, each from what those before have left, by uniforms
// u [count] or where there are none by a race; see `without_replacement` in sampling/draws.py.
// Writes the rows q [count, n] that they were drawn from.
inline void draw_children(const float *p, const float *scores, int64_t n, int64_t count,
                          const double *u, uint64_t seed, uint64_t position, float *q,
                          int64_t *tokens) {
    if (!u) race_children(p, n, count, seed, position, tokens);
    std::vector<char> taken(n);
    for (int64_t j = 0; j < count; j++, q += n) {
        double mass = 0;
        for (int64_t i = 0; i < n; i++) mass += taken[i] ? 0 : p[i];
        if (mass > 0) {
            for (int64_t i = 0; i < n; i++) q[i] = taken[i] ? 0 : float(p[i] / mass);
            if (u) tokens[j] = draw_row(q, n, u[j]);
        } else {
            int64_t best = -1;
            for (int64_t i = 0; i < n; i++)
                if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
            std::fill(q, q + n, 0.0f);
            tokens[j] = std::max<int64_t>(best, 0);
            q[tokens[j]] = 1;
        }
        taken[tokens[j]] = 1;
    }
}
