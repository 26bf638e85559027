// How the attention of a step is shared among threads: made once a step, walked through once a layer.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "crew.h"

namespace llmserve {

// What attention needs besides the plan: each worker's scratch, and the sums of spans that one worker will merge.
template <class T>
struct AttentionMemory {
    std::vector<std::unique_ptr<Scratch<T>>> of_worker;
    Buffer<float> partial;
    std::vector<std::atomic<int>> finished;
};

class Plan {
  public:
    Batch batch{};

    // query_start [sequences + 1], seq_lens [sequences]; `group` query heads share a KV head.
    void make(const Batch& step, int sequences, const int32_t* query_start, const int32_t* seq_lens, int kv_heads,
              int group, int threads) {
        batch = step;
        kv_heads_ = kv_heads;
        group_ = group;
        rows_ = group;
        blocks_.clear();
        const int block_tokens = std::max(1, kQueryRows / group);
        for (const bool prompts : {true, false}) {  // the longest tasks first
            for (int s = 0; s < sequences; ++s) {
                const int length = query_start[s + 1] - query_start[s];
                if ((length > 1) != prompts) continue;
                for (int done = 0; done < length; done += block_tokens) {
                    const int tokens = std::min(block_tokens, length - done);
                    blocks_.push_back({s, query_start[s] + done, tokens, seq_lens[s] - length + done});
                    rows_ = std::max(rows_, tokens * group);
                }
            }
        }
        share(threads);
    }

    template <class T>
    void reserve(AttentionMemory<T>& memory, int workers, int head_dim) const {
        while (static_cast<int>(memory.of_worker.size()) < workers)
            memory.of_worker.push_back(std::make_unique<Scratch<T>>());
        for (auto& scratch : memory.of_worker) scratch->reserve(rows_, head_dim);
        memory.partial.reserve(partials_ * kv_heads_ * Sums::size(rows_, head_dim));
        const size_t counters = blocks_.size() * kv_heads_;
        if (memory.finished.size() < counters) memory.finished = std::vector<std::atomic<int>>(counters);
    }

    // One phase. Queries and out are [T, heads * D], with strides. The memory has been reserved for this plan.
    template <class T>
    void attend(Walk& walk, const Attention<T>& attention, int head_dim, const T* queries, int64_t query_stride, T* out,
                int64_t out_stride, AttentionMemory<T>& memory) const {
        walk.phase(static_cast<int>(tasks_.size()) * kv_heads_, [&](int number) {
            const Task& task = tasks_[number / kv_heads_];
            const int kv_head = number % kv_heads_;
            const QueryBlock& block = blocks_[task.block];
            const int rows = block.tokens * group_, keys = block.position + block.tokens;
            Scratch<T>& scratch = *memory.of_worker[walk.worker];
            const Sums all(scratch.all.data(), rows), span(scratch.span.data(), rows);
            attention.gather(block, kv_head, queries, query_stride, scratch.queries.data());
            auto partial = [&](int index) {
                return Sums(memory.partial.data() +
                                ((task.partials + index) * kv_heads_ + kv_head) * Sums::size(rows_, head_dim),
                            rows);
            };
            if (task.span >= 0) {  // leave the sums of one span; whoever is last merges
                attention.sum_span(block, kv_head, task.span * kSpan, task.span * kSpan + kSpan, scratch,
                                   partial(task.span));
                std::atomic<int>& finished = memory.finished[task.block * kv_heads_ + kv_head];
                if (++finished < spans(keys)) return;
                finished = 0;
            }
            all.clear(rows, head_dim);
            for (int i = 0; i < spans(keys); ++i) {
                if (task.span < 0) attention.sum_span(block, kv_head, i * kSpan, i * kSpan + kSpan, scratch, span);
                all.merge(task.span < 0 ? span : partial(i), rows, head_dim);
            }
            attention.finish(block, kv_head, all, out, out_stride);
        });
    }

  private:
    struct Task {
        int block;
        int span;      // -1: all of them
        int partials;  // where the sums of the block's first span go
    };

    static int spans(int keys) { return (keys + kSpan - 1) / kSpan; }

    // A block is one task, or one for each span where there would be too few tasks to share.
    void share(int threads) {
        tasks_.clear();
        partials_ = 0;
        const bool split = threads > 1 && static_cast<int>(blocks_.size()) * kv_heads_ < 8 * threads;
        for (int b = 0; b < static_cast<int>(blocks_.size()); ++b) {
            const int parts = spans(blocks_[b].position + blocks_[b].tokens);
            if (!split || parts == 1) {
                tasks_.push_back({b, -1, 0});
                continue;
            }
            for (int span = 0; span < parts; ++span) tasks_.push_back({b, span, partials_});
            partials_ += parts;
        }
    }

    std::vector<QueryBlock> blocks_;
    std::vector<Task> tasks_;
    int kv_heads_ = 1, group_ = 1, rows_ = 1, partials_ = 0;
};

}  // namespace llmserve
