// Attention of one query, or of several at a time, over the keys and values of a head.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#include "numbers.h"
#include "products.h"

namespace {

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

}  // namespace
