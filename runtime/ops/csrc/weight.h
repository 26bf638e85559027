// A linear layer's weight in any format, and the products of rows with its panels.
#pragma once

#include "buffer.h"
#include "gemm.h"
#include "quantized.h"

namespace llmserve {

// Plain data, mirrored in native.py. A swap of the weights changes it in place, between two steps.
struct Weight {
    const void* data;
    int64_t outputs;
    int64_t inputs;
    Format format;

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }

    template <class T>
    int64_t panel_bytes() const {
        if (format == Format::plain) return kPanel * inputs * static_cast<int64_t>(sizeof(T));
        return with_tile(format, [&](auto tile) {
            return kPanel / kLanes * (inputs / kGroup) * static_cast<int64_t>(sizeof(tile));
        });
    }

    template <class T>
    const char* panel(int64_t index) const {
        return static_cast<const char*>(data) + index * panel_bytes<T>();
    }

    // to [inputs] = the weights of one output.
    template <class T>
    void read_row(int64_t output, float* to) const {
        if (format == Format::plain) {
            const Packed<T> packed{static_cast<const T*>(data), outputs, inputs};
            for (int64_t i = 0; i < inputs; ++i) to[i] = to_float(packed.at(output, i));
            return;
        }
        with_tile(format, [&](auto tile) {
            const int64_t blocks = inputs / kGroup;
            const auto* tiles =
                reinterpret_cast<const decltype(tile)*>(panel<T>(output / kPanel)) + output % kPanel / kLanes * blocks;
            for (int64_t i = 0; i < inputs; ++i) to[i] = tiles[i / kGroup].value(output % kLanes, i % kGroup);
        });
    }
};

// Rows of a task. To unpack a panel is worth more of them: as many as fit into half of the second-level cache.
inline int block_rows(const Weight& weight) {
    if (weight.format == Format::plain) return kBlockRows;
    return std::max<int>(kBlockRows, (512 << 10) / (2 * static_cast<int>(weight.inputs)));
}

// What a thread needs to multiply rows of x [rows, inputs] with panels. A few rows read the blocks as they are, without
// rounding; for more it is faster to unpack a panel first.
template <class T>
class Product {
  public:
    Product(const T* x, int64_t row_stride, int rows, const Weight& weight)
        : x_(x), row_stride_(row_stride), weight_(weight) {
        if constexpr (sizeof(T) == 2) {
            direct_ = weight.format != Format::plain && rows <= kDirectRows;
            if (!direct_ || weight.format != Format::q4_1) return;
            const int64_t blocks = weight.inputs / kGroup;
            memory().sums.reserve(rows * blocks);
            sum_blocks(x, row_stride, rows, blocks, memory().sums.data());
        }
    }

    // finish(row, sums) for each row of [first, first + rows) and its 64 sums. `next` is the panel that probably comes
    // next, or null.
    template <class Finish>
    void multiply(int first, int rows, int64_t panel, const Ahead& next, Finish&& finish) const {
        const T* x = x_ + first * row_stride_;
        const char* data = weight_.panel<T>(panel);
        if constexpr (sizeof(T) == 2) {
            if (direct_) return multiply_blocks(x, rows, data, next, finish);
            if (weight_.format != Format::plain) {
                memory().panel.reserve(kPanel * weight_.inputs);
                with_tile(weight_.format, [&](auto tile) {
                    unpack_blocks(reinterpret_cast<const decltype(tile)*>(data), memory().panel.data(),
                                  weight_.inputs / kGroup);
                });
                data = reinterpret_cast<const char*>(memory().panel.data());
            }
        }
        multiply_panel<T>(x, row_stride_, rows, reinterpret_cast<const T*>(data), weight_.inputs, next, finish);
    }

  private:
    struct Memory {
        Buffer<float> sums;
        Buffer<bf16> panel;
    };

    static Memory& memory() {
        static thread_local Memory memory;
        return memory;
    }

    template <class Finish>
    void multiply_blocks(const bf16* x, int rows, const char* data, const Ahead& next, Finish&& finish) const {
        alignas(64) float products[kDirectRows * kPanel];
        const int64_t blocks = weight_.inputs / kGroup;
        with_tile(weight_.format, [&](auto tile) {
            using Tiles = decltype(tile);
            const Tiles* tiles = reinterpret_cast<const Tiles*>(data);
            with_count<kDirectRows>(rows, [&](auto count) {
                for (int c = 0; c < 4; ++c) {
                    const Tiles* of_group = tiles + c * blocks;
                    const Tiles* following =
                        c < 3 || !next.data ? of_group + blocks : reinterpret_cast<const Tiles*>(next.data);
                    multiply_tiles<Tiles, count>(x, row_stride_, memory().sums.data(), of_group, blocks, following,
                                                 products + c * kLanes);
                }
            });
        });
        for (int r = 0; r < rows; ++r) {
            __m512 sums[4];
            for (int c = 0; c < 4; ++c) sums[c] = _mm512_load_ps(products + r * kPanel + c * kLanes);
            finish(r, sums);
        }
    }

    const T* x_;
    const int64_t row_stride_;
    const Weight& weight_;
    bool direct_ = false;
};

}  // namespace llmserve
