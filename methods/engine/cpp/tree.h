// A draft tree of a network of one layer.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "blocks.h"
#include "norms.h"
#include "numbers.h"
#include "pass.h"
#include "products.h"
#include "scores.h"
#include "team.h"

namespace {

// A draft network of one layer over pairs of a feature and the token after it, and the tree that it drafts.
struct Network {
    Model model;             // of one layer, which reads the token's norm beside the feature
    Norm token, feature, scored;  // feature: of the residual; without weight it is the feature itself
    Matrix mix;              // of the target's states side by side to a feature; without panels: these come mixed
    int64_t taps;            // of these states
    Matrix score;            // of the draft vocabulary
    const void* embedding;   // [tokens, hidden]
    const int64_t* ids;      // of the draft vocabulary; null: all tokens
    int64_t feeds_scored;    // whether the next pair has the feature after its norm
    int64_t nodes, levels, width;  // of the tree; children of a node, and nodes of a level that have children
    float least;             // the best score of a level below which there is no further one
};

// Pairs that the network has not read, after `length` of one row, and where the tree goes.
struct Growth {
    const void* const* taps; // states, [nodes of a pass, hidden] each
    const int64_t* rows;     // [fresh] of these nodes
    int64_t mixed;           // whether these are features already, of one tap
    const int64_t* tokens;   // [fresh]
    int64_t fresh;
    const void *cos, *sin;   // [fresh + levels - 1, rotary], of the places from the first of them on
    int64_t rotary;
    void* cache;             // see Pass
    int64_t begin, length, capacity;
    int64_t *ids, *parents;  // [nodes] of the tree
    float* scores;           // [nodes]: log-probabilities of their paths
    int64_t* grown;          // levels that there are; of fewer candidates than nodes the tree has all
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

// Pairs of the largest pass.
int64_t most(const Network& n, int64_t fresh) { return fresh > n.width ? fresh : n.width; }

// The tree of the most probable paths, level by level, as `ranked_tree.py` grows it of torch's operators.
template <class T>
class Grower {
  public:
    Grower(const Network& n, const Growth& g)
        : n_(n),
          g_(g),
          width_(n.model.hidden),
          lengths_{g.length, g.length + g.fresh},
          features_(g.fresh * width_),
          residual_(most(n, g.fresh) * width_),
          beside_(most(n, g.fresh) * width_),
          states_(most(n, g.fresh) * width_),
          fed_(n.width * width_),
          turns_(2 * n.width * g.rotary),
          logits_(n.width * n.score.outputs),
          reach_(n.width * n.width * n.levels),
          places_(n.width * n.width),
          best_(n.width * n.width),
          totals_(n.width),
          wide_(g.threads * width_) {
        const T *cos = static_cast<const T*>(g.cos), *sin = static_cast<const T*>(g.sin);
        passes_.push_back(pass(g.fresh, lengths_, 0, cos, sin, nullptr));
        for (int64_t level = 0; level + 1 < n.levels; level++)
            passes_.push_back(pass(n.width, lengths_ + 1, level * n.width, turns_.data(),
                                   turns_.data() + n.width * g.rotary, reach_.data()));
        runners_.reserve(passes_.size());
        for (const Pass& each : passes_) runners_.emplace_back(n.model, each);
    }

    void run(Team& team) {
        begin(team);
        enter(team, g_.fresh, features_.data(), g_.tokens);
        runners_[0].run(team);
        score(team, 1, states_.data() + (g_.fresh - 1) * width_);
        for (int64_t level = 0;; level++) {
            team.each(1, [&](int64_t) {
                add();
                *g_.grown = level + 1;
                further_ = level + 1 < n_.levels && choose(level);
            });
            if (!further_) break;
            enter(team, n_.width, fed_.data(), tokens_.data());
            runners_[level + 1].run(team);
            score(team, n_.width, states_.data());
        }
        team.each(1, [&](int64_t) { finish(); });
    }

  private:
    Pass pass(int64_t nodes, const int64_t* length, int64_t earlier, const T* cos, const T* sin,
              const uint8_t* reach) {
        Pass made{};
        made.hidden = residual_.data();
        made.beside = beside_.data();
        made.result = states_.data();
        made.cos = cos;
        made.sin = sin;
        made.rotary = g_.rotary;
        made.reach = reach;
        made.lengths = length;
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

    // The features of the pairs that are new.
    void begin(Team& team) {
        const auto state = [&](int64_t tap, int64_t row) {
            return static_cast<const T*>(g_.taps[tap]) + g_.rows[row] * width_;
        };
        if (g_.mixed) {
            team.each(g_.fresh, [&](int64_t row) {
                memcpy(features_.data() + row * width_, state(0, row), width_ * sizeof(T));
            });
            return;
        }
        multiply_rows(team, n_.mix, g_.fresh, features_.data(), g_.work, [&](int64_t row, const Row& to) {
            for (int64_t tap = 0; tap < n_.taps; tap++) copy(state(tap, row), to.after(tap * width_), width_);
        });
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
        const int64_t outputs = n_.score.outputs;
        multiply_rows(team, n_.score, rows, logits_.data(), g_.work, [&](int64_t row, const Row& to) {
            float* numbers = wide_.data() + team.thread() * width_;
            copy(states + row * width_, Plain{numbers}, width_);
            if (!n_.feeds_scored) narrow(numbers, fed_.data() + row * width_, width_);
            normalise<T>(n_.scored, numbers, Plain{numbers}, width_);
            if (n_.feeds_scored) narrow(numbers, fed_.data() + row * width_, width_);
            copy(numbers, to, width_);
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

    // The nodes of a level that get children, and what their pass reads; false if it is not worth another level.
    bool choose(int64_t level) {
        const int64_t k = n_.width, seen = level * k;
        const std::vector<int64_t> chosen = best_of({every_.begin() + newest_, every_.end()}, k);
        if (every_[newest_ + chosen[0]] < n_.least) return false;
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
        return true;
    }

    // The best of all candidates, parents before their children.
    void finish() {
        const int64_t nodes = std::min(n_.nodes, int64_t(every_.size()));
        std::vector<int64_t> kept = best_of(every_, nodes);
        std::sort(kept.begin(), kept.end());
        for (int64_t i = 0; i < nodes; i++) {
            const int64_t parent = parents_[kept[i]];
            g_.ids[i] = ids_[kept[i]];
            g_.scores[i] = every_[kept[i]];
            g_.parents[i] = parent < 0 ? -1 : std::lower_bound(kept.begin(), kept.end(), parent) - kept.begin();
        }
    }

    const Network& n_;
    const Growth& g_;
    const int64_t width_;
    const int64_t lengths_[2];  // of the row, before the new pairs and after them
    std::vector<T> features_;                    // of the pairs that are new
    std::vector<T> residual_, beside_, states_;  // of the pairs of a pass
    std::vector<T> fed_, turns_, logits_;  // features of the nodes of a level, their rotary positions, and logits after them
    std::vector<uint8_t> reach_;
    std::vector<int64_t> places_;
    std::vector<float> best_, totals_, wide_;
    std::vector<Pass> passes_;
    std::vector<Runner<T>> runners_;
    std::vector<float> every_;                  // scores of all candidates
    std::vector<int64_t> ids_, parents_;        // of these
    std::vector<int64_t> tokens_, columns_;     // of the nodes of a level that have children
    int64_t newest_ = 0, scored_ = 0;           // first candidate of the last level; rows of the last logits
    bool further_ = true;                       // whether another level grows
    const int32_t first_ = 0;
    const uint8_t whole_ = 1 + 4;
    void* const nowhere_ = nullptr;
};

int64_t growing_room(const Network& n, int64_t fresh, int64_t length, int64_t threads) {
    const int64_t rows = most(n, fresh), slots = length + fresh + n.levels * n.width;
    const int64_t of_pass = lay_out(n.model, rows, slots, threads, nullptr, nullptr);
    const int64_t of_scores = product_room(n.score, n.width, threads);
    const int64_t of_mixing = n.mix.panels ? product_room(n.mix, fresh, threads) : 0;
    return std::max({of_pass, of_scores, of_mixing});
}

template <class T>
void grow(const Network* network, const Growth* growth) {
    Grower<T> grower(*network, *growth);
    with_team(growth->threads, [&](Team& team) { grower.run(team); });
}

}  // namespace
