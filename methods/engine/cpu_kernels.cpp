// Decoder layers on a CPU in one call: products, norms, rotary positions, attention over the cache, and over a source
// where the model has one, and residuals.
//
// A sum always runs in the same order, whatever the number of rows, the shape of the tree, the batch or the threads are,
// so a pass over many tokens gives the bits that passes over one token give. Numbers between two operations are rounded
// to the type of the weights where transformers rounds them, and kept in 32 bit.
//
// Weights are in panels of 2 registers of outputs. Of 16-bit weights two inputs are side by side, so a 32-bit lane holds
// both of one output. Processors with matrix tiles (AMX) multiply 16 rows by 16 outputs at a time, others with bfloat16
// instructions two numbers by two; elsewhere a shift or a mask yields either as a 32-bit float. Of 4 and 8-bit weights
// four inputs are side by side, and are multiplied as integers with rows that are rounded to 8 bits.

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
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
constexpr int TALL_ROWS = LANES == 16 ? 7 : 5;  // of a tile over one panel: higher ones are slower
constexpr int TALLEST = TALL_ROWS + (PAIRS ? 1 : 0);  // of one that holds all rows
constexpr int TOGETHER = LANES == 16 ? 1 : 2;  // panels at a time: one of short registers has too few sums for one row
constexpr int64_t CHUNK = 768;      // inputs that all tiles go through before the next ones are read
constexpr int LINE = 64;            // bytes
constexpr int LINES = 4 * PANEL / LINE;  // of a panel, of two 16-bit inputs or one of 32 bit
constexpr int MOST_GROUPS = 8;      // query heads that share the loads of a key
constexpr int64_t ELEMENTS = 4096;  // of element-wise work that a thread takes at a time
constexpr int64_t AHEAD = 8192;     // bytes of a weight that are asked for before they are needed
constexpr int64_t MOST_DIM = 256;   // of a head whose attention takes several queries at a time
constexpr int64_t FEW_PANELS = 32;  // of a thread: below, threads take single ones
constexpr int SPINS = 4096;
constexpr int HELPED = 4;           // threads that one helps at most
constexpr int BLOCK = 32;           // inputs that share a scale
constexpr int FOURS = BLOCK / 4;    // words of a block of 8-bit numbers
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

// -- threads ------------------------------------------------------------------------------------------------------------

// One team runs a whole pass; between two steps all of its threads meet. Work within a step goes to whoever is free.
class Team {
  public:
    explicit Team(int size) : size_(size), parts_(size) {}

    int size() const { return size_; }
    int thread() const { return size_ == 1 ? 0 : omp_get_thread_num(); }

    // Every thread calls it in the same order of steps; work(item) for 0 <= item < items, each once.
    template <class Work>
    void each(int64_t items, const Work& work) {
        if (size_ == 1) {
            for (int64_t item = 0; item < items; item++) work(item);
            return;
        }
        for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) work(item);
        meet();
    }

    // As `each`, for items that lie side by side in memory: every thread goes through a part of its own from end to end,
    // and then helps the next ones.
    template <class Work>
    void each_part(int64_t items, const Work& work) {
        if (size_ == 1) return each(items, work);
        const int64_t round = int64_t(round_.load(std::memory_order_relaxed)) << 32;
        const int self = thread();
        parts_[self].taken.store(round, std::memory_order_relaxed);
        for (int i = 0; i < size_ && i <= HELPED; i++) {
            const int64_t part = (self + i) % size_, first = items * part / size_;
            const int64_t end = round + items * (part + 1) / size_ - first;
            std::atomic<int64_t>& taken = parts_[part].taken;
            for (int64_t at = taken.load(std::memory_order_relaxed); at >= round && at < end;) {
                at = taken.fetch_add(1, std::memory_order_relaxed);
                if (at < end) work(first + at - round);
            }
        }
        meet();
    }

    // work(row) for 0 <= row < rows of so many numbers; a thread takes several short ones at a time.
    template <class Work>
    void each_row(int64_t rows, int64_t numbers, const Work& work) {
        const int64_t portion = ELEMENTS / numbers > 1 ? ELEMENTS / numbers : 1;
        each((rows + portion - 1) / portion, [&](int64_t part) {
            const int64_t end = (part + 1) * portion < rows ? (part + 1) * portion : rows;
            for (int64_t row = part * portion; row < end; row++) work(row);
        });
    }

  private:
    void meet() {
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            if (spins < SPINS)
                relax();
            else
                sched_yield();
        }
    }

    // The round in the upper half, and below it how many items are taken.
    struct alignas(64) Part {
        std::atomic<int64_t> taken{-1};
    };

    const int size_;
    std::vector<Part> parts_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

// -- products -----------------------------------------------------------------------------------------------------------

// WIDTH vectors of one panel, or of two that are `stride` bytes apart, `size` bytes each.
template <int WIDTH>
struct Columns {
    const char* at;
    int64_t stride;

    const char* vector(int v, int64_t size) const { return at + v / VECTORS * stride + v % VECTORS * size; }
};

// What is asked for while a tile is multiplied, so that it is near when it is needed: from `at` on, `step` bytes with each
// vector of a panel or block.
struct Ask {
    const char* at;
    int64_t step;
};

// GCC 12 drops calls of functions that do nothing but ask, unless they are inlined early.
__attribute__((always_inline)) inline void ask_for(const char* at, int64_t bytes) {
    for (const char* end = at + bytes; at < end; at += LINE) __builtin_prefetch(at);
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
// each vector, LINES of each panel, or one.
template <class T, int ROWS, int WIDTH, int ASKED>
void tile(Columns<WIDTH> weight, int64_t inputs, const float* x, Ask ask, Floats* total) {
    constexpr int each = sizeof(T) == 2 ? 2 : 1;  // inputs of a vector
    Floats sums[ROWS][WIDTH];
    memcpy(sums, total, sizeof sums);
    for (int64_t k = 0; k < inputs; k += each, weight.at += PANEL * each * sizeof(T), ask.at += ask.step) {
#pragma GCC unroll 4
        for (int line = 0; line < ASKED; line++)
            __builtin_prefetch(ask.at + line / LINES * weight.stride + line % LINES * LINE);
        Words numbers[WIDTH];
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) memcpy(&numbers[v], weight.vector(v, sizeof(Words)), sizeof(Words));
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
    const int64_t most = m.bits ? 1 : rows <= MOST_ROWS ? MOST_ROWS : rows <= TALLEST ? TALLEST : TALL_ROWS;
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

// The tile of so many rows.
template <class T, int WIDTH, int ASKED, int ROWS = WIDTH == WIDE ? MOST_ROWS : TALLEST>
void of_rows(int64_t rows, Columns<WIDTH> weight, int64_t inputs, const float* x, Ask ask, Floats* total) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return of_rows<T, WIDTH, ASKED, ROWS - 1>(rows, weight, inputs, x, ask, total);
    tile<T, ROWS, WIDTH, ASKED>(weight, inputs, x, ask, total);
}

// Sums of one or two panels, [rows, width], of at most `most` rows at a time. accumulate(panel, width, row, rows, total): those of
// some rows from `row` on, `width` vectors from a panel on; finish(row, output, values, count): `count` outputs of one row,
// from `output` on. sums: [threads, rows, WIDE * LANES]. With `apart` a panel and the one so many panels after it are
// together: finish(row, output, values, values of the other).
template <class T, class Accumulate, class Finish>
void over_panels(Team& team, const Matrix& m, int64_t rows, int64_t most, bool single, int64_t apart, float* sums,
                 const Accumulate& accumulate, const Finish& finish) {
    const int64_t panels = apart ? apart : (m.outputs + PANEL - 1) / PANEL;
    const int64_t each = apart || single || panels < FEW_PANELS * team.size() ? 1 : TOGETHER;
    team.each_part((panels + each - 1) / each, [&](int64_t item) {
        const int64_t panel = item * each, width = apart ? WIDE : panel + each <= panels ? each * VECTORS : VECTORS;
        Floats* total = reinterpret_cast<Floats*>(sums + team.thread() * rows * WIDE * LANES);
        for (int64_t first = 0; first < rows; first += most) {
            const int64_t count = first + most < rows ? most : rows - first;
            accumulate(panel, width, first, count, total);
            const auto value = [&](int64_t row, int64_t v, int64_t at) {
                return rounded<T>(m.bias ? total[row * width + v] + load(m.bias + at) : total[row * width + v]);
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
    over_panels<T>(team, m, x.rows, 2 * TILE, false, apart, sums, accumulate, finish);
}
#endif

// What a tile of several asks for: its share of what all of them read next, which lies behind what they read now.
inline Ask share(const char* weight, int64_t bytes, int64_t each, int64_t tile, int64_t tiles) {
    return {weight + bytes + bytes * tile / tiles, each / tiles};
}

template <class T, class Finish>
void multiply_plain(Team& team, const Matrix& m, const Rows& x, int64_t apart, float* sums, const Finish& finish) {
    constexpr int64_t input = PANEL * sizeof(T), step = LINES * LINE;  // bytes of an input of a panel, of a vector
    const int64_t chunk = x.tiles == 1 ? m.inputs : CHUNK;
    const int64_t size = input * m.inputs, other = (apart ? apart : 1) * size;
    const auto accumulate = [&](int64_t panel, int64_t width, int64_t, int64_t rows, Floats* total) {
        const char* weight = static_cast<const char*>(m.panels) + panel * size;
        for (int64_t i = 0; i < rows * width; i++) total[i] = Floats{};
        for (int64_t k = 0; k < m.inputs; k += chunk) {
            const int64_t inputs = k + chunk < m.inputs ? chunk : m.inputs - k;
            const char* from = weight + k * input;
            for (int64_t tile = 0; tile < x.tiles; tile++) {
                const int64_t row = x.first(tile), some = x.count(tile);
                const float* read = x.base + row * x.words + (x.pairs ? k / 2 : k) * some;
                Floats* into = total + row * width;
                if (width == WIDE)
                    of_rows<T, WIDE, 2 * LINES>(some, {from, other}, inputs, read, {from + AHEAD, step}, into);
                else if (x.tiles == 1)
                    of_rows<T, VECTORS, LINES>(some, {from, other}, inputs, read, {from + AHEAD, step}, into);
                else
                    of_rows<T, VECTORS, 1>(some, {from, other}, inputs, read,
                                           share(from, inputs * input, step, tile, x.tiles), into);
            }
        }
    };
    over_panels<T>(team, m, x.rows, x.rows, x.rows > MOST_ROWS, apart, sums, accumulate, finish);
}

// -- products with weights of 4 and 8 bits ------------------------------------------------------------------------------

// BLOCK inputs of LANES outputs, w = (n - offset) * scale + zero with 0 <= n < 2^BITS. A word has the numbers of four
// inputs of one output, of 4 bits those of the next four above them.
template <int BITS>
struct Block {
    uint32_t numbers[BITS * LANES];
    BFloat16 scale[LANES], zero[LANES];

    static constexpr int offset = 1 << (BITS - 1);
};

// To each sum the products of four numbers from 0 to 255 with four from -127 to 127; exact.
inline Integers dot(Integers sums, Words numbers, int32_t four) {
#if defined(__AVX512VNNI__)
    return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)numbers, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
    const __m512i n = (__m512i)numbers, q = _mm512_set1_epi32(four);
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(n, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(n, 8), _mm512_srai_epi16(q, 8));
    return sums + (Integers)even + (Integers)odd;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i n = (__m256i)numbers, q = _mm256_set1_epi32(four);
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(n, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(n, 8), _mm256_srai_epi16(q, 8));
    return sums + (Integers)even + (Integers)odd;
#else
    for (int i = 0; i < 4; i++) sums += (Integers)((numbers >> (8 * i)) & 255) * int32_t(int8_t(four >> (8 * i)));
    return sums;
#endif
}

// x: [blocks, WORDS, ROWS].
template <int BITS, int ROWS, int WIDTH>
void tile(Columns<WIDTH> weight, int64_t blocks, const int32_t* x, Ask ask, Floats* total) {
    const Words low = Words{} + 0x0f0f0f0fu;
    for (int64_t b = 0; b < blocks; b++, x += WORDS * ROWS, weight.at += VECTORS * sizeof(Block<BITS>), ask.at += ask.step) {
        for (int v = 0; v < WIDTH; v += VECTORS) ask_for(ask.at + v / VECTORS * weight.stride, ask.step);
#pragma GCC unroll 4
        for (int v = 0; v < WIDTH; v++) {
            const auto& block = *reinterpret_cast<const Block<BITS>*>(weight.vector(v, sizeof(Block<BITS>)));
            Integers sums[ROWS];
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) sums[r] = Integers{} + x[FOURS * ROWS + r];
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
                    for (int r = 0; r < ROWS; r++)
                        sums[r] = dot(sums[r], (numbers >> 4) & low, x[(2 * i + 1) * ROWS + r]);
                }
            }
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

template <int BITS, int WIDTH, int ROWS = MOST_ROWS>
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
    const Rows tiles(nullptr, x.rows, m.inputs, MOST_ROWS, false);
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
                const Ask ask = tiles.tiles == 1 ? Ask{from + AHEAD, step}
                                                 : share(from, count * step, step, tile, tiles.tiles);
                if (width == WIDE)
                    of_rows<BITS, WIDE>(some, {from, other}, count, read, ask, totals);
                else
                    of_rows<BITS, VECTORS>(some, {from, other}, count, read, ask, totals);
            }
        }
    };
    over_panels<T>(team, m, x.rows, x.rows, false, apart, sums, accumulate, finish);
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

// -- norms, rotary positions, activation --------------------------------------------------------------------------------

struct Norm {
    const float* weight;  // null: no norm here
    const float* bias;    // of a norm that takes the mean off before; null: root mean square
    float eps;
};

// A row in plain order, written as one of a tile is.
struct Plain {
    float* base;

    void put(int64_t input, Floats value) const { store(base + input, value); }
    void put_one(int64_t input, float value) const { base[input] = value; }
};

// to = (from - mean) / deviation * weight + bias; or without mean and bias
template <class T, bool CENTRED, class To>
inline void normalise_to(const Norm& norm, const float* from, const To& to, int64_t width) {
    int64_t i = 0;
    float mean = 0.0f;
    if constexpr (CENTRED) {
        Floats numbers = Floats{};
        for (; i + LANES <= width; i += LANES) numbers += load(from + i);
        mean = sum(numbers);
        for (; i < width; i++) mean += from[i];
        mean /= float(width);
    }
    const auto centred = [&](auto number) {
        if constexpr (CENTRED)
            return number - mean;
        else
            return number;
    };
    Floats squares = Floats{};
    for (i = 0; i + LANES <= width; i += LANES) {
        const Floats number = centred(load(from + i));
        squares = fused(number, number, squares);
    }
    float total = sum(squares);
    for (; i < width; i++) total += centred(from[i]) * centred(from[i]);
    const float scale = 1.0f / sqrtf(total / float(width) + norm.eps);
    for (i = 0; i + LANES <= width; i += LANES) {
        Floats number = centred(load(from + i)) * scale * load(norm.weight + i);
        if constexpr (CENTRED) number += load(norm.bias + i);
        to.put(i, rounded<T>(number));
    }
    for (; i < width; i++) {
        float number = centred(from[i]) * scale * norm.weight[i];
        if constexpr (CENTRED) number += norm.bias[i];
        to.put_one(i, rounded_one<T>(number));
    }
}

template <class T, class To>
inline void normalise(const Norm& norm, const float* from, const To& to, int64_t width) {
    if (norm.bias)
        normalise_to<T, true>(norm, from, to, width);
    else
        normalise_to<T, false>(norm, from, to, width);
}

// In place; `sin` has the sign of the half turn, and dimensions beyond `width` pass through.
template <class T>
inline void rotate(float* head, const T* cos, const T* sin, int64_t width) {
    const int64_t half = width / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats low = load(head + i), high = load(head + half + i);
        Floats turned_low = rounded<T>(low * load(cos + i)) + rounded<T>(high * load(sin + i));
        Floats turned_high = rounded<T>(high * load(cos + half + i)) + rounded<T>(low * load(sin + half + i));
        store(head + i, rounded<T>(turned_low));
        store(head + half + i, rounded<T>(turned_high));
    }
    for (; i < half; i++) {
        const float low = head[i], high = head[half + i];
        const float turned_low = rounded_one<T>(low * one(cos[i])) + rounded_one<T>(high * one(sin[i]));
        const float turned_high =
            rounded_one<T>(high * one(cos[half + i])) + rounded_one<T>(low * one(sin[half + i]));
        head[i] = rounded_one<T>(turned_low);
        head[half + i] = rounded_one<T>(turned_high);
    }
}

enum Activation : int64_t { SILU, RELU, GELU };

template <class T>
inline Floats activated(int64_t kind, Floats x) {
    if (kind == SILU) return rounded<T>(x / (1.0f + exponential(-x)));
    if (kind == RELU) return x > Floats{} ? x : Floats{};
    for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    return rounded<T>(x);
}

// to = activated(from), times `ups` where there are some.
template <class T>
inline void activate(int64_t kind, const float* from, const float* ups, const Row& to, int64_t width) {
    const auto made = [&](Floats x, Floats up) {
        return ups ? rounded<T>(activated<T>(kind, x) * up) : activated<T>(kind, x);
    };
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) to.put(i, made(load(from + i), ups ? load(ups + i) : Floats{}));
    if (i == width) return;
    Floats x{}, up{};
    memcpy(&x, from + i, 4 * (width - i));
    if (ups) memcpy(&up, ups + i, 4 * (width - i));
    const Floats last = made(x, up);
    for (int64_t k = i; k < width; k++) to.put_one(k, last[k - i]);
}

// Of some numbers; -inf where there are none.
template <class T>
float highest(const T* numbers, int64_t count) {
    Floats top = all(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) top = load(numbers + i) > top ? load(numbers + i) : top;
    float best = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) best = top[lane] > best ? top[lane] : best;
    for (; i < count; i++) best = one(numbers[i]) > best ? one(numbers[i]) : best;
    return best;
}

// p_1 - p_2 of the softmax over some scores.
float gap(const float* scores, int64_t count) {
    const float best = highest(scores, count);
    Floats totals{}, others = all(-INFINITY);
    int64_t i, bests = 0;
    const auto add = [&](Floats x) {
        const Integers is_best = x == all(best);
        others = x > others && !is_best ? x : others;
        totals += exponential(x - best);
        for (int lane = 0; lane < LANES; lane++) bests -= is_best[lane];
    };
    for (i = 0; i + LANES <= count; i += LANES) add(load(scores + i));
    float total = sum(totals), second = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) second = others[lane] > second ? others[lane] : second;
    for (; i < count; i++) {
        bests += scores[i] == best;
        second = scores[i] < best && scores[i] > second ? scores[i] : second;
        total += exponential(all(scores[i] - best))[0];
    }
    return bests > 1 ? 0.0f : (1.0f - exponential(all(second - best))[0]) / total;
}

// -- attention ----------------------------------------------------------------------------------------------------------

// Sums of neighbouring lanes: of vectors `a` and `b` whose groups of 2 * KEPT lanes belong together, KEPT of each group.
template <int KEPT, int... lane>
inline Floats folded(Floats a, Floats b, std::integer_sequence<int, lane...>) {
    const Integers low = {lane / KEPT * 2 * KEPT + lane % KEPT...};
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + KEPT);
}

// Sums of COUNT vectors, of(i) for i from `start` on, in groups of LANES / COUNT lanes; of LANES vectors one number each.
// A vector's lanes are added in the order of `sum`.
template <int COUNT, class Of>
inline Floats sums_of(int start, const Of& of) {
    if constexpr (COUNT == 1)
        return of(start);
    else
        return folded<LANES / COUNT>(sums_of<COUNT / 2>(start, of), sums_of<COUNT / 2>(start + COUNT / 2, of),
                                     std::make_integer_sequence<int, LANES>());
}

// A query of a head as its products with keys need it: pairs of 16-bit numbers, or 32-bit ones. DIM: its size if that is
// known at compile time, else 0.
template <class T, int DIM>
struct Query {
    static constexpr bool pairs = PAIRS && sizeof(T) == 2 && DIM && DIM % (2 * LANES) == 0;
    const float* numbers;
    int64_t dim;

    // Turned in place; `size` must be a multiple of LANES.
    Query(float* head, int64_t size) : numbers(head), dim(DIM ? DIM : size) {
        if constexpr (pairs)
            for (int64_t i = 0; i < dim; i += LANES) put(reinterpret_cast<BFloat16*>(head) + i, load(head + i));
    }
    inline Floats times(const T* key) const {
        Floats total = Floats{};
        if constexpr (pairs)
            for (int64_t i = 0; i < dim / 2; i += LANES) {
                Words two;
                memcpy(&two, key + 2 * i, sizeof two);
                total = both(total, two, load(numbers + i));
            }
        else
            for (int64_t i = 0; i < dim; i += LANES) total = fused(load(key + i), load(numbers + i), total);
        return total;
    }
};

// Queries of one node and one key head, `size` numbers each, which are turned in place. It sees the first `prefix` slots
// and then those in `own`; null: the next ones. count: of all that it sees.
template <class T, int DIM, int GROUPS>
void attend(float* query, int64_t size, const T* keys, const T* values, int64_t prefix, const int32_t* own,
            int64_t count, float scale, float* scores, int64_t room, const Row& to, int64_t at) {
    constexpr int TOGETHER = 4;  // sums of a query that registers hold
    const int64_t dim = DIM ? DIM : size, plain = own ? prefix : count, last = count - 1;
    const auto slot = [&](int64_t i) { return i < plain ? i : prefix + own[i - prefix]; };
    float total[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        const Query<T, DIM> of(query + g * dim, dim);
        Floats most = all(-INFINITY);
        for (int64_t i = 0; i < count; i += LANES) {
            const T* from = keys + i * dim;
            Floats score;
            if (i + LANES <= plain)
                score = sums_of<LANES>(0, [&](int lane) { return of.times(from + lane * dim); });
            else
                score = sums_of<LANES>(
                    0, [&](int lane) { return of.times(keys + slot(i + lane < last ? i + lane : last) * dim); });
            score *= scale;
            store(scores + g * room + i, score);
            most = score > most ? score : most;
        }
        float largest = most[0];
        for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
        Floats totals = Floats{};
        for (int64_t i = 0; i < count; i += LANES)
            store(scores + g * room + i, exponential(load(scores + g * room + i) - largest));
        for (int64_t i = count; i % LANES; i++) scores[g * room + i] = 0.0f;
        for (int64_t i = 0; i < count; i += LANES) totals += load(scores + g * room + i);
        total[g] = sum(totals);
    }
    int64_t start = 0;
    const auto mix = [&](auto width) {
        constexpr int vectors = decltype(width)::value;
        Floats mixed[GROUPS][vectors];
        for (int g = 0; g < GROUPS; g++)
            for (int v = 0; v < vectors; v++) mixed[g][v] = Floats{};
        const auto add = [&](int64_t i, const T* from) {
            for (int v = 0; v < vectors; v++) {
                const Floats value = load(from + start + v * LANES);
                for (int g = 0; g < GROUPS; g++)
                    mixed[g][v] = fused(value, all(scores[g * room + i]), mixed[g][v]);
            }
        };
        for (int64_t i = 0; i < plain; i++) add(i, values + i * dim);
        for (int64_t i = plain; i < count; i++) add(i, values + slot(i) * dim);
        for (int g = 0; g < GROUPS; g++)
            for (int v = 0; v < vectors; v++)
                to.put(at + g * dim + start + v * LANES, rounded<T>(mixed[g][v] / total[g]));
        start += vectors * LANES;
    };
    while (start + TOGETHER * LANES <= dim) mix(std::integral_constant<int, TOGETHER>());
    while (start < dim) mix(std::integral_constant<int, 1>());
}

template <class T, int DIM, int GROUPS = MOST_GROUPS, class... Rest>
inline void attend_groups(int64_t groups, Rest... rest) {
    if constexpr (GROUPS == 1)
        attend<T, DIM, 1>(rest...);
    else if (groups == GROUPS)
        attend<T, DIM, GROUPS>(rest...);
    else
        attend_groups<T, DIM, GROUPS - 1>(groups, rest...);
}

template <class T, class... Rest>
inline void attend_heads(int64_t groups, float* query, int64_t dim, Rest... rest) {
    if (dim == 64)
        attend_groups<T, 64>(groups, query, dim, rest...);
    else if (dim == 128)
        attend_groups<T, 128>(groups, query, dim, rest...);
    else
        attend_groups<T, 0>(groups, query, dim, rest...);
}

#ifdef __AVX512BF16__
// Blocks of WIDTH columns and rows that lie across the diagonal change places.
template <int WIDTH, int... lane>
inline void exchange(Words* rows, std::integer_sequence<int, lane...>) {
    const Integers low = {(lane & WIDTH ? lane - WIDTH + LANES : lane)...};
    const Integers high = {(lane & WIDTH ? lane + LANES : lane + WIDTH)...};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & WIDTH)) {
            const Words a = rows[i], b = rows[i + WIDTH];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + WIDTH] = __builtin_shuffle(a, b, high);
        }
}

// 16 rows of 32-bit numbers, columns for rows.
inline void transpose(Words* at) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
    Words rows[LANES];
    memcpy(rows, at, sizeof rows);
    exchange<8>(rows, lanes);
    exchange<4>(rows, lanes);
    exchange<2>(rows, lanes);
    exchange<1>(rows, lanes);
    memcpy(at, rows, sizeof rows);
}

// Two vectors as 16-bit numbers, those of `a` and `b` side by side.
inline Words side_by_side(Floats a, Floats b) { return (Words)a >> 16 | ((Words)b & 0xffff0000u); }

// Queries of one row and one key head: `groups` of each node, `step` numbers from one node to the next.
struct Queries {
    const float* numbers;
    int64_t groups, step, dim;

    const float* of(int64_t query) const { return numbers + query / groups * step + query % groups * dim; }
};

// What a query sees: the first `prefix` slots, and of `others` after them those that `reach` names for its node, or
// without `reach` the first `seen` and one more for each node before its own.
struct Sight {
    int64_t prefix, others, seen;
    const uint8_t* reach;

    bool sees(int64_t node, int64_t other) const { return reach ? reach[node * others + other] : other < seen + node; }
    int64_t farthest(int64_t node) const { return reach || seen + node > others ? others : seen + node; }
};

constexpr int MIXED = 4;  // vectors of values at a time

// The two products of attention, of up to TILE queries. Both sum in one order for each query.
struct ByPairs {
    // Of TILE keys, `row` bytes each. turned: [dim / 2, TILE] of two numbers; to: [TILE keys, TILE queries].
    static void scores(const char* keys, int64_t row, const Words* turned, int64_t dim, float* to) {
        Floats sums[TILE] = {};
        for (int64_t pair = 0; pair < dim / 2; pair++, keys += 4) {
            const Words two = turned[pair];
#pragma GCC unroll 16
            for (int key = 0; key < TILE; key++)
                sums[key] = both(sums[key], two, repeated(*reinterpret_cast<const float*>(keys + key * row)));
        }
        memcpy(to, sums, sizeof sums);
    }

    // Sums start at 0, [TILE, MIXED] vectors.
    static void begin(float* sums, int64_t count) { memset(sums, 0, count * MIXED * sizeof(Floats)); }
    // weights: [TILE pairs of slots, TILE queries]; packed: [MIXED, TILE pairs of slots], the first `vectors` of MIXED.
    static void add(Words* weights, const Words* packed, int64_t vectors, int64_t count, float* sums) {
        Floats* into = reinterpret_cast<Floats*>(sums);
        for (int64_t q = 0; q < count; q += MOST_ROWS)
            if (vectors == MIXED)
                of_rows<MIXED>(count - q, reinterpret_cast<float*>(weights) + q, packed, into + q * MIXED);
            else
                of_rows<MIXED / 2>(count - q, reinterpret_cast<float*>(weights) + q, packed, into + q * MIXED);
    }
    static void end(float*) {}

  private:
    template <int WIDTH, int COUNT = MOST_ROWS>
    static void of_rows(int64_t rows, const float* weights, const Words* packed, Floats* into) {
        if constexpr (COUNT > 1)
            if (rows < COUNT) return of_rows<WIDTH, COUNT - 1>(rows, weights, packed, into);
        Floats sums[COUNT][WIDTH];
        for (int q = 0; q < COUNT; q++)
            for (int v = 0; v < WIDTH; v++) sums[q][v] = into[q * MIXED + v];
        for (int pair = 0; pair < TILE; pair++, weights += TILE) {
#pragma GCC unroll 4
            for (int v = 0; v < WIDTH; v++) {
                const Words two = packed[v * TILE + pair];
#pragma GCC unroll 6
                for (int q = 0; q < COUNT; q++) sums[q][v] = both(sums[q][v], two, repeated(weights[q]));
            }
        }
        for (int q = 0; q < COUNT; q++)
            for (int v = 0; v < WIDTH; v++) into[q * MIXED + v] = sums[q][v];
    }
};

#ifdef MATRIX_TILES
// The same by matrix tiles.
struct ByTiles {
    static void scores(const char* keys, int64_t row, const Words* turned, int64_t dim, float* to) {
        Tiles::shape(TILE, TILE);
        written();
        _tile_zero(0);
        for (int64_t step = 0; step < dim / TILE_INPUTS; step++) {
            _tile_loadd(4, keys + step * LINE, row);
            _tile_loadd(6, turned + step * TILE, LINE);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, to, LINE);
        written();
    }
    static void begin(float*, int64_t) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    static void add(Words* weights, const Words* packed, int64_t vectors, int64_t, float*) {
        transpose(weights);
        written();
        _tile_loadd(4, weights, LINE);
        _tile_loadd(6, packed, LINE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, packed + TILE, LINE);
        _tile_dpbf16ps(1, 4, 7);
        if (vectors == MIXED) {
            _tile_loadd(6, packed + 2 * TILE, LINE);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, packed + 3 * TILE, LINE);
            _tile_dpbf16ps(3, 4, 7);
        }
        written();
    }
    static void end(float* sums) {
        _tile_stored(0, sums, MIXED * LINE);
        _tile_stored(1, sums + LANES, MIXED * LINE);
        _tile_stored(2, sums + 2 * LANES, MIXED * LINE);
        _tile_stored(3, sums + 3 * LANES, MIXED * LINE);
        written();
    }
};
#endif

// What `attend_queries` needs beside scores: queries of a tile, weights of a tile, values or the last keys, sums.
constexpr int64_t TURNED = MOST_DIM / 2 * TILE, WEIGHTS = TILE * LANES, PACKED = MOST_DIM * TILE / 2;
constexpr int64_t ATTENTION_NUMBERS = TURNED + WEIGHTS + PACKED + TILE * MIXED * LANES;

// `count` queries from `first` on, at most TILE: lanes are queries. Weights are summed key by key, and values two keys by
// two in the order in which a query sees them. So its sums have one order, whatever tree it is in. scores: [slots, a
// multiple of 32, TILE]; own: [slots]; put_vector(query, d, values): a vector.
template <class By, class Put>
void attend_queries(const Queries& queries, int64_t first, int64_t count, const BFloat16* keys, const BFloat16* values,
                    int64_t capacity, const Sight& sight, float scale, float* scores, int32_t* own, float* room,
                    const Put& put_vector) {
    const int64_t dim = queries.dim, row = 2 * dim;  // bytes of a key
    const int64_t begin = first / queries.groups, end = (first + count - 1) / queries.groups + 1;
    const int64_t slots = sight.prefix + sight.farthest(end - 1);
    Words* turned = reinterpret_cast<Words*>(room);                     // [dim / 2, TILE] of two numbers
    Words* weights = reinterpret_cast<Words*>(room + TURNED);           // [TILE, TILE], of two slots
    Words* packed = reinterpret_cast<Words*>(room + TURNED + WEIGHTS);  // [MIXED, TILE], of two slots
    float* sums = room + TURNED + WEIGHTS + PACKED;                     // [TILE, MIXED] vectors
    for (int64_t i = 0; i < dim; i += TILE_INPUTS) {
        Words* block = turned + i / 2;
        for (int64_t q = 0; q < TILE; q++) {
            const float* from = queries.of(first + (q < count ? q : 0)) + i;
            put(reinterpret_cast<BFloat16*>(block + q), load(from));
            put(reinterpret_cast<BFloat16*>(block + q) + LANES, load(from + LANES));
        }
        transpose(block);
    }
    for (int64_t i = 0; i < slots; i += TILE) {
        const char* from = reinterpret_cast<const char*>(keys) + i * row;
        if (i + TILE > capacity) {  // beyond it may be no memory
            memcpy(packed, from, (capacity - i) * row);
            from = reinterpret_cast<const char*>(packed);
        }
        ask_for(from + AHEAD, TILE * row);
        By::scores(from, row, turned, dim, scores + i * LANES);
    }
    // Scores, and which of the slots after `common` a query sees
    const int64_t common = sight.prefix + (sight.reach ? 0 : sight.farthest(begin));
    Floats most = all(-INFINITY);
    for (int64_t i = 0; i < common; i++) {
        const Floats score = load(scores + i * LANES) * scale;
        store(scores + i * LANES, score);
        most = score > most ? score : most;
    }
    __mmask16 of_node[TILE] = {};  // its queries
    for (int64_t q = 0; q < count; q++) of_node[(first + q) / queries.groups - begin] |= __mmask16(1u << q);
    for (int64_t i = common; i < slots; i++) {
        __mmask16 seen = 0;
        for (int64_t node = begin; node < end; node++)
            if (sight.sees(node, i - sight.prefix)) seen |= of_node[node - begin];
        const Floats score = load(scores + i * LANES) * scale;
        const auto visible = (Floats)_mm512_mask_blend_ps(seen, (__m512)all(-INFINITY), (__m512)score);
        store(scores + i * LANES, visible);
        most = visible > most ? visible : most;
    }
    Floats totals = Floats{};
    for (int64_t i = 0; i < slots; i++) {
        const Floats score = load(scores + i * LANES);
        Floats weight = exponential(score - most);
        if (i >= common) weight = score == all(-INFINITY) ? Floats{} : weight;
        totals += weight;
        store(scores + i * LANES, rounded<BFloat16>(weight));
    }
    const int64_t whole = sight.reach ? sight.prefix / TILE_INPUTS * TILE_INPUTS : slots;  // in one order for all queries
    for (int64_t i = slots; i % TILE_INPUTS; i++) store(scores + i * LANES, Floats{});
    // Values of 32 keys, slot(j) for 0 <= j < size, the others being 0
    const auto pack = [&](int64_t size, int64_t d, int64_t vectors, const auto& slot) {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                             37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
        for (int64_t j = 0; j < TILE_INPUTS; j += 2) {
            const char* a = reinterpret_cast<const char*>(values) + slot(j < size ? j : 0) * row + 2 * d;
            const char* b = reinterpret_cast<const char*>(values) + slot(j + 1 < size ? j + 1 : 0) * row + 2 * d;
            for (int64_t half = 0; half < vectors; half += 2) {
                const __m512i x = j < size ? _mm512_loadu_si512(a + half * 2 * LANES) : _mm512_setzero_si512();
                const __m512i y = j + 1 < size ? _mm512_loadu_si512(b + half * 2 * LANES) : _mm512_setzero_si512();
                packed[half * TILE + j / 2] = (Words)_mm512_permutex2var_epi16(x, low, y);
                packed[(half + 1) * TILE + j / 2] = (Words)_mm512_permutex2var_epi16(x, high, y);
            }
        }
    };
    for (int64_t d = 0; d < dim; d += MIXED * LANES) {
        const int64_t left = (dim - d) / LANES, vectors = left < MIXED ? left : MIXED;
        By::begin(sums, count);
        for (int64_t i = 0; i < whole; i += TILE_INPUTS) {
            for (int64_t j = 0; j < TILE; j++) {
                const float* two = scores + (i + 2 * j) * LANES;
                weights[j] = side_by_side(load(two), load(two + LANES));
            }
            pack(slots - i, d, vectors, [&](int64_t j) { return i + j; });
            if (!d) ask_for(reinterpret_cast<const char*>(values) + i * row + AHEAD, TILE_INPUTS * row);
            By::add(weights, packed, vectors, count, sums);
        }
        for (int64_t node = begin; sight.reach && node < end; node++) {
            int64_t size = 0;
            for (int64_t i = whole; i < sight.prefix; i++) own[size++] = int32_t(i);
            for (int64_t other = 0; other < sight.others; other++)
                if (sight.sees(node, other)) own[size++] = int32_t(sight.prefix + other);
            const Words mask = (Words)_mm512_maskz_set1_epi32(of_node[node - begin], -1);
            for (int64_t i = 0; i < size; i += TILE_INPUTS) {
                const int64_t some = size - i < TILE_INPUTS ? size - i : TILE_INPUTS;
                const auto weight = [&](int64_t j) { return j < some ? load(scores + own[i + j] * LANES) : Floats{}; };
                for (int64_t j = 0; j < TILE; j++)
                    weights[j] = side_by_side(weight(2 * j), weight(2 * j + 1)) & mask;
                pack(some, d, vectors, [&](int64_t j) { return int64_t(own[i + j]); });
                By::add(weights, packed, vectors, count, sums);
            }
        }
        By::end(sums);
        for (int64_t q = 0; q < count; q++)
            for (int64_t v = 0; v < vectors; v++)
                put_vector(first + q, d + v * LANES, rounded<BFloat16>(load(sums + (MIXED * q + v) * LANES) / totals[q]));
    }
}
#endif

// Whether attention takes several queries at a time: of several nodes, and of the heads that share keys. It depends on the
// model alone, as it sums in another order than `attend`.
template <class T>
bool by_queries(int64_t dim, int64_t groups) {
    return PAIRS && sizeof(T) == 2 && dim % TILE_INPUTS == 0 && dim <= MOST_DIM && (groups > 1 || tiles_allowed());
}

// -- a pass -------------------------------------------------------------------------------------------------------------

struct Layer {
    Matrix qkv, out, source_query, source_out, up, down;  // source_*: attention over a source; without panels: none
    Norm before_attention, after_attention, before_source, before_mlp, after_mlp, query, key;
    Norm close_attention, close_source, close_mlp;  // of the sum of a state and what a sub-layer adds
    int64_t norm_heads;  // query and key norms act on each head, not on all together
    int64_t rotary;
    int64_t activation, gated;  // gated: `up` yields what is activated, and after it what that is multiplied with
};

struct Model {
    const Layer* layers;
    int64_t hidden, heads, kv_heads, dim, mlp;
    int64_t beside;  // numbers that the first product of attention reads before those of the state
    float scale, residual;
};

// Nodes of a pass after `lengths` tokens per row; a row of `work` per thread and buffers, see `workspace`.
struct Pass {
    const void* hidden;      // [batch, nodes, hidden]
    const void* beside;      // [batch, nodes, beside]
    void* result;            // of the same shape
    const void *cos, *sin;   // [batch or 1, nodes, rotary]
    int64_t table;           // numbers between the tables of two rows; 0: one for all
    int64_t rotary;          // dimensions that turn
    const uint8_t* reach;    // [batch, nodes, earlier + nodes]: which nodes a node sees; null: those up to itself
    const int64_t* lengths;  // [batch]
    const int64_t* sources;  // [batch]: slots of the source, from the first one of a row; null: the model has none
    int64_t begin;           // slot at which the tokens of a row begin
    void* cache;             // [layer, batch, 2 kv_heads, capacity, dim]
    int64_t batch, nodes, capacity;
    int64_t earlier;         // nodes after the tokens of a row whose keys and values are there
    const int32_t* layers;   // to run, in order
    const int32_t* places;   // of these in the cache
    const uint8_t* parts;    // bit 0: attention, bit 1: attention over a source, bit 2: feed-forward
    void* const* taps;       // where states after these go; null: nowhere
    int64_t count;
    float* work;
    int64_t threads;
    const struct Exits* exits;  // null: every row runs all
};

enum Measure : int64_t { SOFTMAX, COSINE, CLASSIFIER, TABLE };

// Exits of a pass over one node per row. A row that leaves runs no more; the layers above get its keys and values.
struct Exits {
    int64_t run;             // layers that are run of all that there are, at most `count`
    int64_t propagates;      // whether layers that a row did not run get its keys and values
    const uint8_t* stops;    // [count]: whether rows may leave after this one
    int64_t measure;
    const float* thresholds; // [batch]: a row leaves above it
    Norm norm;               // before the output matrix
    const Matrix* maps;      // [count], of the normed state; without panels: none
    Matrix screen, head;     // the output matrix; the screen's first rows are asked before, without panels: none
    const float* weight;     // of the classifier
    float bias;
    const int32_t* depths;   // [batch] of the table
    int32_t* left;           // [batch]: 0 or more: the row is not run; after the pass how many ran
    float* logits;           // [batch, outputs of head]
    uint8_t* scored;         // [batch]: whether its logits are there
    float* confidence;       // [batch] of the softmax, where it was asked last
    int64_t* columns;        // that were multiplied
    float* room;             // [batch, screen's outputs + 2 * hidden]
};

int64_t padded(int64_t numbers) { return (numbers + LANES - 1) / LANES * LANES; }

struct Buffers {
    float *hidden, *rows, *wide, *update, *sums, *scores;
    int32_t* rounded;
    int64_t room, of_thread;
};

int64_t lay_out(const Model& m, int64_t rows, int64_t slots, int64_t threads, float* work, Buffers* into) {
    const int64_t qkv = (m.heads + 2 * m.kv_heads) * m.dim, mixed = m.heads * m.dim;
    int64_t narrow = m.hidden + m.beside > mixed ? m.hidden + m.beside : mixed;
    narrow = narrow > m.mlp ? narrow : m.mlp;
    const int64_t wide = qkv > 2 * m.mlp ? qkv : 2 * m.mlp;
    const int64_t groups = m.heads / m.kv_heads;
    int64_t room = padded(slots), of_thread = ((groups < MOST_GROUPS ? groups : MOST_GROUPS) + 1) * room;
#ifdef __AVX512BF16__
    room = (slots + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    const int64_t of_queries = (TILE + 1) * room + ATTENTION_NUMBERS;
    of_thread = of_queries > of_thread ? of_queries : of_thread;
#endif
    const int64_t sizes[] = {padded(rows * m.hidden), padded(rows * narrow), padded(rows * wide),
                             padded(rows * m.hidden), threads * rows * WIDE * LANES,
                             threads * of_thread,
                             rounded_words(rows, narrow)};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    if (into) {
        into->hidden = work;
        into->rows = into->hidden + sizes[0];
        into->wide = into->rows + sizes[1];
        into->update = into->wide + sizes[2];
        into->sums = into->update + sizes[3];
        into->scores = into->sums + sizes[4];
        into->rounded = reinterpret_cast<int32_t*>(into->scores + sizes[5]);
        into->room = room;
        into->of_thread = sizes[5] / threads;
    }
    return total;
}

// From numbers of any type to 32-bit ones.
template <class T, class To>
inline void copy(const T* from, const To& to, int64_t numbers) {
    int64_t i = 0;
    for (; i + LANES <= numbers; i += LANES) to.put(i, load(from + i));
    for (; i < numbers; i++) to.put_one(i, one(from[i]));
}

template <class T>
void narrow(const float* from, T* to, int64_t numbers) {
    int64_t i = 0;
    for (; i + LANES <= numbers; i += LANES) put(to + i, load(from + i));
    for (; i < numbers; i++) put_one(to + i, from[i]);
}

template <class T>
class Runner {
  public:
    Runner(const Model& m, const Pass& p) : m_(m), p_(p), rows_(p.batch * p.nodes) {
        int64_t longest = 0;
        for (int64_t b = 0; b < p.batch; b++) longest = p.lengths[b] > longest ? p.lengths[b] : longest;
        longest += p.earlier + p.nodes;
        for (int64_t b = 0; p.sources && b < p.batch; b++) longest = p.sources[b] > longest ? p.sources[b] : longest;
        lay_out(m, rows_, longest, p.threads, p.work, &buffers_);
        if (!p.exits) return;
        source_.reserve(p.batch);
        for (int64_t b = 0; b < p.batch; b++)
            if (p.exits->left[b] < 0) source_.push_back(b);
        rows_ = int64_t(source_.size());
        leaves_.resize(p.batch);
        asked_.reserve(p.batch);
    }

    void run(Team& team) {
        over_rows(team, [&](int64_t row) {
            copy(static_cast<const T*>(p_.hidden) + source(row) * m_.hidden, Plain{buffers_.hidden + row * m_.hidden},
                 m_.hidden);
        });
        for (int64_t i = 0; i < (p_.exits ? p_.exits->run : p_.count) && rows_; i++) {
            const Layer& layer = m_.layers[p_.layers[i]];
            if (p_.parts[i] & 1) attention(team, layer, p_.places[i]);
            if (p_.parts[i] & 2 && layer.source_query.panels) look(team, layer, p_.places[i]);
            if (p_.parts[i] & 4) feed_forward(team, layer);
            if (p_.taps[i]) copy_out(team, static_cast<T*>(p_.taps[i]));
            if (p_.exits && p_.exits->stops[i]) leave(team, i);
        }
        copy_out(team, static_cast<T*>(p_.result));
        if (p_.exits && p_.exits->propagates) fill(team);
    }

  private:
    template <class Work>
    void over_rows(Team& team, const Work& work) {
        team.each_row(rows_, m_.hidden, work);
    }

    // Row and node of the pass, of a row that is run.
    int64_t source(int64_t row) const { return p_.exits ? source_[row] : row; }

    void copy_out(Team& team, T* to) {
        over_rows(team, [&](int64_t row) {
            narrow(buffers_.hidden + row * m_.hidden, to + source(row) * m_.hidden, m_.hidden);
        });
    }

    // Judge all rows after the i-th layer, and drop those that leave.
    void leave(Team& team, int64_t i) {
        const Exits& exits = *p_.exits;
        if (exits.measure == TABLE)
            team.each(1, [&](int64_t) {
                for (int64_t row = 0; row < rows_; row++) leaves_[row] = exits.depths[source_[row]] == i + 1;
            });
        else if (exits.measure == COSINE)
            over_rows(team, [&](int64_t row) { leaves_[row] = saturated(row); });
        else
            judge(team, exits.maps[i]);
        team.each(1, [&](int64_t) {
            int64_t kept = 0;
            for (int64_t row = 0; row < rows_; row++) {
                const int64_t b = source_[row];
                const float* state = buffers_.hidden + row * m_.hidden;
                if (leaves_[row]) {
                    exits.left[b] = int32_t(i + 1);
                    narrow(state, static_cast<T*>(p_.result) + b * m_.hidden, m_.hidden);
                    continue;
                }
                if (kept < row) memcpy(buffers_.hidden + kept * m_.hidden, state, 4 * m_.hidden);
                source_[kept++] = b;
            }
            rows_ = kept;
            judged_ = true;
        });
    }

    // The cosine of the angle to the state that was judged before is above the threshold.
    bool saturated(int64_t row) {
        const float* state = buffers_.hidden + row * m_.hidden;
        float* before = p_.exits->room + source_[row] * (p_.exits->screen.outputs + 2 * m_.hidden);
        const float cosine = inner(state, before) / fmaxf(1e-8f, sqrtf(inner(state, state) * inner(before, before)));
        memcpy(before, state, 4 * m_.hidden);
        return judged_ && cosine > p_.exits->thresholds[source_[row]];
    }

    float inner(const float* a, const float* b) const {
        Floats totals{};
        int64_t i = 0;
        for (; i + LANES <= m_.hidden; i += LANES) totals = fused(load(a + i), load(b + i), totals);
        float total = sum(totals);
        for (; i < m_.hidden; i++) total += a[i] * b[i];
        return total;
    }

    // By what the output matrix makes of the state, or a classifier.
    void judge(Team& team, const Matrix& map) {
        const Exits& exits = *p_.exits;
        const int64_t each = exits.screen.outputs + 2 * m_.hidden;
        const auto ready = [&](int64_t row) { return exits.room + row * each; };
        const Rows x = rows_for<T>(buffers_.rows, rows_, map.panels ? map : exits.head);
        over_rows(team, [&](int64_t row) {
            normalise<T>(exits.norm, buffers_.hidden + row * m_.hidden, Plain{ready(row)}, m_.hidden);
            if (map.panels) copy(ready(row), Row(x, row), m_.hidden);
        });
        if (map.panels)
            product(team, map, x, [&](int64_t row, int64_t at, Floats value, int count) {
                store(ready(row) + at, value, count);
            });
        if (exits.measure == CLASSIFIER) {
            over_rows(team, [&](int64_t row) {
                const float z = inner(ready(row), exits.weight) + exits.bias;
                leaves_[row] = 1.0f / (1.0f + expf(-z)) > exits.thresholds[source_[row]];
            });
            return;
        }
        if (exits.screen.panels) {
            const Rows all = rows_for<T>(buffers_.rows, rows_, exits.screen);
            over_rows(team, [&](int64_t row) { copy(ready(row), Row(all, row), m_.hidden); });
            product(team, exits.screen, all, [&](int64_t row, int64_t at, Floats value, int count) {
                store(ready(row) + 2 * m_.hidden + at, value, count);
            });
        }
        team.each_row(rows_, exits.screen.panels ? exits.screen.outputs : m_.hidden, [&](int64_t row) {
            float& sure = exits.confidence[source_[row]];
            sure = exits.screen.panels ? gap(ready(row) + 2 * m_.hidden, exits.screen.outputs) : 1.0f;
            leaves_[row] = !exits.screen.panels || sure > exits.thresholds[source_[row]];
        });
        team.each(1, [&](int64_t) {
            asked_.clear();
            for (int64_t row = 0; row < rows_; row++)
                if (leaves_[row]) asked_.push_back(row);
            *exits.columns += exits.screen.outputs + (asked_.empty() ? 0 : exits.head.outputs);
        });
        if (asked_.empty()) return;
        const int64_t asked = int64_t(asked_.size()), outputs = exits.head.outputs;
        const Rows some = rows_for<T>(buffers_.rows, asked, exits.head);
        team.each_row(asked, m_.hidden, [&](int64_t k) { copy(ready(asked_[k]), Row(some, k), m_.hidden); });
        product(team, exits.head, some, [&](int64_t k, int64_t at, Floats value, int count) {
            store(exits.logits + source_[asked_[k]] * outputs + at, value, count);
        });
        team.each_row(asked, outputs, [&](int64_t k) {
            const int64_t row = asked_[k], b = source_[row];
            exits.confidence[b] = fminf(exits.confidence[b], gap(exits.logits + b * outputs, outputs));
            leaves_[row] = exits.scored[b] = exits.confidence[b] > exits.thresholds[b];
        });
    }

    // Keys and values of the layers that rows did not run, of the state with which they left.
    void fill(Team& team) {
        const auto without = [&](int64_t b, int64_t i) { return p_.exits->left[b] > 0 && p_.exits->left[b] <= i; };
        for (int64_t i = 0; i < p_.count; i++) {
            int64_t rows = 0;  // each thread counts for itself: what they share changes while some look at it
            for (int64_t b = 0; b < p_.batch; b++) rows += without(b, i);
            if (!rows || !(p_.parts[i] & 1)) continue;
            team.each(1, [&](int64_t) {
                source_.clear();
                for (int64_t b = 0; b < p_.batch; b++)
                    if (without(b, i)) source_.push_back(b);
                rows_ = rows;
            });
            over_rows(team, [&](int64_t row) {
                copy(static_cast<const T*>(p_.result) + source_[row] * m_.hidden,
                     Plain{buffers_.hidden + row * m_.hidden}, m_.hidden);
            });
            keys_and_values(team, m_.layers[p_.layers[i]], p_.places[i], false);
        }
    }

    template <class Finish>
    void product(Team& team, const Matrix& matrix, const Rows& x, const Finish& finish, int64_t apart = 0) {
        multiply<T>(team, matrix, x, apart, buffers_.sums, buffers_.rounded, finish);
    }

    // Input of a sub-layer, for its first product: the state or its norm, after `beside` numbers of the pass.
    Rows input(Team& team, const Norm& norm, const Matrix& matrix, int64_t beside) {
        const Rows x = rows_for<T>(buffers_.rows, rows_, matrix);
        over_rows(team, [&](int64_t row) {
            const float* state = buffers_.hidden + row * m_.hidden;
            if (beside) copy(static_cast<const T*>(p_.beside) + row * beside, Row(x, row), beside);
            const Row to = Row(x, row).after(beside);
            if (norm.weight)
                normalise<T>(norm, state, to, m_.hidden);
            else
                copy(state, to, m_.hidden);
        });
        return x;
    }

    inline void add(int64_t row, int64_t output, Floats update, int count) {
        float* state = buffers_.hidden + row * m_.hidden + output;
        if (m_.residual != 1.0f) update = rounded<T>(update * m_.residual);
        if (count == LANES) {
            store(state, rounded<T>(load(state) + update));
            return;
        }
        for (int i = 0; i < count; i++) state[i] = rounded_one<T>(state[i] + update[i]);
    }

    // The last product of a sub-layer, and the residual.
    void output(Team& team, const Matrix& matrix, const Norm& norm, const Rows& x, const Norm& close) {
        if (norm.weight) {
            product(team, matrix, x, [&](int64_t row, int64_t at, Floats value, int count) {
                store(buffers_.update + row * m_.hidden + at, value, count);
            });
            over_rows(team, [&](int64_t row) {
                float* update = buffers_.update + row * m_.hidden;
                normalise<T>(norm, update, Plain{update}, m_.hidden);
                for (int64_t i = 0; i < m_.hidden; i += LANES) {
                    const int count = m_.hidden - i < LANES ? int(m_.hidden - i) : LANES;
                    Floats value{};
                    memcpy(&value, update + i, 4 * count);
                    add(row, i, value, count);
                }
            });
        } else {
            product(team, matrix, x,
                    [&](int64_t row, int64_t at, Floats value, int count) { add(row, at, value, count); });
        }
        if (!close.weight) return;
        over_rows(team, [&](int64_t row) {
            float* state = buffers_.hidden + row * m_.hidden;
            normalise<T>(close, state, Plain{state}, m_.hidden);
        });
    }

    // After the tokens of a row.
    int64_t slot(int64_t b) const { return p_.begin + p_.lengths[b]; }

    T* cache_of(int64_t place) const {
        return static_cast<T*>(p_.cache) + place * p_.batch * 2 * m_.kv_heads * p_.capacity * m_.dim;
    }

    // Queries, keys and values into `wide`, and keys and values into the cache; or without queries, where the matrix has
    // whole panels before those of the keys.
    void keys_and_values(Team& team, const Layer& layer, int64_t place, bool queries) {
        const int64_t dim = m_.dim, width = layer.qkv.outputs, turning = m_.heads + m_.kv_heads;
        const int64_t first = queries || m_.heads * dim % PANEL ? 0 : m_.heads * dim;
        const Matrix matrix = rest(layer.qkv, first);
        const Rows x = input(team, layer.before_attention, matrix, m_.beside);
        product(team, matrix, x, [&](int64_t row, int64_t at, Floats value, int count) {
            store(buffers_.wide + row * width + first + at, value, count);
        });
        T* cache = cache_of(place);
        over_rows(team, [&](int64_t row) {
            const int64_t b = source(row) / p_.nodes, node = source(row) % p_.nodes;
            float* heads = buffers_.wide + row * width;
            if (queries) norm_heads(layer.query, layer.norm_heads, heads, m_.heads);
            norm_heads(layer.key, layer.norm_heads, heads + m_.heads * dim, m_.kv_heads);
            if (layer.rotary) {
                const int64_t at = b * p_.table + node * p_.rotary;
                for (int64_t h = queries ? 0 : m_.heads; h < turning; h++)
                    rotate(heads + h * dim, static_cast<const T*>(p_.cos) + at, static_cast<const T*>(p_.sin) + at,
                           p_.rotary);
            }
            for (int64_t h = 0; h < 2 * m_.kv_heads; h++)
                narrow(heads + (m_.heads + h) * dim,
                       cache + ((b * 2 * m_.kv_heads + h) * p_.capacity + slot(b) + p_.earlier + node) * dim, dim);
        });
    }

    // The outputs of a matrix from one on, the first of a panel.
    Matrix rest(const Matrix& m, int64_t first) const {
        const int64_t block = m.bits == 4 ? sizeof(Block<4>) : sizeof(Block<8>);
        const int64_t size = m.bits ? m.inputs / BLOCK * VECTORS * block : PANEL * m.inputs * int64_t(sizeof(T));
        return {static_cast<const char*>(m.panels) + first / PANEL * size, m.bias ? m.bias + first : nullptr, m.inputs,
                m.outputs - first, m.bits};
    }

    void attention(Team& team, const Layer& layer, int64_t place) {
        keys_and_values(team, layer, place, true);
        const int64_t dim = m_.dim, width = layer.qkv.outputs;
        const T* cache = cache_of(place);
        const int64_t groups = m_.heads / m_.kv_heads;
        const Rows mixed = rows_for<T>(buffers_.rows, rows_, layer.out);
#ifdef __AVX512BF16__
        if constexpr (sizeof(T) == 2)
            if (by_queries<T>(dim, groups)) {
                const int64_t others = p_.earlier + p_.nodes;
                over_queries(team, groups, width, cache, p_.begin, mixed, [&](int64_t b) {
                    const uint8_t* reach = p_.reach ? p_.reach + b * p_.nodes * others : nullptr;
                    return Sight{p_.lengths[b], others, p_.earlier + 1, reach};
                });
                output(team, layer.out, layer.after_attention, mixed, layer.close_attention);
                return;
            }
#endif
        const bool alone = rows_ * m_.kv_heads < 4 * p_.threads || groups > MOST_GROUPS;
        const int64_t together = alone ? 1 : groups;
        const int64_t units = m_.heads / together;  // of a node
        team.each(rows_ * units, [&](int64_t item) {
            const int64_t row = item / units, head = item % units * together, kv = head / groups;
            const int64_t b = source(row) / p_.nodes, node = source(row) % p_.nodes;
            float* scores = buffers_.scores + team.thread() * buffers_.of_thread;
            int32_t* own = reinterpret_cast<int32_t*>(scores + together * buffers_.room);
            const int64_t others = p_.earlier + p_.nodes;
            int64_t count = p_.reach ? 0 : p_.earlier + node + 1;
            if (p_.reach)
                for (int64_t other = 0; other < others; other++)
                    if (p_.reach[(b * p_.nodes + node) * others + other]) own[count++] = int32_t(other);
            const T* keys = cache + ((b * 2 * m_.kv_heads + kv) * p_.capacity + p_.begin) * dim;
            const T* values = keys + m_.kv_heads * p_.capacity * dim;
            attend_heads<T>(together, buffers_.wide + row * width + head * dim, dim, keys, values, p_.lengths[b],
                             p_.reach ? own : nullptr, p_.lengths[b] + count, m_.scale, scores, buffers_.room,
                             Row(mixed, row), head * dim);
        });
        output(team, layer.out, layer.after_attention, mixed, layer.close_attention);
    }

#ifdef __AVX512BF16__
    // Attention of queries in `wide`, `width` numbers from one node to the next, over the keys and values from slot `begin`
    // on. sight(b): what those of a row see.
    template <class See>
    void over_queries(Team& team, int64_t groups, int64_t width, const T* cache, int64_t begin, const Rows& mixed,
                      const See& sight) {
        const int64_t dim = m_.dim, heads = m_.heads / groups, blocks = (p_.nodes * groups + TILE - 1) / TILE;
        team.each(rows_ / p_.nodes * heads * blocks, [&](int64_t item) {
            const int64_t row = item / blocks / heads * p_.nodes, head = item / blocks % heads;
            const int64_t first = item % blocks * TILE, left = p_.nodes * groups - first;
            const int64_t b = source(row) / p_.nodes;
            const T* keys = cache + ((b * 2 * m_.kv_heads + head) * p_.capacity + begin) * dim;
            const T* values = keys + m_.kv_heads * p_.capacity * dim;
            float* scores = buffers_.scores + team.thread() * buffers_.of_thread;
            float* room = scores + TILE * buffers_.room;
            const Queries queries{buffers_.wide + row * width + head * groups * dim, groups, width, dim};
            const auto run = [&](auto by) {
                attend_queries<decltype(by)>(
                    queries, first, left < TILE ? left : TILE, keys, values, p_.capacity - begin, sight(b), m_.scale,
                    scores, reinterpret_cast<int32_t*>(room + ATTENTION_NUMBERS), room,
                    [&](int64_t query, int64_t d, Floats value) {
                        Row(mixed, row + query / groups).put((head * groups + query % groups) * dim + d, value);
                    });
            };
#ifdef MATRIX_TILES
            if (tiles_allowed()) return run(ByTiles());
#endif
            run(ByPairs());
        });
    }
#endif

    // Attention over the source of a row.
    void look(Team& team, const Layer& layer, int64_t place) {
        const int64_t dim = m_.dim, width = layer.source_query.outputs;
        const Rows x = input(team, layer.before_source, layer.source_query, 0);
        product(team, layer.source_query, x, [&](int64_t row, int64_t at, Floats value, int count) {
            store(buffers_.wide + row * width + at, value, count);
        });
        const T* cache = cache_of(place);
        const Rows mixed = rows_for<T>(buffers_.rows, rows_, layer.source_out);
#ifdef __AVX512BF16__
        if constexpr (sizeof(T) == 2)
            if (by_queries<T>(dim, 1)) {
                over_queries(team, 1, width, cache, 0, mixed,
                             [&](int64_t b) { return Sight{p_.sources[b], 0, 0, nullptr}; });
                output(team, layer.source_out, Norm{}, mixed, layer.close_source);
                return;
            }
#endif
        team.each(rows_ * m_.heads, [&](int64_t item) {
            const int64_t row = item / m_.heads, head = item % m_.heads, b = source(row) / p_.nodes;
            const T* keys = cache + (b * 2 * m_.kv_heads + head) * p_.capacity * dim;
            const T* values = keys + m_.kv_heads * p_.capacity * dim;
            float* scores = buffers_.scores + team.thread() * buffers_.of_thread;
            attend_heads<T>(1, buffers_.wide + row * width + head * dim, dim, keys, values, int64_t(0),
                            static_cast<const int32_t*>(nullptr), p_.sources[b], m_.scale, scores, buffers_.room,
                            Row(mixed, row), head * dim);
        });
        output(team, layer.source_out, Norm{}, mixed, layer.close_source);
    }

    void norm_heads(const Norm& norm, bool each, float* heads, int64_t count) {
        if (!norm.weight) return;
        if (!each) {
            normalise<T>(norm, heads, Plain{heads}, count * m_.dim);
            return;
        }
        for (int64_t h = 0; h < count; h++) normalise<T>(norm, heads + h * m_.dim, Plain{heads + h * m_.dim}, m_.dim);
    }

    void feed_forward(Team& team, const Layer& layer) {
        const int64_t width = layer.up.outputs;
        const Rows x = input(team, layer.before_mlp, layer.up, 0);
        // both halves of the product at once, where a tile of so many rows has room for two panels
        const bool together = in_tiles<T>(layer.up) || layer.up.bits || rows_ <= MOST_ROWS;
        if (layer.gated && together && m_.mlp % PANEL == 0) {
            const Rows ready = rows_for<T>(buffers_.wide, rows_, layer.down);
            const auto gate = [&](int64_t row, int64_t at, Floats value, Floats factor) {
                Row(ready, row).put(at, rounded<T>(activated<T>(layer.activation, value) * factor));
            };
            product(team, layer.up, x, gate, m_.mlp / PANEL);
            output(team, layer.down, layer.after_mlp, ready, layer.close_mlp);
            return;
        }
        const Rows ready = rows_for<T>(buffers_.rows, rows_, layer.down);
        product(team, layer.up, x, [&](int64_t row, int64_t at, Floats value, int count) {
            store(buffers_.wide + row * width + at, value, count);
        });
        over_rows(team, [&](int64_t row) {
            const float* from = buffers_.wide + row * width;
            activate<T>(layer.activation, from, layer.gated ? from + m_.mlp : nullptr, Row(ready, row), m_.mlp);
        });
        output(team, layer.down, layer.after_mlp, ready, layer.close_mlp);
    }

    const Model& m_;
    const Pass& p_;
    int64_t rows_;
    Buffers buffers_;
    std::vector<int64_t> source_, asked_;  // with exits: rows of the pass that are run; of these, which ask the whole matrix
    std::vector<uint8_t> leaves_;
    bool judged_ = false;
};

// work(team) on every thread of a team.
template <class Work>
void with_team(int64_t threads, const Work& work) {
    const auto run = [&](Team& team) {
        work(team);
#ifdef MATRIX_TILES
        Tiles::release();
#endif
    };
    if (threads == 1) {
        Team team(1);
        run(team);
        return;
    }
    Team* team = nullptr;
#pragma omp parallel num_threads(int(threads))
    {
#pragma omp single
        team = new Team(omp_get_num_threads());
        run(*team);
    }
    delete team;
}

template <class T>
void run_pass(const Model* model, const Pass* pass) {
    Runner<T> runner(*model, *pass);
    with_team(pass->threads, [&](Team& team) { runner.run(team); });
}

template <class T>
void run_product(const Matrix& m, const T* rows, T* to, int64_t count, float* work, int64_t threads) {
    const Rows x = rows_for<T>(work, count, m);
    float* sums = work + count * m.inputs;
    int32_t* rounded = reinterpret_cast<int32_t*>(sums + threads * count * WIDE * LANES);
    with_team(threads, [&](Team& team) {
        team.each_row(count, m.inputs, [&](int64_t row) { copy(rows + row * m.inputs, Row(x, row), m.inputs); });
        multiply<T>(team, m, x, 0, sums, rounded, [&](int64_t row, int64_t at, Floats value, int width) {
            T* into = to + row * m.outputs + at;
            if (width == LANES)
                put(into, value);
            else
                for (int i = 0; i < width; i++) put_one(into + i, value[i]);
        });
    });
}

// Whether a bit is set in any lane.
inline bool any(Integers lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes);
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)lanes);
#else
    int32_t found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= lanes[lane];
    return found;
#endif
}

// Places of the `count` largest numbers of a row, the largest first, and of equal ones the first. best: room for them.
template <class T>
void largest(const T* row, int64_t numbers, int64_t count, int64_t* places, float* best) {
    const auto insert = [&](int64_t held, int64_t place, float number) {
        int64_t at = held;
        for (; at && best[at - 1] < number; at--)
            if (at < count) {
                best[at] = best[at - 1];
                places[at] = places[at - 1];
            }
        if (at == count) return;
        best[at] = number;
        places[at] = place;
    };
    for (int64_t i = 0; i < count; i++) insert(i, i, one(row[i]));
    constexpr int together = 4;
    int64_t i = count;
    const auto look = [&](int64_t end) {
        for (; i < end; i++)
            if (one(row[i]) > best[count - 1]) insert(count, i, one(row[i]));
    };
    while (i + together * LANES <= numbers) {
        Floats top = load(row + i);
        for (int v = 1; v < together; v++) {
            const Floats next = load(row + i + v * LANES);
            top = next > top ? next : top;
        }
        if (any((Integers)(top > all(best[count - 1]))))
            look(i + together * LANES);
        else
            i += together * LANES;
    }
    look(numbers);
}

// The logarithm of the sum of e^x.
template <class T>
float log_total(const T* row, int64_t numbers) {
    const float most = highest(row, numbers);
    if (most == -INFINITY) return most;
    Floats totals = Floats{};
    int64_t i = 0;
    for (; i + LANES <= numbers; i += LANES) totals += exponential(load(row + i) - most);
    float total = sum(totals);
    for (; i < numbers; i++) total += exponential(all(one(row[i]) - most))[0];
    return most + logf(total);
}

template <class T>
void run_largest(const T* from, int64_t rows, int64_t numbers, int64_t count, int64_t* places, int64_t threads) {
    std::vector<float> best(rows * count);
    with_team(threads, [&](Team& team) {
        team.each(rows, [&](int64_t row) {
            largest(from + row * numbers, numbers, count, places + row * count, best.data() + row * count);
        });
    });
}

template <class T>
void run_log_totals(const T* from, int64_t rows, int64_t numbers, float* to, int64_t threads) {
    with_team(threads, [&](Team& team) {
        team.each(rows, [&](int64_t row) { to[row] = log_total(from + row * numbers, numbers); });
    });
}

template <class T>
void run_norm(const T* from, int64_t rows, int64_t width, T* to, const Norm& norm, int64_t threads) {
    std::vector<float> wide(threads * width);
    with_team(threads, [&](Team& team) {
        team.each_row(rows, width, [&](int64_t row) {
            float* numbers = wide.data() + team.thread() * width;
            copy(from + row * width, Plain{numbers}, width);
            normalise<T>(norm, numbers, Plain{numbers}, width);
            narrow(numbers, to + row * width, width);
        });
    });
}

// -- a draft tree -------------------------------------------------------------------------------------------------------

// A draft network of one layer over pairs of a feature and the token after it, and the tree that it drafts.
struct Network {
    Model model;             // of one layer, which reads the token's norm beside the feature
    Norm token, feature, scored;  // feature: of the residual; without weight it is the feature itself
    Matrix score;            // of the draft vocabulary
    const void* embedding;   // [tokens, hidden]
    const int64_t* ids;      // of the draft vocabulary; null: all tokens
    int64_t feeds_scored;    // whether the next pair has the feature after its norm
    int64_t nodes, levels, width;  // of the tree; children of a node, and nodes of a level that have children
};

// Pairs that the network has not read, after `length` of one row, and where the tree goes.
struct Growth {
    const void* feature;     // [fresh, hidden]
    const int64_t* tokens;   // [fresh]
    int64_t fresh;
    const void *cos, *sin;   // [fresh + levels - 1, rotary], of the places from the first of them on
    int64_t rotary;
    void* cache;             // see Pass
    int64_t begin, length, capacity;
    int64_t *ids, *parents;  // [nodes] of the tree
    float* scores;           // [nodes]: log-probabilities of their paths
    float* work;             // see `growing_workspace`
    int64_t threads;
};

// Places of the `count` best scores, the best first, and of equal ones the first.
std::vector<int64_t> best_of(const std::vector<float>& scores, int64_t count) {
    std::vector<int64_t> places(count);
    std::vector<float> best(count);
    largest(scores.data(), int64_t(scores.size()), count, places.data(), best.data());
    return places;
}

// The tree of the most probable paths, level by level, as `ranked_tree.py` grows it of torch's operators.
template <class T>
class Grower {
  public:
    Grower(const Network& n, const Growth& g)
        : n_(n),
          g_(g),
          width_(n.model.hidden),
          most_(g.fresh > n.width ? g.fresh : n.width),
          residual_(most_ * width_),
          beside_(most_ * width_),
          states_(most_ * width_),
          fed_(n.width * width_),
          turns_(2 * n.width * g.rotary),
          logits_(n.width * n.score.outputs),
          reach_(n.width * n.width * n.levels),
          places_(n.width * n.width),
          best_(n.width * n.width),
          totals_(n.width),
          wide_(g.threads * width_) {
        const T *cos = static_cast<const T*>(g.cos), *sin = static_cast<const T*>(g.sin);
        passes_.push_back(pass(g.fresh, g.length, 0, cos, sin, g.rotary, nullptr));
        for (int64_t level = 0; level + 1 < n.levels; level++)
            passes_.push_back(pass(n.width, g.length + g.fresh, level * n.width, turns_.data(),
                                   turns_.data() + n.width * g.rotary, g.rotary, reach_.data()));
        for (const Pass& each : passes_) runners_.emplace_back(n.model, each);
    }

    void run(Team& team) {
        enter(team, g_.fresh, static_cast<const T*>(g_.feature), g_.tokens);
        runners_[0].run(team);
        score(team, 1, states_.data() + (g_.fresh - 1) * width_);
        for (int64_t level = 0; level + 1 < n_.levels; level++) {
            team.each(1, [&](int64_t) { choose(level); });
            enter(team, n_.width, fed_.data(), tokens_.data());
            runners_[level + 1].run(team);
            score(team, n_.width, states_.data());
        }
        team.each(1, [&](int64_t) { finish(); });
    }

  private:
    Pass pass(int64_t nodes, int64_t length, int64_t earlier, const T* cos, const T* sin, int64_t turn,
              const uint8_t* reach) {
        lengths_.push_back(length);
        Pass made{};
        made.hidden = residual_.data();
        made.beside = beside_.data();
        made.result = states_.data();
        made.cos = cos;
        made.sin = sin;
        made.rotary = turn;
        made.reach = reach;
        made.lengths = &lengths_.back();
        made.begin = g_.begin;
        made.cache = g_.cache;
        made.batch = 1;
        made.nodes = nodes;
        made.capacity = g_.capacity;
        made.earlier = earlier;
        made.layers = made.places = &first_;
        made.parts = &whole_;
        made.taps = &nowhere_;
        made.count = 1;
        made.work = g_.work;
        made.threads = g_.threads;
        return made;
    }

    // The layer's inputs for pairs of features and tokens.
    void enter(Team& team, int64_t pairs, const T* features, const int64_t* tokens) {
        team.each(pairs, [&](int64_t row) {
            float* numbers = wide_.data() + team.thread() * width_;
            copy(static_cast<const T*>(n_.embedding) + tokens[row] * width_, Plain{numbers}, width_);
            normalise<T>(n_.token, numbers, Plain{numbers}, width_);
            narrow(numbers, beside_.data() + row * width_, width_);
            copy(features + row * width_, Plain{numbers}, width_);
            if (n_.feature.weight) normalise<T>(n_.feature, numbers, Plain{numbers}, width_);
            narrow(numbers, residual_.data() + row * width_, width_);
        });
    }

    // Logits after some states, their best tokens, and the features that pairs with these have.
    void score(Team& team, int64_t rows, const T* states) {
        const Rows x = rows_for<T>(g_.work, rows, n_.score);
        float* sums = g_.work + rows * width_;
        int32_t* rounded = reinterpret_cast<int32_t*>(sums + g_.threads * rows * WIDE * LANES);
        team.each(rows, [&](int64_t row) {
            float* numbers = wide_.data() + team.thread() * width_;
            copy(states + row * width_, Plain{numbers}, width_);
            if (!n_.feeds_scored) narrow(numbers, fed_.data() + row * width_, width_);
            normalise<T>(n_.scored, numbers, Plain{numbers}, width_);
            if (n_.feeds_scored) narrow(numbers, fed_.data() + row * width_, width_);
            copy(numbers, Row(x, row), width_);
        });
        const int64_t outputs = n_.score.outputs;
        multiply<T>(team, n_.score, x, 0, sums, rounded, [&](int64_t row, int64_t at, Floats value, int count) {
            T* into = logits_.data() + row * outputs + at;
            if (count == LANES)
                put(into, value);
            else
                for (int i = 0; i < count; i++) put_one(into + i, value[i]);
        });
        team.each(2 * rows, [&](int64_t item) {
            const int64_t row = item / 2;
            const T* logits = logits_.data() + row * outputs;
            if (item % 2)
                totals_[row] = log_total(logits, outputs);
            else
                largest(logits, outputs, n_.width, places_.data() + row * n_.width, best_.data() + row * n_.width);
        });
        scored_ = rows;
    }

    // The children of the last level's nodes, after those of earlier ones.
    void add() {
        newest_ = int64_t(every_.size());
        for (int64_t row = 0; row < scored_; row++)
            for (int64_t rank = 0; rank < n_.width; rank++) {
                const int64_t place = places_[row * n_.width + rank];
                const float gained = best_[row * n_.width + rank] - totals_[row];
                float sum = gained;
                if (newest_) {  // below its parent's, so that no node is without its parent
                    const float above = every_[columns_[row]], below = nextafterf(above, -INFINITY);
                    sum = above + gained < below ? above + gained : below;
                }
                every_.push_back(sum);
                ids_.push_back(n_.ids ? n_.ids[place] : place);
                parents_.push_back(newest_ ? columns_[row] : -1);
            }
    }

    // The nodes of a level that get children, and what their pass reads.
    void choose(int64_t level) {
        add();
        const int64_t k = n_.width, seen = level * k;
        const std::vector<int64_t> chosen = best_of({every_.begin() + newest_, every_.end()}, k);
        const std::vector<T> states(fed_);
        const std::vector<uint8_t> reach(reach_);
        tokens_.resize(k);
        columns_.resize(k);
        std::fill(reach_.begin(), reach_.end(), 0);
        for (int64_t i = 0; i < k; i++) {
            const int64_t above = level ? chosen[i] / k : 0;
            columns_[i] = newest_ + chosen[i];
            tokens_[i] = ids_[columns_[i]];
            memcpy(fed_.data() + i * width_, states.data() + above * width_, width_ * sizeof(T));
            memcpy(reach_.data() + i * (seen + k), reach.data() + above * seen, seen);
            reach_[i * (seen + k) + seen + i] = 1;
            const int64_t at = (g_.fresh + level) * g_.rotary;
            memcpy(turns_.data() + i * g_.rotary, static_cast<const T*>(g_.cos) + at, g_.rotary * sizeof(T));
            memcpy(turns_.data() + (k + i) * g_.rotary, static_cast<const T*>(g_.sin) + at, g_.rotary * sizeof(T));
        }
    }

    // The best of all candidates, parents before their children.
    void finish() {
        add();
        std::vector<int64_t> kept = best_of(every_, n_.nodes);
        std::sort(kept.begin(), kept.end());
        for (int64_t i = 0; i < n_.nodes; i++) {
            const int64_t parent = parents_[kept[i]];
            g_.ids[i] = ids_[kept[i]];
            g_.scores[i] = every_[kept[i]];
            g_.parents[i] = parent < 0 ? -1 : std::lower_bound(kept.begin(), kept.end(), parent) - kept.begin();
        }
    }

    const Network& n_;
    const Growth& g_;
    const int64_t width_, most_;
    std::vector<T> residual_, beside_, states_;  // of the pairs of a pass
    std::vector<T> fed_, turns_, logits_;  // features of the nodes of a level, their rotary positions, and logits after them
    std::vector<uint8_t> reach_;
    std::vector<int64_t> places_;
    std::vector<float> best_, totals_, wide_;
    std::deque<int64_t> lengths_;
    std::vector<Pass> passes_;
    std::deque<Runner<T>> runners_;
    std::vector<float> every_;                  // scores of all candidates
    std::vector<int64_t> ids_, parents_;        // of these
    std::vector<int64_t> tokens_, columns_;     // of the nodes of a level that have children
    int64_t newest_ = 0, scored_ = 0;           // first candidate of the last level; rows of the last logits
    const int32_t first_ = 0;
    const uint8_t whole_ = 1 + 4;
    void* const nowhere_ = nullptr;
};

int64_t growing_room(const Network& n, int64_t fresh, int64_t length, int64_t threads) {
    const int64_t most = fresh > n.width ? fresh : n.width, slots = length + fresh + n.levels * n.width;
    const int64_t of_pass = lay_out(n.model, most, slots, threads, nullptr, nullptr);
    const int64_t of_scores = most * (n.model.hidden + threads * WIDE * LANES) + rounded_words(most, n.model.hidden);
    return of_pass > of_scores ? of_pass : of_scores;
}

template <class T>
void grow(const Network* network, const Growth* growth) {
    Grower<T> grower(*network, *growth);
    with_team(growth->threads, [&](Team& team) { grower.run(team); });
}

template <class T>
void pack_panels(const T* weight, T* to, int64_t outputs, int64_t inputs, bool back) {
    constexpr int pair = sizeof(T) == 2 ? 2 : 1;
    const int64_t panel = inputs * PANEL;
    T* plain = const_cast<T*>(weight);
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t k = 0; k < inputs; k++) {
            T& packed = to[o / PANEL * panel + k / pair * pair * PANEL + o % PANEL * pair + k % pair];
            if (back)
                plain[o * inputs + k] = packed;
            else
                packed = plain[o * inputs + k];
        }
}

// numbers: [outputs, inputs], scales and zeros: [outputs, inputs / BLOCK].
template <int BITS>
void pack_blocks(uint8_t* numbers, BFloat16* scales, BFloat16* zeros, Block<BITS>* to, int64_t outputs, int64_t inputs,
                 bool back) {
    const int64_t blocks = inputs / BLOCK;
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t lane = o % LANES;
            Block<BITS>& block = to[(o / PANEL * blocks + b) * VECTORS + o % PANEL / LANES];
            if (back) {
                scales[o * blocks + b] = block.scale[lane];
                zeros[o * blocks + b] = block.zero[lane];
            } else {
                block.scale[lane] = scales[o * blocks + b];
                block.zero[lane] = zeros[o * blocks + b];
            }
            for (int k = 0; k < BLOCK; k++) {
                uint8_t& number = numbers[o * inputs + b * BLOCK + k];
                const int four = k / 4, at = BITS == 8 ? four : four / 2;
                const int shift = 8 * (k % 4) + (BITS == 8 ? 0 : 4 * (four % 2));
                uint32_t& word = block.numbers[at * LANES + lane];
                if (back)
                    number = uint8_t((word >> shift) & ((1u << BITS) - 1));
                else
                    word |= uint32_t(number) << shift;
            }
        }
}

}  // namespace

extern "C" {

// Numbers of `work` for a pass: rows = batch * nodes, slots = the longest row's tokens, earlier nodes and nodes, or the
// longest source.
int64_t workspace(const Model* model, int64_t rows, int64_t slots, int64_t threads) {
    return lay_out(*model, rows, slots, threads, nullptr, nullptr);
}

void run_bfloat16(const Model* model, const Pass* pass) { run_pass<BFloat16>(model, pass); }
void run_float32(const Model* model, const Pass* pass) { run_pass<float>(model, pass); }

void multiply_bfloat16(const Matrix* m, const void* rows, void* to, int64_t count, float* work, int64_t threads) {
    run_product(*m, static_cast<const BFloat16*>(rows), static_cast<BFloat16*>(to), count, work, threads);
}
void multiply_float32(const Matrix* m, const void* rows, void* to, int64_t count, float* work, int64_t threads) {
    run_product(*m, static_cast<const float*>(rows), static_cast<float*>(to), count, work, threads);
}

// Of rows one by one: see `largest` (places: [rows, count], count <= numbers) and `log_total`, and norms.
void largest_bfloat16(const void* from, int64_t rows, int64_t numbers, int64_t count, int64_t* places, int64_t threads) {
    run_largest(static_cast<const BFloat16*>(from), rows, numbers, count, places, threads);
}
void largest_float32(const void* from, int64_t rows, int64_t numbers, int64_t count, int64_t* places, int64_t threads) {
    run_largest(static_cast<const float*>(from), rows, numbers, count, places, threads);
}
void log_totals_bfloat16(const void* from, int64_t rows, int64_t numbers, float* to, int64_t threads) {
    run_log_totals(static_cast<const BFloat16*>(from), rows, numbers, to, threads);
}
void log_totals_float32(const void* from, int64_t rows, int64_t numbers, float* to, int64_t threads) {
    run_log_totals(static_cast<const float*>(from), rows, numbers, to, threads);
}
void norm_bfloat16(const void* from, int64_t rows, int64_t width, void* to, const Norm* norm, int64_t threads) {
    run_norm(static_cast<const BFloat16*>(from), rows, width, static_cast<BFloat16*>(to), *norm, threads);
}
void norm_float32(const void* from, int64_t rows, int64_t width, void* to, const Norm* norm, int64_t threads) {
    run_norm(static_cast<const float*>(from), rows, width, static_cast<float*>(to), *norm, threads);
}

// A draft tree of EAGLE, and the numbers of `work` for one.
void grow_bfloat16(const Network* network, const Growth* growth) { grow<BFloat16>(network, growth); }
void grow_float32(const Network* network, const Growth* growth) { grow<float>(network, growth); }
int64_t growing_workspace(const Network* network, int64_t fresh, int64_t length, int64_t threads) {
    return growing_room(*network, fresh, length, threads);
}

// Outputs of a panel.
int64_t panel_outputs() { return PANEL; }

// Numbers of `work` for a product.
int64_t product_workspace(const Matrix* m, int64_t rows, int64_t threads) {
    return rows * (m->inputs + threads * WIDE * LANES) + rounded_words(rows, m->inputs);
}

// Between [outputs, inputs] and panels, which must be zero before.
void pack_bfloat16(void* weight, void* panels, int64_t outputs, int64_t inputs, int64_t back) {
    pack_panels(static_cast<BFloat16*>(weight), static_cast<BFloat16*>(panels), outputs, inputs, back);
}
void pack_float32(void* weight, void* panels, int64_t outputs, int64_t inputs, int64_t back) {
    pack_panels(static_cast<float*>(weight), static_cast<float*>(panels), outputs, inputs, back);
}

// Bytes of the blocks of a weight with so many outputs, a multiple of those of a panel.
int64_t block_bytes(int64_t bits, int64_t outputs, int64_t inputs) {
    return outputs / LANES * (inputs / BLOCK) * int64_t(bits == 4 ? sizeof(Block<4>) : sizeof(Block<8>));
}

// Between numbers with their scales and zeros, and blocks, which must be zero before.
void pack_blocks(int64_t bits, void* numbers, void* scales, void* zeros, void* blocks, int64_t outputs, int64_t inputs,
                 int64_t back) {
    auto n = static_cast<uint8_t*>(numbers);
    auto s = static_cast<BFloat16*>(scales), z = static_cast<BFloat16*>(zeros);
    if (bits == 4)
        pack_blocks(n, s, z, static_cast<Block<4>*>(blocks), outputs, inputs, back);
    else
        pack_blocks(n, s, z, static_cast<Block<8>*>(blocks), outputs, inputs, back);
}

}  // extern "C"
