// What happens to one row between the matrix products: norms, rotary embedding, gated activation, the best logit.
#pragma once

#include <cmath>

#include "simd.h"

namespace llmserve {

// to = from / rms(from) * weight; `to` may be `from`.
template <class In, class Out>
void rms_norm(const In* from, Out* to, const float* weight, int64_t size, float eps) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += kLanes) {
        const __m512 v = load(from + i, first_lanes(size - i));
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    const __m512 scale =
        _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / static_cast<float>(size) + eps));
    for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 lanes = first_lanes(size - i);
        store(to + i, _mm512_mul_ps(_mm512_mul_ps(load(from + i, lanes), scale), load(weight + i, lanes)), lanes);
    }
}

// Rotates the first 2 * half dimensions of a head in place; cos_sin holds `half` cosines, then `half` sines.
template <class T>
void rotate(T* head, const float* cos_sin, int64_t half) {
    for (int64_t i = 0; i < half; i += kLanes) {
        const __mmask16 lanes = first_lanes(half - i);
        const __m512 cos = load(cos_sin + i, lanes), sin = load(cos_sin + half + i, lanes);
        const __m512 low = load(head + i, lanes), high = load(head + half + i, lanes);
        store(head + i, _mm512_fmsub_ps(low, cos, _mm512_mul_ps(high, sin)), lanes);
        store(head + half + i, _mm512_fmadd_ps(high, cos, _mm512_mul_ps(low, sin)), lanes);
    }
}

enum class Activation : int { silu = 0, gelu_tanh = 1 };

inline __m512 activate(__m512 x, Activation activation) {
    __m512 y = x;
    if (activation ==
        Activation::gelu_tanh) {  // 0.5 x (1 + tanh(y / 2)) is x sigmoid(y), which loses nothing for x << 0
        const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        y = _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x));
    }
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp(_mm512_sub_ps(_mm512_setzero_ps(), y))));
}

// to[i] = activation(gate_up[i]) * gate_up[size + i].
template <class T>
void activate_and_multiply(const T* gate_up, T* to, int64_t size, Activation activation) {
    for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 lanes = first_lanes(size - i);
        store(to + i, _mm512_mul_ps(activate(load(gate_up + i, lanes), activation), load(gate_up + size + i, lanes)),
              lanes);
    }
}

// The first index of the largest number, or of the first NaN, as torch.argmax.
inline int64_t argmax(const float* row, int64_t size) {
    __m512 best = _mm512_set1_ps(-INFINITY);
    __mmask16 nan = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
        const __m512 v = _mm512_mask_loadu_ps(best, first_lanes(size - i), row + i);
        nan |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        best = _mm512_max_ps(best, v);
    }
    const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(best));
    for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 lanes = first_lanes(size - i);
        const __m512 v = load(row + i, lanes);
        const __mmask16 hit = nan ? _mm512_mask_cmp_ps_mask(lanes, v, v, _CMP_UNORD_Q)
                                  : _mm512_mask_cmp_ps_mask(lanes, v, top, _CMP_EQ_OQ);
        if (hit) return i + __builtin_ctz(hit);
    }
    return 0;
}

// to[i] = from[i] where bit i of the mask is set, else minus infinity.
inline void mask(const float* from, const uint8_t* bits, float* to, int64_t size) {
    const __m512 never = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < size; i += kLanes) {
        const __mmask16 lanes = first_lanes(size - i);
        const int allowed = bits[i / 8] | (size - i > 8 ? bits[i / 8 + 1] << 8 : 0);
        store(to + i, _mm512_mask_loadu_ps(never, lanes & static_cast<__mmask16>(allowed), from + i), lanes);
    }
}

}  // namespace llmserve
