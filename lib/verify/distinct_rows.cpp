#include "verify/distinct_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/distribution.hpp"
#include "core/error.hpp"
#include "core/hash.hpp"
#include "device/parallel.hpp"
#include "verify/drawn.hpp"
#include "verify/input_data.hpp"

namespace fftune {

DistinctRows::DistinctRows(const Op& op, Problem problem, InputData data, Parallel& parallel)
    : op_(&op), problem_(std::move(problem)), data_(std::move(data)), parallel_(&parallel) {
  const std::string token_size(op.token_size());
  const std::int64_t tokens = problem_.size(token_size);
  tensors_ = op.tensors(problem_);
  const auto others = op.tensors(problem_.with_size(token_size, tokens + 1));
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    // A first dimension that equals the number of tokens by chance, such as a buffer of strided
    // rows, does not grow with it.
    counts_tokens_.push_back(tensors_[i].shape.at(0) == tokens &&
                             others[i].shape.at(0) == tokens + 1);
    if (tensors_[i].role == Role::output && !counts_tokens_.back()) repeat_ = false;
    if (!tensors_[i].pattern.empty()) marking_ = i;
  }
  if (!op.rows_are_alike(problem_)) repeat_ = false;
  drawn_.resize(tensors_.size());
  retoken(tokens);
}

void DistinctRows::retoken(std::int64_t tokens) {
  problem_ = problem_.with_size(op_->token_size(), tokens);
  tensors_ = op_->tensors(problem_);
  stages_ = op_->stages(problem_);
  const std::int64_t versions = marking_ ? 2 : 1;
  const std::int64_t needed = repeat_ ? versions * std::min(tokens, most_where_alike) : tokens;
  if (repeat_ ? needed > count_ : needed != count_) {
    count_ = needed;
    draw_inputs();
  }
  if (marking_) draw_marks();
}

void DistinctRows::draw_marks() {
  const auto pattern = parse_pattern(tensors_[*marking_].pattern);
  if (!pattern)
    throw Error(ErrorKind::internal,
                fmt::format("'{}' is not a pattern", tensors_[*marking_].pattern));
  auto of_tokens = draw_pattern(*pattern, rows(*marking_), data_.seed);
  sources_.clear();
  sorted_sources_.clear();
  if (repeat_) {
    const std::int64_t half = count_ / 2;
    for (std::size_t token = 0; token < of_tokens.size(); ++token)
      sources_.push_back(static_cast<std::int64_t>(token) % half +
                         (of_tokens[token] != 0 ? 0 : half));
    for (const std::int64_t token : sorted_by_mark(of_tokens))
      sorted_sources_.push_back(sources_[static_cast<std::size_t>(token)]);
    // The first half of the distinct rows is marked.
    marks_.clear();
    for (std::int64_t row = 0; row < count_; ++row)
      marks_.push_back(static_cast<std::uint8_t>(row < half ? 1 << row % 8 : 0));
  } else {
    sorted_sources_ = sorted_by_mark(of_tokens);
    marks_ = std::move(of_tokens);
  }
  const auto* const first = reinterpret_cast<const std::byte*>(marks_.data());
  drawn_[*marking_].assign(first, first + marks_.size());
}

void DistinctRows::draw_inputs() {
  const auto specs = op_->tensors(problem_.with_size(op_->token_size(), count_));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& spec = specs[i];
    if ((spec.role != Role::input && spec.role != Role::updated) || i == marking_) continue;
    // Values from TensorSpec::draw may depend on the number of tokens.
    if (!counts_tokens_[i] && !spec.draw && drawn_[i].size() == spec.bytes()) continue;
    drawn_[i] = {};
    drawn_[i] = large_vector<std::byte>(spec.bytes(), *parallel_);
    // The same rows serve marked and unmarked.
    TensorSpec once = spec;
    const bool twice = marking_ && repeat_ && counts_tokens_[i] && !spec.draw;
    if (twice) once.shape.at(0) /= 2;
    draw(once, std::span(drawn_[i]).first(once.bytes()));
    if (twice)
      std::copy_n(drawn_[i].begin(), once.bytes(),
                  drawn_[i].begin() + static_cast<std::ptrdiff_t>(once.bytes()));
  }
}

void DistinctRows::draw(const TensorSpec& spec, std::span<std::byte> out) const {
  if (data_.given != nullptr && data_.given->fill(spec, out, *parallel_)) return;
  if (spec.draw) {
    draw_encoded(spec, data_.seed ^ fnv1a(spec.name), spec.elements(), out.data(), *parallel_);
    return;
  }
  const std::int64_t rows = spec.shape.at(0);
  random_rows(data_.seed, spec.name, spec.dtype, spec.scale, spec.mean, rows,
              rows == 0 ? 0 : spec.elements() / rows, out.data(), *parallel_);
}

std::int64_t DistinctRows::columns(std::size_t tensor) const {
  return tensors_[tensor].elements() / rows(tensor);
}

std::int64_t DistinctRows::period(std::size_t tensor) const {
  return counts_tokens_[tensor] ? std::min(count_, rows(tensor)) : rows(tensor);
}

const std::int64_t* DistinctRows::sources(std::size_t tensor) const {
  if (!marking_ || !counts_tokens_[tensor]) return nullptr;
  if (tensors_[tensor].sorted) return sorted_sources_.data();
  // An input's rows do not depend on the marks, and distinct rows are in token order.
  const bool given = tensors_[tensor].role == Role::input && tensor != *marking_;
  return !repeat_ || given ? nullptr : sources_.data();
}

std::size_t DistinctRows::producer(std::size_t tensor) const {
  for (std::size_t stage = 0; stage < stages_.size(); ++stage) {
    const auto& outputs = stages_[stage].outputs;
    if (std::find(outputs.begin(), outputs.end(), tensors_[tensor].name) != outputs.end())
      return stage;
  }
  return stages_.size();
}

}  // namespace fftune
