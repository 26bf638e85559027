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
        if (task + 1 != walk_.end(tasks)) return ahead(weight_, (task + 1) % panels);
        return following_.weight ? ahead(*following_.weight, walk_.begin(following_.panels)) : Ahead{};
    }

  private:
    static Ahead ahead(const Weight& weight, int panel) { return {weight.panel<T>(panel), weight.panel_bytes<T>()}; }

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

// to = activation(gate) * up, where gate and up are the two halves of the layer's outputs and each fills whole panels.
template <class T>
void multiply_gated(Walk& walk, const T* x, int64_t row_stride, int rows, const Weight& weight, const T* bias,
                    Activation activation, T* to, const Following& following) {
    const int64_t half = weight.outputs / 2;
    const Shares<T> shares(walk, weight, following, rows, static_cast<int>(half / kPanel));
    const Product<T> product(x, row_stride, rows, weight);
    walk.phase(shares.tasks, [&](int task) {
        static thread_local Buffer<float> memory;
        const int first = shares.first_row(task), height = shares.height(task), panel = shares.panel(task);
        memory.reserve(height * kPanel);
        float* gates = memory.data();
        const Ahead up{weight.panel<T>(panel + shares.panels), weight.panel_bytes<T>()};
        product.multiply(first, height, panel, up, [&](int row, const __m512(&sums)[4]) {
            write_outputs<float, T>(gates + row * kPanel, 0, kPanel, sums, nullptr);
        });
        product.multiply(first, height, panel + shares.panels, shares.next(task), [&](int row, const __m512(&sums)[4]) {
            for (int c = 0; c < 4; ++c) {
                const int column = panel * kPanel + c * kLanes;
                __m512 gate = _mm512_load_ps(gates + row * kPanel + c * kLanes), value = sums[c];
                if (bias)
                    gate = _mm512_add_ps(gate, load(bias + column)),
                    value = _mm512_add_ps(value, load(bias + half + column));
                store(to + (first + row) * half + column, _mm512_mul_ps(activate(gate, activation), value));
            }
        });
    });
}

}  // namespace llmserve
