// Vectors of floats as wide as the processor's, with fused multiply-add where it has one.
//
// Compiled without contraction: a product and a sum are fused where `fma` says so and nowhere
// else, so that the source alone decides how a value is rounded.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t Longs __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));

// Lets the processor's other thread work while this one waits.
inline void relax() {
#if defined(__x86_64__) || defined(_M_X64)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline Floats fill(float x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_set1_ps(x);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_set1_ps(x);
#else
    return Floats{x, x, x, x};
#endif
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "bits are reinterpreted, not converted");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Lower words times a word, whatever is in the upper ones.
inline Longs multiply_lower(Longs a, uint32_t b) {
    const Longs by = Longs{} + b;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Longs)_mm512_mul_epu32((__m512i)a, (__m512i)by);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Longs)_mm256_mul_epu32((__m256i)a, (__m256i)by);
#elif defined(__x86_64__) || defined(_M_X64)
    return (Longs)_mm_mul_epu32((__m128i)a, (__m128i)by);
#elif defined(__ARM_NEON)
    return (Longs)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)by));
#else
    return (a & 0xFFFFFFFF) * by;
#endif
}

inline uint64_t multiply_lower(uint64_t a, uint32_t b) { return uint64_t{uint32_t(a)} * b; }

template <class V>
inline V read(const void *at) {
    V v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

// How weights, keys and values are kept. All are computed with as fp32.

struct Fp32 {
    typedef float Item;
    static Floats load(const Item *at) { return read<Floats>(at); }
    static void store(Item *at, Floats x) { std::memcpy(at, &x, sizeof x); }
};

struct Bf16 {
    typedef uint16_t Item;
    static Floats load(const Item *at) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
        return bits<Floats>((Words)_mm512_cvtepu16_epi32(read<__m256i>(at)) << 16);
#elif defined(__AVX2__) && defined(__FMA__)
        return bits<Floats>((Words)_mm256_cvtepu16_epi32(read<__m128i>(at)) << 16);
#else
        return bits<Floats>(__builtin_convertvector(read<Halves>(at), Words) << 16);
#endif
    }
    static void store(Item *at, Floats x) {  // to the nearest, ties to even; NaN stays NaN
        const Words w = bits<Words>(x);
        const Words rounded = (w + 0x7FFF + ((w >> 16) & 1)) >> 16;
        const Words nan = (w >> 16) | 0x40;
        const Halves h = __builtin_convertvector(x == x ? rounded : nan, Halves);
        std::memcpy(at, &h, sizeof h);
    }
};

struct Fp16 {
    typedef uint16_t Item;
#if defined(__AVX512F__) && defined(__AVX512BW__)
    static Floats load(const Item *at) { return (Floats)_mm512_cvtph_ps(read<__m256i>(at)); }
    static void store(Item *at, Floats x) {
        const __m256i h = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(at, &h, sizeof h);
    }
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
    static Floats load(const Item *at) { return (Floats)_mm256_cvtph_ps(read<__m128i>(at)); }
    static void store(Item *at, Floats x) {
        const __m128i h = _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(at, &h, sizeof h);
    }
#else
    static Floats load(const Item *at) {
        typedef _Float16 Small __attribute__((vector_size(2 * WIDTH)));
        return __builtin_convertvector(read<Small>(at), Floats);
    }
    static void store(Item *at, Floats x) {
        typedef _Float16 Small __attribute__((vector_size(2 * WIDTH)));
        const Small h = __builtin_convertvector(x, Small);
        std::memcpy(at, &h, sizeof h);
    }
#endif
};

// Integers: vectors of pairs of 16 bits, multiplied and added to 32.

inline Ints fill_ints(int32_t x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Ints)_mm512_set1_epi32(x);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Ints)_mm256_set1_epi32(x);
#else
    return Ints{x, x, x, x};
#endif
}

// 0, 1, 2, ..
inline Ints lanes() {
    Ints all;
    for (int i = 0; i < WIDTH; i++) all[i] = i;
    return all;
}

inline bool any(Ints x) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
    const Longs some = bits<Longs>(x);
    uint64_t all = 0;
    for (int i = 0; i < WIDTH / 2; i++) all |= some[i];
    return all;
#endif
}

// WIDTH pairs of bytes as pairs of 16 bits, with their signs.
inline Ints widen_pairs(const void *at) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return (Ints)_mm512_cvtepi8_epi16(read<__m256i>(at));
#elif defined(__AVX2__) && defined(__FMA__)
    return (Ints)_mm256_cvtepi8_epi16(read<__m128i>(at));
#else
    typedef int8_t Pairs __attribute__((vector_size(2 * WIDTH)));
    typedef int16_t Wide __attribute__((vector_size(4 * WIDTH)));
    return bits<Ints>(__builtin_convertvector(read<Pairs>(at), Wide));
#endif
}

// WIDTH bytes of two numbers from 0 to 15 as pairs of 16 bits, the lower number first.
inline Ints widen_nibbles(const void *at) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    const Ints b = (Ints)_mm512_cvtepu8_epi32(read<__m128i>(at));
#else
    typedef uint8_t Small __attribute__((vector_size(WIDTH)));
    const Ints b = __builtin_convertvector(read<Small>(at), Ints);
#endif
    return (b | b << 12) & 0x000F000F;
}

inline Ints dot_pairs(Ints a, Ints b, Ints sum) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512F__) && defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && defined(__FMA__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define PAIRS_OF_BF16
// What is smaller than normal numbers counts as 0 here.

inline void store_bf16(int16_t *at, Floats x, int64_t n) {
    const __m256bh items = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(at, &items, n * sizeof(int16_t));
}

// sum + a's pairs times b's.
inline Floats dot_bf16(Floats a, Floats b, Floats sum) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#endif

// The first n < WIDTH items, zeros behind them.
template <class Kind>
inline Floats load_some(const typename Kind::Item *at, int64_t n) {
    typename Kind::Item items[WIDTH] = {};
    std::memcpy(items, at, n * sizeof(items[0]));
    return Kind::load(items);
}

inline void store_some(float *at, Floats x, int64_t n) { std::memcpy(at, &x, n * sizeof(float)); }

inline float sum(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int n = WIDTH / 2; n; n /= 2)
        for (int i = 0; i < n; i++) v[i] += v[i + n];
    return v[0];
#endif
}

inline float largest(Floats v) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float most = v[0];
    for (int i = 1; i < WIDTH; i++) most = v[i] > most ? v[i] : most;
    return most;
#endif
}

// e to the x within 2 units in the last place; 0 below -87.
inline Floats exp(Floats x) {
    const Floats low = fill(-87.0f), high = fill(88.0f);
    const Ints tiny = x < low;
    x = x < low ? low : x > high ? high : x;
    const Floats shift = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats whole = fma(x, fill(1.44269504f), shift);
    const Floats n = whole - shift;
    Floats r = fma(n, fill(-0.693359375f), x);
    r = fma(n, fill(2.12194440e-4f), r);  // the rest of ln 2
    Floats p = fill(1.0f / 5040);
    for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = fma(p, r, fill(c));
    const Ints scale = (bits<Ints>(whole) - bits<Ints>(shift) + 127) << 23;
    return tiny ? Floats{} : p * bits<Floats>(scale);
}
