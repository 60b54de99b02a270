// Norms, rotary positions and activations of rows.
#pragma once

#include <math.h>
#include <stdint.h>

#include "numbers.h"
#include "products.h"

namespace {

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

}  // namespace
