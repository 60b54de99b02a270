// Rounds of one row whose passes judge guesses: what followed the same tokens before, in the text and in a table, or what
// heads draft.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "blocks.h"
#include "numbers.h"
#include "pass.h"
#include "rounds.h"
#include "scores.h"
#include "team.h"

namespace {

constexpr int64_t LONGEST = 3;      // tokens of a context of the table, as in guesses.py
constexpr int64_t EACH = 4;         // tokens that it has after a context, as there
constexpr int64_t MOST_MATCH = 32;  // tokens of an ending that are compared
constexpr float FADING = 0.98f;     // weight of the past in what is trusted, per pass

// What followed contexts of 1, 2 and 3 tokens in other texts.
struct Table {
    const int64_t* keys[LONGEST];    // ascending: the ids of a context as digits
    int64_t counts[LONGEST];
    const int32_t* tokens[LONGEST];  // [counts, EACH], the likeliest first; -1: no further one
    const float* shares[LONGEST];    // how likely they are
    int64_t base;                    // of the digits

    // The place of the longest context that a text ends with, by its length less 1; -1 if there is none.
    int64_t find(const int64_t* end, int64_t available, int64_t* place) const {
        int64_t key = 0, digit = 1, found = -1;
        for (int64_t n = 0; n < LONGEST && n < available; n++, digit *= base) {
            key += end[-1 - n] * digit;
            const int64_t* last = keys[n] + counts[n];
            const int64_t* at = std::lower_bound(keys[n], last, key);
            if (at == last || *at != key) break;  // a longer one has this one in it
            found = n;
            *place = at - keys[n];
        }
        return found;
    }
};

// Heads that draft a chain from the state that chose the last token (methods/speculative/heads/blockwise.py).
struct Heads {
    Matrix first, second, output;  // of the state; of what is above zero of that, an update per head; of updated states
    const int64_t* vocabulary;     // [outputs]: their ids
    int64_t count;                 // of heads
    void* state;                   // [hidden]; gets that of the next chain
};

// What guesses are made from, and how many.
struct Guesses {
    const int64_t* text;  // of the row, with the token that the first round reads
    int64_t length;
    const Table* table;   // null: there is none
    int64_t wanted;       // tokens after which no further round is run; there may be more, `most` of the rounds
    int64_t nodes;        // most of a tree
    const float* costs;   // [1 + nodes]: of a pass over a root and so many guesses; null: they cost nothing
    float least;          // likelihood below which nothing is guessed
    float* trust;         // [2, 2]: guesses of the text and of the table that were right, and that should have been
    int64_t passes;       // gets how many were run
    float spent;          // gets their costs
    int64_t* judged;      // [5, most], gets of each pass its tokens, guesses that were kept, guesses, the longest path
                          // of these, and nanoseconds of guessing
    const Heads* heads;   // draft a chain in the place of text and table; null: there are none
};

template <class T>
void run_product(const Matrix& m, const T* rows, T* to, int64_t count, float* work, int64_t threads) {
    with_team(threads, [&](Team& team) {
        multiply_rows(team, m, count, to, work,
                      [&](int64_t row, const Row& into) { copy(rows + row * m.inputs, into, m.inputs); });
    });
}

// The likeliest token by each head.
template <class T>
std::vector<int64_t> drafted_by(const Heads& heads, int64_t width, int64_t threads) {
    const int64_t count = heads.count, outputs = heads.output.outputs;
    const T* state = static_cast<const T*>(heads.state);
    std::vector<T> inner(heads.first.outputs), states(count * width), logits(count * outputs);
    const int64_t rooms[] = {product_room(heads.first, 1, threads), product_room(heads.second, 1, threads),
                             product_room(heads.output, count, threads)};
    std::vector<float> work(*std::max_element(rooms, rooms + 3));
    run_product(heads.first, state, inner.data(), 1, work.data(), threads);
    for (T& number : inner) put_one(&number, std::max(one(number), 0.0f));
    run_product(heads.second, inner.data(), states.data(), 1, work.data(), threads);
    for (int64_t i = 0; i < count * width; i++) put_one(&states[i], one(state[i % width]) + one(states[i]));
    run_product(heads.output, states.data(), logits.data(), count, work.data(), threads);
    std::vector<int64_t> tokens(count);
    for (int64_t head = 0; head < count; head++) {
        int64_t place;
        float most;
        largest(logits.data() + head * outputs, outputs, 1, &place, &most);
        tokens[head] = heads.vocabulary[place];
    }
    return tokens;
}

// A path that followed the longest ending of a text in it before, with the share of each token after those before it.
struct Path {
    std::vector<int64_t> tokens;
    std::vector<float> shares;
};

// What most often followed the longest ending of a text in it before, of equals the latest; no longer than the ending.
// A text that has repeated m tokens repeats one more with probability m / (m + 1).
Path repeated(const std::vector<int64_t>& text, int64_t most, float least) {
    std::vector<int64_t> ends;  // the tokens after the places where it ends
    int64_t longest = 0;
    const int64_t size = int64_t(text.size());
    for (int64_t end = 1; end < size; end++) {
        if (text[end - 1] != text.back()) continue;
        int64_t match = 1;
        while (match < end && match < MOST_MATCH && text[end - 1 - match] == text[size - 1 - match]) match++;
        if (match > longest) {
            longest = match;
            ends.clear();
        }
        if (match == longest) ends.push_back(end);
    }
    Path path;
    float all = 1.0f;
    most = std::min(most, longest);
    for (int64_t step = 0; step < most; step++) {
        const auto next = [&](int64_t end) {  // of an ending near the end of the text, which goes on as guessed
            const int64_t at = end + step;
            return at < size ? text[at] : path.tokens[at - size];
        };
        int64_t best = 0, token = -1;
        for (auto end = ends.rbegin(); end != ends.rend(); end++) {
            if (next(*end) == token) continue;
            const int64_t own = next(*end);
            const int64_t count = std::count_if(ends.begin(), ends.end(), [&](int64_t e) { return next(e) == own; });
            if (count > best) best = count, token = own;
        }
        const float share = float(best) / float(ends.size());
        all *= share;
        if (all < least) break;
        ends.erase(std::remove_if(ends.begin(), ends.end(), [&](int64_t e) { return next(e) != token; }), ends.end());
        path.tokens.push_back(token);
        path.shares.push_back(share * float(longest + step) / float(longest + step + 1));
    }
    return path;
}

// A guess: a node of a tree, or one that may become one.
struct Guess {
    int64_t token, parent, depth;  // parent: column, -1: the root
    float share, gain;             // after its parent, and with all before it
    int64_t source;                // 0: the text, 1: the table
    int64_t step;                  // of the path, that its children go on with; -1: it is not on the path
};

// The likeliest guesses after a text, as many as pay.
class GuessedTree {
  public:
    std::vector<Guess> nodes;

    GuessedTree(const Guesses& from, const std::vector<int64_t>& whole)
        : from_(from), whole_(whole), path_(repeated(whole, from.nodes, PATH_LEAST)) {
        open(-1);
        while (int64_t(nodes.size()) < from.nodes && !open_.empty()) {
            const auto best = std::max_element(open_.begin(), open_.end(),
                                               [](const Guess& a, const Guess& b) { return a.gain < b.gain; });
            if (best->gain < from.least) break;
            nodes.push_back(*best);
            open_.erase(best);
            open(int64_t(nodes.size()) - 1);
        }
        nodes.resize(paying());
    }

    // The chain of some tokens, whatever it costs.
    GuessedTree(const Guesses& from, const std::vector<int64_t>& whole, const std::vector<int64_t>& chain)
        : from_(from), whole_(whole) {
        for (int64_t i = 0; i < int64_t(chain.size()); i++) nodes.push_back({chain[i], i - 1, i + 1, 1.0f, 1.0f, 0, -1});
    }

    int64_t longest() const {
        int64_t depth = 0;
        for (const Guess& guess : nodes) depth = std::max(depth, guess.depth);
        return depth;
    }

    bool is_chain() const {
        for (size_t i = 0; i < nodes.size(); i++)
            if (nodes[i].parent != int64_t(i) - 1) return false;
        return true;
    }

    // The child of a node with this token, and what is learnt of how likely guesses are; -1: there is none.
    int64_t follow(int64_t parent, int64_t token) const {
        int64_t found = -1;
        for (size_t i = 0; i < nodes.size(); i++) {
            const Guess& guess = nodes[i];
            if (guess.parent != parent) continue;
            from_.trust[2 * guess.source + 1] += guess.share;
            if (guess.token != token) continue;
            from_.trust[2 * guess.source]++;
            found = int64_t(i);
        }
        return found;
    }

  private:
    static constexpr float PATH_LEAST = 0.1f, WEIGHT = 8.0f;

    const Guesses& from_;
    const std::vector<int64_t>& whole_;
    Path path_;
    std::vector<Guess> open_;

    // How many guesses make the most tokens per time.
    size_t paying() const {
        if (!from_.costs) return nodes.size();
        size_t best = 0;
        float tokens = 1.0f, rate = 1.0f / from_.costs[0];
        for (size_t n = 1; n <= nodes.size(); n++) {
            tokens += nodes[n - 1].gain;
            if (tokens / from_.costs[n] > rate) best = n, rate = tokens / from_.costs[n];
        }
        return best;
    }

    float trusted(int64_t source, float share) const {
        const float* seen = from_.trust + 2 * source;
        return std::min(1.0f, share * (WEIGHT + seen[0]) / (WEIGHT + seen[1]));
    }

    // Children of a node, or of the root.
    void open(int64_t parent) {
        const bool root = parent < 0;
        const float gain = root ? 1.0f : nodes[parent].gain;
        const int64_t step = root ? 0 : nodes[parent].step, depth = root ? 1 : nodes[parent].depth + 1;
        const auto add = [&](int64_t token, float share, int64_t source, int64_t next) {
            open_.push_back({token, parent, depth, share, gain * trusted(source, share), source, next});
        };
        int64_t repeats = -1;
        float left = 1.0f;
        if (step >= 0 && step < int64_t(path_.tokens.size())) {
            repeats = path_.tokens[step];
            add(repeats, path_.shares[step], 0, step + 1);
            left -= trusted(0, path_.shares[step]);
        }
        if (!from_.table) return;
        int64_t ending[LONGEST], available = 0, node = parent, place;  // from the last one backwards, at the end
        for (; available < LONGEST && node >= 0; node = nodes[node].parent)
            ending[LONGEST - ++available] = nodes[node].token;
        for (int64_t at = int64_t(whole_.size()) - 1; available < LONGEST && at >= 0; at--)
            ending[LONGEST - ++available] = whole_[at];
        const int64_t order = from_.table->find(ending + LONGEST, available, &place);
        if (order < 0) return;
        const int32_t* tokens = from_.table->tokens[order] + place * EACH;
        const float* shares = from_.table->shares[order] + place * EACH;
        for (int64_t i = 0; i < EACH && tokens[i] >= 0; i++)
            if (tokens[i] != repeats) add(tokens[i], left * shares[i], 1, -1);
    }
};

// The tables by which the nodes of a tree turn, and which of them each one sees.
template <class T>
class Laid {
  public:
    void into(Pass& pass, const Rounds& rounds, const GuessedTree& tree) {
        const int64_t nodes = 1 + int64_t(tree.nodes.size()), rotary = pass.rotary, length = pass.lengths[0];
        pass.nodes = nodes;
        pass.table = nodes * rotary;
        pass.reach = nullptr;
        if (rounds.cos) {
            cos_.resize(nodes * rotary);
            sin_.resize(nodes * rotary);
            for (int64_t i = 0; i < nodes; i++) {
                const int64_t from = (length + (i ? tree.nodes[i - 1].depth : 0)) * rotary;
                memcpy(cos_.data() + i * rotary, static_cast<const T*>(rounds.cos) + from, rotary * sizeof(T));
                memcpy(sin_.data() + i * rotary, static_cast<const T*>(rounds.sin) + from, rotary * sizeof(T));
            }
            pass.cos = cos_.data();
            pass.sin = sin_.data();
        }
        if (tree.is_chain()) return;
        reach_.assign(nodes * nodes, 0);
        reach_[0] = 1;
        for (int64_t i = 1; i < nodes; i++) {
            memcpy(&reach_[i * nodes], &reach_[(tree.nodes[i - 1].parent + 1) * nodes], nodes);
            reach_[i * nodes + i] = 1;
        }
        pass.reach = reach_.data();
    }

  private:
    std::vector<T> cos_, sin_;
    std::vector<uint8_t> reach_;
};

// Move what a pass wrote of the kept nodes together after its root.
template <class T>
void pack_kept(const Model& model, const Pass& pass, const std::vector<int64_t>& kept) {
    const int64_t dim = model.dim, first = pass.begin + pass.lengths[0] + 1, heads = 2 * model.kv_heads;
    for (size_t i = 0; i < kept.size(); i++) {
        if (kept[i] == int64_t(i)) continue;
        for (int64_t layer = 0; layer < pass.count; layer++)
            for (int64_t h = 0; h < heads; h++) {
                T* head = static_cast<T*>(pass.cache) + (pass.places[layer] * heads + h) * pass.capacity * dim;
                memcpy(head + (first + int64_t(i)) * dim, head + (first + kept[i]) * dim, dim * sizeof(T));
            }
    }
}

// Rounds of one row as `run_rounds` has them, several tokens of which may come from one pass.
template <class T>
void run_guessed(const Model& model, const Pass& given) {
    Pass pass = given;
    const Rounds& rounds = *pass.rounds;
    Guesses& guesses = *rounds.guesses;
    const int64_t width = model.hidden, outputs = pass.ending->head.outputs;
    const int64_t* last = rounds.ends + rounds.end_count;
    const auto begin = std::chrono::steady_clock::now();
    const auto since = [&] { return (std::chrono::steady_clock::now() - begin) / std::chrono::nanoseconds(1); };
    T* hidden = static_cast<T*>(const_cast<void*>(pass.hidden));
    std::vector<int64_t> whole(guesses.text, guesses.text + guesses.length), kept;
    Laid<T> laid;
    bool ended = false;
    int64_t &made = *rounds.made, &passes = guesses.passes;
    guesses.spent = 0.0f;
    for (made = passes = 0; made < guesses.wanted && !ended; passes++) {
        for (int i = 0; i < 4; i++) guesses.trust[i] *= FADING;
        const int64_t asked = since(), before = made;
        const GuessedTree tree =
            guesses.heads ? GuessedTree(guesses, whole, drafted_by<T>(*guesses.heads, width, pass.threads))
                          : GuessedTree(guesses, whole);
        const int64_t guessing = since() - asked;
        guesses.spent += guesses.costs ? guesses.costs[tree.nodes.size()] : 1.0f;
        laid.into(pass, rounds, tree);
        embed(rounds, whole.back(), pass.lengths[0], hidden, width);
        for (int64_t i = 1; i < pass.nodes; i++) {
            const Guess& guess = tree.nodes[i - 1];
            embed(rounds, guess.token, pass.lengths[0] + guess.depth, hidden + i * width, width);
        }
        Runner<T> runner(model, pass);
        with_team(pass.threads, [&](Team& team) { runner.run(team); });
        kept.clear();
        int64_t right = 0, chose = 0;  // chose: the node whose state chose the last token
        for (int64_t node = -1; made < rounds.most;) {
            int64_t chosen = pass.ending->best[node + 1];
            if (rounds.drawing)
                chosen = draw(*rounds.drawing, made, static_cast<const T*>(pass.ending->logits) + (node + 1) * outputs, outputs);
            rounds.tokens[++made] = chosen;
            whole.push_back(chosen);
            chose = node + 1;
            ended = std::find(rounds.ends, last, chosen) != last;
            node = tree.follow(node, chosen);
            right += node >= 0;
            if (ended || node < 0) break;
            kept.push_back(node);
        }
        pack_kept<T>(model, pass, kept);
        rounds.lengths[0] += 1 + int64_t(kept.size());
        if (guesses.heads)
            memcpy(guesses.heads->state, static_cast<const T*>(pass.ending->normed) + chose * width, width * sizeof(T));
        const int64_t found[] = {made - before, right, int64_t(tree.nodes.size()), tree.longest(), guessing};
        for (int i = 0; i < 5; i++) guesses.judged[i * rounds.most + passes] = found[i];
        rounds.times[passes] = since();
    }
}

}  // namespace
