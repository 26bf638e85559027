// The threads of a step. All walk through the same phases; a phase's tasks go to whoever comes first, and a phase ends when
// its tasks are done, not when every thread has arrived: a thread that the system has put aside delays nobody.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace llmserve {

inline void wait_a_little(int& turns) {
    if (++turns < 2000) {
        _mm_pause();
    } else {
        sched_yield();
    }
}

class Crew;

// One thread's walk through a job.
class Walk {
  public:
    Walk(Crew& crew, int worker) : worker(worker), crew_(crew) {}

    // Runs task(i) for i in [0, tasks), shared with the other threads; returns when all are done.
    template <class Task>
    void phase(int tasks, Task&& task);

    const int worker;

  private:
    Crew& crew_;
    int phase_ = 0;
};

class Crew {
  public:
    explicit Crew(int threads) : size(threads) {
        for (int worker = 1; worker < threads; ++worker) helpers_.emplace_back([this, worker] { help(worker); });
    }

    ~Crew() {
        closing_ = true;
        ++generation_;
        generation_.notify_all();
        for (auto& helper : helpers_) helper.join();
    }

    // Runs body(walk) on this thread and on at most `threads - 1` helpers; it may have `max_phases` phases.
    void run(int threads, int max_phases, const std::function<void(Walk&)>& body) {
        if (static_cast<int>(marks_.size()) < max_phases) marks_ = std::vector<Mark>(max_phases);
        for (int i = 0; i < max_phases; ++i) {
            marks_[i].taken.store(0, std::memory_order_relaxed);
            marks_[i].done.store(0, std::memory_order_relaxed);
        }
        body_ = &body;
        const bool helped = threads > 1 && size > 1;
        invited_ = threads;
        if (helped) {
            open_ = true;
            ++generation_;
            generation_.notify_all();
        }
        Walk walk(*this, 0);
        body(walk);
        open_ = false;
        int turns = 0;
        while (inside_ != 0) wait_a_little(turns);
    }

    const int size;

  private:
    friend class Walk;

    struct alignas(64) Mark {
        std::atomic<int> taken{0};
        std::atomic<int> done{0};
    };

    void help(int worker) {
        uint32_t seen = 0;
        while (true) {
            for (int turns = 0; generation_ == seen && turns < kIdleTurns; ++turns) _mm_pause();
            generation_.wait(seen);
            seen = generation_;
            if (closing_) return;
            ++inside_;  // run() lets nothing go while anyone is inside
            if (open_ && worker < invited_) {
                Walk walk(*this, worker);
                (*body_)(walk);
            }
            --inside_;
        }
    }

    static constexpr int kIdleTurns = 2000;  // about 50 us: the time between two steps, mostly

    std::vector<Mark> marks_;
    std::vector<std::thread> helpers_;
    const std::function<void(Walk&)>* body_ = nullptr;
    std::atomic<uint32_t> generation_{0};
    std::atomic<int> inside_{0};
    std::atomic<int> invited_{0};
    std::atomic<bool> open_{false};
    std::atomic<bool> closing_{false};
};

template <class Task>
void Walk::phase(int tasks, Task&& task) {
    Crew::Mark& mark = crew_.marks_[phase_++];
    int mine = 0;
    for (int i; (i = mark.taken.fetch_add(1, std::memory_order_relaxed)) < tasks; ++mine) task(i);
    if (mine) mark.done.fetch_add(mine, std::memory_order_release);
    int turns = 0;
    while (mark.done.load(std::memory_order_acquire) < tasks) wait_a_little(turns);
}

}  // namespace llmserve
