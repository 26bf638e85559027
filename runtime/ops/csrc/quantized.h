// Products with weights in a GGUF file's blocks.
#pragma once

#include "tiles.h"

namespace llmserve {

constexpr int kDirectRows = 12;  // 12 registers for the sums of a group, 12 for those of all groups

// A panel is 64 outputs: the tiles of 16 of them, one for each block of inputs, then those of the next 16.
template <class T>
void pack_blocks(const uint8_t* rows, T* panel, int64_t outputs, int64_t blocks) {
    static_assert(sizeof(T) == kLanes * T::kBytes);
    for (int64_t output = 0; output < 4 * kLanes; ++output) {
        for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t zero[T::kBytes] = {};
            panel[output / kLanes * blocks + b].set(output % kLanes,
                                                    output < outputs ? rows + (output * blocks + b) * T::kBytes : zero);
        }
    }
}

// Prefetches what follows a group of a tile by the bytes of 256 inputs. After `end` a thread goes on at `next`.
template <class T>
inline void fetch_ahead(const T& tile, int group, const T* end, const T* next) {
    constexpr int64_t bytes = sizeof(T) * T::kGroup / T::kInputs, ahead = sizeof(T) * 256 / T::kInputs;
    const char* at = reinterpret_cast<const char*>(&tile) + group * bytes + ahead;
    const int64_t beyond = at - reinterpret_cast<const char*>(end);
    if (beyond >= 0) at = reinterpret_cast<const char*>(next) + beyond;
    for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(at + line, _MM_HINT_T0);
}

// f(i, the weights of a group's inputs 2i and 2i + 1, rounded to bf16, an output in each 32-bit lane)
template <class T, class F>
void weights(const T& tile, int group, const decltype(tile.scales())& scales, F&& f) {
    static constexpr auto alternating = [] {
        std::array<uint16_t, 2 * kLanes> order{};
        for (int i = 0; i < 2 * kLanes; ++i) order[i] = i / 2 + i % 2 * kLanes;
        return order;
    }();
    const __m512i order = _mm512_loadu_si512(alternating.data()), odd = _mm512_set1_epi32(0xffff0000);
    tile.codes(group, [&](int i, __m512i codes) {
        const auto weight = [&](__m512i code) {
            const __m512 scaled = _mm512_mul_ps(_mm512_castsi512_ps(code), scales.scale[group]);
            return T::has_least ? _mm512_add_ps(scaled, scales.least[group]) : scaled;
        };
        const __m512i pairs = narrow(weight(_mm512_slli_epi32(codes, 16)), weight(_mm512_and_si512(codes, odd)));
        f(i, _mm512_permutexvar_epi16(order, pairs));
    });
}

template <class F>
void weights(const Tile<Format::q8_0>& tile, int, const Scales<1>& scales, F&& f) {  // needs no codes in bf16
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512 first = _mm512_permutexvar_ps(twice, scales.scale[0]);
    const __m512 rest = _mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), scales.scale[0]);
#pragma GCC unroll 16
    for (int i = 0; i < kSummed / 2; ++i)
        f(i, narrow(_mm512_mul_ps(tile.widened(i, 0), first), _mm512_mul_ps(tile.widened(i, kLanes / 2), rest)));
}

// The weights of a panel, rounded to bf16, as the panel of gemm.h that `to` is.
template <class T>
void unpack_blocks(const T* panel, bf16* to, int64_t blocks) {
    constexpr int kGroups = T::kInputs / T::kGroup;
    const T* end = panel + 4 * blocks;  // where the next panel is
    for (int c = 0; c < 4; ++c) {
        for (int64_t b = 0; b < blocks; ++b) {
            const T& tile = panel[c * blocks + b];
            const auto scales = tile.scales();
            for (int g = 0; g < kGroups; ++g) {
                fetch_ahead(tile, g, end, end);
                bf16* at = to + ((b * kGroups + g) * (T::kGroup / 2) * 4 + c) * 2 * kLanes;
                weights(tile, g, scales,
                        [&](int i, __m512i pairs) { _mm512_storeu_si512(at + i * 8 * kLanes, pairs); });
            }
        }
    }
}

// sums[r][s] = the sum of x[r] over the s-th kSummed inputs, for the least values.
inline void sum_inputs(const bf16* x, int64_t row_stride, int rows, int64_t count, float* sums) {
    for (int r = 0; r < rows; ++r) {
        for (int64_t s = 0; s < count; ++s) {
            const bf16* at = x + r * row_stride + s * kSummed;
            sums[r * count + s] = _mm512_reduce_add_ps(_mm512_add_ps(load(at), load(at + kLanes)));
        }
    }
}

// to[r][0 .. 15] (a row of `to` has 64 numbers) = x[r] times the 16 outputs of some tiles, with nothing rounded on the
// way: the products with the codes of a group are summed, then scaled. input_sums are those of sum_inputs. `next` is
// where the tiles lie that will be read after these.
template <class T, int Rows>
__attribute__((noinline)) void multiply_tiles(const bf16* x, int64_t row_stride, const float* input_sums,
                                              const T* tiles, int64_t blocks, const T* next, float* to) {
    constexpr int kGroups = T::kInputs / T::kGroup;
    __m512 totals[Rows];
    for (auto& total : totals) total = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        const auto scales = tiles[b].scales();
        for (int g = 0; g < kGroups; ++g) {
            fetch_ahead(tiles[b], g, tiles + blocks, next);
            const int64_t group = b * kGroups + g;
            const bf16* inputs = x + group * T::kGroup;
            __m512 sums[Rows];
            for (auto& sum : sums) sum = _mm512_setzero_ps();
            tiles[b].codes(g, [&](int i, __m512i codes) {
#pragma GCC unroll 12
                for (int r = 0; r < Rows; ++r)
                    sums[r] = multiply_add<bf16>(sums[r], codes, broadcast(inputs + r * row_stride + 2 * i));
            });
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r) {
                totals[r] = _mm512_fmadd_ps(sums[r], scales.scale[g], totals[r]);
                if constexpr (T::has_least) {
                    static_assert(T::kGroup == kSummed);
                    const __m512 input_sum = _mm512_set1_ps(input_sums[r * blocks * kGroups + group]);
                    totals[r] = _mm512_fmadd_ps(input_sum, scales.least[g], totals[r]);
                }
            }
        }
    }
    for (int r = 0; r < Rows; ++r) _mm512_store_ps(to + r * 4 * kLanes, totals[r]);
}

// Calls f with the constant that `n` is, in [1, Most].
template <int Most, class F>
inline void with_count(int n, F&& f) {
    if constexpr (Most > 1) {
        if (n < Most) return with_count<Most - 1>(n, f);
    }
    f(std::integral_constant<int, Most>{});
}

}  // namespace llmserve
