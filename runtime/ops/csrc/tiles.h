// The blocks of a GGUF file's weights (llama.cpp's ggml-common.h) as the kernels read them: as small as in the file,
// only their order is another. A tile holds one block of each of 16 outputs.
#pragma once

#include <array>
#include <bit>

#include "simd.h"

namespace llmserve {

// By GGML's numbers; plain: a panel of gemm.h.
enum class Format : int64_t { plain = 0, q4_0 = 2, q4_1 = 3, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14 };

constexpr int kSummed = 32;  // inputs that share a least value, in each format that has them

inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline __m512 load_halves(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// What the codes of 16 outputs are worth, for each of the groups of inputs that share it.
template <int Groups>
struct Scales {
    __m512 scale[Groups], least[Groups];
};

// Some bits of the codes of 16 outputs. A run has two words of each output, [2 * output] for its even inputs and
// [2 * output + 1] for its odd ones, with the bits of the first input lowest.
template <int Bits, int Inputs>
struct Plane {
    static constexpr int kPairs = 16 / Bits;  // of inputs, in a run
    uint16_t words[Inputs / 2 / kPairs][2 * kLanes];

    // bits_of(input) for all inputs of an output
    template <class F>
    void set(int lane, F&& bits_of) {
        for (int run = 0; run < Inputs / 2 / kPairs; ++run) {
            for (int odd = 0; odd < 2; ++odd) {
                uint16_t word = 0;
                for (int i = 0; i < kPairs; ++i) word |= bits_of(2 * (run * kPairs + i) + odd) << (Bits * i);
                words[run][2 * lane + odd] = word;
            }
        }
    }

    int get(int lane, int input) const {
        const int pair = input / 2;
        return words[pair / kPairs][2 * lane + input % 2] >> (Bits * (pair % kPairs)) & ((1 << Bits) - 1);
    }

    __m512i run(int index) const { return _mm512_loadu_si512(words[index]); }
};

// Moves the bits of the i-th pair of a run to bit `at` and up. Bits of other pairs are left above and below.
template <int Bits>
inline __m512i shifted(__m512i run, int i, int at = 0) {
    const int right = Bits * i - at;
    return right < 0 ? _mm512_slli_epi16(run, -right) : _mm512_srli_epi16(run, right);
}

// The low nibble of each word from `nibbles`, the rest from `above`.
inline __m512i join(__m512i nibbles, __m512i above) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), nibbles, above, 0xca);
}

// The bf16 numbers that the codes 0, 1, ... stand for: first, first + 1, ... They repeat after `period`, so that a
// lookup ignores the bits above a shorter code.
template <int Count>
constexpr std::array<uint16_t, Count> code_values(int first, int period = Count) {
    std::array<uint16_t, Count> bits{};
    for (int i = 0; i < Count; ++i) bits[i] = std::bit_cast<uint32_t>(static_cast<float>(i % period + first)) >> 16;
    return bits;
}

// A weight is scale * code, plus the least value where the format has one. Of each tile:
// kInputs, the inputs of a block; kGroup, those that share a scale; kBytes, what a block takes in the file.
// codes(group, f) calls f(i, the codes of the group's inputs 2i and 2i + 1 in bf16, an output in each 32-bit lane).
// set(lane, block) takes a block from the file; value(lane, input) is one weight.
template <Format format>
struct Tile {  // q4_0, q4_1
    static constexpr bool has_least = format == Format::q4_1;
    static constexpr int kInputs = 32, kGroup = 32, kZero = has_least ? 0 : 8;
    static constexpr int64_t kBytes = has_least ? 20 : 18;

    uint16_t scale[kLanes];
    uint16_t least[has_least ? kLanes : 0];
    Plane<4, kInputs> nibbles;

    Scales<1> scales() const {
        if constexpr (has_least) return {{load_halves(scale)}, {load_halves(least)}};
        return {{load_halves(scale)}, {_mm512_setzero_ps()}};
    }

    template <class F>
    void codes(int, F&& f) const {
        static constexpr auto table = code_values<32>(-kZero, 16);
        const __m512i values = _mm512_loadu_si512(table.data());
#pragma GCC unroll 4
        for (int z = 0; z < 4; ++z) {
            const __m512i run = nibbles.run(z);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) f(4 * z + i, _mm512_permutexvar_epi16(shifted<4>(run, i), values));
        }
    }

    void set(int lane, const uint8_t* block) {
        std::memcpy(scale + lane, block, 2);
        if constexpr (has_least) std::memcpy(least + lane, block + 2, 2);
        const uint8_t* bytes = block + kBytes - 16;  // inputs 0 to 15 in the low halves, then 16 to 31
        nibbles.set(lane, [&](int input) { return input < 16 ? bytes[input] & 15 : bytes[input - 16] >> 4; });
    }

    float value(int lane, int input) const {
        const float scaled = half_to_float(scale[lane]) * static_cast<float>(nibbles.get(lane, input) - kZero);
        if constexpr (has_least) return scaled + half_to_float(least[lane]);
        return scaled;
    }
};

template <>
struct Tile<Format::q8_0> {
    static constexpr bool has_least = false;
    static constexpr int kInputs = 32, kGroup = 32;
    static constexpr int64_t kBytes = 34;

    uint16_t scale[kLanes];
    int8_t bytes[kInputs / 2][kLanes][2];

    Scales<1> scales() const { return {{load_halves(scale)}, {_mm512_setzero_ps()}}; }

    template <class F>
    void codes(int, F&& f) const {
#pragma GCC unroll 16
        for (int i = 0; i < kInputs / 2; ++i) f(i, narrow(widened(i, 0), widened(i, kLanes / 2)));
    }

    __m512 widened(int pair, int lane) const {
        return _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes[pair][lane]))));
    }

    void set(int lane, const uint8_t* block) {
        std::memcpy(scale + lane, block, 2);
        for (int i = 0; i < kInputs / 2; ++i) std::memcpy(bytes[i][lane], block + 2 + 2 * i, 2);
    }

    float value(int lane, int input) const {
        return half_to_float(scale[lane]) * static_cast<float>(bytes[input / 2][lane][input % 2]);
    }
};

// Q4_K and Q5_K: eight groups, each with a scale and a least value of six bits, which have a scale each themselves.
template <bool Fifth>
struct GroupedTile {
    static constexpr bool has_least = true;
    static constexpr int kInputs = 256, kGroup = 32;
    static constexpr int64_t kBytes = Fifth ? 176 : 144;

    uint16_t scale[kLanes];
    uint16_t least[kLanes];  // negative
    uint8_t sixes[3][4][kLanes];  // bytes of the block, packed as there
    Plane<4, kInputs> nibbles;
    Plane<1, Fifth ? kInputs : 0> fifths;

    Scales<8> scales() const {
        const __m512i first = _mm512_loadu_si512(sixes[0]), second = _mm512_loadu_si512(sixes[1]);
        const __m512i third = _mm512_loadu_si512(sixes[2]);
        const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(48), six = _mm512_set1_epi8(63);
        const auto upper = [&](__m512i quads, __m512i pairs) {
            return _mm512_or_si512(_mm512_and_si512(quads, low), _mm512_and_si512(_mm512_srli_epi16(pairs, 2), high));
        };
        alignas(64) uint8_t parts[2][8][kLanes];
        _mm512_store_si512(parts[0], _mm512_and_si512(first, six));
        _mm512_store_si512(parts[0][4], upper(third, first));
        _mm512_store_si512(parts[1], _mm512_and_si512(second, six));
        _mm512_store_si512(parts[1][4], upper(_mm512_srli_epi16(third, 4), second));
        const __m512 scale_of = load_halves(scale), least_of = _mm512_sub_ps(_mm512_setzero_ps(), load_halves(least));
        Scales<8> all;
        for (int g = 0; g < 8; ++g) {
            const auto number = [&](const uint8_t* bytes) {
                return _mm512_cvtepi32_ps(
                    _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes))));
            };
            all.scale[g] = _mm512_mul_ps(number(parts[0][g]), scale_of);
            all.least[g] = _mm512_mul_ps(number(parts[1][g]), least_of);
        }
        return all;
    }

    template <class F>
    void codes(int group, F&& f) const {
        static constexpr auto table = code_values<32>(0, Fifth ? 32 : 16);
        const __m512i values = _mm512_loadu_si512(table.data());
        __m512i above;
        if constexpr (Fifth) above = fifths.run(group);
#pragma GCC unroll 4
        for (int z = 0; z < 4; ++z) {
            const __m512i run = nibbles.run(4 * group + z);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                __m512i code = shifted<4>(run, i);
                if constexpr (Fifth) code = join(code, shifted<1>(above, 4 * z + i, 4));
                f(4 * z + i, _mm512_permutexvar_epi16(code, values));
            }
        }
    }

    void set(int lane, const uint8_t* block) {
        std::memcpy(scale + lane, block, 2);
        std::memcpy(least + lane, block + 2, 2);
        for (int i = 0; i < 12; ++i) sixes[i / 4][i % 4][lane] = block[4 + i];
        const uint8_t* bytes = block + kBytes - kInputs / 2;  // of 64 inputs the first 32 in the low halves
        nibbles.set(lane, [&](int input) { return bytes[input / 64 * 32 + input % 32] >> (input / 32 % 2 * 4) & 15; });
        if constexpr (Fifth)
            fifths.set(lane, [&](int input) { return block[16 + input % 32] >> (input / 32) & 1; });
    }

    float value(int lane, int input) const {
        const int group = input / kGroup, i = group % 4;
        const int first = sixes[0][i][lane], second = sixes[1][i][lane], third = sixes[2][i][lane];
        const int factor = group < 4 ? first & 63 : (third & 15) | (first >> 2 & 48);
        const int steps = group < 4 ? second & 63 : third >> 4 | (second >> 2 & 48);
        int code = nibbles.get(lane, input);
        if constexpr (Fifth) code |= fifths.get(lane, input) << 4;
        return half_to_float(scale[lane]) * static_cast<float>(factor * code) -
               half_to_float(least[lane]) * static_cast<float>(steps);
    }
};

template <>
struct Tile<Format::q4_k> : GroupedTile<false> {};
template <>
struct Tile<Format::q5_k> : GroupedTile<true> {};

template <>
struct Tile<Format::q6_k> {  // sixteen groups, each with a scale of eight bits, which have a scale themselves
    static constexpr bool has_least = false;
    static constexpr int kInputs = 256, kGroup = 16, kZero = 32;
    static constexpr int64_t kBytes = 210;

    uint16_t scale[kLanes];
    int8_t eights[16][kLanes];
    Plane<4, kInputs> nibbles;
    Plane<2, kInputs> above;

    Scales<16> scales() const {
        const __m512 of = load_halves(scale);
        Scales<16> all;
        for (int g = 0; g < 16; ++g) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(eights[g]));
            all.scale[g] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), of);
        }
        return all;
    }

    template <class F>
    void codes(int group, F&& f) const {
        static constexpr auto table = code_values<64>(-kZero);
        const __m512i values = _mm512_loadu_si512(table.data()), more = _mm512_loadu_si512(table.data() + 32);
        const __m512i high = above.run(group);
#pragma GCC unroll 2
        for (int z = 0; z < 2; ++z) {
            const __m512i run = nibbles.run(2 * group + z);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                const __m512i code = join(shifted<4>(run, i), shifted<2>(high, 4 * z + i, 4));
                f(4 * z + i, _mm512_permutex2var_epi16(values, code, more));
            }
        }
    }

    void set(int lane, const uint8_t* block) {
        std::memcpy(scale + lane, block + 208, 2);
        for (int g = 0; g < 16; ++g) eights[g][lane] = static_cast<int8_t>(block[192 + g]);
        // of 128 inputs the first 64 in the low halves; the upper bits are those of 32 inputs, of the next 32, ...
        nibbles.set(lane, [&](int input) { return block[input / 128 * 64 + input % 64] >> (input / 64 % 2 * 4) & 15; });
        above.set(lane, [&](int input) {
            return block[128 + input / 128 * 32 + input % 32] >> (input / 32 % 4 * 2) & 3;
        });
    }

    float value(int lane, int input) const {
        const int code = (nibbles.get(lane, input) | above.get(lane, input) << 4) - kZero;
        return half_to_float(scale[lane]) * static_cast<float>(eights[input / kGroup][lane] * code);
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
        case Format::q4_k:
            return f(Tile<Format::q4_k>{});
        case Format::q5_k:
            return f(Tile<Format::q5_k>{});
        case Format::q6_k:
            return f(Tile<Format::q6_k>{});
        default:
            return f(Tile<Format::q8_0>{});
    }
}

}  // namespace llmserve
