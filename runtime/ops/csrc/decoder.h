// A whole step of a decoder, or of one rank's part of it: embedding, layers, final norm. The residual stream is kept in
// float; what the matrix products read is in the model's type.
#pragma once

#include <vector>

#include "attention.h"
#include "crew.h"
#include "experts.h"
#include "linear.h"
#include "plan.h"
#include "rows.h"
#include "shared_group.h"

namespace llmserve {

// ---- what the caller describes: plain data, mirrored in native.py --------------------------------------------------

struct LinearDesc {
    const Weight* weight;
    const void* bias;  // in the model's type, or null
};

struct LayerDesc {
    LinearDesc qkv, output, gate_up, down;  // gate_up and down are of all experts where there is a router
    LinearDesc router;                      // its weight may be null
    const float *attention_input_norm, *attention_output_norm, *mlp_input_norm, *mlp_output_norm;  // each may be null
    const float *query_norm, *key_norm;                                                            // null, or both
    const float* cos_sin;  // [positions, rotary_dim], or null: no positions
    void* keys;
    void* values;
    int64_t rotary_dim;
    int64_t window;
};

struct ModelDesc {
    const Weight* embedding;     // the head's weight too, or null
    const void* embedding_rows;  // else the table [vocabulary, hidden]
    const float* final_norm;     // null on all pipeline stages but the last
    SharedGroup* ranks;          // that hold slices of the layers, of which this one is one; or null
    int64_t first_token, token_count;  // the slice of the vocabulary that the embedding has
    int64_t hidden, heads, kv_heads, head_dim, page_size;
    int64_t norm_heads;  // query_norm and key_norm are over a head, not over all heads together
    int64_t activation;
    int64_t experts, chosen;  // how many there are, and to how many of them a token goes
    int64_t norm_experts;     // the weights of these add up to 1
    int64_t expert_size;      // outputs of an expert's gate
    float eps, scale, softcap, embedding_multiplier, residual_multiplier;
};

class AnyDecoder {
  public:
    virtual ~AnyDecoder() = default;
    virtual int step(Crew& crew, const Plan& plan, const int64_t* input_ids, const void* before, void* after) = 0;
};

template <class T>
class Decoder : public AnyDecoder {
  public:
    Decoder(const ModelDesc& model, std::vector<LayerDesc> layers) : model_(model), layers_(std::move(layers)) {
        for (const LayerDesc& layer : layers_) {
            if (!layer.router.weight) intermediate_ = layer.down.weight->inputs;
        }
        if (model.experts) sparse_ = std::vector<Sparse>(layers_.size());
        qkv_width_ = (model.heads + 2 * model.kv_heads) * model.head_dim;
    }

    // input_ids [T], or the hidden states [T, hidden] `before` this stage, to those `after` it, which the last one norms.
    // Returns 0, or what SharedGroup says when a rank is lost; there is nothing after it then.
    int step(Crew& crew, const Plan& plan, const int64_t* input_ids, const void* before, void* after) override {
        const int tokens = plan.batch.tokens;
        reserve(tokens);
        plan.reserve(memory_, crew.size(), static_cast<int>(model_.head_dim));
        failure_ = 0;
        const int phases = 3 + (model_.experts ? 18 : 13) * static_cast<int>(layers_.size());
        crew.run(crew.size(), phases, [&](Walk& walk) {
            if (before) {
                rows_phase(walk, tokens, [&](int64_t t) { copy_row(row(before, t), stream(t)); });
            } else {
                rows_phase(walk, tokens, [&](int64_t t) { embed(input_ids[t] - model_.first_token, stream(t)); });
                add_up(walk, stream_, tokens);
            }
            for (size_t i = 0; i < layers_.size(); ++i) layer(walk, plan, i);
            rows_phase(walk, tokens, [&](int64_t t) { leave(stream(t), row(after, t)); });
        });
        return failure_;
    }

  private:
    // Where a layer's experts get their rows. Each layer keeps it to the end of the step: a thread that comes late to a
    // phase must see as many tasks as the others did.
    struct Sparse {
        Routes routes;
        GroupShares<T> gates, downs;
    };

    T* row(void* rows, int64_t t) const { return static_cast<T*>(rows) + t * model_.hidden; }
    const T* row(const void* rows, int64_t t) const { return static_cast<const T*>(rows) + t * model_.hidden; }

    // Nothing where another rank has the token.
    void embed(int64_t token, float* to) const {
        if (token < 0 || token >= model_.token_count) {
            std::fill_n(to, model_.hidden, 0.0f);
            return;
        }
        if (model_.embedding) {
            model_.embedding->template read_row<T>(token, to);
        } else {
            copy_row(row(model_.embedding_rows, token), to);
        }
        for (int64_t i = 0; i < model_.hidden; ++i) to[i] *= model_.embedding_multiplier;
    }

    void leave(const float* stream, T* to) const {
        if (model_.final_norm) {
            rms_norm(stream, to, model_.final_norm, model_.hidden, model_.eps);
        } else {
            copy_row(stream, to);
        }
    }

    // rows = their sum over the ranks.
    void add_up(Walk& walk, Buffer<float>& rows, int tokens) {
        if (!model_.ranks) return;
        walk.phase(1, [&](int) {
            if (!failure_) failure_ = model_.ranks->all_reduce(rows.data(), tokens * model_.hidden);
        });
    }

    template <class From, class To>
    void copy_row(const From* from, To* to) const {
        for (int64_t i = 0; i < model_.hidden; i += kLanes) {
            const __mmask16 lanes = first_lanes(model_.hidden - i);
            store(to + i, load(from + i, lanes), lanes);
        }
    }

    void layer(Walk& walk, const Plan& plan, size_t index) {
        const LayerDesc& layer = layers_[index];
        const Batch& batch = plan.batch;
        const int tokens = batch.tokens;
        const Following next_layer = index + 1 < layers_.size() ? all_of(layers_[index + 1].qkv) : Following{};
        const Pages<T> pages{static_cast<T*>(layer.keys), static_cast<T*>(layer.values),
                             static_cast<int>(model_.kv_heads), static_cast<int>(model_.head_dim),
                             static_cast<int>(model_.page_size)};
        const Attention<T> attention(pages, batch, {model_.scale, static_cast<int>(layer.window), model_.softcap},
                                     static_cast<int>(model_.heads));

        rows_phase(walk, tokens, [&](int64_t t) { enter(t, layer.attention_input_norm); });
        const T* qkv_bias = static_cast<const T*>(layer.qkv.bias);
        multiply_rows<T>(walk, normed_.data(), model_.hidden, tokens, *layer.qkv.weight, all_of(layer.output),
                         [&](int row, int column, const __m512(&sums)[4]) {
                             write_outputs(qkv_.data() + row * qkv_width_, column, qkv_width_, sums, qkv_bias);
                         });
        rows_phase(walk, tokens, [&](int64_t t) { place(t, layer, batch, pages); });
        plan.attend(walk, attention, static_cast<int>(model_.head_dim), qkv_.data(), qkv_width_, attended_.data(),
                    model_.heads * model_.head_dim, memory_);
        project(walk, attended_.data(), tokens, layer.output, layer.attention_output_norm,
                layer.router.weight ? all_of(layer.router) : Following{layer.gate_up.weight, gated_panels()});
        rows_phase(walk, tokens, [&](int64_t t) { enter(t, layer.mlp_input_norm); });
        if (layer.router.weight) return ask_experts(walk, tokens, layer, sparse_[index], next_layer);
        gate(walk, tokens, layer.gate_up, all_of(layer.down));
        project(walk, gated_.data(), tokens, layer.down, layer.mlp_output_norm, next_layer);
    }

    static Following all_of(const LinearDesc& linear) {
        return {linear.weight, static_cast<int>(linear.weight->panels())};
    }

    // Tasks of gate_up: pairs of panels where these hold whole ones, as the gate and up halves then do.
    int gated_panels() const {
        return static_cast<int>(intermediate_ % kPanel ? (2 * intermediate_ + kPanel - 1) / kPanel
                                                       : intermediate_ / kPanel);
    }

    // What the next product reads of token t: its stream, normed or not.
    void enter(int64_t t, const float* norm) {
        T* to = normed_.data() + t * model_.hidden;
        if (norm) {
            rms_norm(stream(t), to, norm, model_.hidden, model_.eps);
        } else {
            copy_row(stream(t), to);
        }
    }

    // Norms and rotates token t's queries and keys and writes its keys and values into their page.
    void place(int64_t t, const LayerDesc& layer, const Batch& batch, const Pages<T>& pages) {
        const int64_t d = model_.head_dim, rotated = model_.heads + model_.kv_heads;
        T* row = qkv_.data() + t * qkv_width_;
        T* keys = row + model_.heads * d;
        if (layer.query_norm && !model_.norm_heads) {
            rms_norm(row, row, layer.query_norm, model_.heads * d, model_.eps);
            rms_norm(keys, keys, layer.key_norm, model_.kv_heads * d, model_.eps);
        }
        for (int64_t h = 0; h < rotated; ++h) {
            T* head = row + h * d;
            if (layer.query_norm && model_.norm_heads) {
                rms_norm(head, head, h < model_.heads ? layer.query_norm : layer.key_norm, d, model_.eps);
            }
            if (layer.cos_sin)
                rotate(head, layer.cos_sin + batch.positions[t] * layer.rotary_dim, layer.rotary_dim / 2);
        }
        for (int64_t h = 0; h < model_.kv_heads; ++h) {
            pages.write(batch.slots[t], static_cast<int>(h), keys + h * d, keys + (model_.kv_heads + h) * d);
        }
    }

    // stream += residual_multiplier * norm(x W^T + bias), where the product is the sum of the ranks'.
    void project(Walk& walk, const T* x, int tokens, const LinearDesc& linear, const float* norm,
                 const Following& following) {
        const bool direct = !norm && !model_.ranks;
        const float multiplier = direct ? model_.residual_multiplier : 1.0f;
        multiply_rows<T>(walk, x, linear.weight->inputs, tokens, *linear.weight, following,
                         [&](int row, int column, const __m512(&sums)[4]) {
                             float* to = (direct ? stream_.data() : delta_.data()) + row * model_.hidden;
                             accumulate(to, column, sums, static_cast<const T*>(linear.bias), multiplier, direct);
                         });
        if (!direct) settle(walk, tokens, norm);
    }

    // stream += residual_multiplier * norm(delta), where delta is the sum of the ranks'.
    void settle(Walk& walk, int tokens, const float* norm) {
        add_up(walk, delta_, tokens);
        rows_phase(walk, tokens, [&](int64_t t) {
            float* delta = delta_.data() + t * model_.hidden;
            if (norm) rms_norm(delta, delta, norm, model_.hidden, model_.eps);
            for (int64_t i = 0; i < model_.hidden; ++i) stream(t)[i] += delta[i] * model_.residual_multiplier;
        });
    }

    // gated = activation(gate) * up, where the first half of the outputs is the gate.
    void gate(Walk& walk, int tokens, const LinearDesc& gate_up, const Following& following) {
        const T* bias = static_cast<const T*>(gate_up.bias);
        const Activation activation = static_cast<Activation>(model_.activation);
        if (intermediate_ % kPanel == 0) {  // a task has a panel of the gate and the same one of up
            multiply_gated<T>(walk, normed_.data(), model_.hidden, tokens, *gate_up.weight, bias, activation,
                              gated_.data(), following);
            return;
        }
        multiply_rows<T>(walk, normed_.data(), model_.hidden, tokens, *gate_up.weight, following,
                         [&](int row, int column, const __m512(&sums)[4]) {
                             write_outputs(gate_up_.data() + row * 2 * intermediate_, column, 2 * intermediate_, sums,
                                           bias);
                         });
        rows_phase(walk, tokens, [&](int64_t t) {
            activate_and_multiply(gate_up_.data() + t * 2 * intermediate_, gated_.data() + t * intermediate_,
                                  intermediate_, activation);
        });
    }

    // stream += residual_multiplier * norm(what the tokens' experts answer, times their weights).
    void ask_experts(Walk& walk, int tokens, const LayerDesc& layer, Sparse& sparse, const Following& following) {
        const int experts = static_cast<int>(model_.experts);
        multiply_rows<T>(walk, normed_.data(), model_.hidden, tokens, *layer.router.weight, {},
                         [&](int row, int column, const __m512(&sums)[4]) {
                             write_outputs<float, T>(scores_.data() + row * experts, column, experts, sums, nullptr);
                         });
        rows_phase(walk, tokens, [&](int64_t t) {
            sparse.routes.choose(t, scores_.data() + t * experts, experts, model_.norm_experts);
        });
        walk.phase(1, [&](int) {
            sparse.routes.group();
            const auto& groups = sparse.routes.groups();
            const int64_t size = model_.expert_size;
            const int64_t gates = size % kPanel ? layer.gate_up.weight->panels() / experts : size / kPanel;
            sparse.gates.plan(groups, *layer.gate_up.weight, experts, static_cast<int>(gates), walk.threads);
            const int64_t downs = layer.down.weight->panels() / experts;
            sparse.downs.plan(groups, *layer.down.weight, experts, static_cast<int>(downs), walk.threads);
        });
        rows_phase(walk, tokens, [&](int64_t t) {
            for (int i = 0; i < sparse.routes.chosen(); ++i) {
                copy_row(normed_.data() + t * model_.hidden, sent_.data() + sparse.routes.places(t)[i] * model_.hidden);
            }
        });
        gate_experts(walk, tokens, *layer.gate_up.weight, sparse);
        const auto after = [&] { return following.template first_panel<T>(walk); };
        sparse.downs.phase(walk, gated_.data(), after, [&](const auto& task, const auto& product, const Ahead& next) {
            product.multiply(task.first, task.height, task.first_panel + task.panel, next,
                             [&](int row, const __m512(&sums)[4]) {
                                 float* to = answers_.data() + (task.group->first + task.first + row) * model_.hidden;
                                 write_outputs<float, T>(to, task.panel * kPanel, model_.hidden, sums, nullptr);
                             });
        });
        const bool direct = !layer.mlp_output_norm && !model_.ranks;
        rows_phase(walk, tokens, [&](int64_t t) { weigh(t, sparse.routes, direct); });
        if (!direct) settle(walk, tokens, layer.mlp_output_norm);
    }

    // gated = activation(gate) * up at each place, by the expert whose place it is.
    void gate_experts(Walk& walk, int tokens, const Weight& gate_up, const Sparse& sparse) {
        const Activation activation = static_cast<Activation>(model_.activation);
        const int64_t size = model_.expert_size;
        const auto after = [&] { return sparse.downs.ahead_of(walk.begin(sparse.downs.tasks())); };
        const bool whole = size % kPanel == 0;
        sparse.gates.phase(walk, sent_.data(), after, [&](const auto& task, const auto& product, const Ahead& next) {
            const int64_t panel = task.first_panel + task.panel, first = task.group->first;
            if (whole) {
                multiply_gated_panel<T>(product, gate_up, task.first, task.height, panel, panel + sparse.gates.panels(),
                                        next, nullptr, nullptr, activation,
                                        gated_.data() + first * size + task.panel * kPanel, size);
                return;
            }
            product.multiply(task.first, task.height, panel, next, [&](int row, const __m512(&sums)[4]) {
                T* to = gate_up_.data() + (first + task.first + row) * 2 * size;
                write_outputs<T, T>(to, task.panel * kPanel, 2 * size, sums, nullptr);
            });
        });
        if (whole) return;
        rows_phase(walk, tokens * sparse.routes.chosen(), [&](int64_t place) {
            activate_and_multiply(gate_up_.data() + place * 2 * size, gated_.data() + place * size, size, activation);
        });
    }

    // The answers that token t has, times their weights: added to its stream if `direct`, else its delta.
    void weigh(int64_t t, const Routes& routes, bool direct) {
        const int* places = routes.places(t);
        const float* weights = routes.weights(t);
        float* to = direct ? stream(t) : delta_.data() + t * model_.hidden;
        const __m512 multiplier = _mm512_set1_ps(model_.residual_multiplier);
        for (int64_t i = 0; i < model_.hidden; i += kLanes) {
            const __mmask16 lanes = first_lanes(model_.hidden - i);
            __m512 sum = _mm512_setzero_ps();
            for (int e = 0; e < routes.chosen(); ++e) {
                const float* answer = answers_.data() + places[e] * model_.hidden;
                sum = _mm512_fmadd_ps(load(answer + i, lanes), _mm512_set1_ps(weights[e]), sum);
            }
            store(to + i, direct ? _mm512_fmadd_ps(sum, multiplier, load(to + i, lanes)) : sum, lanes);
        }
    }

    void accumulate(float* row, int column, const __m512 (&sums)[4], const T* bias, float multiplier, bool add) const {
        for (int c = 0; c < 4; ++c, column += kLanes) {
            const __mmask16 lanes = first_lanes(model_.hidden - column);
            __m512 sum = sums[c];
            if (bias) sum = _mm512_add_ps(sum, load(bias + column, lanes));
            sum = _mm512_mul_ps(sum, _mm512_set1_ps(multiplier));
            store(row + column, add ? _mm512_add_ps(load(row + column, lanes), sum) : sum, lanes);
        }
    }

    // A phase over tokens. Tasks are large where there are many: tokens that are neighbours write into the same lines
    // of a page.
    template <class Row>
    void rows_phase(Walk& walk, int tokens, Row&& row) {
        const int a_task = std::clamp(tokens / 8, 8, 64);
        walk.phase((tokens + a_task - 1) / a_task, [&](int task) {
            for (int t = task * a_task; t < std::min(tokens, (task + 1) * a_task); ++t) row(t);
        });
    }

    float* stream(int64_t t) { return stream_.data() + t * model_.hidden; }

    void reserve(int64_t tokens) {
        stream_.reserve(tokens * model_.hidden);
        delta_.reserve(tokens * model_.hidden);
        normed_.reserve(tokens * model_.hidden);
        qkv_.reserve(tokens * qkv_width_);
        attended_.reserve(tokens * model_.heads * model_.head_dim);
        gated_.reserve(tokens * intermediate_);
        if (intermediate_ % kPanel) gate_up_.reserve(tokens * 2 * intermediate_);
        if (!model_.experts) return;
        const int64_t places = tokens * model_.chosen, size = model_.expert_size;
        for (auto& sparse : sparse_)
            sparse.routes.reserve(static_cast<int>(tokens), static_cast<int>(model_.experts),
                                  static_cast<int>(model_.chosen));
        scores_.reserve(tokens * model_.experts);
        sent_.reserve(places * model_.hidden);
        answers_.reserve(places * model_.hidden);
        gated_.reserve(places * size);
        if (size % kPanel) gate_up_.reserve(places * 2 * size);
    }

    const ModelDesc model_;
    const std::vector<LayerDesc> layers_;
    int64_t intermediate_ = 0, qkv_width_;
    Buffer<float> stream_, delta_, scores_, answers_;
    Buffer<T> normed_, qkv_, attended_, gated_, gate_up_, sent_;
    std::vector<Sparse> sparse_;
    AttentionMemory<T> memory_;
    int failure_ = 0;
};

}  // namespace llmserve
