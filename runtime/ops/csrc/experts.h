// An MLP of experts: which of them a step's tokens go to, and the products of each one's rows. The matrices of all
// experts are one weight, of which each has equally many panels. A place is one of a token's answers: the places of an
// expert lie together, so that its rows are multiplied together.
#pragma once

#include <optional>
#include <vector>

#include "linear.h"

namespace llmserve {

// Where each token of a step goes, in one layer.
class Routes {
  public:
    struct Group {
        int expert, first, rows;  // the places [first, first + rows)
    };

    void reserve(int tokens, int experts, int chosen) {
        tokens_ = tokens;
        chosen_ = chosen;
        experts_.reserve(static_cast<int64_t>(tokens) * chosen);
        places_.reserve(static_cast<int64_t>(tokens) * chosen);
        weights_.reserve(static_cast<int64_t>(tokens) * chosen);
        starts_.assign(experts, 0);
        groups_.reserve(experts);
    }

    // The experts of token t are those with the best of the scores, which are overwritten. Their weights are a softmax
    // over all experts, or, if `normed`, over the chosen ones.
    void choose(int64_t t, float* scores, int experts, bool normed) {
        float* weights = weights_.data() + t * chosen_;
        int* chosen = experts_.data() + t * chosen_;
        const float best = scores[argmax(scores, experts)];
        double total = 0;
        if (!normed) {
            for (int e = 0; e < experts; ++e) total += std::exp(scores[e] - best);
        }
        for (int i = 0; i < chosen_; ++i) {
            chosen[i] = static_cast<int>(argmax(scores, experts));
            weights[i] = std::exp(scores[chosen[i]] - best);
            scores[chosen[i]] = -INFINITY;
            if (normed) total += weights[i];
        }
        for (int i = 0; i < chosen_; ++i) weights[i] = static_cast<float>(weights[i] / total);
    }

    // Gives each answer its place, once all tokens have chosen.
    void group() {
        const int answers = tokens_ * chosen_;
        for (int i = 0; i < answers; ++i) ++starts_[experts_.data()[i]];
        groups_.clear();
        int first = 0;
        for (int e = 0; e < static_cast<int>(starts_.size()); ++e) {
            const int rows = starts_[e];
            starts_[e] = first;
            if (rows) groups_.push_back({e, first, rows});
            first += rows;
        }
        for (int i = 0; i < answers; ++i) places_.data()[i] = starts_[experts_.data()[i]]++;
        std::fill(starts_.begin(), starts_.end(), 0);
    }

    const std::vector<Group>& groups() const { return groups_; }
    int chosen() const { return chosen_; }
    const int* places(int64_t t) const { return places_.data() + t * chosen_; }
    const float* weights(int64_t t) const { return weights_.data() + t * chosen_; }

  private:
    int tokens_ = 0, chosen_ = 0;
    Buffer<int> experts_, places_;
    Buffer<float> weights_;
    std::vector<int> starts_;
    std::vector<Group> groups_;
};

// How the products of the groups' rows with their experts' parts of a weight are shared: a task is one panel (of each
// half, if gated) of one expert, and a block of its rows.
template <class T>
class GroupShares {
  public:
    struct Task {
        const Routes::Group* group;
        int64_t first_panel;  // of the expert
        int panel, first, height;
    };

    void plan(const std::vector<Routes::Group>& groups, const Weight& weight, int experts, int panels, int threads) {
        groups_ = &groups;
        weight_ = &weight;
        stride_ = weight.panels() / experts;
        panels_ = panels;
        const int all = panels * static_cast<int>(groups.size());
        blocks_.clear();
        starts_.assign(1, 0);
        for (const auto& group : groups) {
            blocks_.push_back(row_blocks(group.rows, all, threads, block_rows(weight)));
            starts_.push_back(starts_.back() + panels * blocks_.back());
        }
    }

    int tasks() const { return starts_.back(); }
    int panels() const { return panels_; }

    Task at(int task) const {
        const auto after = std::upper_bound(starts_.begin(), starts_.end(), task);
        const int index = static_cast<int>(after - starts_.begin()) - 1, within = task - starts_[index];
        const Routes::Group& group = (*groups_)[index];
        const auto row = [&](int block) {
            return static_cast<int>(static_cast<int64_t>(group.rows) * block / blocks_[index]);
        };
        const int block = within / panels_;
        return {&group, group.expert * stride_, within % panels_, row(block), row(block + 1) - row(block)};
    }

    // The first panel of a task, if there is such a task.
    Ahead ahead_of(int task) const {
        if (task >= tasks()) return {};
        const Task next = at(task);
        return weight_->panel<T>(next.first_panel + next.panel);
    }

    // What the thread that has `task` will probably read after it: the next task's, or what `following` begins with.
    template <class Following>
    Ahead next(const Walk& walk, int task, Following&& following) const {
        return task + 1 != walk.end(tasks()) ? ahead_of(task + 1) : following();
    }

    // One phase: body(task, product, next) for each task, where the product is that of all rows of the task's group.
    // x has a row for each place.
    template <class Following, class Body>
    void phase(Walk& walk, const T* x, Following&& following, Body&& body) const {
        std::optional<Product<T>> product;
        const Routes::Group* of = nullptr;
        walk.phase(tasks(), [&](int number) {
            const Task task = at(number);
            if (task.group != of) {
                of = task.group;
                product.emplace(x + of->first * weight_->inputs, weight_->inputs, of->rows, *weight_);
            }
            body(task, *product, next(walk, number, following));
        });
    }

  private:
    const std::vector<Routes::Group>* groups_ = nullptr;
    const Weight* weight_ = nullptr;
    int64_t stride_ = 0;
    int panels_ = 0;
    std::vector<int> starts_{0}, blocks_;
};

}  // namespace llmserve
