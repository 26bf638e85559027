// The draw of a token from a row of scores: what engine/sampler.py's `draw` defines, without sorting the vocabulary.
#pragma once

#include <algorithm>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace llmserve {

struct DrawParams {
    float temperature;
    float top_p;    // 1: off
    float min_p;    // 0: off
    int32_t top_k;  // 0: off
    double number;  // in [0, 1)
};

class Sampler {
  public:
    // The token at which the cumulative distribution of the filtered scores passes `number`; `best` is the largest one.
    int64_t draw(const float* scores, int64_t size, float best, const DrawParams& params) {
        const bool by_rank = (params.top_k > 0 && params.top_k < size) || params.top_p < 1.0f;
        const double total = weigh(scores, size, best, params.temperature, by_rank ? 0.0f : params.min_p);
        if (!by_rank) return pass(size, total * params.number);
        keep_likeliest(size, total, params);
        double sum = 0.0;
        for (const int32_t i : kept_) sum += weights_.data()[i];
        double passed = 0.0;
        for (const int32_t i : kept_) {
            passed += weights_.data()[i];
            if (passed > sum * params.number) return i;
        }
        return kept_.empty() ? 0 : kept_.back();
    }

  private:
    static constexpr int64_t kRun = 512;  // weights that are summed together

    // weights = e^((score - best) / temperature), so that the likeliest token's is 1, and 0 below `least`; returns
    // their sum.
    double weigh(const float* scores, int64_t size, float best, float temperature, float least) {
        weights_.reserve((size + kLanes) / kLanes * kLanes);
        runs_.clear();
        const __m512 top = _mm512_set1_ps(best), slope = _mm512_set1_ps(1.0f / temperature),
                     floor = _mm512_set1_ps(least);
        double total = 0.0;
        for (int64_t start = 0; start < size; start += kRun) {
            __m512 sum = _mm512_setzero_ps();
            for (int64_t i = start; i < std::min(size, start + kRun); i += kLanes) {
                const __mmask16 lanes = first_lanes(size - i);
                const __m512 weight = exp(_mm512_mul_ps(_mm512_sub_ps(load(scores + i, lanes), top), slope));
                const __m512 kept = _mm512_maskz_mov_ps(lanes & _mm512_cmp_ps_mask(weight, floor, _CMP_GE_OQ), weight);
                _mm512_store_ps(weights_.data() + i, kept);
                sum = _mm512_add_ps(sum, kept);
            }
            runs_.push_back(_mm512_reduce_add_ps(sum));
            total += runs_.back();
        }
        return total;
    }

    // The first token at which the sum of the weights is above `target`; the last that has a weight where rounding
    // denies it.
    int64_t pass(int64_t size, double target) const {
        double passed = 0.0;
        int64_t run = 0;
        while (run + 1 < static_cast<int64_t>(runs_.size()) && passed + runs_[run] <= target) passed += runs_[run++];
        for (int64_t i = run * kRun; i < size; ++i) {
            passed += weights_.data()[i];
            if (passed > target && weights_.data()[i] > 0.0f) return i;
        }
        for (int64_t i = size - 1; i > 0; --i)
            if (weights_.data()[i] > 0.0f) return i;
        return 0;
    }

    // kept = the indices, in order, that pass top_k, then top_p, then min_p. Only as many of the likeliest are sorted
    // as it takes.
    void keep_likeliest(int64_t size, double total, const DrawParams& params) {
        const float* weights = weights_.data();
        const auto heavier = [weights](int32_t a, int32_t b) {
            return weights[a] != weights[b] ? weights[a] > weights[b] : a < b;
        };
        const size_t wanted = params.top_k > 0 && params.top_k < size ? params.top_k : 0;
        for (float least = 0.05f;; least = least > 1e-6f ? least * 0.02f : -1.0f) {
            double sum = 0.0;
            kept_.clear();
            collect(size, least, sum);
            const bool enough = wanted ? kept_.size() >= wanted : sum >= params.top_p * total;
            if (enough || least < 0.0f) break;
        }
        if (wanted && kept_.size() > wanted) {
            std::nth_element(kept_.begin(), kept_.begin() + (wanted - 1), kept_.end(), heavier);
            const float last = weights[kept_[wanted - 1]];  // tokens as likely as the last one stay, too
            std::erase_if(kept_, [=](int32_t i) { return weights[i] < last; });
        }
        std::sort(kept_.begin(), kept_.end(), heavier);
        if (wanted) {
            total = 0.0;
            for (const int32_t i : kept_) total += weights[i];
        }
        double likelier = 0.0;
        size_t count = 0;
        while (count < kept_.size() && (count == 0 || params.top_p >= 1.0f || likelier < params.top_p * total))
            likelier += weights[kept_[count++]];
        while (count > 1 && weights[kept_[count - 1]] < params.min_p) --count;
        kept_.resize(count);
        std::sort(kept_.begin(), kept_.end());
    }

    void collect(int64_t size, float least, double& sum) {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        alignas(64) int32_t found[kLanes];
        for (int64_t i = 0; i < size; i += kLanes) {
            const __mmask16 lanes = first_lanes(size - i);
            const __m512 v = load(weights_.data() + i, lanes);
            const __mmask16 hit = _mm512_mask_cmp_ps_mask(lanes, v, _mm512_set1_ps(least), _CMP_GE_OQ);
            if (!hit) continue;
            sum += _mm512_mask_reduce_add_ps(hit, v);
            _mm512_storeu_si512(found, _mm512_maskz_compress_epi32(
                                           hit, _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(i)))));
            kept_.insert(kept_.end(), found, found + __builtin_popcount(hit));
        }
    }

    Buffer<float> weights_;
    std::vector<float> runs_;
    std::vector<int32_t> kept_;
};

}  // namespace llmserve
