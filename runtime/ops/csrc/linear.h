// A linear layer shared among the threads of a walk: one phase, one task for a panel of outputs and a block of rows.
#pragma once

#include "crew.h"
#include "rows.h"
#include "weight.h"

namespace llmserve {

// The layer that comes next, and how many of its panels will be shared among the threads.
struct Following {
    const Weight* weight = nullptr;
    int panels = 0;

    // The first panel of the calling thread.
    template <class T>
    Ahead first_panel(const Walk& walk) const {
        return weight ? weight->panel<T>(walk.begin(panels)) : Ahead{};
    }
};

// How a product is shared: a task is one panel (of each half, if gated) and a block of rows.
template <class T>
class Shares {
  public:
    const int panels, blocks, tasks;

    Shares(const Walk& walk, const Weight& weight, const Following& following, int rows, int panels)
        : panels(panels),
          blocks(row_blocks(rows, panels, walk.threads, block_rows(weight))),
          tasks(panels * blocks),
          walk_(walk),
          weight_(weight),
          following_(following),
          rows_(rows) {}

    int panel(int task) const { return task % panels; }
    int first_row(int task) const { return static_cast<int>(static_cast<int64_t>(rows_) * (task / panels) / blocks); }
    int height(int task) const { return first_row(task + panels) - first_row(task); }

    // What the thread that has `task` will probably read after it.
    Ahead next(int task) const {
        if (task + 1 != walk_.end(tasks)) return weight_.panel<T>((task + 1) % panels);
        return following_.first_panel<T>(walk_);
    }

  private:
    const Walk& walk_;
    const Weight& weight_;
    const Following following_;
    const int rows_;
};

// The panels of a layer times the rows of x. finish(row, column, sums) gets 64 consecutive outputs of a row: sums[4]
// of 16. The first panels of `following` are fetched while the last ones of this layer are multiplied.
template <class T, class Finish>
void multiply_rows(Walk& walk, const T* x, int64_t row_stride, int rows, const Weight& weight,
                   const Following& following, Finish&& finish) {
    const Shares<T> shares(walk, weight, following, rows, static_cast<int>(weight.panels()));
    const Product<T> product(x, row_stride, rows, weight);
    walk.phase(shares.tasks, [&](int task) {
        const int first = shares.first_row(task), panel = shares.panel(task);
        product.multiply(first, shares.height(task), panel, shares.next(task),
                         [&](int row, const __m512(&sums)[4]) { finish(first + row, panel * kPanel, sums); });
    });
}

// to[column ...] = sums + bias, as far as the row goes.
template <class Out, class T>
void write_outputs(Out* to, int column, int64_t width, const __m512 (&sums)[4], const T* bias) {
    for (int c = 0; c < 4; ++c, column += kLanes) {
        const __mmask16 lanes = first_lanes(width - column);
        store(to + column, bias ? _mm512_add_ps(sums[c], load(bias + column, lanes)) : sums[c], lanes);
    }
}

// A panel of activation(gate) * up: to[row] + 0 .. 63 for each row of [first, first + height). The panels of the gate
// and of up have the numbers `gate` and `up`; the biases are null, or those of the panels.
template <class T>
void multiply_gated_panel(const Product<T>& product, const Weight& weight, int first, int height, int64_t gate,
                          int64_t up, const Ahead& next, const T* gate_bias, const T* up_bias, Activation activation,
                          T* to, int64_t width) {
    static thread_local Buffer<float> memory;
    memory.reserve(height * kPanel);
    float* gates = memory.data();
    product.multiply(first, height, gate, weight.panel<T>(up), [&](int row, const __m512(&sums)[4]) {
        write_outputs<float, T>(gates + row * kPanel, 0, kPanel, sums, gate_bias);
    });
    product.multiply(first, height, up, next, [&](int row, const __m512(&sums)[4]) {
        for (int c = 0; c < 4; ++c) {
            const __m512 value = up_bias ? _mm512_add_ps(sums[c], load(up_bias + c * kLanes)) : sums[c];
            const __m512 factor = activate(_mm512_load_ps(gates + row * kPanel + c * kLanes), activation);
            store(to + (first + row) * width + c * kLanes, _mm512_mul_ps(factor, value));
        }
    });
}

// to = activation(gate) * up, where gate and up are the two halves of the layer's outputs and each fills whole panels.
template <class T>
void multiply_gated(Walk& walk, const T* x, int64_t row_stride, int rows, const Weight& weight, const T* bias,
                    Activation activation, T* to, const Following& following) {
    const int64_t half = weight.outputs / 2;
    const Shares<T> shares(walk, weight, following, rows, static_cast<int>(half / kPanel));
    const Product<T> product(x, row_stride, rows, weight);
    walk.phase(shares.tasks, [&](int task) {
        const int panel = shares.panel(task), column = panel * kPanel;
        multiply_gated_panel<T>(product, weight, shares.first_row(task), shares.height(task), panel,
                                panel + shares.panels, shares.next(task), bias ? bias + column : nullptr,
                                bias ? bias + half + column : nullptr, activation, to + column, half);
    });
}

}  // namespace llmserve
