// The two number types of the kernels, and how 16 lanes of them are read, multiplied and written, with AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace llmserve {

struct bf16 {
    uint16_t bits;
};

constexpr int kLanes = 16;

// A dot product step multiplies `pack` consecutive numbers a lane: one 32-bit word of each operand.
template <class T>
constexpr int pack = 4 / sizeof(T);

inline __m512 load(const float* p) { return _mm512_loadu_ps(p); }
inline __m512 load(const bf16* p) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Rounds to nearest even, as torch does.
inline __m256i narrow(__m512 v) {
#ifdef __AVX512BF16__
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000)), 16));
#endif
}

// 16 numbers, then 16 more.
inline __m512i narrow(__m512 first, __m512 second) {
#ifdef __AVX512BF16__
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
#else
    return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(first)), narrow(second), 1);
#endif
}

inline void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
inline void store(bf16* p, __m512 v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }

inline void store(float* p, __m512 v, __mmask16 lanes) { _mm512_mask_storeu_ps(p, lanes, v); }
inline void store(bf16* p, __m512 v, __mmask16 lanes) { _mm256_mask_storeu_epi16(p, lanes, narrow(v)); }

inline __m512 load(const float* p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
inline __m512 load(const bf16* p, __mmask16 lanes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
}

// All lanes where n is 16 or more, none where it is 0 or less.
inline __mmask16 first_lanes(int64_t n) {
    return n >= kLanes ? 0xffff : static_cast<__mmask16>((1u << std::max<int64_t>(n, 0)) - 1);
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// One 32-bit word (two bf16 or one float) in every lane.
template <class T>
inline __m512i broadcast(const T* p) {
    int word;
    std::memcpy(&word, p, 4);
    return _mm512_set1_epi32(word);
}

// sum + a * b, lane by lane, over the numbers of a word.
template <class T>
inline __m512 multiply_add(__m512 sum, __m512i a, __m512i b);

template <>
inline __m512 multiply_add<float>(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
}

template <>
inline __m512 multiply_add<bf16>(__m512 sum, __m512i a, __m512i b) {
#ifdef __AVX512BF16__
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32(0xffff0000);
    sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)),
                          sum);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(a, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(b, high)), sum);
#endif
}

// 2^x to about one unit in the last place: the nearest power of two times a polynomial of the rest. -inf gives 0.
inline __m512 exp2(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-160.0f));
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(0.00015353359f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0013398875f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.00961843692f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0555033237f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240226477f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.693147182f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// e^x to about one unit in the last place: 2^n times a polynomial (Cephes, expf). -inf gives 0.
inline __m512 exp(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-110.0f));
    x = _mm512_min_ps(x, _mm512_set1_ps(88.8f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

inline __m512 tanh(__m512 x) {  // 1 - 2 / (e^2x + 1)
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 grown = exp(_mm512_add_ps(x, x));
    return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(grown, one)));
}

}  // namespace llmserve
