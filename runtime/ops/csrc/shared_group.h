// What ranks on one machine say to each other, through memory that all of them have mapped.
//
// It is made of streams, each with one writer and some readers: a ring of chunks and two kinds of counters, how many
// chunks have been written and how many each reader has taken. Whoever waits spins shortly and then sleeps on a counter;
// now and then it looks whether the others still live, so that nobody waits for a rank that is gone.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstring>

#include "simd.h"

namespace llmserve {

class SharedGroup {
  public:
    static constexpr int kMostRanks = 64;
    static constexpr int kTags = 3;  // kinds of messages between two ranks, which do not wait for each other

    // Bytes of memory, zero at first, that a group needs.
    static int64_t bytes(int ranks) { return (ranks + static_cast<int64_t>(ranks) * ranks * kTags) * sizeof(Stream); }

    // Each rank has opened `file`, the shared memory, for itself and holds a lock on the byte that has its number: a
    // lock that the system takes back when the process ends, however it ends.
    SharedGroup(void* memory, int file, int rank, int ranks, double timeout_s, int spins)
        : rank(rank), ranks(ranks), streams_(static_cast<Stream*>(memory)), file_(file), timeout_(timeout_s),
          spins_(spins) {}

    // Each of these returns 0, or why it and all that follow fail: the number of a rank that is gone plus one, or -1
    // where a rank has not answered in time.

    // data = the ranks' sum, added up in rank order: the same bits on every rank.
    template <class T>
    int all_reduce(T* data, int64_t count) {
        constexpr int64_t kMost = kChunk / sizeof(T);
        const T* parts[kMostRanks];
        for (int64_t done = 0; done < count; done += kMost) {
            const int64_t n = std::min(kMost, count - done);
            if (!write(everyone(rank_stream(rank)), data + done, n * sizeof(T))) return failure_;
            for (int r = 0; r < ranks; ++r) {
                parts[r] = r == rank ? data + done : static_cast<const T*>(arrived(rank_stream(r)));
                if (!parts[r]) return failure_;
            }
            for (int64_t i = 0; i < n; i += kLanes) {
                const __mmask16 lanes = first_lanes(n - i);
                __m512 sum = load(parts[0] + i, lanes);
                for (int r = 1; r < ranks; ++r) sum = _mm512_add_ps(sum, load(parts[r] + i, lanes));
                store(data + done + i, sum, lanes);
            }
            for (int r = 0; r < ranks; ++r) {
                if (r != rank) advance(rank_stream(r).taken[rank]);
            }
        }
        return 0;
    }

    // to [ranks, bytes] = each rank's data.
    int all_gather(const char* data, char* to, int64_t bytes) {
        std::memcpy(to + rank * bytes, data, bytes);
        for (int64_t done = 0; done < bytes; done += kChunk) {
            const int64_t n = std::min(kChunk, bytes - done);
            if (!write(everyone(rank_stream(rank)), data + done, n)) return failure_;
            for (int r = 0; r < ranks; ++r) {
                if (r != rank && !read(rank_stream(r), to + r * bytes + done, n)) return failure_;
            }
        }
        return 0;
    }

    // Rank 0's data, on every rank, but for one whose `data` is null. Rank 0 may be some chunks ahead of the others.
    int broadcast(char* data, int64_t bytes) {
        for (int64_t done = 0; done < bytes; done += kChunk) {
            const int64_t n = std::min(kChunk, bytes - done);
            const bool passed = rank == 0 ? write(everyone(rank_stream(0)), data + done, n)
                                          : read(rank_stream(0), data ? data + done : nullptr, n);
            if (!passed) return failure_;
        }
        return 0;
    }

    // The sender may be some chunks ahead of the receiver.
    int send(int to, int tag, const char* data, int64_t bytes) {
        for (int64_t done = 0; done < bytes; done += kChunk) {
            if (!write({tag_stream(rank, to, tag), to, to + 1}, data + done, std::min(kChunk, bytes - done)))
                return failure_;
        }
        return 0;
    }

    int receive(int source, int tag, char* data, int64_t bytes) {
        for (int64_t done = 0; done < bytes; done += kChunk) {
            if (!read(tag_stream(source, rank, tag), data + done, std::min(kChunk, bytes - done))) return failure_;
        }
        return 0;
    }

    const int rank;
    const int ranks;

  private:
    static constexpr int64_t kChunk = 256 << 10;
    static constexpr uint32_t kChunks = 4;
    static constexpr int64_t kLookEvery_ns = 100'000'000;

    struct alignas(64) Counter {
        std::atomic<uint32_t> value;
        std::atomic<uint32_t> sleepers;
    };

    struct Stream {
        Counter written;
        Counter taken[kMostRanks];  // by reader
        char chunks[kChunks][kChunk];
    };

    // A stream as its writer sees it: the readers are ranks of [first, last) but for itself.
    struct Target {
        Stream& stream;
        int first, last;
    };

    Stream& rank_stream(int writer) { return streams_[writer]; }
    Stream& tag_stream(int from, int to, int tag) { return streams_[ranks + (from * ranks + to) * kTags + tag]; }
    Target everyone(Stream& stream) { return {stream, 0, ranks}; }

    bool write(const Target& target, const void* data, int64_t bytes) {
        Stream& stream = target.stream;
        const uint32_t number = stream.written.value.load(std::memory_order_relaxed);
        for (int reader = target.first; reader < target.last; ++reader) {
            if (reader == rank) continue;
            uint32_t taken;
            while (number - (taken = stream.taken[reader].value.load(std::memory_order_acquire)) >= kChunks) {
                if (!wait(stream.taken[reader], taken)) return false;
            }
        }
        std::memcpy(stream.chunks[number % kChunks], data, bytes);
        advance(stream.written);
        return true;
    }

    // The next chunk of a stream, which stays until this rank has advanced its `taken`; null where none comes.
    const void* arrived(Stream& stream) {
        const uint32_t number = stream.taken[rank].value.load(std::memory_order_relaxed);
        while (stream.written.value.load(std::memory_order_acquire) == number) {
            if (!wait(stream.written, number)) return nullptr;
        }
        return stream.chunks[number % kChunks];
    }

    bool read(Stream& stream, void* to, int64_t bytes) {
        const void* chunk = arrived(stream);
        if (!chunk) return false;
        if (to) std::memcpy(to, chunk, bytes);
        advance(stream.taken[rank]);
        return true;
    }

    static void advance(Counter& counter) {
        counter.value.fetch_add(1);  // sequentially consistent, as what follows: no sleeper is overlooked
        if (counter.sleepers.load()) syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // Waits until the counter is no longer `seen`. False where that will not be.
    bool wait(Counter& counter, uint32_t seen) {
        if (failure_) return false;
        for (int i = 0; i < spins_; ++i) {
            if (counter.value.load(std::memory_order_acquire) != seen) return true;
            _mm_pause();
        }
        const auto began = std::chrono::steady_clock::now();
        while (counter.value.load() == seen) {
            const timespec slice{0, kLookEvery_ns};
            ++counter.sleepers;
            const long result = syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &slice, nullptr, 0);
            --counter.sleepers;
            if (result == 0 || counter.value.load() != seen) continue;
            const int gone = find_gone();
            const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - began;
            if (!gone && waited.count() < timeout_) continue;
            if (counter.value.load() != seen) return true;  // its last act
            failure_ = gone ? gone : -1;
            return false;
        }
        return true;
    }

    // A rank that no longer holds its lock, plus one; 0 where all do.
    int find_gone() const {
        for (int r = 0; r < ranks; ++r) {
            if (r == rank) continue;
            struct flock lock {};
            lock.l_type = F_WRLCK;
            lock.l_whence = SEEK_SET;
            lock.l_start = r;
            lock.l_len = 1;
            if (fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK) return r + 1;
        }
        return 0;
    }

    Stream* const streams_;
    const int file_;
    const double timeout_;
    const int spins_;
    std::atomic<int> failure_{0};
};

}  // namespace llmserve
