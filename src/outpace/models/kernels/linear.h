// Linear layers over packed weights: few rows, each computed alike however many there are.
//
// A weight [out, in] lies in blocks of 64 outputs, [out / 64, in, 64]. An output is a sum of
// partial sums over stretches of inputs, each in ascending order: neither the number of rows,
// nor that of threads, nor the width of the processor's vectors changes a bit of it.
#pragma once

#include <algorithm>

#include "vectors.h"

constexpr int64_t BLOCK = 64, HALF = BLOCK / 2;
constexpr int64_t STRETCH = 64;  // inputs whose products are summed before they are added
constexpr int64_t ROWS = 96;     // rows for which weights are read once
constexpr int64_t UNROLL = 4;    // inputs between prefetches
constexpr int TILE = 6;          // rows that are computed together, at most

enum Kind : int32_t { FP32, BF16, FP16, INT8, INT4 };

struct Matrix {
    const void *data;    // packed
    const float *scale;  // INT8: [out]; INT4: [out / 64, in / group, 64]
    const float *bias;   // [out] or null
    int64_t in, out;
    int64_t group;  // INT4: inputs that share a scale
    int32_t kind;
};

// How the weights of one input and a block's outputs lie. `load` gives a vector of the first 32
// outputs, from number `from` on, and the vector that stands 32 further.

template <class Item>
struct Plain {
    static constexpr int64_t BYTES = BLOCK * sizeof(typename Item::Item);
    static void load(const char *at, int64_t from, Floats &low, Floats &high) {
        low = Item::load((const typename Item::Item *)at + from);
        high = Item::load((const typename Item::Item *)at + HALF + from);
    }
};

struct PairedBf16 {  // words of two outputs, the first 32's in the lower halves
    static constexpr int64_t BYTES = BLOCK * 2;
    static void load(const char *at, int64_t from, Floats &low, Floats &high) {
        const Words pair = read<Words>(at + 4 * from);
        low = bits<Floats>(pair << 16);
        high = bits<Floats>(pair & 0xFFFF0000);
    }
};

struct Int8 {
    static constexpr int64_t BYTES = BLOCK;
    static void load(const char *at, int64_t from, Floats &low, Floats &high) {
        low = __builtin_convertvector(widen(read<Bytes>(at + from)), Floats);
        high = __builtin_convertvector(widen(read<Bytes>(at + HALF + from)), Floats);
    }
};

struct PairedInt4 {  // bytes of two outputs, the first 32's in the lower halves
    static constexpr int64_t BYTES = BLOCK / 2;
    static void load(const char *at, int64_t from, Floats &low, Floats &high) {
        const Ints pair = widen(read<Bytes>(at + from));
        low = __builtin_convertvector(pair << 28 >> 28, Floats);
        high = __builtin_convertvector(pair >> 4, Floats);
    }
};

// What a tile of rows and a stretch of a block's inputs need.
struct Stretch {
    const char *weights;
    const float *scale;  // [64] or null
    const float *x;      // the tile's rows, from the stretch's first input on
    int64_t x_stride, inputs;
    int64_t from, to;   // outputs: [from, to) and [32 + from, 32 + to)
    float *out;         // [rows, 64], added to
    bool first;         // or set
    const char *ahead;  // the part of the next stretch to fetch meanwhile
};

// PAIRS: pairs of vectors that are computed together. SHARE: tiles that share the fetching of the
// next stretch; 0 fetches nothing.
template <class Weights, int M, int PAIRS, int SHARE>
void multiply_tile(const Stretch &s) {
    constexpr int64_t fetched = SHARE ? UNROLL * Weights::BYTES * PAIRS * WIDTH / HALF / SHARE : 0;
    const char *ahead = s.ahead;
    for (int64_t from = s.from; from < s.to; from += PAIRS * WIDTH) {
        Floats low[M][PAIRS] = {}, high[M][PAIRS] = {};
        const char *at = s.weights;
        for (int64_t k = 0; k < s.inputs;) {
            for (int64_t b = 0; b < fetched; b += 64) __builtin_prefetch(ahead + b);
            ahead += fetched;
            const int64_t end = std::min(k + UNROLL, s.inputs);
            for (; k < end; k++, at += Weights::BYTES) {
                Floats a[PAIRS], b[PAIRS];
                for (int c = 0; c < PAIRS; c++) Weights::load(at, from + c * WIDTH, a[c], b[c]);
                for (int m = 0; m < M; m++) {
                    const Floats value = fill(s.x[m * s.x_stride + k]);
                    for (int c = 0; c < PAIRS; c++) {
                        low[m][c] = fma(value, a[c], low[m][c]);
                        high[m][c] = fma(value, b[c], high[m][c]);
                    }
                }
            }
        }
        auto add = [&](int m, int64_t i, Floats sum) {
            float *total = s.out + m * BLOCK + i;
            const Floats by = s.scale ? read<Floats>(s.scale + i) : fill(1.0f);
            Fp32::store(total, fma(sum, by, s.first ? Floats{} : read<Floats>(total)));
        };
        for (int m = 0; m < M; m++) {
            for (int c = 0; c < PAIRS; c++) {
                add(m, from + c * WIDTH, low[m][c]);
                add(m, HALF + from + c * WIDTH, high[m][c]);
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

// Rows x [rows <= 96, in] times a part of a block: out [rows, 64] in [from, to) and 32 further.
template <class Weights>
void multiply_block(const Matrix &w, int64_t block, int64_t from, int64_t to, const float *x,
                    int64_t rows, float *out) {
    const bool whole = to - from == HALF;
    const int64_t stretch = w.kind == INT4 ? w.group : STRETCH;
    const int64_t stretches = (w.in + stretch - 1) / stretch;
    const char *weights = (const char *)w.data + block * w.in * Weights::BYTES;
    const int64_t tiles = (rows + TILE - 1) / TILE;
    for (int64_t i = 0; i < stretches; i++) {
        const int64_t k = i * stretch, inputs = std::min(stretch, w.in - k);
        const int64_t bytes = inputs * Weights::BYTES;
        const char *at = weights + k * Weights::BYTES;
        const float *scale = w.kind == INT4 ? w.scale + (block * stretches + i) * BLOCK : nullptr;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t r = t * rows / tiles, m = (t + 1) * rows / tiles - r;
            const Stretch s{at, scale, x + r * w.in + k, w.in, inputs, from, to,
                            out + r * BLOCK, i == 0, at + bytes + (t ? bytes / 2 : 0)};
            if (WIDTH == 16 && !whole) multiply_rows<Weights, 1, 0>(m, s);
            else if (tiles == 1) multiply_rows<Weights, WIDTH == 16 ? 2 : 1, 1>(m, s);
            else if (t < 2) multiply_rows<Weights, WIDTH == 16 ? 2 : 1, 2>(m, s);
            else multiply_rows<Weights, WIDTH == 16 ? 2 : 1, 0>(m, s);
        }
    }
}

inline void multiply(const Matrix &w, int64_t block, int64_t from, int64_t to, const float *x,
                     int64_t rows, float *out) {
    switch (w.kind) {
        case FP32: return multiply_block<Plain<Fp32>>(w, block, from, to, x, rows, out);
        case BF16: return multiply_block<PairedBf16>(w, block, from, to, x, rows, out);
        case FP16: return multiply_block<Plain<Fp16>>(w, block, from, to, x, rows, out);
        case INT8: return multiply_block<Int8>(w, block, from, to, x, rows, out);
        default: return multiply_block<PairedInt4>(w, block, from, to, x, rows, out);
    }
}

// A thread's share of a linear layer of rows x [rows, in]. Work is shared by the half block, 16
// outputs and the 16 that stand 32 further. Once per row and block, `done` is called with
// (row, block, from, to, values [64]).
template <class Done>
void linear(const Matrix &w, const float *x, int64_t rows, int thread, int threads, Done done) {
    const int64_t halves = 2 * ((w.out + BLOCK - 1) / BLOCK);
    const int64_t begin = halves * thread / threads, end = halves * (thread + 1) / threads;
    alignas(64) float out[ROWS * BLOCK];
    for (int64_t row = 0; row < rows; row += ROWS) {
        const int64_t some = std::min(ROWS, rows - row);
        for (int64_t half = begin; half < end;) {
            const int64_t next = std::min(end, half / 2 * 2 + 2), block = half / 2;
            const int64_t from = half % 2 * (HALF / 2), to = from + (next - half) * (HALF / 2);
            multiply(w, block, from, to, x + row * w.in, some, out);
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
