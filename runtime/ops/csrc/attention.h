// Attention over pages in place, for decodes and prompt chunks alike (online softmax: FlashAttention, Dao et al., 2022).
//
// What a row gets does not depend on the batch: keys are taken in chunks of 128 and spans of 512 at absolute positions,
// a span is summed from nothing, and the spans are merged in order, whether one thread goes through them or several.
#pragma once

#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "gemm.h"
#include "simd.h"

namespace llmserve {

constexpr int kBlock = 16;   // keys that lie together, one a lane
constexpr int kChunk = 128;  // keys whose scores are made at once
constexpr int kSpan = 512;   // keys that a task may be split at
constexpr int kQueryRows = 96;
constexpr float kLog2E = 1.44269504088896341f;

// The pages of one layer: keys as [page][head][page_size / 16][D / pack][16][pack], so that a vector holds one
// dimension (pair) of 16 keys; values as [page][head][page_size / 16][16 / pack][D][pack].
template <class T>
struct Pages {
    T* keys;
    T* values;
    int kv_heads;
    int head_dim;
    int page_size;

    int64_t block(int64_t page, int head, int offset) const {
        return ((page * kv_heads + head) * (page_size / kBlock) + offset / kBlock) * kBlock * head_dim;
    }

    void write(int64_t slot, int head, const T* key, const T* value) const {
        const int offset = static_cast<int>(slot % page_size), lane = offset % kBlock;
        const int64_t at = block(slot / page_size, head, offset);
        T* k = keys + at + lane * pack<T>;
        for (int d = 0; d < head_dim; d += pack<T>) std::memcpy(k + d * kBlock, key + d, 4);
        T* v = values + at + lane / pack<T> * head_dim * pack<T> + lane % pack<T>;
        for (int d = 0; d < head_dim; ++d) v[d * pack<T>] = value[d];
    }
};

struct AttentionSpec {
    float scale;
    int window;     // 0: none
    float softcap;  // 0: none
};

// Some consecutive query tokens of one sequence.
struct QueryBlock {
    int sequence;
    int first_token;  // in the batch
    int tokens;
    int position;  // of the first token
};

// The step as all layers see it.
struct Batch {
    int tokens;
    const int64_t* positions;
    const int64_t* slots;
    const int32_t* block_table;
    int64_t table_stride;
};

// What a query block has summed so far: for each of its rows the largest score (to the base 2, as all scores here), the
// sum of the weights, and the weighted values [rows, head_dim].
struct Sums {
    float* largest;
    float* total;
    float* values;

    static int64_t size(int rows, int head_dim) { return static_cast<int64_t>(rows) * (head_dim + 2); }
    Sums(float* memory, int rows) : largest(memory), total(memory + rows), values(memory + 2 * rows) {}

    void clear(int rows, int head_dim) const {
        std::fill_n(largest, rows, -INFINITY);
        std::fill_n(total, static_cast<int64_t>(rows) * (head_dim + 1), 0.0f);
    }

    // Adds the sums of a later span.
    void merge(const Sums& other, int rows, int head_dim) const {
        for (int r = 0; r < rows; ++r) {
            if (other.total[r] == 0.0f) continue;
            const float top = std::max(largest[r], other.largest[r]);
            const float mine = total[r] == 0.0f ? 0.0f : std::exp2(largest[r] - top),
                        theirs = std::exp2(other.largest[r] - top);
            largest[r] = top;
            total[r] = total[r] * mine + other.total[r] * theirs;
            float *to = values + r * head_dim, *from = other.values + r * head_dim;
            for (int d = 0; d < head_dim; ++d) to[d] = to[d] * mine + from[d] * theirs;
        }
    }
};

// A thread's own memory.
template <class T>
struct Scratch {
    Buffer<T> queries, tail;
    Buffer<float> span, all;
    alignas(64) float scores[kTileRows * kChunk];
    alignas(64) T weights[kTileRows * kChunk];

    void reserve(int rows, int head_dim) {
        queries.reserve(static_cast<int64_t>(rows) * head_dim);
        tail.reserve(static_cast<int64_t>(kBlock) * head_dim);
        span.reserve(Sums::size(rows, head_dim));
        all.reserve(Sums::size(rows, head_dim));
    }
};

template <class T>
class Attention {
  public:
    Attention(const Pages<T>& pages, const Batch& batch, const AttentionSpec& spec, int heads)
        : pages_(pages), batch_(batch), spec_(spec), group_(heads / pages.kv_heads) {}

    // Copies the queries of the block's tokens and of one KV head's group together: row = token * group + head.
    void gather(const QueryBlock& q, int kv_head, const T* queries, int64_t token_stride, T* to) const {
        const int width = group_ * pages_.head_dim;
        for (int t = 0; t < q.tokens; ++t) {
            std::memcpy(to + t * width, queries + (q.first_token + t) * token_stride + kv_head * width,
                        width * sizeof(T));
        }
    }

    // The sums over the keys [begin, end) that the rows may see; begin is a multiple of kSpan. Queries are in scratch.
    void sum_span(const QueryBlock& q, int kv_head, int begin, int end, Scratch<T>& scratch, const Sums& sums) const {
        const int rows = q.tokens * group_, keys = q.position + q.tokens;
        sums.clear(rows, pages_.head_dim);
        const int first = spec_.window ? std::max(0, q.position - spec_.window + 1) : 0;
        for (int chunk = begin + std::max(0, first - begin) / kChunk * kChunk; chunk < std::min(end, keys);
             chunk += kChunk) {
            const int blocks = (std::min({chunk + kChunk, end, keys}) - chunk + kBlock - 1) / kBlock;
            const T* key_blocks[kChunk / kBlock];
            const T* value_blocks[kChunk / kBlock];
            for (int b = 0; b < kChunk / kBlock; ++b) {
                const int key = chunk + std::min(b, blocks - 1) * kBlock;
                const int32_t page = batch_.block_table[q.sequence * batch_.table_stride + key / pages_.page_size];
                const int64_t at = pages_.block(page, kv_head, key % pages_.page_size);
                key_blocks[b] = pages_.keys + at;
                value_blocks[b] = pages_.values + at;
                if (key + kBlock > keys)
                    value_blocks[b] = without_stale(value_blocks[b], keys - key, scratch.tail.data());
            }
            const int tiles = (rows + kTileRows - 1) / kTileRows;
            for (int tile = 0, row = 0; tile < tiles; ++tile) {
                const int height = (rows - row + tiles - tile - 1) / (tiles - tile);
                const int lowest = q.position + row / group_, highest = q.position + (row + height - 1) / group_;
                const bool any = chunk <= highest && (!spec_.window || chunk + kChunk > lowest - spec_.window + 1);
                const bool all = chunk + kChunk - 1 <= lowest && (!spec_.window || chunk > highest - spec_.window);
                if (any) {
                    with_rows(height, [&](auto constant) {
                        constexpr int Rows = decltype(constant)::value;
                        if (all) {
                            score<Rows, false>(q, row, chunk, blocks, key_blocks, scratch, sums);
                        } else {
                            score<Rows, true>(q, row, chunk, blocks, key_blocks, scratch, sums);
                        }
                        add_values<Rows>(row, blocks, value_blocks, scratch, sums);
                    });
                }
                row += height;
            }
        }
    }

    // Divides the sums and writes the block's rows: out is [T, heads * D].
    void finish(const QueryBlock& q, int kv_head, const Sums& sums, T* out, int64_t token_stride) const {
        const int head_dim = pages_.head_dim;
        for (int row = 0; row < q.tokens * group_; ++row) {
            T* to = out + (q.first_token + row / group_) * token_stride + (kv_head * group_ + row % group_) * head_dim;
            const __m512 scale = _mm512_set1_ps(1.0f / sums.total[row]);
            const float* values = sums.values + row * head_dim;
            for (int d = 0; d < head_dim; d += kLanes) store(to + d, _mm512_mul_ps(load(values + d), scale));
        }
    }

  private:
    // The values of a block's first `live` keys, zeros after them: what another sequence left there may not be finite.
    const T* without_stale(const T* block, int live, T* copy) const {
        const int words = pages_.head_dim;  // a word holds one dimension of `pack` keys
        for (int key = 0; key < kBlock; key += pack<T>) {
            const int kept = std::clamp(live - key, 0, pack<T>);
            const __m512i mask = _mm512_set1_epi32(kept == 0 ? 0 : kept == pack<T> ? -1 : 0xffff);
            for (int d = 0; d < words; d += kLanes) {
                const int at = key * words + d * pack<T>;
                _mm512_storeu_si512(copy + at, _mm512_and_si512(mask, _mm512_loadu_si512(block + at)));
            }
        }
        return copy;
    }

    // The weights of a chunk's keys for some rows; `Masked`: not all rows see all keys.
    template <int Rows, bool Masked>
    void score(const QueryBlock& q, int row, int chunk, int blocks, const T* const* key_blocks, Scratch<T>& scratch,
               const Sums& all) const {
        const int head_dim = pages_.head_dim;
        __m512 best[Rows];
        for (auto& b : best) b = _mm512_set1_ps(-INFINITY);
        for (int first = 0; first < blocks; first += 4) {
            __m512 sums[Rows][4];
            for (auto& of_row : sums)
                for (auto& sum : of_row) sum = _mm512_setzero_ps();
            const T* const* four = key_blocks + first;
            multiply<T, Rows, 4>(
                sums, scratch.queries.data() + row * head_dim, head_dim, head_dim / pack<T>,
                [four](int step, int c) { return four[c] + step * (kBlock * pack<T>); }, [](int) {});
            for (int r = 0; r < Rows; ++r) {
                const int position = q.position + (row + r) / group_;
                for (int c = 0; c < 4; ++c) {
                    __m512 s = scaled(sums[r][c]);
                    if constexpr (Masked) s = hide(s, position, chunk + (first + c) * kBlock);
                    best[r] = _mm512_max_ps(best[r], s);
                    _mm512_store_ps(scratch.scores + r * kChunk + (first + c) * kBlock, s);
                }
            }
        }
        for (int r = 0; r < Rows; ++r) {
            const float largest = std::max(all.largest[row + r], _mm512_reduce_max_ps(best[r]));
            if (largest == -INFINITY) {  // the row sees nothing yet
                std::memset(scratch.weights + r * kChunk, 0, kChunk * sizeof(T));
                continue;
            }
            const __m512 top = _mm512_set1_ps(largest);
            __m512 total = _mm512_setzero_ps();
            for (int b = 0; b < blocks; ++b) {
                const __m512 weight =
                    exp2(_mm512_sub_ps(_mm512_load_ps(scratch.scores + r * kChunk + b * kBlock), top));
                total = _mm512_add_ps(total, weight);
                store(scratch.weights + r * kChunk + b * kBlock, weight);
            }
            if (largest != all.largest[row + r]) {
                const float shrink = std::exp2(all.largest[row + r] - largest);
                all.total[row + r] *= shrink;
                float* values = all.values + (row + r) * head_dim;
                for (int d = 0; d < head_dim; d += kLanes)
                    store(values + d, _mm512_mul_ps(load(values + d), _mm512_set1_ps(shrink)));
                all.largest[row + r] = largest;
            }
            all.total[row + r] += _mm512_reduce_add_ps(total);
        }
    }

    // Scores to the base 2, so that a weight is 2^score.
    __m512 scaled(__m512 product) const {
        if (spec_.softcap == 0.0f) return _mm512_mul_ps(product, _mm512_set1_ps(spec_.scale * kLog2E));
        const __m512 bounded = tanh(_mm512_mul_ps(product, _mm512_set1_ps(spec_.scale / spec_.softcap)));
        return _mm512_mul_ps(bounded, _mm512_set1_ps(spec_.softcap * kLog2E));
    }

    // The scores of 16 keys from `key` on, -inf where the token at `position` does not see them.
    __m512 hide(__m512 scores, int position, int key) const {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i keys = _mm512_add_epi32(lane, _mm512_set1_epi32(key));
        const int before = spec_.window ? position - spec_.window : -1;
        const __mmask16 seen = _mm512_cmple_epi32_mask(keys, _mm512_set1_epi32(position)) &
                               _mm512_cmpgt_epi32_mask(keys, _mm512_set1_epi32(before));
        return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, scores);
    }

    template <int Rows>
    void add_values(int row, int blocks, const T* const* value_blocks, const Scratch<T>& scratch,
                    const Sums& all) const {
        int column = 0;
        for (; column + 4 * kLanes <= pages_.head_dim; column += 4 * kLanes)
            add_columns<Rows, 4>(row, column, blocks, value_blocks, scratch, all);
        for (; column < pages_.head_dim; column += kLanes)
            add_columns<Rows, 1>(row, column, blocks, value_blocks, scratch, all);
    }

    template <int Rows, int Columns>
    void add_columns(int row, int column, int blocks, const T* const* value_blocks, const Scratch<T>& scratch,
                     const Sums& all) const {
        constexpr int steps = kBlock / pack<T>;
        const int head_dim = pages_.head_dim;
        float* values = all.values + row * head_dim + column;
        __m512 sums[Rows][Columns];
        for (int r = 0; r < Rows; ++r)
            for (int c = 0; c < Columns; ++c) sums[r][c] = load(values + r * head_dim + c * kLanes);
        for (int b = 0; b < blocks; ++b) {
            const T* block = value_blocks[b] + column * pack<T>;
            multiply<T, Rows, Columns>(
                sums, scratch.weights + b * kBlock, kChunk, steps,
                [=](int step, int c) { return block + (step * head_dim + c * kLanes) * pack<T>; }, [](int) {});
        }
        for (int r = 0; r < Rows; ++r)
            for (int c = 0; c < Columns; ++c) store(values + r * head_dim + c * kLanes, sums[r][c]);
    }

    const Pages<T> pages_;
    const Batch batch_;
    const AttentionSpec spec_;
    const int group_;
};

}  // namespace llmserve
