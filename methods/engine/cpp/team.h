// The threads of a call.
#pragma once

#include <omp.h>
#include <sched.h>
#include <stdint.h>

#include <atomic>
#include <vector>

#include "numbers.h"

namespace {

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

#ifdef MATRIX_TILES
void release_tiles();  // of this thread, see products.h
#endif

// work(team) on every thread of a team.
template <class Work>
void with_team(int64_t threads, const Work& work) {
    const auto run = [&](Team& team) {
        work(team);
#ifdef MATRIX_TILES
        release_tiles();
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

}  // namespace
