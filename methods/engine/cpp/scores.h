// The largest numbers of a row, logits that a rounded weight screens, the logarithm of the sum of exponentials, the
// distribution that logits stand for, and a draw from one.
#pragma once

#include <math.h>
#include <stdint.h>

#include <vector>

#include "attention.h"
#include "numbers.h"
#include "products.h"

namespace {

constexpr int64_t DRAWN = 256;  // numbers that are summed in 32 bit

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

// The logits of a row by a rounded weight get those of the full one in some places. x: [inputs], as `tile` reads one row.
template <class T>
void refine(const Matrix& full, const int64_t* places, int64_t count, const float* x, T* logits) {
    for (int64_t i = 0; i < count; i++) {
        const int64_t panel = places[i] / PANEL, within = places[i] % PANEL;
        const char* from = static_cast<const char*>(full.panels) + panel * PANEL * full.inputs * int64_t(sizeof(T)) +
                           within / LANES * int64_t(sizeof(Words));
        Floats total = {};
        tile<T, 1, 1, LINES>({from, 0}, full.inputs, x, {from, LINES * LINE}, &total);
        const float product = total[within % LANES];
        put_one(logits + places[i], rounded_one<T>(full.bias ? product + full.bias[places[i]] : product));
    }
}

// The first of the largest logits in some places.
template <class T>
int64_t best_of(const int64_t* places, int64_t count, const T* logits) {
    int64_t best = places[0];
    for (int64_t i = 1; i < count; i++) {
        const float logit = one(logits[places[i]]), highest = one(logits[best]);
        if (logit > highest || (logit == highest && places[i] < best)) best = places[i];
    }
    return best;
}

// e^(x / temperature) over the sum of all; 0 where it is below e^-87 of the largest.
template <class T>
void probabilities(const T* row, int64_t numbers, float temperature, float* to) {
    const float most = highest(row, numbers);
    const auto weigh = [&](Floats x) {
        const Floats power = (x - most) / temperature;
        return power < all(-87.0f) ? Floats{} : exponential(power);
    };
    double total = 0.0;
    int64_t i = 0;
    while (i + LANES <= numbers) {
        Floats part = Floats{};
        for (const int64_t end = i + DRAWN; i < end && i + LANES <= numbers; i += LANES) {
            const Floats weight = weigh(load(row + i));
            store(to + i, weight);
            part += weight;
        }
        total += sum(part);
    }
    for (; i < numbers; i++) total += to[i] = weigh(all(one(row[i])))[0];
    const float share = float(1.0 / total);
    for (i = 0; i + LANES <= numbers; i += LANES) store(to + i, load(to + i) * share);
    for (; i < numbers; i++) to[i] *= share;
}

// The place at which the running sum of a row first exceeds `luck`, from 0 to below 1, of the whole; never one of
// weight 0. Running sums are of 64 bit.
inline int64_t drawn(const float* weights, int64_t numbers, double luck) {
    std::vector<double> sums;
    double total = 0.0;
    for (int64_t begin = 0; begin < numbers; begin += DRAWN) {
        const int64_t end = begin + DRAWN < numbers ? begin + DRAWN : numbers;
        Floats part = Floats{};
        int64_t i = begin;
        for (; i + LANES <= end; i += LANES) part += load(weights + i);
        double own = sum(part);
        for (; i < end; i++) own += weights[i];
        sums.push_back(own);
        total += own;
    }
    const double spot = luck * total;
    double before = 0.0;
    int64_t block = 0, place = numbers - 1;
    while (block + 1 < int64_t(sums.size()) && !(before + sums[block] > spot)) before += sums[block++];
    for (int64_t i = block * DRAWN; i < numbers; i++)
        if ((before += weights[i]) > spot) return i;
    while (place && !(weights[place] > 0.0f)) place--;  // sums were rounded up
    return place;
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
