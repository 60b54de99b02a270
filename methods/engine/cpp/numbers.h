// Vectors of 32-bit numbers: sizes, conversions, functions of them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16, MOST_ROWS = 6;  // 32-bit numbers of a register, rows of a tile
#else
constexpr int LANES = 8, MOST_ROWS = 2;
#endif
#ifdef __AVX512BF16__
constexpr bool PAIRS = true;  // products of 16-bit numbers two by two
#else
constexpr bool PAIRS = false;
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define MATRIX_TILES
#endif
constexpr int VECTORS = 2, PANEL = VECTORS * LANES, WIDE = 2 * VECTORS;  // of a panel, and of two side by side
constexpr int TALL_ROWS = PAIRS ? 8 : LANES == 16 ? 7 : 5;  // of a tile over one panel: higher ones are slower
constexpr int BLOCK_ROWS = LANES == 16 ? 6 : 4;  // of a tile of blocks
constexpr int TOGETHER = LANES == 16 ? 1 : 2;  // panels at a time: one of short registers has too few sums for one row
constexpr int64_t CHUNK = 768;      // inputs that all tiles go through before the next ones are read
constexpr int64_t SHORT_CHUNK = 192;  // of two tiles, which then find a weight in the nearest cache
constexpr int LINE = 64;            // bytes
constexpr int LINES = 4 * PANEL / LINE;  // of a panel, of two 16-bit inputs or one of 32 bit
constexpr int MOST_GROUPS = 8;      // query heads that share the loads of a key
constexpr int64_t ELEMENTS = 4608;  // of element-wise work that a thread takes at a time
constexpr int64_t AHEAD = 8192;     // bytes of keys and values that are asked for before they are needed
constexpr int64_t NEAR = 2048, FAR = 24576;  // the same of a weight: into the first cache, and into the second one
constexpr int FEW_ROWS = LANES == 16 ? 4 : 2;  // of a tile of plain weights, for which the processor itself is far enough ahead
constexpr int64_t MOST_DIM = 256;   // of a head whose attention takes several queries at a time
constexpr int64_t FEW_PANELS = 32;  // of a thread: below, threads take single ones
constexpr int SPINS = 4096;
constexpr int HELPED = 4;           // threads that one helps at most
constexpr int BLOCK = 32;           // inputs that share a scale
constexpr int FOURS = BLOCK / 4;    // words of a block of 8-bit numbers
constexpr int64_t REFINED = 8;    // logits that a thread takes from the full matrix at a time
constexpr int WORDS = FOURS + 3;    // of a block of a rounded row: numbers, their sum times -offset, scale, scale times sum

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<Floats*>(to) = value; }
inline Floats load(const BFloat16* from) {
    Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
    return (Floats)wide;
}
// The first `count` of them.
inline void store(float* to, Floats value, int count) {
    if (count == LANES)
        store(to, value);
    else
        memcpy(to, &value, 4 * count);
}
inline float one(float value) { return value; }
inline float one(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}
inline Floats all(float value) { return value - Floats{}; }

// a * b + c, everywhere with one rounding or everywhere with two: a compiler that chose place by place would make sums
// depend on the number of rows.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// To the nearest number of the type, ties to even.
template <class T>
Floats rounded(Floats value);
template <>
inline Floats rounded<float>(Floats value) {
    return value;
}
template <>
inline Floats rounded<BFloat16>(Floats value) {
    Words bits = (Words)value;
    bits += 0x7fff + ((bits >> 16) & 1);
    return (Floats)(bits & 0xffff0000u);
}
template <class T>
inline float rounded_one(float value) {
    return rounded<T>(all(value))[0];
}

// Of numbers that are rounded already.
inline void put(float* to, Floats value) { store(to, value); }
inline void put(BFloat16* to, Floats value) {
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector((Words)value >> 16, Halves);
}
inline void put_one(float* to, float value) { *to = value; }
inline void put_one(BFloat16* to, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    to->bits = uint16_t(bits >> 16);
}

// The first `count` of them.
template <class T>
inline void put_some(T* to, Floats value, int count) {
    if (count == LANES)
        put(to, value);
    else
        for (int i = 0; i < count; i++) put_one(to + i, value[i]);
}

inline float sum(Floats v) {
    float at[LANES];
    store(at, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) at[i] += at[i + width];
    return at[0];
}

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// e^x with a relative error below 2e-7, for -87 <= x <= 87; others as the nearest of these.
inline Floats exponential(Floats x) {
    const Floats low = all(-87.0f), high = all(87.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Floats scaled = fused(x, all(1.44269504088896341f), all(shift));
    Floats n = scaled - shift;
    Floats r = fused(n, all(2.12194440e-4f), x - n * 0.693359375f);
    Floats p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    Integers exponent = __builtin_convertvector(n, Integers) << 23;
    return (Floats)((Integers)p + exponent);
}

}  // namespace
