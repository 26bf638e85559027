// Weights in the blocks of a GGUF file (Q4_0, Q4_1 and Q8_0 of llama.cpp's ggml-common.h): 32 inputs of one output
// share a scale and, in Q4_1, a least value. They stay as small as in the file; only their order is the kernels'.
#pragma once

#include <array>
#include <bit>

#include "simd.h"

namespace llmserve {

enum class Format : int64_t { plain = 0, q4_0 = 2, q4_1 = 3, q8_0 = 8 };  // by GGML's numbers; plain: a panel of gemm.h

constexpr int kGroup = 32;  // inputs of a block
constexpr int kPairs = kGroup / 2;
constexpr int kDirectRows = 12;  // 12 registers for the sums of a block, 12 for those of all blocks

inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline __m512 load_halves(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// A number of each of 16 outputs, twice in a row: of the first 8, and of the rest.
struct Doubled {
    __m512 low, high;

    explicit Doubled(__m512 v)
        : low(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), v)),
          high(_mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15),
                                     v)) {}
};

// A tile holds one block of each of 16 outputs. Its codes are whole numbers, exact in bf16: a weight is scale * code,
// plus the least value where the format has one. codes(f) calls f(i, those of the inputs 2i and 2i + 1, an output in
// each 32-bit lane), and weights(f) likewise with the weights, rounded to bf16.
template <Format format>
struct Tile {
    static constexpr bool has_least = format == Format::q4_1;
    static constexpr int kZero = has_least ? 0 : 8;
    static constexpr int64_t block_bytes = has_least ? 20 : 18;

    uint16_t scale[kLanes];
    uint16_t least_[has_least ? kLanes : 0];
    uint16_t nibbles[4]
                    [2 * kLanes];  // the lowest nibble of [z][2 * output + i] is input 8z + i, the next 8z + i + 2, ...

    template <class F>
    void codes(F&& f) const {
        // the lookup ignores what lies above the fifth bit of an index, and the table repeats: the nibbles need no
        // masks
        static constexpr auto table = [] {
            std::array<uint16_t, 32> bits{};
            for (int i = 0; i < 32; ++i) bits[i] = std::bit_cast<uint32_t>(static_cast<float>(i % 16 - kZero)) >> 16;
            return bits;
        }();
        const __m512i values = _mm512_loadu_si512(table.data());
#pragma GCC unroll 4
        for (int z = 0; z < 4; ++z) {
            const __m512i words = _mm512_loadu_si512(nibbles[z]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) f(4 * z + j, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * j), values));
        }
    }

    template <class F>
    void weights(F&& f) const {
        const __m512 values =
            _mm512_sub_ps(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_ps(kZero));
        const Doubled scales(load_halves(scale)), leasts(least());
        for (int z = 0; z < 4; ++z) {
            const auto words = [&](int half) {
                return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles[z]) + half));
            };
            const __m512i low = words(0), high = words(1);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                f(4 * z + j, narrow(_mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(low, 4 * j), values),
                                                    scales.low, leasts.low),
                                    _mm512_fmadd_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(high, 4 * j), values),
                                                    scales.high, leasts.high)));
            }
        }
    }

    __m512 least() const {
        if constexpr (has_least) return load_halves(least_);
        return _mm512_setzero_ps();
    }

    void set(int lane, const uint8_t* block) {
        std::memcpy(scale + lane, block, 2);
        if constexpr (has_least) std::memcpy(least_ + lane, block + 2, 2);
        const uint8_t* bytes = block + block_bytes - kGroup / 2;  // inputs 0 to 15 in the low halves, then 16 to 31
        for (int word = 0; word < 8; ++word) {
            uint16_t packed = 0;
            for (int j = 0; j < 4; ++j) {
                const int input = word / 2 * 8 + word % 2 + 2 * j;
                packed |= (input < 16 ? bytes[input] & 15 : bytes[input - 16] >> 4) << (4 * j);
            }
            nibbles[word / 2][2 * lane + word % 2] = packed;
        }
    }

    float value(int lane, int input) const {
        const int code = (nibbles[input / 8][2 * lane + input % 2] >> (input % 8 / 2 * 4) & 15) - kZero;
        const float scaled = half_to_float(scale[lane]) * static_cast<float>(code);
        if constexpr (has_least) return scaled + half_to_float(least_[lane]);
        return scaled;
    }
};

template <>
struct Tile<Format::q8_0> {
    static constexpr bool has_least = false;
    static constexpr int64_t block_bytes = 34;

    uint16_t scale[kLanes];
    int8_t bytes[kPairs][kLanes][2];

    template <class F>
    void codes(F&& f) const {
#pragma GCC unroll 16
        for (int i = 0; i < kPairs; ++i) f(i, narrow(widened(i, 0), widened(i, kLanes / 2)));
    }

    template <class F>
    void weights(F&& f) const {
        const Doubled scales(load_halves(scale));
#pragma GCC unroll 16
        for (int i = 0; i < kPairs; ++i)
            f(i, narrow(_mm512_mul_ps(widened(i, 0), scales.low), _mm512_mul_ps(widened(i, kLanes / 2), scales.high)));
    }

    __m512 widened(int pair, int lane) const {
        return _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[pair][lane]))));
    }

    void set(int lane, const uint8_t* block) {
        std::memcpy(scale + lane, block, 2);
        for (int i = 0; i < kPairs; ++i) std::memcpy(bytes[i][lane], block + 2 + 2 * i, 2);
    }

    float value(int lane, int input) const {
        return half_to_float(scale[lane]) * static_cast<float>(bytes[input / 2][lane][input % 2]);
    }
};

// Calls f with the tile type of a format that is not plain.
template <class F>
inline auto with_tile(Format format, F&& f) {
    switch (format) {
        case Format::q4_0:
            return f(Tile<Format::q4_0>{});
        case Format::q4_1:
            return f(Tile<Format::q4_1>{});
        default:
            return f(Tile<Format::q8_0>{});
    }
}

// A panel is 64 outputs: the tiles of 16 of them, one for each block of inputs, then those of the next 16.
template <class T>
void pack_blocks(const uint8_t* rows, T* panel, int64_t outputs, int64_t blocks) {
    for (int64_t output = 0; output < 4 * kLanes; ++output) {
        for (int64_t b = 0; b < blocks; ++b) {
            const uint8_t zero[T::block_bytes] = {};
            panel[output / kLanes * blocks + b].set(
                output % kLanes, output < outputs ? rows + (output * blocks + b) * T::block_bytes : zero);
        }
    }
}

// The weights of a panel, rounded to bf16, as the panel of gemm.h that `to` is.
template <class T>
void unpack_blocks(const T* panel, bf16* to, int64_t blocks) {
    for (int c = 0; c < 4; ++c) {
        for (int64_t b = 0; b < blocks; ++b) {
            const T& tile = panel[c * blocks + b];
            for (size_t line = 0; line < sizeof(T); line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(&tile + 8) + line, _MM_HINT_T0);
            bf16* at = to + (b * kPairs * 4 + c) * 2 * kLanes;
            tile.weights([&](int i, __m512i pairs) { _mm512_storeu_si512(at + i * 8 * kLanes, pairs); });
        }
    }
}

// sums[r][b] = the sum of x[r] over block b, for the least values.
inline void sum_blocks(const bf16* x, int64_t row_stride, int rows, int64_t blocks, float* sums) {
    for (int r = 0; r < rows; ++r) {
        for (int64_t b = 0; b < blocks; ++b) {
            const bf16* at = x + r * row_stride + b * kGroup;
            sums[r * blocks + b] = _mm512_reduce_add_ps(_mm512_add_ps(load(at), load(at + kLanes)));
        }
    }
}

// to[r][0 .. 15] (a row of `to` has 64 numbers) = x[r] times the 16 outputs of some tiles, with nothing rounded on the
// way: the products with the codes of a block are summed, then scaled. `next` is where the tiles lie that will be read
// after these.
template <class T, int Rows>
__attribute__((noinline)) void multiply_tiles(const bf16* x, int64_t row_stride, const float* block_sums,
                                              const T* tiles, int64_t blocks, const T* next, float* to) {
    constexpr int64_t ahead = 8;
    __m512 totals[Rows];
    for (auto& total : totals) total = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        const char* coming =
            reinterpret_cast<const char*>(b + ahead < blocks ? tiles + b + ahead : next + (b + ahead - blocks));
        for (size_t line = 0; line < sizeof(T); line += 64) _mm_prefetch(coming + line, _MM_HINT_T0);
        __m512 sums[Rows];
        for (auto& sum : sums) sum = _mm512_setzero_ps();
        tiles[b].codes([&](int i, __m512i codes) {
#pragma GCC unroll 12
            for (int r = 0; r < Rows; ++r)
                sums[r] = multiply_add<bf16>(sums[r], codes, broadcast(x + r * row_stride + b * kGroup + 2 * i));
        });
        const __m512 scale = load_halves(tiles[b].scale);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
            totals[r] = _mm512_fmadd_ps(sums[r], scale, totals[r]);
            if constexpr (T::has_least)
                totals[r] = _mm512_fmadd_ps(_mm512_set1_ps(block_sums[r * blocks + b]), tiles[b].least(), totals[r]);
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
