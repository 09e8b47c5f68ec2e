#include "verify/truth.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "core/pattern.hpp"
#include "verify/blocks.hpp"
#include "verify/random_rows.hpp"
#include "verify/verifier.hpp"

namespace fftune {
namespace {

constexpr std::int64_t piece = std::int64_t{1} << 16;

/// Calls body(first, count) over the pieces of `total` elements, in parallel.
template <typename Body>
void for_each_piece(std::size_t total, Parallel& parallel, const Body& body) {
  for_each_block(static_cast<std::int64_t>(total) / piece + 1, piece, parallel,
                 [&](const Block& block) {
                   const auto first = static_cast<std::size_t>(block.first_row * piece);
                   const auto last = static_cast<std::size_t>(block.last_row * piece);
                   if (first < total) body(first, std::min(last, total) - first);
                 });
}

std::vector<double> decode_all(DType dtype, const std::vector<std::byte>& data,
                               Parallel& parallel) {
  const std::size_t element = dtype_bytes(dtype);
  std::vector<double> values(data.size() / element);
  for_each_piece(values.size(), parallel, [&](std::size_t first, std::size_t count) {
    decode(dtype, data.data() + first * element, std::span<double>(values.data() + first, count));
  });
  return values;
}

std::vector<std::byte> encode_all(DType dtype, const std::vector<double>& values,
                                  Parallel& parallel) {
  const std::size_t element = dtype_bytes(dtype);
  std::vector<std::byte> data(values.size() * element);
  for_each_piece(values.size(), parallel, [&](std::size_t first, std::size_t count) {
    encode(dtype, std::span<const double>(values.data() + first, count),
           data.data() + first * element);
  });
  return data;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Truth::Truth(const Op& op, Problem problem, std::uint64_t seed, Parallel& parallel,
             ReferenceFile* kept)
    : op_(&op), problem_(std::move(problem)), seed_(seed), parallel_(&parallel), kept_(kept) {
  const std::string token_size(op.token_size());
  const std::int64_t tokens = problem_.size(token_size);
  tensors_ = op.tensors(problem_);
  const auto others = op.tensors(problem_.with_size(token_size, tokens + 1));
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    counts_tokens_.push_back(tensors_[i].shape.at(0) != others[i].shape.at(0));
    if (tensors_[i].role == Role::output && !counts_tokens_.back()) rows_repeat_ = false;
    if (!tensors_[i].pattern.empty()) marking_ = i;
  }
  if (!op.rows_are_alike(problem_)) rows_repeat_ = false;
  encoded_.resize(tensors_.size());
  retoken(tokens);
}

void Truth::retoken(std::int64_t tokens) {
  problem_ = problem_.with_size(op_->token_size(), tokens);
  tensors_ = op_->tensors(problem_);
  stages_ = op_->stages(problem_);
  expected_.clear();
  const std::int64_t versions = marking_ ? 2 : 1;
  const std::int64_t needed =
      rows_repeat_ ? versions * std::min(tokens, most_distinct_rows) : tokens;
  if (rows_repeat_ ? needed > known_rows_ : needed != known_rows_) {
    known_rows_ = needed;
    unrounded_.clear();
    not_kept_.clear();
    draw_inputs();
  }
  if (marking_) draw_marks();
}

void Truth::draw_marks() {
  const auto pattern = parse_pattern(tensors_[*marking_].pattern);
  if (!pattern)
    throw Error(ErrorKind::internal,
                fmt::format("'{}' is no pattern", tensors_[*marking_].pattern));
  marks_ = draw_pattern(*pattern, rows(*marking_), seed_);
  auto& bytes = encoded_[*marking_];
  if (!rows_repeat_) {
    const auto* const first = reinterpret_cast<const std::byte*>(marks_.data());
    bytes.assign(first, first + marks_.size());
    return;
  }
  // Of the distinct rows the first half is marked, so that they are in the order of their marks.
  const std::int64_t half = known_rows_ / 2;
  bytes.resize(static_cast<std::size_t>(known_rows_));
  for (std::int64_t row = 0; row < known_rows_; ++row)
    bytes[static_cast<std::size_t>(row)] =
        static_cast<std::byte>(row < half ? std::size_t{1} << row % 8 : 0);
  sources_.clear();
  sorted_sources_.clear();
  for (std::size_t token = 0; token < marks_.size(); ++token)
    sources_.push_back(static_cast<std::int64_t>(token) % half + (marks_[token] != 0 ? 0 : half));
  for (const std::int64_t token : sorted_by_mark(marks_))
    sorted_sources_.push_back(sources_[static_cast<std::size_t>(token)]);
}

void Truth::draw_inputs() {
  const auto specs = op_->tensors(distinct_problem());
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const auto& spec = specs[i];
    const bool given = spec.role == Role::input || spec.role == Role::updated;
    // What is drawn as a whole may depend on the tokens.
    if (given && !counts_tokens_[i] && !spec.draw && encoded_[i].size() == spec.bytes()) continue;
    encoded_[i].clear();
    if (!given || i == marking_) continue;
    encoded_[i].resize(spec.bytes());
    if (spec.draw) {
      std::vector<double> values(static_cast<std::size_t>(spec.elements()));
      spec.draw(seed_ ^ fnv1a(spec.name), values);
      encode(spec.dtype, std::span<const double>(values), encoded_[i].data());
      continue;
    }
    // The rows that are marked come again as those that are not.
    const bool twice = marking_ && rows_repeat_ && counts_tokens_[i];
    const std::int64_t drawn = twice ? spec.shape.at(0) / 2 : spec.shape.at(0);
    random_rows(seed_, spec.name, spec.dtype, spec.scale, spec.mean, drawn, columns(i),
                encoded_[i].data(), *parallel_);
    if (twice)
      std::copy_n(encoded_[i].begin(), spec.bytes() / 2,
                  encoded_[i].begin() + static_cast<std::ptrdiff_t>(spec.bytes() / 2));
  }
}

Problem Truth::distinct_problem() const {
  return problem_.with_size(op_->token_size(), known_rows_);
}

std::int64_t Truth::columns(std::size_t tensor) const {
  return tensors_[tensor].elements() / rows(tensor);
}

std::int64_t Truth::period(std::size_t tensor) const {
  return counts_tokens_[tensor] ? std::min(known_rows_, rows(tensor)) : rows(tensor);
}

const std::int64_t* Truth::sources(std::size_t tensor) const {
  if (!marking_ || !rows_repeat_ || !counts_tokens_[tensor]) return nullptr;
  if (tensors_[tensor].role == Role::input && tensor != *marking_) return nullptr;
  return tensors_[tensor].sorted ? sorted_sources_.data() : sources_.data();
}

std::size_t Truth::producer(std::size_t tensor) const {
  for (std::size_t stage = 0; stage < stages_.size(); ++stage)
    if (contains(stages_[stage].outputs, tensors_[tensor].name)) return stage;
  return stages_.size();
}

const std::vector<std::byte>& Truth::encoded(std::size_t tensor) {
  if (encoded_[tensor].empty()) {
    const std::size_t stage = producer(tensor);
    const auto& spec = tensors_[tensor];
    encoded_[tensor] = encode_all(spec.dtype, unrounded(stage, stage).at(spec.name), *parallel_);
  }
  return encoded_[tensor];
}

const ReferenceTensors& Truth::unrounded(std::size_t first_stage, std::size_t stage) {
  const auto key = std::pair(first_stage, stage);
  if (const auto known = unrounded_.find(key); known != unrounded_.end()) return known->second;
  if (auto outputs = kept_outputs(first_stage, stage)) return unrounded_[key] = std::move(*outputs);
  ReferenceTensors values;
  for (const auto& name : stages_.at(stage).inputs) {
    const std::size_t tensor = tensor_index(tensors_, name);
    const std::size_t source = producer(tensor);
    const bool within =
        source >= first_stage && source < stage && tensors_[tensor].role != Role::updated;
    values[name] = within ? unrounded(first_stage, source).at(name)
                          : decode_all(tensors_[tensor].dtype, encoded(tensor), *parallel_);
  }
  op_->reference(distinct_problem(), stage, values, *parallel_);
  ReferenceTensors outputs;
  for (const auto& name : stages_[stage].outputs) outputs[name] = std::move(values.at(name));
  not_kept_.insert(key);
  return unrounded_[key] = std::move(outputs);
}

std::string Truth::key_of(std::size_t first_stage, std::size_t stage,
                          const std::string& tensor) const {
  return fmt::format("{} {} {} {} {}", distinct_problem().text(), seed_, first_stage, stage,
                     tensor);
}

std::optional<ReferenceTensors> Truth::kept_outputs(std::size_t first_stage,
                                                    std::size_t stage) const {
  if (!kept_) return {};
  const auto specs = op_->tensors(distinct_problem());
  ReferenceTensors outputs;
  for (const auto& name : stages_[stage].outputs) {
    const auto count = static_cast<std::size_t>(specs[tensor_index(tensors_, name)].elements());
    auto values = kept_->find(key_of(first_stage, stage, name), count, *parallel_);
    if (values.empty()) return {};
    outputs[name] = std::move(values);
  }
  return outputs;
}

void Truth::keep() {
  if (!kept_) return;
  for (const auto& [first_stage, stage] : not_kept_)
    for (const auto& [name, values] : unrounded_.at({first_stage, stage}))
      kept_->keep(key_of(first_stage, stage, name), values, *parallel_);
  not_kept_.clear();
}

const Expected& Truth::expected(std::size_t first_stage, std::size_t tensor) {
  const auto key = std::pair(first_stage, tensor);
  if (const auto known = expected_.find(key); known != expected_.end()) return known->second;
  const auto& spec = tensors_[tensor];
  const std::size_t stage = producer(tensor);
  Expected expected;
  expected.values = &unrounded(first_stage, stage).at(spec.name);
  const bool updated = spec.role == Role::updated;
  const auto rounded = decode_all(
      spec.dtype, updated ? encode_all(spec.dtype, *expected.values, *parallel_) : encoded(tensor),
      *parallel_);

  double squares = 0;
  double error_squares = 0;
  const std::int64_t width = columns(tensor);
  const std::int64_t* const sources = this->sources(tensor);
  const std::int64_t distinct = sources != nullptr ? known_rows_ : period(tensor);
  std::vector<std::int64_t> times(static_cast<std::size_t>(distinct));
  for (std::int64_t row = 0; row < rows(tensor); ++row)
    ++times[static_cast<std::size_t>(sources != nullptr ? sources[row] : row % distinct)];
  for (std::int64_t row = 0; row < distinct; ++row) {
    double row_squares = 0;
    double row_error_squares = 0;
    for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
      const double value = (*expected.values)[static_cast<std::size_t>(i)];
      if (std::isinf(value)) continue;  // meant, and compared exactly
      const double error = rounded[static_cast<std::size_t>(i)] - value;
      row_squares += value * value;
      row_error_squares += error * error;
    }
    const auto count = static_cast<double>(times[static_cast<std::size_t>(row)]);
    squares += row_squares * count;
    error_squares += row_error_squares * count;
  }
  if (!std::isfinite(squares) || !std::isfinite(error_squares))
    throw Error(ErrorKind::internal,
                fmt::format("{}: the reference of '{}' leaves the range of {}: its inputs' scales "
                            "are too large",
                            problem_.text(), spec.name, dtype_name(spec.dtype)));
  expected.norm = std::sqrt(squares);
  expected.root_mean_square = std::sqrt(squares / static_cast<double>(spec.elements()));

  for (std::size_t k = first_stage; k <= stage; ++k)
    expected.reduction_length += stages_[k].reduction_length;
  // A few elements may round luckily in the reference alone: no sample is believed to be better
  // than the worst case, a unit roundoff for each stage, over the square root of its size.
  const std::int64_t sample = distinct * width;
  const double worst =
      dtype_unit_roundoff(spec.dtype) * static_cast<double>(stage - first_stage + 1);
  const double measured = squares == 0 ? 0 : std::sqrt(error_squares / squares);
  expected.rounding_error = std::max(measured, worst / std::sqrt(static_cast<double>(sample)));
  // The coarsest dtype that the run rounds to on the way decides, were it an intermediate's. What
  // else the last stage writes is beside the way; but in f32 nothing is rounded that would cover
  // what sums of fp8 are off by.
  DType coarsest = spec.dtype;
  const std::size_t end = spec.dtype == DType::f32 ? stage + 1 : stage;
  for (std::size_t k = first_stage; k < end; ++k)
    for (const auto& name : stages_[k].outputs) {
      const DType other = tensors_[tensor_index(tensors_, name)].dtype;
      if (dtype_unit_roundoff(other) > dtype_unit_roundoff(coarsest)) coarsest = other;
    }
  expected.tolerance =
      tolerance(coarsest, expected.rounding_error, expected.reduction_length, sample);
  return expected_[key] = expected;
}

}  // namespace fftune
