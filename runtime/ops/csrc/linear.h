// A linear layer shared among the threads of a walk: one phase, one task for a panel of outputs and a block of rows.
#pragma once

#include "crew.h"
#include "gemm.h"
#include "rows.h"

namespace llmserve {

// The panels of a layer times the rows of x. finish(row, column, sums) gets 64 consecutive outputs of a row: sums[4] of 16.
// `following` is the layer that comes next: its first panels are fetched while the last ones of this are multiplied.
template <class T, class Finish>
void multiply_rows(Walk& walk, int threads, const T* x, int64_t row_stride, int rows, const Packed<T>& weight,
                   const Packed<T>* following, Finish&& finish) {
    const int panels = static_cast<int>(weight.panels());
    const int blocks = row_blocks(rows, panels, threads), tasks = panels * blocks;
    walk.phase(tasks, [&](int task) {
        const int block = task / panels, panel = task % panels;
        const int first = static_cast<int>(static_cast<int64_t>(rows) * block / blocks);
        const int last = static_cast<int>(static_cast<int64_t>(rows) * (block + 1) / blocks);
        const T* next = nullptr;
        if (task + threads < tasks) {
            next = weight.panel((task + threads) % panels);
        } else if (following) {
            next = following->data + (task + threads - tasks) * following->panel_size();
        }
        multiply_panel<T>(x + first * row_stride, row_stride, last - first, weight.panel(panel), weight.inputs, next,
                          [&](int row, const __m512(&sums)[4]) { finish(first + row, panel * kPanel, sums); });
    });
}

// to[column ...] = sums + bias, as far as the row goes.
template <class Out, class T>
void write_outputs(Out* to, int column, int64_t width, const __m512 (&sums)[4], const T* bias) {
    for (int c = 0; c < 4; ++c, column += kLanes) {
        const __mmask16 lanes = first_lanes(std::max<int64_t>(0, width - column));
        store(to + column, bias ? _mm512_add_ps(sums[c], load(bias + column, lanes)) : sums[c], lanes);
    }
}

// to = activation(gate) * up, where gate and up are the two halves of the layer's outputs and each fills whole panels.
template <class T>
void multiply_gated(Walk& walk, int threads, const T* x, int64_t row_stride, int rows, const Packed<T>& weight, const T* bias,
                    Activation activation, T* to, const Packed<T>* following) {
    const int half = static_cast<int>(weight.outputs / 2), panels = half / kPanel;
    const int blocks = row_blocks(rows, panels, threads), tasks = panels * blocks;
    walk.phase(tasks, [&](int task) {
        alignas(64) float gates[kBlockRows * kPanel];
        const int block = task / panels, panel = task % panels;
        const int first = static_cast<int>(static_cast<int64_t>(rows) * block / blocks);
        const int height = static_cast<int>(static_cast<int64_t>(rows) * (block + 1) / blocks) - first;
        const T* up = weight.panel(panel + panels);
        const T* next = nullptr;
        if (task + threads < tasks) {
            next = weight.panel((task + threads) % panels);
        } else if (following) {
            next = following->data + (task + threads - tasks) * following->panel_size();
        }
        multiply_panel<T>(x + first * row_stride, row_stride, height, weight.panel(panel), weight.inputs, up,
                          [&](int row, const __m512(&sums)[4]) { write_outputs<float, T>(gates + row * kPanel, 0, kPanel, sums, nullptr); });
        multiply_panel<T>(x + first * row_stride, row_stride, height, up, weight.inputs, next, [&](int row, const __m512(&sums)[4]) {
            for (int c = 0; c < 4; ++c) {
                const int column = panel * kPanel + c * kLanes;
                __m512 gate = _mm512_load_ps(gates + row * kPanel + c * kLanes), value = sums[c];
                if (bias) gate = _mm512_add_ps(gate, load(bias + column)), value = _mm512_add_ps(value, load(bias + half + column));
                store(to + (first + row) * half + column, _mm512_mul_ps(activate(gate, activation), value));
            }
        });
    });
}

}  // namespace llmserve
