// Products of rows with weights in panels, by vectors or by matrix tiles.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "numbers.h"
#include "team.h"

namespace {

// WIDTH vectors of one panel, or of two that are `stride` bytes apart, `size` bytes each.
template <int WIDTH>
struct Columns {
    const char* at;
    int64_t stride;

    const char* vector(int v, int64_t size) const { return at + v / VECTORS * stride + v % VECTORS * size; }
};

// What is asked for while a tile is multiplied, so that it is near when it is needed: what lies ahead of `at`, `step`
// bytes with each vector of a panel or block.
struct Ask {
    const char* at;
    int64_t step;
};

// GCC 12 drops calls of functions that do nothing but ask, unless they are inlined early.
__attribute__((always_inline)) inline void ask_for(const char* at, int64_t bytes) {
    for (const char* end = at + bytes; at < end; at += LINE) __builtin_prefetch(at);
}

// The line far ahead, and the one that is needed next.
__attribute__((always_inline)) inline void ask_ahead(const char* at, bool near) {
    __builtin_prefetch(at + FAR, 0, 2);
    if (near) __builtin_prefetch(at + NEAR);
}

// The sums with the products of two vectors of pairs of 16-bit numbers.
inline Floats both(Floats sums, Words a, Floats b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    sums = fused((Floats)(a << 16), (Floats)((Words)b << 16), sums);
    return fused((Floats)(a & 0xffff0000u), (Floats)((Words)b & 0xffff0000u), sums);
#endif
}

// GCC reads a vector from memory again for every row that it is multiplied with, unless it is held.
inline void hold(Words& vector) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    asm("" : "+x"(vector));
#endif
}

// The same bits in all lanes; as a number they may be any.
inline Floats repeated(const float& word) {
    uint32_t bits;
    memcpy(&bits, &word, 4);
    return (Floats)(Words{} + bits);
}

// The sums with the products of a vector of a weight: of 32-bit numbers, of the first of each two of 16 bits, or with
// PAIRS of both.
template <class T>
inline Floats first(Floats sums, Words numbers, const float& x) {
    if constexpr (sizeof(T) == 4)
        return fused((Floats)numbers, repeated(x), sums);
    else if constexpr (PAIRS)
        return both(sums, numbers, repeated(x));
    else
        return fused((Floats)(numbers << 16), repeated(x), sums);
}

// Add to the sums of ROWS rows the products with WIDTH vectors. x: [inputs, ROWS], or with PAIRS [inputs / 2, ROWS] of two
// inputs each; total: [ROWS, WIDTH]; 16-bit weights have an even number of inputs. ASKED: lines that are asked for with
// each vector, LINES of each panel, or one of a part that several tiles share.
template <class T, int ROWS, int WIDTH, int ASKED>
void tile(Columns<WIDTH> weight, int64_t inputs, const float* x, Ask ask, Floats* total) {
    constexpr int each = sizeof(T) == 2 ? 2 : 1;  // inputs of a vector
    Floats sums[ROWS][WIDTH];
    memcpy(sums, total, sizeof sums);
    for (int64_t k = 0; k < inputs; k += each, weight.at += PANEL * each * sizeof(T), ask.at += ask.step) {
        if constexpr (ROWS > FEW_ROWS || ASKED == 1)
#pragma GCC unroll 4
            for (int line = 0; line < ASKED; line++)
                ask_ahead(ask.at + line / LINES * weight.stride + line % LINES * LINE, ASKED > 1);
        Words numbers[WIDTH];
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) {
            memcpy(&numbers[v], weight.vector(v, sizeof(Words)), sizeof(Words));
            if constexpr (sizeof(T) == 4 && ROWS > 1) hold(numbers[v]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) sums[r][v] = first<T>(sums[r][v], numbers[v], x[r]);
        x += ROWS;
        if constexpr (each == 2 && !PAIRS) {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int v = 0; v < WIDTH; v++)
                    sums[r][v] = fused((Floats)(numbers[v] & 0xffff0000u), repeated(x[r]), sums[r][v]);
            x += ROWS;
        }
    }
    memcpy(total, sums, sizeof sums);
}

struct Matrix {
    const void* panels;
    const float* bias;  // padded to whole panels; null: none
    int64_t inputs, outputs;
    int64_t bits;  // of numbers in blocks, 4 or 8; 0: plain weights
};

// Rows that products read, in tiles: [tile][inputs][rows of the tile], so that one address leads to all of them. The
// first `longer` tiles have a row more than the others. Rows that are still to be rounded are one by one. With `pairs`
// a word holds two inputs as 16-bit numbers.
struct Rows {
    float* base;
    int64_t rows, words, tiles, least, longer;
    bool pairs;

    Rows(float* base, int64_t rows, int64_t inputs, int64_t most, bool pairs)
        : base(base),
          rows(rows),
          words(pairs ? inputs / 2 : inputs),
          tiles((rows + most - 1) / most),
          least(rows / tiles),
          longer(rows % tiles),
          pairs(pairs) {}
    int64_t first(int64_t tile) const { return tile * least + (tile < longer ? tile : longer); }
    int64_t count(int64_t tile) const { return least + (tile < longer); }
    int64_t tile(int64_t row) const {
        const int64_t within = longer * (least + 1);
        return row < within ? row / (least + 1) : longer + (row - within) / least;
    }
};

// -- matrix tiles -------------------------------------------------------------------------------------------------------

constexpr int TILE = 16, TILE_INPUTS = 32;  // rows or outputs of a tile, and inputs

#ifdef MATRIX_TILES
// Linux lets a process use tiles when it asks once.
bool tiles_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return allowed;
}

// GCC does not know what tiles read and write: nothing that is written before this is written after it, or the reverse.
inline void written() { asm volatile("" ::: "memory"); }

// Rows of a thread's tiles: 0 and 1 have the sums of `first` rows, 2 and 3 of `second` rows, 4 and 5 the inputs of these,
// 6 and 7 a part of the weight, whose rows are pairs of inputs.
class Tiles {
  public:
    static void shape(int first, int second) {
        if (first == first_ && second == second_) return;
        struct alignas(64) Shapes {
            uint8_t palette = 1, start = 0, none[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        };
        Shapes shapes;
        const int rows[] = {first, first, second, second, first, second, TILE, TILE};
        for (int i = 0; i < 8; i++) {
            shapes.bytes[i] = LINE;
            shapes.rows[i] = uint8_t(rows[i]);
        }
        written();
        _tile_loadconfig(&shapes);
        first_ = first, second_ = second;
    }
    static void release() {
        if (!first_) return;
        _tile_release();
        first_ = second_ = 0;
    }

  private:
    static thread_local int first_, second_;
};
thread_local int Tiles::first_ = 0, Tiles::second_ = 0;

void release_tiles() { Tiles::release(); }

// Sums of up to TILE rows and two panels `size` bytes apart. x: rows of bfloat16, `step` bytes each; total: `width`
// vectors a row.
inline void tile_of_two(const char* weight, int64_t size, int64_t inputs, const char* x, int64_t step, float* total,
                        int64_t width) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, weight += TILE_INPUTS * PANEL * 2, x += TILE_INPUTS * 2) {
        _tile_loadd(4, x, step);
        _tile_loadd(6, weight, 2 * LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + LINE, 2 * LINE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, weight + size, 2 * LINE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, weight + size + LINE, 2 * LINE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, total, width * LINE);
    _tile_stored(1, total + LANES, width * LINE);
    _tile_stored(2, total + 2 * LANES, width * LINE);
    _tile_stored(3, total + 3 * LANES, width * LINE);
}

// Sums of one panel, and with SECOND those of up to TILE rows more, after the first TILE.
template <bool SECOND>
inline void tile_of_one(const char* weight, int64_t inputs, const char* x, int64_t step, float* total, int64_t width) {
    float* second = total + TILE * width * LANES;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (SECOND) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < inputs; k += TILE_INPUTS, weight += TILE_INPUTS * PANEL * 2, x += TILE_INPUTS * 2) {
        _tile_loadd(6, weight, 2 * LINE);
        _tile_loadd(4, x, step);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weight + LINE, 2 * LINE);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (SECOND) {
            _tile_loadd(5, x + TILE * step, step);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, total, width * LINE);
    _tile_stored(1, total + LANES, width * LINE);
    if constexpr (SECOND) {
        _tile_stored(2, second, width * LINE);
        _tile_stored(3, second + LANES, width * LINE);
    }
}
#else
inline bool tiles_allowed() { return false; }
#endif

// Whether products with a weight of this type take tiles; then rows are one by one, as bfloat16.
template <class T>
bool in_tiles(const Matrix& m) {
    return sizeof(T) == 2 && !m.bits && m.inputs % TILE_INPUTS == 0 && tiles_allowed();
}

template <class T>
Rows rows_for(float* base, int64_t rows, const Matrix& m) {
    if (in_tiles<T>(m)) return Rows(base, rows, m.inputs, 1, true);
    const int64_t most = m.bits ? 1 : rows <= MOST_ROWS ? MOST_ROWS : TALL_ROWS;
    return Rows(base, rows, m.inputs, most, PAIRS && sizeof(T) == 2 && !m.bits);
}

// Where one row lies in its tile.
struct Row {
    float* base;
    int64_t step;
    bool pairs;

    Row(const Rows& all, int64_t row) : pairs(all.pairs) {
        if (all.tiles == all.rows) {
            base = all.base + row * all.words;
            step = 1;
            return;
        }
        const int64_t tile = all.tile(row), first = all.first(tile);
        base = all.base + first * all.words + row - first;
        step = all.count(tile);
    }
    // From an input on, an even one.
    Row after(int64_t input) const {
        Row rest = *this;
        rest.base += (pairs ? input / 2 : input) * step;
        return rest;
    }
    void put(int64_t input, Floats value) const {
        if (!pairs) {
            put_words(base + input * step, value);
            return;
        }
        float* to = base + input / 2 * step;
        if (step == 1) {
            ::put(reinterpret_cast<BFloat16*>(to), value);
            return;
        }
        float words[LANES / 2];
        ::put(reinterpret_cast<BFloat16*>(words), value);
        for (int i = 0; i < LANES / 2; i++) to[i * step] = words[i];
    }
    void put_one(int64_t input, float value) const {
        if (pairs)
            ::put_one(reinterpret_cast<BFloat16*>(base + input / 2 * step) + input % 2, value);
        else
            base[input * step] = value;
    }

  private:
    void put_words(float* to, Floats value) const {
        if (step == 1) {
            store(to, value);
            return;
        }
        for (int i = 0; i < LANES; i++) to[i * step] = value[i];
    }
};

// From numbers of any type to 32-bit ones.
template <class T, class To>
inline void copy(const T* from, const To& to, int64_t numbers) {
    int64_t i = 0;
    for (; i + LANES <= numbers; i += LANES) to.put(i, load(from + i));
    for (; i < numbers; i++) to.put_one(i, one(from[i]));
}

// The tile of so many rows.
template <class T, int WIDTH, int ASKED, int ROWS = WIDTH == WIDE ? MOST_ROWS : TALL_ROWS>
void of_rows(int64_t rows, Columns<WIDTH> weight, int64_t inputs, const float* x, Ask ask, Floats* total) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return of_rows<T, WIDTH, ASKED, ROWS - 1>(rows, weight, inputs, x, ask, total);
    tile<T, ROWS, WIDTH, ASKED>(weight, inputs, x, ask, total);
}

// Sums of one or two panels, [rows, width] or with `halves` [panel, rows, VECTORS], of at most `most` rows at a time.
// accumulate(panel, width, row, rows, total): those of some rows from `row` on, `width` vectors from a panel on;
// finish(row, output, values, count): `count` outputs of one row, from `output` on. sums: [threads, rows, WIDE * LANES].
// With `apart` a panel and the one so many panels after it are together: finish(row, output, values, values of the other).
template <class T, class Accumulate, class Finish>
void over_panels(Team& team, const Matrix& m, int64_t rows, int64_t most, bool single, int64_t apart, bool halves,
                 float* sums, const Accumulate& accumulate, const Finish& finish) {
    const int64_t panels = apart ? apart : (m.outputs + PANEL - 1) / PANEL;
    const int64_t each = apart || single || panels < FEW_PANELS * team.size() ? 1 : TOGETHER;
    team.each_part((panels + each - 1) / each, [&](int64_t item) {
        const int64_t panel = item * each, width = apart ? WIDE : panel + each <= panels ? each * VECTORS : VECTORS;
        Floats* total = reinterpret_cast<Floats*>(sums + team.thread() * rows * WIDE * LANES);
        for (int64_t first = 0; first < rows; first += most) {
            const int64_t count = first + most < rows ? most : rows - first;
            accumulate(panel, width, first, count, total);
            const auto value = [&](int64_t row, int64_t v, int64_t at) {
                const Floats sum = total[halves ? (v / VECTORS * count + row) * VECTORS + v % VECTORS : row * width + v];
                return rounded<T>(m.bias ? sum + load(m.bias + at) : sum);
            };
            for (int64_t row = 0; row < count; row++)
                if constexpr (std::is_invocable_v<Finish, int64_t, int64_t, Floats, Floats>) {
                    for (int64_t v = 0; v < VECTORS; v++) {
                        const int64_t at = panel * PANEL + v * LANES;
                        finish(first + row, at, value(row, v, at), value(row, v + VECTORS, at + apart * PANEL));
                    }
                } else {
                    for (int64_t v = 0; v < width; v++) {
                        const int64_t at = panel * PANEL + v * LANES, left = m.outputs - at;
                        if (left <= 0) break;
                        finish(first + row, at, value(row, v, at), left < LANES ? int(left) : LANES);
                    }
                }
        }
    });
}

#ifdef MATRIX_TILES
template <class T, class Finish>
void multiply_tiles(Team& team, const Matrix& m, const Rows& x, int64_t apart, float* sums, const Finish& finish) {
    const int64_t size = PANEL * m.inputs * 2, other = (apart ? apart : 1) * size, step = m.inputs * 2;
    const auto accumulate = [&](int64_t panel, int64_t width, int64_t row, int64_t rows, Floats* total) {
        const char* weight = static_cast<const char*>(m.panels) + panel * size;
        const char* from = reinterpret_cast<const char*>(x.base) + row * step;
        float* into = reinterpret_cast<float*>(total);
        Tiles::shape(rows < TILE ? int(rows) : TILE, int(rows > TILE ? rows - TILE : rows));
        written();
        if (rows <= TILE && width == WIDE)
            tile_of_two(weight, other, m.inputs, from, step, into, width);
        else
            for (int64_t v = 0; v < width; v += VECTORS, weight += other, into += VECTORS * LANES)
                if (rows > TILE)
                    tile_of_one<true>(weight, m.inputs, from, step, into, width);
                else
                    tile_of_one<false>(weight, m.inputs, from, step, into, width);
        written();
    };
    over_panels<T>(team, m, x.rows, 2 * TILE, false, apart, false, sums, accumulate, finish);
}
#endif

// What a tile of several asks for: its share of what all of them read next, which lies behind what they read now.
inline Ask share(const char* weight, int64_t bytes, int64_t each, int64_t tile, int64_t tiles) {
    return {weight + bytes + bytes * tile / tiles, each / tiles};
}

template <class T, class Finish>
void multiply_plain(Team& team, const Matrix& m, const Rows& x, int64_t apart, float* sums, const Finish& finish) {
    constexpr int64_t input = PANEL * sizeof(T), step = LINES * LINE;  // bytes of an input of a panel, of a vector
    const int64_t chunk = x.tiles == 1 ? m.inputs : x.tiles == 2 ? SHORT_CHUNK : CHUNK;
    const int64_t size = input * m.inputs, other = (apart ? apart : 1) * size;
    const bool halves = apart && x.rows > MOST_ROWS;  // one panel and then the other: registers cannot hold all sums
    const auto accumulate = [&](int64_t panel, int64_t width, int64_t, int64_t rows, Floats* total) {
        const char* weight = static_cast<const char*>(m.panels) + panel * size;
        for (int64_t i = 0; i < rows * width; i++) total[i] = Floats{};
        for (int64_t k = 0; k < m.inputs; k += chunk) {
            const int64_t inputs = k + chunk < m.inputs ? chunk : m.inputs - k;
            const char* from = weight + k * input;
            for (int64_t tile = 0; tile < x.tiles; tile++) {
                const int64_t row = x.first(tile), some = x.count(tile);
                const float* read = x.base + row * x.words + (x.pairs ? k / 2 : k) * some;
                if (width == WIDE && !halves) {
                    of_rows<T, WIDE, 2 * LINES>(some, {from, other}, inputs, read, {from, step}, total + row * WIDE);
                    continue;
                }
                for (int half = 0; half <= halves; half++) {
                    const char* at = from + half * other;
                    Floats* into = total + (half * rows + row) * VECTORS;
                    if (x.tiles == 1)
                        of_rows<T, VECTORS, LINES>(some, {at, other}, inputs, read, {at, step}, into);
                    else
                        of_rows<T, VECTORS, 1>(some, {at, other}, inputs, read,
                                               share(at, inputs * input, step, tile, x.tiles), into);
                }
            }
        }
    };
    // another thread may have written them; many more do not fit into the nearest cache
    if (team.size() > 1 && x.tiles <= 2)
        ask_for(reinterpret_cast<const char*>(x.base), x.rows * x.words * int64_t(sizeof(float)));
    over_panels<T>(team, m, x.rows, x.rows, x.rows > MOST_ROWS, apart, halves, sums, accumulate, finish);
}

}  // namespace
