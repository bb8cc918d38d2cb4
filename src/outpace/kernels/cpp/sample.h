// From logits to tokens: softmax with a temperature, draws, and the rule of token verification.
//
// A draw inverts the distribution function in double precision, adding up in ascending order.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

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

// Goes down a chain: token x ~ q stays with probability min(1, p(x) / q(x)). Returns how many
// stay, and draws the one behind them, from (p - q)+ where one was rejected (Leviathan et al.,
// 2023). Without q the tokens were certain.
inline int64_t verify_chain(const float *p, const float *q, const int64_t *tokens, int64_t length,
                            int64_t n, const double *accept, const double *target,
                            int64_t *token) {
    int64_t kept = 0;
    for (; kept < length; kept++, p += n, q += q ? n : 0) {
        const int64_t x = tokens[kept];
        const double qx = q ? q[x] : 1;
        if (!(accept[kept] * qx < p[x] && qx > 0)) break;
    }
    const double u = target[kept];
    if (kept == length) {
        *token = draw_row(p, n, u);
        return kept;
    }
    const int64_t x = tokens[kept];
    auto rest = [&](int64_t i) {
        if (!q) return i == x ? 0.0f : p[i];
        return p[i] > q[i] ? p[i] - q[i] : 0.0f;
    };
    bool some = false;
    for (int64_t i = 0; i < n; i++) some |= rest(i) > 0;
    *token = some ? draw(rest, n, u) : draw_row(p, n, u);
    return kept;
}
