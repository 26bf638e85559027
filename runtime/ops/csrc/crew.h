// The threads of a step. All walk through the same phases. Each begins with a range of a phase's tasks of its own, for
// neighbouring tasks read neighbouring memory, which the hardware fetches ahead; who has none left takes the last of
// another's. A phase ends when its tasks are done, not when every thread has arrived: a thread that the system has put
// aside delays nobody.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <system_error>
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
    Walk(Crew& crew, int worker, int threads) : worker(worker), threads(threads), crew_(crew) {}

    // Runs task(i) for i in [0, tasks), shared with the other threads; returns when all are done.
    template <class Task>
    void phase(int tasks, Task&& task);

    // Where this thread's own range of a phase's tasks begins and ends.
    int begin(int tasks) const { return begin(tasks, worker); }
    int end(int tasks) const { return begin(tasks, worker + 1); }

    const int worker;
    const int threads;

  private:
    int begin(int tasks, int owner) const { return static_cast<int>(static_cast<int64_t>(tasks) * owner / threads); }

    Crew& crew_;
    int phase_ = 0;
};

// It is there until the process ends, and so are its threads: nobody need wait for them then.
class Crew {
  public:
    Crew() = default;
    ~Crew() = delete;

    // So many threads from the next job on, or as many as the system gives. Those that are not needed sleep.
    void resize(int threads) {
        size_ = std::clamp(threads, 1, kMostThreads);
        try {
            for (; helpers_ + 1 < size_; ++helpers_) {
                std::thread([this, worker = helpers_ + 1] { help(worker); }).detach();
            }
        } catch (const std::system_error&) {
            size_ = helpers_ + 1;
        }
    }

    int size() const { return size_; }

    // Runs body(walk) on this thread and on at most `threads - 1` helpers; it may have `max_phases` phases.
    void run(int threads, int max_phases, const std::function<void(Walk&)>& body) {
        threads_ = std::min(threads, size_);
        if (static_cast<int>(marks_.size()) < max_phases) marks_ = std::vector<Mark>(max_phases);
        for (int i = 0; i < max_phases; ++i) marks_[i].reset(threads_);
        body_ = &body;
        if (threads_ > 1) {
            open_ = true;
            ++generation_;
            generation_.notify_all();
        }
        Walk walk(*this, 0, threads_);
        body(walk);
        open_ = false;
        int turns = 0;
        while (inside_ != 0) wait_a_little(turns);
    }

  private:
    friend class Walk;

    static constexpr int kMostThreads = 64;

    // What is left of a phase. Each thread has a range of the tasks; the halves of its word count how many have been
    // taken from the range's front and from its back.
    struct alignas(64) Mark {
        std::atomic<int> done{0};
        std::atomic<uint64_t> taken[kMostThreads];

        void reset(int threads) {
            done.store(0, std::memory_order_relaxed);
            for (int i = 0; i < threads; ++i) taken[i].store(0, std::memory_order_relaxed);
        }

        // A task of [start, start + length), the range of thread `owner`, or -1 if none is left.
        int take(int owner, int start, int length, bool from_front) {
            uint64_t seen = taken[owner].load(std::memory_order_relaxed);
            while (true) {
                const int front = static_cast<int>(seen >> 32), back = static_cast<int>(seen & 0xffffffff);
                if (front + back >= length) return -1;
                const uint64_t next = seen + (from_front ? uint64_t{1} << 32 : 1);
                if (taken[owner].compare_exchange_weak(seen, next, std::memory_order_relaxed)) {
                    return from_front ? start + front : start + length - 1 - back;
                }
            }
        }
    };

    [[noreturn]] void help(int worker) {
        uint32_t seen = 0;
        while (true) {
            for (int turns = 0; generation_ == seen && turns < kIdleTurns; ++turns) _mm_pause();
            generation_.wait(seen);
            seen = generation_;
            ++inside_;  // run() lets nothing go while anyone is inside
            if (open_ && worker < threads_) {
                Walk walk(*this, worker, threads_);
                (*body_)(walk);
            }
            --inside_;
        }
    }

    static constexpr int kIdleTurns = 2000;  // about 50 us: the time between two steps, mostly

    int size_ = 1;
    std::vector<Mark> marks_;
    int helpers_ = 0;
    const std::function<void(Walk&)>* body_ = nullptr;
    std::atomic<uint32_t> generation_{0};
    std::atomic<int> inside_{0};
    std::atomic<int> threads_{1};
    std::atomic<bool> open_{false};
};

template <class Task>
void Walk::phase(int tasks, Task&& task) {
    Crew::Mark& mark = crew_.marks_[phase_++];
    int mine = 0;
    for (int i = 0; i < threads; ++i) {  // the own range, then those of the others
        const int owner = (worker + i) % threads;
        const int start = begin(tasks, owner), length = begin(tasks, owner + 1) - start;
        for (int number; (number = mark.take(owner, start, length, i == 0)) >= 0; ++mine) task(number);
    }
    if (mine) mark.done.fetch_add(mine, std::memory_order_release);
    int turns = 0;
    while (mark.done.load(std::memory_order_acquire) < tasks) wait_a_little(turns);
}

}  // namespace llmserve
