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
    const Weight* rest;  // null, or the outputs from some panel on, which have another format

    int64_t panels() const { return (outputs + kPanel - 1) / kPanel; }

    // The part that holds panel `index`, which becomes the number of the panel in that part.
    const Weight& part_of(int64_t& index) const {
        const int64_t own = rest ? panels() - rest->panels() : panels();
        if (index < own || !rest) return *this;
        index -= own;
        return rest->part_of(index);
    }

    template <class T>
    Ahead panel(int64_t index) const {
        const Weight& part = part_of(index);
        const int64_t bytes = part.panel_bytes<T>();
        return {static_cast<const char*>(part.data) + index * bytes, bytes};
    }

    template <class Tile>
    int64_t blocks() const {  // of one output
        return inputs / Tile::kInputs;
    }

    // to [inputs] = the weights of one output.
    template <class T>
    void read_row(int64_t output, float* to) const {
        int64_t index = output / kPanel;
        const Weight& part = part_of(index);
        const void* panel = part.panel<T>(index).data;
        output %= kPanel;
        if (part.format == Format::plain) {
            const Packed<T> packed{static_cast<const T*>(panel), kPanel, inputs};
            for (int64_t i = 0; i < inputs; ++i) to[i] = to_float(packed.at(output, i));
            return;
        }
        with_tile(part.format, [&](auto tile) {
            using Tiles = decltype(tile);
            const Tiles* tiles = static_cast<const Tiles*>(panel) + output / kLanes * blocks<Tiles>();
            for (int64_t i = 0; i < inputs; ++i)
                to[i] = tiles[i / Tiles::kInputs].value(output % kLanes, i % Tiles::kInputs);
        });
    }

  private:
    template <class T>
    int64_t panel_bytes() const {
        if (format == Format::plain) return kPanel * inputs * static_cast<int64_t>(sizeof(T));
        return with_tile(format, [&](auto tile) {
            return kPanel / kLanes * blocks<decltype(tile)>() * static_cast<int64_t>(sizeof(tile));
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
        : x_(x), row_stride_(row_stride), weight_(weight), few_(rows <= kDirectRows) {
        if constexpr (sizeof(T) == 2) {
            bool has_least = false;
            for (const Weight* part = &weight; part && few_; part = part->rest) {
                if (part->format != Format::plain)
                    has_least |= with_tile(part->format, [](auto tile) { return decltype(tile)::has_least; });
            }
            if (!has_least) return;
            const int64_t sums = weight.inputs / kSummed;
            memory().sums.reserve(rows * sums);
            sum_inputs(x, row_stride, rows, sums, memory().sums.data());
        }
    }

    // finish(row, sums) for each row of [first, first + rows) and its 64 sums. `next` is the panel that probably comes
    // next, or null.
    template <class Finish>
    void multiply(int first, int rows, int64_t panel, const Ahead& next, Finish&& finish) const {
        const T* x = x_ + first * row_stride_;
        const Weight& part = weight_.part_of(panel);
        const char* data = part.panel<T>(panel).data;
        if constexpr (sizeof(T) == 2) {
            if (part.format != Format::plain) {
                if (few_) {
                    alignas(64) float products[kDirectRows * kPanel];
                    multiply_blocks(x, rows, part.format, data, next, products);
                    for (int r = 0; r < rows; ++r) {
                        __m512 sums[4];
                        for (int c = 0; c < 4; ++c) sums[c] = _mm512_load_ps(products + r * kPanel + c * kLanes);
                        finish(r, sums);
                    }
                    return;
                }
                data = unpack(part.format, data);
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

    // products[r][0 .. 63] = x[r] times the panel at `data`.
    __attribute__((noinline)) void multiply_blocks(const bf16* x, int rows, Format format, const char* data,
                                                   const Ahead& next, float* products) const {
        with_tile(format, [&](auto tile) {
            using Tiles = decltype(tile);
            const int64_t blocks = weight_.blocks<Tiles>();
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
    }

    // The panel at `data` as a panel of gemm.h, valid until the thread's next call.
    __attribute__((noinline)) const char* unpack(Format format, const char* data) const {
        memory().panel.reserve(kPanel * weight_.inputs);
        bf16* panel = memory().panel.data();
        with_tile(format, [&](auto tile) {
            using Tiles = decltype(tile);
            unpack_blocks(reinterpret_cast<const Tiles*>(data), panel, weight_.blocks<Tiles>());
        });
        return reinterpret_cast<const char*>(panel);
    }

    const T* x_;
    const int64_t row_stride_;
    const Weight& weight_;
    const bool few_;
};

}  // namespace llmserve
