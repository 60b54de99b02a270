// The largest numbers of a row, and the logarithm of the sum of its exponentials.
#pragma once

#include <math.h>
#include <stdint.h>

#include "attention.h"
#include "numbers.h"

namespace {

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

}  // namespace
