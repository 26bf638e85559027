// y = x W^T for weights packed into panels of 64 outputs. One micro-kernel serves the linear layers and both products
// of attention: up to 6 rows by 64 columns of sums in registers.
#pragma once

#include <algorithm>

#include "simd.h"

namespace llmserve {

constexpr int kPanel = 64;      // outputs in a panel
constexpr int kTileRows = 6;    // 6 x 4 registers of sums, 4 of weights, 1 of x: 29 of the 32
constexpr int kBlockRows = 96;  // rows of a task: x [96, 1536] in bf16 stays in the second-level cache

// sums[r][c] += sum over steps of x[r] times weights(step, c), c counting groups of 16 columns. hint(step) prefetches.
template <class T, int Rows, int Columns, class Weights, class Hint>
inline __attribute__((always_inline)) void multiply(__m512 (&sums)[Rows][Columns], const T* x, int64_t row_stride,
                                                    int steps, Weights&& weights, Hint&& hint) {
    for (int step = 0; step < steps; ++step) {
        __m512i w[Columns];
#pragma GCC unroll 4
        for (int c = 0; c < Columns; ++c) w[c] = _mm512_loadu_si512(weights(step, c));
        hint(step);
#pragma GCC unroll 6
        for (int r = 0; r < Rows; ++r) {
            const __m512i word = broadcast(x + r * row_stride + step * pack<T>);
#pragma GCC unroll 4
            for (int c = 0; c < Columns; ++c) sums[r][c] = multiply_add<T>(sums[r][c], w[c], word);
        }
    }
}

// Calls f with the constant that `rows` is, in [1, 6].
template <class F>
inline void with_rows(int rows, F&& f) {
    switch (rows) {
        case 1:
            return f(std::integral_constant<int, 1>{});
        case 2:
            return f(std::integral_constant<int, 2>{});
        case 3:
            return f(std::integral_constant<int, 3>{});
        case 4:
            return f(std::integral_constant<int, 4>{});
        case 5:
            return f(std::integral_constant<int, 5>{});
        default:
            return f(std::integral_constant<int, 6>{});
    }
}

// Into how many blocks the rows of x are split: of `block_rows`, or of fewer rows where there are few panels to share.
inline int row_blocks(int rows, int panels, int threads, int block_rows) {
    const int enough = (4 * threads + panels - 1) / panels;
    const int most = std::max(1, rows / (2 * kTileRows));
    return std::max((rows + block_rows - 1) / block_rows, std::min(enough, most));
}

// Memory that will probably be read soon; null: unknown.
struct Ahead {
    const char* data = nullptr;
    int64_t bytes = 0;
};

// A weight [N, K] as [N / 64 rounded up][K / pack][64][pack], missing outputs zero. K must be a multiple of pack.
template <class T>
struct Packed {
    const T* data;
    int64_t outputs;
    int64_t inputs;

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }
    int64_t panel_size() const { return kPanel * inputs; }
    const T* panel(int64_t index) const { return data + index * panel_size(); }
    T at(int64_t output, int64_t input) const {
        return panel(output / kPanel)[input / pack<T> * kPanel * pack<T> + output % kPanel * pack<T> + input % pack<T>];
    }
};

template <class T>
void pack_panel(const T* weight, T* packed, int64_t outputs, int64_t inputs, int64_t panel) {
    T* to = packed + panel * kPanel * inputs;
    for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t output = panel * kPanel + n;
        for (int64_t k = 0; k < inputs; k += pack<T>) {
            for (int i = 0; i < pack<T>; ++i)
                to[k * kPanel + n * pack<T> + i] = output < outputs ? weight[output * inputs + k + i] : T{};
        }
    }
}

template <class T>
void unpack_panel(const T* packed, T* weight, int64_t outputs, int64_t inputs, int64_t panel) {
    const T* from = packed + panel * kPanel * inputs;
    for (int64_t n = 0; n < kPanel && panel * kPanel + n < outputs; ++n) {
        for (int64_t k = 0; k < inputs; k += pack<T>) {
            for (int i = 0; i < pack<T>; ++i)
                weight[(panel * kPanel + n) * inputs + k + i] = from[k * kPanel + n * pack<T> + i];
        }
    }
}

// x [rows, K] times one panel; finish(row, sums) gets each row's 64 sums. Meanwhile `next` comes into the cache: the
// panel that this thread will probably multiply next. One line is asked for at a time, evenly over the steps of all
// tiles: the core drops prefetches that come in bursts. A single tile leaves no time between them, and the hardware's
// own prefetcher does better there.
template <class T, class Finish>
void multiply_panel(const T* x, int64_t row_stride, int rows, const T* panel, int64_t inputs, const Ahead& next,
                    Finish&& finish) {
    const int steps = static_cast<int>(inputs / pack<T>);
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    const int interval = std::max<int>(1, static_cast<int64_t>(steps) * tiles * 64 / std::max<int64_t>(64, next.bytes));
    const char* line = next.data;
    const char* end = tiles > 1 ? line + next.bytes : line;
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
        const int height = (rows - row + tiles - tile - 1) / (tiles - tile);
        with_rows(height, [&](auto constant) {
            constexpr int Rows = constant;
            __m512 sums[Rows][4];
            for (auto& of_row : sums)
                for (auto& sum : of_row) sum = _mm512_setzero_ps();
            auto weights = [panel](int step, int c) {
                return panel + step * (kPanel * pack<T>)+c * (kLanes * pack<T>);
            };
            const T* start = x + row * row_stride;
            if (line < end) {
                int turn = 0;
                multiply<T, Rows, 4>(sums, start, row_stride, steps, weights, [&](int) {
                    if (++turn < interval) return;
                    _mm_prefetch(line, _MM_HINT_T0);
                    line += 64;
                    turn = 0;
                });
            } else {
                multiply<T, Rows, 4>(sums, start, row_stride, steps, weights, [](int) {});
            }
            for (int r = 0; r < Rows; ++r) finish(row + r, sums[r]);
        });
        row += height;
    }
}

}  // namespace llmserve
