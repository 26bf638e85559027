// The C interface that native.py calls. Arrays are contiguous unless a stride (in numbers) says otherwise; the caller
// checks shapes. dtype 0 is float32, 1 bfloat16.
#include <pthread.h>
#include <sys/mman.h>


#include "decoder.h"
#include "sample.h"
#include "shared_group.h"

using namespace llmserve;

namespace {

Crew* crew = nullptr;

template <class F>
void with_type(int dtype, F&& f) {
    if (dtype == 0) {
        f(float{});
    } else {
        f(bf16{});
    }
}

// One phase over `rows` rows, in tasks large enough to be worth another thread.
template <class Row>
void for_rows(int64_t rows, int64_t numbers_a_row, Row&& row) {
    const int64_t a_task = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, numbers_a_row));
    const int tasks = static_cast<int>((rows + a_task - 1) / a_task);
    crew->run(tasks > 1 ? crew->size() : 1, 1, [&](Walk& walk) {
        walk.phase(tasks, [&](int task) {
            for (int64_t r = task * a_task; r < std::min(rows, (task + 1) * a_task); ++r) row(r);
        });
    });
}

struct Handle {
    Plan plan;
    AttentionMemory<float> wide;
    AttentionMemory<bf16> narrow;

    template <class T>
    AttentionMemory<T>& memory() {
        if constexpr (sizeof(T) == 4) {
            return wide;
        } else {
            return narrow;
        }
    }
};

}  // namespace

extern "C" {

void llmserve_set_threads(int threads) {
    if (!crew) {
        crew = new Crew;
        pthread_atfork(nullptr, nullptr, [] { crew = new Crew; });  // a forked process has none of its threads
    }
    crew->resize(threads);
}

// Asks for huge pages in memory that nothing has touched yet; the system may not give them.
void llmserve_huge_pages(void* memory, int64_t bytes) {
    const uintptr_t huge = 2 << 20, start = (reinterpret_cast<uintptr_t>(memory) + huge - 1) / huge * huge;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / huge * huge;
    if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
}

// ---- weights -------------------------------------------------------------------------------------------------------

void llmserve_pack(int dtype, const void* weight, void* packed, int64_t outputs, int64_t inputs) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        for_rows((outputs + kPanel - 1) / kPanel, kPanel * inputs, [&](int64_t panel) {
            pack_panel(static_cast<const T*>(weight), static_cast<T*>(packed), outputs, inputs, panel);
        });
    });
}

void llmserve_unpack(int dtype, const void* packed, void* weight, int64_t outputs, int64_t inputs) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        for_rows((outputs + kPanel - 1) / kPanel, kPanel * inputs, [&](int64_t panel) {
            unpack_panel(static_cast<const T*>(packed), static_cast<T*>(weight), outputs, inputs, panel);
        });
    });
}

// rows [outputs, blocks, bytes of a block], as a GGUF file has them, to panels.
void llmserve_pack_blocks(int64_t format, const uint8_t* rows, void* packed, int64_t outputs, int64_t inputs) {
    with_tile(static_cast<Format>(format), [&](auto tile) {
        using Tiles = decltype(tile);
        const int64_t blocks = inputs / Tiles::kInputs;
        for_rows((outputs + kPanel - 1) / kPanel, kPanel * inputs, [&](int64_t panel) {
            pack_blocks(rows + panel * kPanel * blocks * Tiles::kBytes,
                        static_cast<Tiles*>(packed) + panel * (kPanel / kLanes) * blocks, outputs - panel * kPanel,
                        blocks);
        });
    });
}

// rows [n, inputs] = the rows of the weight that ids [n] name.
void llmserve_gather_rows(int dtype, const Weight* weight, const int64_t* ids, void* rows, int64_t n) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        for_rows(n, weight->inputs, [&](int64_t r) {
            static thread_local Buffer<float> row;
            row.reserve(weight->inputs);
            weight->read_row<T>(ids[r], row.data());
            T* to = static_cast<T*>(rows) + r * weight->inputs;
            for (int64_t i = 0; i < weight->inputs; i += kLanes) {
                const __mmask16 lanes = first_lanes(weight->inputs - i);
                store(to + i, load(row.data() + i, lanes), lanes);
            }
        });
    });
}

// y [rows, outputs] = x W^T + bias; y is float32 if `wide`, else of x's type.
void llmserve_linear(int dtype, const void* x, int64_t x_stride, int64_t rows, const Weight* weight, const void* bias,
                     void* y, int wide) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        const int64_t outputs = weight->outputs;
        crew->run(crew->size(), 1, [&](Walk& walk) {
            multiply_rows<T>(walk, static_cast<const T*>(x), x_stride, static_cast<int>(rows), *weight, {},
                             [&](int row, int column, const __m512(&sums)[4]) {
                                 const T* b = static_cast<const T*>(bias);
                                 if (wide) {
                                     write_outputs(static_cast<float*>(y) + row * outputs, column, outputs, sums, b);
                                 } else {
                                     write_outputs(static_cast<T*>(y) + row * outputs, column, outputs, sums, b);
                                 }
                             });
        });
    });
}

// ---- rows
// ------------------------------------------------------------------------------------------------------------

// to = rms_norm(x + residual), total = x + residual; without a residual only the norm of x.
void llmserve_rms_norm(int dtype, const void* x, const void* residual, const float* weight, void* to, void* total,
                       int64_t rows, int64_t size, float eps) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        for_rows(rows, size, [&](int64_t r) {
            const T* from = static_cast<const T*>(x) + r * size;
            if (residual) {
                T* sum = static_cast<T*>(total) + r * size;
                for (int64_t i = 0; i < size; i += kLanes) {
                    const __mmask16 lanes = first_lanes(size - i);
                    store(sum + i,
                          _mm512_add_ps(load(from + i, lanes),
                                        load(static_cast<const T*>(residual) + r * size + i, lanes)),
                          lanes);
                }
                from = sum;
            }
            rms_norm(from, static_cast<T*>(to) + r * size, weight, size, eps);
        });
    });
}

void llmserve_activate_and_multiply(int dtype, const void* x, void* y, int64_t rows, int64_t size, int activation) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        for_rows(rows, size, [&](int64_t r) {
            activate_and_multiply(static_cast<const T*>(x) + r * 2 * size, static_cast<T*>(y) + r * size, size,
                                  static_cast<Activation>(activation));
        });
    });
}

// Rotates x [tokens, heads, head_dim] in place.
void llmserve_rotary(int dtype, void* x, int64_t tokens, int64_t heads, int64_t head_dim, const int64_t* positions,
                     const float* cos_sin, int64_t rotary_dim) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        for_rows(tokens, heads * head_dim, [&](int64_t t) {
            for (int64_t h = 0; h < heads; ++h) {
                rotate(static_cast<T*>(x) + (t * heads + h) * head_dim, cos_sin + positions[t] * rotary_dim,
                       rotary_dim / 2);
            }
        });
    });
}

void llmserve_argmax(const float* logits, int64_t* tokens, float* best, int64_t rows, int64_t size) {
    for_rows(rows, size, [&](int64_t r) {
        tokens[r] = argmax(logits + r * size, size);
        best[r] = logits[r * size + tokens[r]];
    });
}

// to [rows, size]: those rows of scores, masked.
void llmserve_mask(const float* const* from, const uint8_t* const* masks, float* to, int64_t rows, int64_t size) {
    for_rows(rows, size, [&](int64_t r) { mask(from[r], masks[r], to + r * size, size); });
}

// tokens [n]: one drawn from each of the rows of scores [size], none of which may be all -inf or hold a NaN.
void llmserve_draw(const float* const* rows, const float* best, const DrawParams* params, int64_t* tokens, int64_t n,
                   int64_t size) {
    for_rows(n, size, [&](int64_t r) {
        thread_local Sampler sampler;
        tokens[r] = sampler.draw(rows[r], size, best[r], params[r]);
    });
}

// ---- attention
// ---------------------------------------------------------------------------------------------------------

Handle* llmserve_plan_new() { return new Handle; }
void llmserve_plan_delete(Handle* handle) { delete handle; }

// What the batch points to must stay until the next plan.
void llmserve_plan_make(Handle* handle, const Batch* batch, int sequences, const int32_t* query_start,
                        const int32_t* seq_lens, int kv_heads, int group) {
    handle->plan.make(*batch, sequences, query_start, seq_lens, kv_heads, group, crew->size());
}

struct AttentionCall {
    void *keys, *values;
    const void *q, *k, *v;
    void* out;
    int64_t q_stride, k_stride, v_stride;
    int heads, kv_heads, head_dim, page_size;
    AttentionSpec spec;
};

void llmserve_attention(int dtype, Handle* handle, const AttentionCall* call) {
    with_type(dtype, [&](auto number) {
        using T = decltype(number);
        const Plan& plan = handle->plan;
        const int d = call->head_dim;
        const Pages<T> pages{static_cast<T*>(call->keys), static_cast<T*>(call->values), call->kv_heads, d,
                             call->page_size};
        const Attention<T> attention(pages, plan.batch, call->spec, call->heads);
        AttentionMemory<T>& memory = handle->memory<T>();
        plan.reserve(memory, crew->size(), d);
        crew->run(crew->size(), 2, [&](Walk& walk) {
            walk.phase((plan.batch.tokens + 7) / 8, [&](int task) {
                for (int t = task * 8; t < std::min(plan.batch.tokens, task * 8 + 8); ++t) {
                    for (int h = 0; h < call->kv_heads; ++h) {
                        pages.write(plan.batch.slots[t], h, static_cast<const T*>(call->k) + t * call->k_stride + h * d,
                                    static_cast<const T*>(call->v) + t * call->v_stride + h * d);
                    }
                }
            });
            plan.attend(walk, attention, d, static_cast<const T*>(call->q), call->q_stride, static_cast<T*>(call->out),
                        static_cast<int64_t>(call->heads) * d, memory);
        });
    });
}

// ---- ranks that share memory: see shared_group.h ---------------------------------------------------------------------

int64_t llmserve_shared_bytes(int ranks) { return ranks <= SharedGroup::kMostRanks ? SharedGroup::bytes(ranks) : 0; }

SharedGroup* llmserve_shared_new(void* memory, int file, int rank, int ranks, double timeout_s, int spins) {
    return new SharedGroup(memory, file, rank, ranks, timeout_s, spins);
}

int llmserve_shared_all_reduce(int dtype, SharedGroup* group, void* data, int64_t count) {
    int failure = 0;
    with_type(dtype, [&](auto number) { failure = group->all_reduce(static_cast<decltype(number)*>(data), count); });
    return failure;
}

int llmserve_shared_all_gather(SharedGroup* group, const char* data, char* to, int64_t bytes) {
    return group->all_gather(data, to, bytes);
}

int llmserve_shared_broadcast(SharedGroup* group, char* data, int64_t bytes) { return group->broadcast(data, bytes); }

int llmserve_shared_send(SharedGroup* group, int to, int tag, const char* data, int64_t bytes) {
    return group->send(to, tag, data, bytes);
}

int llmserve_shared_receive(SharedGroup* group, int source, int tag, char* data, int64_t bytes) {
    return group->receive(source, tag, data, bytes);
}

// ---- the decoder
// -------------------------------------------------------------------------------------------------------

AnyDecoder* llmserve_decoder_new(int dtype, const ModelDesc* model, const LayerDesc* layers, int count) {
    AnyDecoder* decoder = nullptr;
    with_type(dtype, [&](auto number) {
        decoder = new Decoder<decltype(number)>(*model, std::vector<LayerDesc>(layers, layers + count));
    });
    return decoder;
}

void llmserve_decoder_delete(AnyDecoder* decoder) { delete decoder; }

int llmserve_decoder_step(AnyDecoder* decoder, const Handle* handle, const int64_t* input_ids, const void* before,
                          void* after) {
    return decoder->step(*crew, handle->plan, input_ids, before, after);
}

}  // extern "C"
