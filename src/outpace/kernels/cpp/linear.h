// Linear layers over packed weights: few rows, each computed alike however many there are.
//
// A weight [out, in] lies in blocks of 64 outputs, [out / 64, in, 64]. An output is a sum of
// partial sums over stretches of inputs, each in a fixed order: neither the number of rows, nor
// that of threads, nor the width of the processor's vectors changes a bit of it.
//
// Quantised weights are multiplied as integers: the inputs of a stretch are rounded to 16 bits
// of their largest, which is finer than bf16, and the partial sum of a stretch is exact. Where the
// processor multiplies pairs of bf16, a bf16 model's inputs are rounded to bf16 for that.
#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int64_t BLOCK = 64, HALF = BLOCK / 2;
constexpr int64_t STRETCH = 64;  // inputs whose products are summed before they are added
constexpr int64_t ROWS = 96;     // rows for which weights are read once
constexpr int64_t UNROLL = 4;    // steps between prefetches
constexpr int TILE = 6;          // rows that are computed together, at most

enum Kind : int32_t { FP32, BF16, FP16, INT8, INT4, BF16_PAIRS };

struct Matrix {
    const void *data;    // packed
    const float *scale;  // INT8: [out]; INT4: [out / 64, in / stretch, 64]
    const float *bias;   // [out] or null
    int64_t in, out;
    int64_t stretch;  // INT8, INT4: inputs that are rounded together; INT4: that share a scale
    int32_t kind;

    bool quantised() const { return kind == INT8 || kind == INT4; }
    // Whether inputs are multiplied as something else than fp32.
    bool converts() const { return quantised() || kind == BF16_PAIRS; }
};

// Inputs [rows, in] as they are multiplied: values, or integers with a scale and their sum per
// stretch.
struct Inputs {
    const void *values;  // [rows, stride] of what a weight's format takes at a time
    int64_t stride;
    const float *scales;  // [rows, stretches]
    const int32_t *sums;
};

// Room for the inputs of some rows that are not multiplied as they are.
struct Room {
    float *normed;     // [rows, in]
    int16_t *rounded;  // [rows, in], in rounded up to pairs
    float *scales;     // [rows, stretches]
    int32_t *sums;
};

// What a tile of rows and a stretch of a block's inputs need.
struct Stretch {
    const char *weights;
    const float *scale;  // [64] or null
    Inputs x;            // the tile's rows, from the stretch's first input on
    int64_t stretches, steps;
    int64_t from, to;   // outputs: [from, to) and [32 + from, 32 + to)
    float *out;         // [rows, 64], added to
    const char *ahead;  // the part of the next stretch to fetch meanwhile
};

// How the weights of one step, STEP inputs and a block's outputs, lie and are multiplied. `load`
// gives a vector of the first 32 outputs, from number `from` on, and the one 32 further. The cache
// lines that half a block needs are APART bytes apart.

template <class Item>
struct Plain {
    typedef float Input;
    typedef Floats Sum;
    static constexpr int64_t STEP = 1, BYTES = BLOCK * sizeof(typename Item::Item);
    static constexpr int64_t APART = sizeof(typename Item::Item) == 4 ? 128 : 64;
    static void load(const char *at, int64_t from, Sum &low, Sum &high) {
        low = Item::load((const typename Item::Item *)at + from);
        high = Item::load((const typename Item::Item *)at + HALF + from);
    }
    static Sum all(Input x) { return fill(x); }
    static Sum add(Sum x, Sum w, Sum sum) { return fma(x, w, sum); }
    struct Row {  // what turns a sum into a value
        Row(const Stretch &, int) {}
        Floats operator()(Sum sum) const { return sum; }
    };
};

struct PairedBf16 : Plain<Bf16> {  // words of two outputs, the first 32's in the lower halves
    static constexpr int64_t APART = 128;
    static void load(const char *at, int64_t from, Floats &low, Floats &high) {
        const Words pair = read<Words>(at + 4 * from);
        low = bits<Floats>(pair << 16);
        high = bits<Floats>(pair & 0xFFFF0000);
    }
};

#ifdef PAIRS_OF_BF16
struct Bf16Pairs {  // an output's weights of two inputs side by side
    typedef int32_t Input;  // two of bf16
    typedef Floats Sum;
    static constexpr int64_t STEP = 2, BYTES = 4 * BLOCK, APART = 128;
    static void load(const char *at, int64_t from, Sum &low, Sum &high) {
        low = read<Floats>(at + 4 * from);
        high = read<Floats>(at + 4 * (HALF + from));
    }
    static Sum all(Input x) { return bits<Floats>(fill_ints(x)); }
    static Sum add(Sum x, Sum w, Sum sum) { return dot_bf16(x, w, sum); }
    typedef Plain<Bf16>::Row Row;
};
#endif

struct Int8 {  // an output's weights of two inputs side by side
    typedef int32_t Input;  // two of 16 bits
    typedef Ints Sum;
    static constexpr int64_t STEP = 2, BYTES = 2 * BLOCK, APART = 64;
    static void load(const char *at, int64_t from, Sum &low, Sum &high) {
        low = widen_pairs(at + 2 * from);
        high = widen_pairs(at + 2 * (HALF + from));
    }
    static Sum all(Input x) { return fill_ints(x); }
    static Sum add(Sum x, Sum w, Sum sum) { return dot_pairs(x, w, sum); }
    struct Row {
        const Floats scale;
        Row(const Stretch &s, int m) : scale(fill(s.x.scales[m * s.stretches])) {}
        Floats operator()(Sum sum) const { return __builtin_convertvector(sum, Floats) * scale; }
    };
};

struct Int4 : Int8 {  // the same in a byte, 8 above their values
    static constexpr int64_t BYTES = BLOCK;
    static void load(const char *at, int64_t from, Sum &low, Sum &high) {
        low = widen_nibbles(at + from);
        high = widen_nibbles(at + HALF + from);
    }
    struct Row : Int8::Row {
        const Ints surplus;
        Row(const Stretch &s, int m)
            : Int8::Row(s, m), surplus(fill_ints(8 * s.x.sums[m * s.stretches])) {}
        Floats operator()(Sum sum) const { return Int8::Row::operator()(sum - surplus); }
    };
};

// Adds to out [M, 64] the products of M rows with a stretch of a block's inputs. PAIRS: pairs of
// vectors that are computed together. SHARE: tiles that share the fetching of the next stretch;
// 0 fetches nothing.
template <class Weights, int M, int PAIRS, int SHARE>
void multiply_tile(const Stretch &s) {
    typedef typename Weights::Sum Sum;
    constexpr bool halved = WIDTH == 16 && PAIRS == 1;  // half a block, and nothing else
    constexpr int64_t every = halved ? Weights::APART : 64, part = halved ? HALF : PAIRS * WIDTH;
    constexpr int64_t fetched = SHARE ? UNROLL * Weights::BYTES * part / HALF / SHARE : 0;
    const auto *x = (const typename Weights::Input *)s.x.values;
    const char *ahead = s.ahead + (every > 64 ? 4 * s.from : 0);
    for (int64_t from = s.from; from < s.to; from += PAIRS * WIDTH) {
        Sum low[M][PAIRS] = {}, high[M][PAIRS] = {};
        const char *at = s.weights;
        for (int64_t k = 0; k < s.steps;) {
            for (int64_t b = 0; b < fetched; b += every) __builtin_prefetch(ahead + b, 0, 2);
            ahead += fetched;
            const int64_t end = std::min(k + UNROLL, s.steps);
            for (; k < end; k++, at += Weights::BYTES) {
                Sum a[PAIRS], b[PAIRS];
                for (int c = 0; c < PAIRS; c++) Weights::load(at, from + c * WIDTH, a[c], b[c]);
                for (int m = 0; m < M; m++) {
                    const Sum value = Weights::all(x[m * s.x.stride + k]);
                    for (int c = 0; c < PAIRS; c++) {
                        low[m][c] = Weights::add(value, a[c], low[m][c]);
                        high[m][c] = Weights::add(value, b[c], high[m][c]);
                    }
                }
            }
        }
        const float *scale = s.scale;
        auto add = [scale](float *total, int64_t i, Floats sum) {
            const Floats by = scale ? read<Floats>(scale + i) : fill(1.0f);
            Fp32::store(total + i, fma(sum, by, read<Floats>(total + i)));
        };
        float *total = s.out;
#pragma GCC unroll 6
        for (int m = 0; m < M; m++, total += BLOCK) {
            const typename Weights::Row value(s, m);
#pragma GCC unroll 2
            for (int c = 0; c < PAIRS; c++) {
                add(total, from + c * WIDTH, value(low[m][c]));
                add(total, HALF + from + c * WIDTH, value(high[m][c]));
            }
        }
    }
}

template <class Weights, int PAIRS, int SHARE>
void multiply_rows(int64_t m, const Stretch &s) {
    static_assert(TILE == 6, "one case for each number of rows");
    switch (m) {
        case 1: return multiply_tile<Weights, 1, PAIRS, SHARE>(s);
        case 2: return multiply_tile<Weights, 2, PAIRS, SHARE>(s);
        case 3: return multiply_tile<Weights, 3, PAIRS, SHARE>(s);
        case 4: return multiply_tile<Weights, 4, PAIRS, SHARE>(s);
        case 5: return multiply_tile<Weights, 5, PAIRS, SHARE>(s);
        default: return multiply_tile<Weights, 6, PAIRS, SHARE>(s);
    }
}

// Adds rows x [rows <= 96, in] times a part of a block to out [rows, 64], in [from, to) and 32
// further.
template <class Weights>
void multiply_block(const Matrix &w, int64_t block, int64_t from, int64_t to, const Inputs &x,
                    int64_t rows, float *out) {
    constexpr int PAIRS = WIDTH == 16 ? 2 : 1;
    const bool whole = to - from == HALF;
    const int64_t stretch = w.quantised() ? w.stretch : STRETCH;
    const int64_t stretches = (w.in + stretch - 1) / stretch;
    const int64_t steps = (w.in + Weights::STEP - 1) / Weights::STEP;
    const char *weights = (const char *)w.data + block * steps * Weights::BYTES;
    const int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t i = 0; i < stretches; i++) {
        const int64_t k = i * stretch / Weights::STEP;
        const int64_t some = std::min(stretch / Weights::STEP, steps - k);
        const int64_t bytes = some * Weights::BYTES;
        const char *at = weights + k * Weights::BYTES;
        const float *scale = w.kind == INT4 ? w.scale + (block * stretches + i) * BLOCK : nullptr;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = t * rows / tiles, m = (t + 1) * rows / tiles - r;
            const auto *values = (const typename Weights::Input *)x.values + r * x.stride + k;
            const Inputs own{values, x.stride, x.scales + r * stretches + i,
                             x.sums + r * stretches + i};
            const Stretch s{at, scale, own, stretches, some, from, to,
                            out + r * BLOCK, at + bytes + (t ? bytes / 2 : 0)};
            if (WIDTH == 16 && !whole && !t) multiply_rows<Weights, 1, 1>(m, s);
            else if (WIDTH == 16 && !whole) multiply_rows<Weights, 1, 0>(m, s);
            else if (tiles == 1) multiply_rows<Weights, PAIRS, 1>(m, s);
            else if (t < 2) multiply_rows<Weights, PAIRS, 2>(m, s);
            else multiply_rows<Weights, PAIRS, 0>(m, s);
        }
    }
}

inline void multiply(const Matrix &w, int64_t block, int64_t from, int64_t to, const Inputs &x,
                     int64_t rows, float *out) {
    switch (w.kind) {
        case FP32: return multiply_block<Plain<Fp32>>(w, block, from, to, x, rows, out);
        case BF16: return multiply_block<PairedBf16>(w, block, from, to, x, rows, out);
        case FP16: return multiply_block<Plain<Fp16>>(w, block, from, to, x, rows, out);
        case INT8: return multiply_block<Int8>(w, block, from, to, x, rows, out);
#ifdef PAIRS_OF_BF16
        case BF16_PAIRS: return multiply_block<Bf16Pairs>(w, block, from, to, x, rows, out);
#endif
        case INT4: return multiply_block<Int4>(w, block, from, to, x, rows, out);
    }
}

// Rounds a row [in] to 16 bits of the largest of each stretch, with zeros behind it to a pair.
inline void round_row(const float *x, int64_t in, int64_t stretch, int16_t *values, float *scales,
                      int32_t *sums) {
    typedef int16_t Shorts __attribute__((vector_size(2 * WIDTH)));
    const Floats shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    for (int64_t from = 0; from < in; from += stretch) {
        const int64_t to = std::min(in, from + stretch);
        auto each = [&](auto f) {
            for (int64_t i = from; i < to; i += WIDTH) {
                const int64_t n = std::min<int64_t>(WIDTH, to - i);
                f(i, n, n == WIDTH ? read<Floats>(x + i) : load_some<Fp32>(x + i, n));
            }
        };
        Floats most = {}, odd = {};  // odd becomes NaN where a value is not finite
        each([&](int64_t, int64_t, Floats v) {
            const Floats size = v < 0 ? -v : v;
            most = size > most ? size : most;
            odd += v * 0.0f;
        });
        const float largest_one = largest(most), mark = sum(odd);
        const Floats up = fill(largest_one > 0 && mark == 0 ? 32767 / largest_one : 0);
        Ints total = {};
        each([&](int64_t i, int64_t n, Floats v) {
            const Ints whole = bits<Ints>(fma(v, up, shift)) - bits<Ints>(shift);
            const Shorts narrow = __builtin_convertvector(whole, Shorts);
            std::memcpy(values + i, &narrow, n * sizeof(int16_t));
            total += whole;
        });
        *scales++ = largest_one / 32767 + mark;
        *sums = 0;
        for (int i = 0; i < WIDTH; i++) *sums += total[i];
        sums++;
    }
    if (in % 2) std::memset(values + in, 0, sizeof *values);
}

#ifdef PAIRS_OF_BF16
// Rounds a row [in] to bf16, with a zero behind it to a pair.
inline void narrow_row(const float *x, int64_t in, int16_t *values) {
    int64_t i = 0;
    for (; i + WIDTH <= in; i += WIDTH) store_bf16(values + i, read<Floats>(x + i), WIDTH);
    if (i < in) store_bf16(values + i, load_some<Fp32>(x + i, in - i), in - i);
    if (in % 2) std::memset(values + in, 0, sizeof *values);
}
#endif

// out = x / sqrt(mean(x^2) + eps) * weight, of one row (Zhang and Sennrich, 2019).
inline void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const Floats some = read<Floats>(x + i);
        squares = fma(some, some, squares);
    }
    if (i < n) {
        const Floats rest = load_some<Fp32>(x + i, n - i);
        squares = fma(rest, rest, squares);
    }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)n + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// What a layer's weights take instead of rows x [rows, in]; `take` puts a row of it into the room.
inline Inputs taken(const Matrix &w, const float *x, const Room &room) {
    if (!w.converts()) return {x, w.in, nullptr, nullptr};
    return {room.rounded, (w.in + 1) / 2, room.scales, room.sums};
}

inline void take(const Matrix &w, const float *x, int64_t row, const Room &room) {
    int16_t *rounded = room.rounded + row * ((w.in + 1) / 2 * 2);
#ifdef PAIRS_OF_BF16
    if (w.kind == BF16_PAIRS) return narrow_row(x, w.in, rounded);
#endif
    const int64_t stretches = (w.in + w.stretch - 1) / w.stretch;
    round_row(x, w.in, w.stretch, rounded, room.scales + row * stretches,
              room.sums + row * stretches);
}

// A thread's share of a linear layer of some rows of inputs. Work is shared by the half block, 16
// outputs and the 16 that stand 32 further. Once per row and block, `done` is called with
// (row, block, from, to, values [64]).
template <class Done>
void linear(const Matrix &w, const Inputs &x, int64_t rows, int thread, int threads, Done done) {
    const int64_t halves = 2 * ((w.out + BLOCK - 1) / BLOCK);
    const int64_t begin = halves * thread / threads, end = halves * (thread + 1) / threads;
    const int64_t stretches = w.quantised() ? (w.in + w.stretch - 1) / w.stretch : 0;
    alignas(64) float out[ROWS * BLOCK];
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t some = std::min(ROWS, rows - row);
        const char *values = (const char *)x.values + row * x.stride * 4;  // floats or pairs
        const Inputs own{values, x.stride, x.scales + row * stretches, x.sums + row * stretches};
        for (int64_t half = begin; half < end;) {
            const int64_t next = std::min(end, half / 2 * 2 + 2), block = half / 2;
            const int64_t from = half % 2 * (HALF / 2), to = from + (next - half) * (HALF / 2);
            std::fill(out, out + some * BLOCK, 0.0f);
            multiply(w, block, from, to, own, some, out);
            for (int64_t r = 0; r < some; r++) {
                float *values = out + r * BLOCK;
                for (int64_t first : {from, HALF + from}) {
                    const int64_t last = std::min(first + to - from, w.out - block * BLOCK);
                    for (int64_t i = first; i < last; i++) {
                        if (w.kind == INT8) values[i] *= w.scale[block * BLOCK + i];
                        if (w.bias) values[i] += w.bias[block * BLOCK + i];
                    }
                }
                done(row + r, block, from, to, values);
            }
            half = next;
        }
    }
}
