// A pass through layers: attention over the cache and a source, feed-forward, exits of rows.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <chrono>
#include <vector>

#include "attention.h"
#include "blocks.h"
#include "norms.h"
#include "numbers.h"
#include "products.h"
#include "scores.h"
#include "team.h"

namespace {

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
    const struct Ending* ending;  // null: nothing follows the layers
    const struct Rounds* rounds;  // null: one pass
};

// The final norm and the output matrix after a pass, and what an exit has between them.
struct Ending {
    Norm norm;       // without weights: none
    Matrix map;      // of the normed state; without panels: none
    Matrix head;
    Matrix full;       // the weight that `head` is rounded from, in panels; without panels: none
    int64_t screened;  // how many of the largest outputs of `head` are taken from `full`
    void* normed;    // [batch, nodes, hidden]
    void* logits;    // [batch, nodes, outputs of head]
    int64_t* best;   // [batch, nodes]: the first of the largest
};

// Rounds without drafts: passes over one node per row, each of the tokens that the one before chose.
struct Rounds {
    const void *embedding, *positions;  // [vocabulary, hidden], [count, hidden]; positions null: places have no vectors
    int64_t count;          // a token at a place beyond gets the vector of the last one
    const void *cos, *sin;  // [places, rotary]: of the tables of passes; null: queries and keys do not turn
    float factor;           // of the embedding
    Norm norm;              // of both together
    const int32_t* depths;  // [vocabulary], with exits by a table: those of a row that reads a token
    int64_t most;           // rounds
    int64_t* lengths;       // of the pass; they grow
    const uint8_t* moves;   // [batch]: whether the row commits tokens
    const int64_t* ends;    // tokens after which no further round is run
    int64_t end_count;
    int64_t* tokens;        // [1 + most, batch]: the first of each row, and then those that the rounds chose
    int64_t* times;         // [most]: nanoseconds from the call to the end of each round
    int64_t* made;          // how many were run
    const struct Waiting* waiting;  // null: rows run all layers up to their exits
    const struct Drawing* drawing;  // null: the likeliest tokens are chosen; not with exits
    struct Guesses* guesses;  // null: every pass is over one node per row; of one row, not with exits
};

// How rounds draw their tokens.
struct Drawing {
    float temperature;   // by which logits are divided
    const double* luck;  // [most, batch], from 0 to below 1
    float* probs;        // [most, batch, vocabulary]: gets the distributions that are drawn from
};

// States after a shallow exit whose rows defer the layers above it, until one is not sure or too many wait.
struct Waiting {
    int64_t depth;          // layers of a shallow pass
    int64_t most;           // that wait, without those of the pass
    void* states;           // [most + 1, batch, hidden]
    int64_t* count;         // per row, that wait; kept from call to call
    int64_t* nodes;         // of the rounds [most]: states per row that the layers above ran over at the end; 0: none
};

enum Measure : int64_t { SOFTMAX, COSINE, CLASSIFIER, TABLE };

// Exits of a pass over one node per row. A row that leaves runs no more; the layers above get its keys and values.
struct Exits {
    int64_t run;             // layers that are run of all that there are, at most `count`
    int64_t propagates;      // whether layers that a row did not run get its keys and values
    const uint8_t* stops;    // [count]: whether rows may leave after this one
    int64_t measure;
    const float* thresholds; // [batch], of rounds [most, batch]: a row leaves above it
    Norm norm;               // before the output matrix
    const Matrix* maps;      // [count], of the normed state; without panels: none
    Matrix screen, head;     // the output matrix; the screen's first rows are asked before, without panels: none
    const float* weight;     // of the classifier
    float bias;
    const int32_t* depths;   // [batch] of the table
    int32_t* left;           // as the thresholds: 0 or more: the row is not run; after the pass how many ran
    float* logits;           // [batch, outputs of head]
    uint8_t* scored;         // [batch]: whether its logits are there
    float* confidence;       // [batch] of the softmax, where it was asked last
    int64_t* columns;        // that were multiplied
    int64_t* deciding;       // nanoseconds that rows were judged for; a table takes none
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
        if (p.ending && p.ending->full.panels) {
            places_.resize(rows_ * p.ending->screened);
            highest_.resize(places_.size());
        }
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
            if (p_.exits && p_.exits->stops[i]) decide(team, i);
        }
        copy_out(team, static_cast<T*>(p_.result));
        if (p_.exits && p_.exits->propagates) fill(team);
        if (p_.ending && p_.exits) return choose(team, *p_.ending);
        if (p_.ending) end(team, *p_.ending);
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

    void end(Team& team, const Ending& ending) {
        const Rows x = rows_for<T>(buffers_.rows, rows_, ending.head);
        const Rows normed = ending.map.panels ? rows_for<T>(buffers_.rows, rows_, ending.map) : x;
        over_rows(team, [&](int64_t row) {
            float* state = buffers_.hidden + row * m_.hidden;
            if (ending.norm.weight) normalise<T>(ending.norm, state, Plain{state}, m_.hidden);
            copy(state, Row(normed, row), m_.hidden);
        });
        if (ending.map.panels) {
            product(team, ending.map, normed, [&](int64_t row, int64_t at, Floats value, int count) {
                store(buffers_.hidden + row * m_.hidden + at, value, count);
            });
            over_rows(team, [&](int64_t row) { copy(buffers_.hidden + row * m_.hidden, Row(x, row), m_.hidden); });
        }
        copy_out(team, static_cast<T*>(ending.normed));
        read_out(team, ending, x);
    }

    // The best token of each row, by the logits of its exit where there are any; `end` of the others.
    void choose(Team& team, const Ending& ending) {
        const Exits& exits = *p_.exits;
        const int64_t outputs = ending.head.outputs;
        const auto depth = [&](int64_t b) { return exits.left[b] < 0 ? int32_t(exits.run) : exits.left[b]; };
        const auto select = [&](const auto& wanted) {
            int64_t rows = 0;  // each thread counts for itself, as in `fill`
            for (int64_t b = 0; b < p_.batch; b++) rows += wanted(b);
            if (!rows) return false;
            team.each(1, [&](int64_t) {
                source_.clear();
                for (int64_t b = 0; b < p_.batch; b++)
                    if (wanted(b)) source_.push_back(b);
                rows_ = rows;
            });
            return true;
        };
        const auto missing = [&](int64_t b) { return depth(b) && !exits.scored[b]; };
        if (select([&](int64_t b) { return exits.scored[b]; }))
            team.each(rows_, [&](int64_t row) {
                float most;
                largest(exits.logits + source_[row] * outputs, outputs, 1, ending.best + source_[row], &most);
            });
        const auto normed = [&](int64_t row, const auto& to) {
            float* state = buffers_.hidden + row * m_.hidden;
            copy(static_cast<const T*>(p_.result) + source_[row] * m_.hidden, Plain{state}, m_.hidden);
            normalise<T>(ending.norm, state, to, m_.hidden);
        };
        for (int32_t taken = 1; taken <= exits.run; taken++) {
            const Matrix& map = exits.maps[taken - 1];
            if (!map.panels || !select([&](int64_t b) { return missing(b) && depth(b) == taken; })) continue;
            const Rows mapped = rows_for<T>(buffers_.rows, rows_, map);
            over_rows(team, [&](int64_t row) { normed(row, Row(mapped, row)); });
            product(team, map, mapped, [&](int64_t row, int64_t at, Floats value, int count) {
                store(buffers_.hidden + row * m_.hidden + at, value, count);
            });
            copy_out(team, static_cast<T*>(ending.normed));
        }
        if (!select(missing)) return;
        const Rows x = rows_for<T>(buffers_.rows, rows_, ending.head);
        over_rows(team, [&](int64_t row) {
            const int64_t b = source_[row];
            if (exits.maps[depth(b) - 1].panels)
                copy(static_cast<const T*>(ending.normed) + b * m_.hidden, Row(x, row), m_.hidden);
            else
                normed(row, Row(x, row));
        });
        read_out(team, ending, x);
        team.each(1, [&](int64_t) { *exits.columns += outputs; });
    }

    // The output matrix, and the best token of each row.
    void read_out(Team& team, const Ending& ending, const Rows& x) {
        T* logits = static_cast<T*>(ending.logits);
        const int64_t outputs = ending.head.outputs;
        product(team, ending.head, x, [&](int64_t row, int64_t at, Floats value, int count) {
            put_some(logits + row * outputs + at, value, count);
        });
        if (ending.full.panels) return screen(team, ending, x);
        team.each(rows_, [&](int64_t row) {
            float most;
            largest(logits + row * outputs, outputs, 1, ending.best + source(row), &most);
        });
    }

    // The largest logits by the rounded matrix become those of the full one, and the best of them is a row's.
    void screen(Team& team, const Ending& ending, const Rows& x) {
        T* logits = static_cast<T*>(ending.logits);
        const int64_t count = ending.screened, outputs = ending.head.outputs, parts = (count + REFINED - 1) / REFINED;
        const auto places = [&](int64_t row) { return places_.data() + row * count; };
        team.each(rows_, [&](int64_t row) {
            largest(logits + row * outputs, outputs, count, places(row), highest_.data() + row * count);
        });
        team.each(rows_ * parts, [&](int64_t item) {
            const int64_t row = item / parts, first = item % parts * REFINED, left = count - first;
            std::vector<float> words(m_.hidden);
            copy(Row(x, row).base, Row(rows_for<T>(words.data(), 1, ending.full), 0), m_.hidden);
            refine(ending.full, places(row) + first, left < REFINED ? left : REFINED, words.data(), logits + row * outputs);
        });
        team.each(rows_, [&](int64_t row) {
            ending.best[source(row)] = best_of(places(row), count, logits + row * outputs);
        });
    }

    // `leave`, and its time on the first thread.
    void decide(Team& team, int64_t i) {
        const auto begin = std::chrono::steady_clock::now();
        leave(team, i);
        if (team.thread() == 0 && p_.exits->measure != TABLE)
            *p_.exits->deciding += (std::chrono::steady_clock::now() - begin) / std::chrono::nanoseconds(1);
    }

    // Judge all rows after the i-th layer, and drop those that leave.
    void leave(Team& team, int64_t i) {
        const Exits& exits = *p_.exits;
        const bool known = exits.measure == TABLE;
        const auto leaves = [&](int64_t row) {
            return known ? exits.depths[source_[row]] == i + 1 : bool(leaves_[row]);
        };
        if (known) {  // each thread looks for itself, also while another one already drops the rows
            bool any = false;
            for (int64_t b = 0; b < p_.batch; b++)
                any = any || (exits.depths[b] == i + 1 && (exits.left[b] < 0 || exits.left[b] == i + 1));
            if (!any) return;
        }
        if (exits.measure == COSINE) over_rows(team, [&](int64_t row) { leaves_[row] = saturated(row); });
        if (exits.measure == SOFTMAX || exits.measure == CLASSIFIER) judge(team, exits.maps[i]);
        team.each(1, [&](int64_t) {
            int64_t kept = 0;
            for (int64_t row = 0; row < rows_; row++) {
                const int64_t b = source_[row];
                const float* state = buffers_.hidden + row * m_.hidden;
                if (leaves(row)) {
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
        if (layer.gated && m_.mlp % PANEL == 0) {  // both halves of the product at once
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
    std::vector<int64_t> places_;  // of the largest logits of each row, by a rounded matrix
    std::vector<float> highest_;
    bool judged_ = false;
};

}  // namespace
