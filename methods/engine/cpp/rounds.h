// Several rounds without drafts in one call.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "norms.h"
#include "numbers.h"
#include "pass.h"
#include "scores.h"
#include "team.h"

namespace {

// The state of a token at a place before the first layer.
template <class T>
void embed(const Rounds& rounds, int64_t token, int64_t place, T* to, int64_t width) {
    const T* from = static_cast<const T*>(rounds.embedding) + token * width;
    std::vector<float> state(width);
    for (int64_t i = 0; i < width; i++) state[i] = rounded_one<T>(one(from[i]) * rounds.factor);
    if (rounds.positions) {
        const T* at = static_cast<const T*>(rounds.positions) + std::min(place, rounds.count - 1) * width;
        for (int64_t i = 0; i < width; i++) state[i] = rounded_one<T>(state[i] + one(at[i]));
    }
    if (rounds.norm.weight) normalise<T>(rounds.norm, state.data(), Plain{state.data()}, width);
    narrow(state.data(), to, width);
}

// The tables by which the nodes of a pass turn, out of those of all places.
template <class T>
class Turns {
  public:
    // pass: gets the tables, of its nodes after `lengths`.
    void into(Pass& pass, const Rounds& rounds) {
        if (!rounds.cos) return;
        const int64_t rotary = pass.rotary, each = pass.nodes * rotary;
        cos_.resize(pass.batch * each);
        sin_.resize(pass.batch * each);
        for (int64_t b = 0; b < pass.batch; b++) {
            const int64_t from = pass.lengths[b] * rotary;
            memcpy(cos_.data() + b * each, static_cast<const T*>(rounds.cos) + from, each * sizeof(T));
            memcpy(sin_.data() + b * each, static_cast<const T*>(rounds.sin) + from, each * sizeof(T));
        }
        pass.cos = cos_.data();
        pass.sin = sin_.data();
        pass.table = each;
    }

  private:
    std::vector<T> cos_, sin_;
};

// The exits of one round out of several, and the depths of the tokens that its rows read.
class RoundExits {
  public:
    RoundExits(const Pass& pass) : first_(pass.exits), depths_(pass.batch), batch_(pass.batch) {}

    const Exits* of(int64_t round, const int32_t* table, const int64_t* tokens) {
        if (!first_) return nullptr;
        now_ = *first_;
        now_.thresholds += round * batch_;
        now_.left += round * batch_;
        memset(now_.scored, 0, batch_);
        if (table) {
            for (int64_t b = 0; b < batch_; b++) depths_[b] = table[tokens[b]];
            now_.depths = depths_.data();
        }
        return &now_;
    }

  private:
    const Exits* first_;
    Exits now_;
    std::vector<int32_t> depths_;
    int64_t batch_;
};

// What rows choose at a shallow exit if all are sure; else, or if too many states wait, the layers above run over all of
// them, and give the tokens of rows that are not sure.
template <class T>
void run_shallow(const Model& model, Pass pass, const Waiting& waiting, int64_t round) {
    const int64_t batch = pass.batch, width = model.hidden, before = *waiting.count, nodes = before + 1;
    const uint8_t* moves = pass.rounds->moves;
    const Exits& exits = *pass.exits;
    const Ending& ending = *pass.ending;
    const auto run = [&](const Pass& part) {
        Runner<T> runner(model, part);
        with_team(part.threads, [&](Team& team) { runner.run(team); });
    };
    T* states = static_cast<T*>(waiting.states);
    pass.ending = nullptr;
    pass.result = states + before * batch * width;
    run(pass);
    bool sure = true;
    for (int64_t b = 0; b < batch; b++) {
        if (!moves[b]) continue;
        float most;
        sure = sure && exits.scored[b];
        if (exits.scored[b])
            largest(exits.logits + b * exits.head.outputs, exits.head.outputs, 1, ending.best + b, &most);
    }
    const bool waits = sure && before < waiting.most;
    waiting.nodes[round] = waits ? 0 : nodes;
    *waiting.count = waits ? nodes : 0;
    if (waits) return;

    std::vector<T> rows(batch * nodes * width), last(batch * width);
    for (int64_t b = 0; b < batch; b++)
        for (int64_t node = 0; node < nodes; node++)
            memcpy(&rows[(b * nodes + node) * width], states + (node * batch + b) * width, width * sizeof(T));
    std::vector<int64_t> lengths(pass.lengths, pass.lengths + batch), best(batch);
    for (int64_t b = 0; b < batch; b++) lengths[b] -= moves[b] ? before : 0;
    Pass deep = pass;
    deep.exits = nullptr;
    deep.hidden = deep.result = rows.data();
    deep.lengths = lengths.data();
    deep.nodes = nodes;
    deep.layers += waiting.depth;
    deep.places += waiting.depth;
    deep.parts += waiting.depth;
    deep.taps += waiting.depth;
    deep.count -= waiting.depth;
    Turns<T> turns;
    turns.into(deep, *pass.rounds);
    run(deep);
    for (int64_t b = 0; b < batch; b++)
        memcpy(&last[b * width], &rows[((b + 1) * nodes - 1) * width], width * sizeof(T));
    Ending own = ending;
    own.best = best.data();
    deep.hidden = deep.result = last.data();
    deep.nodes = 1;
    deep.count = 0;
    deep.ending = &own;
    run(deep);
    for (int64_t b = 0; b < batch; b++)
        if (!exits.scored[b]) ending.best[b] = best[b];
}

// The token that the n-th luck of a drawing chooses by logits, whose distribution is kept.
template <class T>
int64_t draw(const Drawing& drawing, int64_t n, const T* logits, int64_t outputs) {
    float* probs = drawing.probs + n * outputs;
    probabilities(logits, outputs, drawing.temperature, probs);
    return drawn(probs, outputs, drawing.luck[n]);
}

// Ends with the first round in which a row that moves chose one of `ends`.
template <class T>
void run_rounds(const Model& model, const Pass& given) {
    Pass pass = given;
    const Rounds& rounds = *pass.rounds;
    const int64_t batch = pass.batch, width = model.hidden;
    const int64_t* last = rounds.ends + rounds.end_count;
    const auto begin = std::chrono::steady_clock::now();
    T* hidden = static_cast<T*>(const_cast<void*>(pass.hidden));
    RoundExits exits(given);
    Turns<T> turns;
    bool ended = false;
    int64_t& made = *rounds.made;
    for (made = 0; made < rounds.most && !ended; made++) {
        const int64_t* tokens = rounds.tokens + made * batch;
        int64_t* chosen = rounds.tokens + (made + 1) * batch;
        for (int64_t b = 0; b < batch; b++) embed(rounds, tokens[b], pass.lengths[b], hidden + b * width, width);
        turns.into(pass, rounds);
        pass.exits = exits.of(made, rounds.depths, tokens);
        if (rounds.waiting) {
            run_shallow<T>(model, pass, *rounds.waiting, made);
        } else {
            Runner<T> runner(model, pass);
            with_team(pass.threads, [&](Team& team) { runner.run(team); });
        }
        if (rounds.drawing) {
            const int64_t outputs = pass.ending->head.outputs;
            const auto choose = [&](int64_t b) {
                const T* logits = static_cast<const T*>(pass.ending->logits) + b * outputs;
                pass.ending->best[b] = draw(*rounds.drawing, made * batch + b, logits, outputs);
            };
            with_team(std::min(batch, pass.threads), [&](Team& team) { team.each(batch, choose); });
        }
        for (int64_t b = 0; b < batch; b++) {
            chosen[b] = given.exits && !rounds.moves[b] ? tokens[b] : pass.ending->best[b];  // exits run what moves
            if (!rounds.moves[b]) continue;
            rounds.lengths[b]++;
            ended = ended || std::find(rounds.ends, last, chosen[b]) != last;
        }
        rounds.times[made] = (std::chrono::steady_clock::now() - begin) / std::chrono::nanoseconds(1);
    }
}

}  // namespace
