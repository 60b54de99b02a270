// Products with weights of 4 and 8 bits, and the choice among all products.
#pragma once

#include <stdint.h>
#include <string.h>

#include "numbers.h"
#include "products.h"
#include "team.h"

namespace {

// BLOCK inputs of LANES outputs, w = (n - offset) * scale + zero with 0 <= n < 2^BITS. A word has the numbers of four
// inputs of one output, of 4 bits those of the next four above them.
template <int BITS>
struct Block {
    uint32_t numbers[BITS * LANES];
    BFloat16 scale[LANES], zero[LANES];

    static constexpr int offset = 1 << (BITS - 1);
};

#if (defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HALF_SUMS
// To each of two 16-bit sums a lane the products of two numbers from 0 to 15 with two from -127 to 127. A block's fit.
inline Words dot_halves(Words sums, Words numbers, int32_t four) {
#ifdef __AVX512BW__
    return (Words)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)numbers, _mm512_set1_epi32(four)));
#else
    return (Words)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)numbers, _mm256_set1_epi32(four)));
#endif
}
// To each sum `factor` times the two 16-bit ones of its lane.
inline Integers widened(Integers sums, Words halves, int16_t factor) {
#ifdef __AVX512BW__
    return sums + (Integers)_mm512_madd_epi16((__m512i)halves, _mm512_set1_epi16(factor));
#else
    return sums + (Integers)_mm256_madd_epi16((__m256i)halves, _mm256_set1_epi16(factor));
#endif
}
#else
// To each sum the products of four numbers from 0 to 255 with four from -127 to 127.
inline Integers dot(Integers sums, Words numbers, int32_t four) {
#ifdef __AVX512VNNI__
    return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)numbers, _mm512_set1_epi32(four));
#else
    for (int i = 0; i < 4; i++) sums += (Integers)((numbers >> (8 * i)) & 255) * int32_t(int8_t(four >> (8 * i)));
    return sums;
#endif
}
#endif

// To the sums of ROWS rows the products of a block with theirs; exact. x: [FOURS, ROWS].
template <int BITS, int ROWS>
inline void dot_block(const Block<BITS>& block, const int32_t* x, Integers* sums) {
    const Words low = Words{} + 0x0f0f0f0fu;
#ifdef HALF_SUMS
    Words first[ROWS] = {}, second[ROWS] = {};
#pragma GCC unroll 8
    for (int i = 0; i < BITS; i++) {
        Words numbers;
        memcpy(&numbers, block.numbers + i * LANES, sizeof numbers);
        const Words lower = numbers & low, upper = (numbers >> 4) & low;
        const int32_t *of_lower = x + (BITS == 4 ? 2 * i : i) * ROWS, *of_upper = BITS == 4 ? of_lower + ROWS : of_lower;
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            first[r] = dot_halves(first[r], lower, of_lower[r]);
            Words& into = BITS == 4 ? first[r] : second[r];
            into = dot_halves(into, upper, of_upper[r]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) {
        sums[r] = widened(sums[r], first[r], 1);
        if constexpr (BITS == 8) sums[r] = widened(sums[r], second[r], 16);
    }
#else
#pragma GCC unroll 8
    for (int i = 0; i < BITS; i++) {
        Words numbers;
        memcpy(&numbers, block.numbers + i * LANES, sizeof numbers);
        if constexpr (BITS == 8) {
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sums[r] = dot(sums[r], numbers, x[i * ROWS + r]);
        } else {
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sums[r] = dot(sums[r], numbers & low, x[2 * i * ROWS + r]);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sums[r] = dot(sums[r], (numbers >> 4) & low, x[(2 * i + 1) * ROWS + r]);
        }
    }
#endif
}

// x: [blocks, WORDS, ROWS].
template <int BITS, int ROWS, int WIDTH>
void tile(Columns<WIDTH> weight, int64_t blocks, const int32_t* x, Ask ask, Floats* total) {
    constexpr int64_t whole = VECTORS * sizeof(Block<BITS>);
    for (int64_t b = 0; b < blocks; b++, x += WORDS * ROWS, weight.at += VECTORS * sizeof(Block<BITS>), ask.at += ask.step) {
        for (int v = 0; v < WIDTH; v += VECTORS) {
            const char* at = ask.at + v / VECTORS * weight.stride;
            for (const char* end = at + ask.step; at < end; at += LINE) ask_ahead(at, ask.step == whole);
        }
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) {
            const auto& block = *reinterpret_cast<const Block<BITS>*>(weight.vector(v, sizeof(Block<BITS>)));
            Integers sums[ROWS];
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sums[r] = Integers{} + x[FOURS * ROWS + r];
            dot_block<BITS, ROWS>(block, x, sums);
            const Floats scale = load(block.scale), zero = load(block.zero);
            const float* scales = reinterpret_cast<const float*>(x + (FOURS + 1) * ROWS);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const Floats exact = __builtin_convertvector(sums[r], Floats) * scales[r];
                Floats& into = total[r * WIDTH + v];
                into = fused(zero, all(scales[ROWS + r]), fused(exact, scale, into));
            }
        }
    }
}

template <int BITS, int WIDTH, int ROWS = BLOCK_ROWS>
void of_rows(int64_t rows, Columns<WIDTH> weight, int64_t blocks, const int32_t* x, Ask ask, Floats* total) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return of_rows<BITS, WIDTH, ROWS - 1>(rows, weight, blocks, x, ask, total);
    tile<BITS, ROWS, WIDTH>(weight, blocks, x, ask, total);
}

// A row to 8 bits: x = q * scale, the largest number of a block being 127 or -127. to: [blocks, WORDS], a word every
// `step`.
inline void round_row(const float* row, int64_t blocks, int32_t offset, int32_t* to, int64_t step) {
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    for (int64_t b = 0; b < blocks; b++, row += BLOCK, to += WORDS * step) {
        Floats most = Floats{};
        for (int i = 0; i < BLOCK; i += LANES) {
            const Floats x = load(row + i), size = (Floats)((Words)x & 0x7fffffffu);
            most = size > most ? size : most;
        }
        float largest = 0.0f;
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
        Integers total = Integers{};
        for (int i = 0; i < BLOCK; i += LANES) {
            const Integers q = __builtin_convertvector(fused(load(row + i), all(inverse), all(shift)) - shift, Integers);
            const Bytes bytes = __builtin_convertvector(q, Bytes);
            int32_t fours[LANES / 4];
            memcpy(fours, &bytes, sizeof fours);
            for (int w = 0; w < LANES / 4; w++) to[(i / 4 + w) * step] = fours[w];
            total += q;
        }
        int32_t sum = 0;
        for (int i = 0; i < LANES; i++) sum += total[i];
        to[FOURS * step] = -offset * sum;
        const float scales[] = {scale, scale * float(sum)};
        memcpy(to + (FOURS + 1) * step, scales, 4);
        memcpy(to + (FOURS + 2) * step, scales + 1, 4);
    }
}

// x: one by one; into: room for them rounded, rows * inputs / BLOCK * WORDS.
template <int BITS, class T, class Finish>
void multiply_blocks(Team& team, const Matrix& m, const Rows& x, int64_t apart, float* sums, int32_t* into,
                     const Finish& finish) {
    const Rows tiles(nullptr, x.rows, m.inputs, BLOCK_ROWS, false);
    const int64_t blocks = m.inputs / BLOCK, chunk = tiles.tiles == 1 ? blocks : CHUNK / BLOCK;
    team.each_row(x.rows, m.inputs, [&](int64_t row) {
        const int64_t tile = tiles.tile(row), first = tiles.first(tile);
        round_row(x.base + row * m.inputs, blocks, Block<BITS>::offset, into + first * blocks * WORDS + row - first,
                  tiles.count(tile));
    });
    constexpr int64_t step = VECTORS * sizeof(Block<BITS>);
    const int64_t size = blocks * step, other = (apart ? apart : 1) * size;
    const auto accumulate = [&](int64_t panel, int64_t width, int64_t, int64_t rows, Floats* total) {
        const char* weight = static_cast<const char*>(m.panels) + panel * size;
        for (int64_t i = 0; i < rows * width; i++) total[i] = Floats{};
        for (int64_t b = 0; b < blocks; b += chunk) {
            const int64_t count = b + chunk < blocks ? chunk : blocks - b;
            const char* from = weight + b * step;
            for (int64_t tile = 0; tile < tiles.tiles; tile++) {
                const int64_t row = tiles.first(tile), some = tiles.count(tile);
                const int32_t* read = into + (row * blocks + b * some) * WORDS;
                Floats* totals = total + row * width;
                const Ask ask = tiles.tiles == 1 ? Ask{from, step}
                                                 : share(from, count * step, step, tile, tiles.tiles);
                if (width == WIDE)
                    of_rows<BITS, WIDE>(some, {from, other}, count, read, ask, totals);
                else
                    of_rows<BITS, VECTORS>(some, {from, other}, count, read, ask, totals);
            }
        }
    };
    over_panels<T>(team, m, x.rows, x.rows, false, apart, false, sums, accumulate, finish);
}

int64_t rounded_words(int64_t rows, int64_t inputs) { return rows * ((inputs + BLOCK - 1) / BLOCK) * WORDS; }

// finish, apart, sums: see over_panels; into: see multiply_blocks.
template <class T, class Finish>
void multiply(Team& team, const Matrix& m, const Rows& x, int64_t apart, float* sums, int32_t* into,
              const Finish& finish) {
    if (m.bits == 4)
        multiply_blocks<4, T>(team, m, x, apart, sums, into, finish);
    else if (m.bits == 8)
        multiply_blocks<8, T>(team, m, x, apart, sums, into, finish);
#ifdef MATRIX_TILES
    else if (in_tiles<T>(m))
        multiply_tiles<T>(team, m, x, apart, sums, finish);
#endif
    else
        multiply_plain<T>(team, m, x, apart, sums, finish);
}

int64_t product_room(const Matrix& m, int64_t rows, int64_t threads) {
    return rows * (m.inputs + threads * WIDE * LANES) + rounded_words(rows, m.inputs);
}

// The product with rows that fill(row, where it goes) writes, to [rows, outputs]; work: numbers of `product_room`.
template <class T, class Fill>
void multiply_rows(Team& team, const Matrix& m, int64_t rows, T* to, float* work, const Fill& fill) {
    const Rows x = rows_for<T>(work, rows, m);
    float* sums = work + rows * m.inputs;
    int32_t* rounded = reinterpret_cast<int32_t*>(sums + team.size() * rows * WIDE * LANES);
    team.each_row(rows, m.inputs, [&](int64_t row) { fill(row, Row(x, row)); });
    multiply<T>(team, m, x, 0, sums, rounded, [&](int64_t row, int64_t at, Floats value, int count) {
        put_some(to + row * m.outputs + at, value, count);
    });
}

}  // namespace
