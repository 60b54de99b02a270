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
//
// numbers.h and team.h come first, then products.h and blocks.h, norms.h and attention.h, which pass.h puts together;
// rounds.h runs several passes in a row, guesses.h over what may follow, tree.h drafts with them. This file has what
// other languages call.

#include <stdint.h>

#include <vector>

#include "attention.h"
#include "blocks.h"
#include "guesses.h"
#include "norms.h"
#include "numbers.h"
#include "pass.h"
#include "products.h"
#include "rounds.h"
#include "scores.h"
#include "team.h"
#include "tree.h"

namespace {

template <class T>
void run_pass(const Model* model, const Pass* pass) {
    if (pass->rounds && pass->rounds->guesses) return run_guessed<T>(*model, *pass);
    if (pass->rounds) return run_rounds<T>(*model, *pass);
    Runner<T> runner(*model, *pass);
    with_team(pass->threads, [&](Team& team) { runner.run(team); });
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
void run_probabilities(const T* from, int64_t rows, int64_t numbers, float temperature, float* to, int64_t threads) {
    with_team(threads, [&](Team& team) {
        team.each(rows, [&](int64_t row) {
            probabilities(from + row * numbers, numbers, temperature, to + row * numbers);
        });
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

// Of rows one by one: see `largest` (places: [rows, count], count <= numbers), `log_total`, `probabilities`, and norms.
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
void probabilities_bfloat16(const void* from, int64_t rows, int64_t numbers, float temperature, float* to,
                            int64_t threads) {
    run_probabilities(static_cast<const BFloat16*>(from), rows, numbers, temperature, to, threads);
}
void probabilities_float32(const void* from, int64_t rows, int64_t numbers, float temperature, float* to,
                           int64_t threads) {
    run_probabilities(static_cast<const float*>(from), rows, numbers, temperature, to, threads);
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

// A tree of guesses after a text, parents first; how many there are. tokens, parents, gains, sources: [nodes]; see Guess.
int64_t guess(const Guesses* guesses, int64_t* tokens, int64_t* parents, float* gains, int64_t* sources) {
    const std::vector<int64_t> text(guesses->text, guesses->text + guesses->length);
    const GuessedTree tree(*guesses, text);
    for (const Guess& guess : tree.nodes) {
        *tokens++ = guess.token;
        *parents++ = guess.parent;
        *gains++ = guess.gain;
        *sources++ = guess.source;
    }
    return int64_t(tree.nodes.size());
}

// Outputs of a panel.
int64_t panel_outputs() { return PANEL; }

// Numbers of `work` for a product.
int64_t product_workspace(const Matrix* m, int64_t rows, int64_t threads) {
    return product_room(*m, rows, threads);
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
