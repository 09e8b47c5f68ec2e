// Parts that the definitions of several ops share: the op as data, problem fields, the stage of a
// single-stage op, and tensor positions by name.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device/program.hpp"
#include "registry/op.hpp"

namespace fftune {

/// The element types of inputs and outputs that every op has; the first is the default.
std::vector<DType> float_dtypes(DeviceKind kind);

/// The functions of an op that has a single stage.
struct SingleStage {
  std::vector<TensorSpec> (*tensors)(const Problem&) = nullptr;
  /// Completes a whole_stage() that is named after the pass.
  void (*complete)(const Problem&, StageSpec&) = nullptr;
  void (*reference)(const Problem&, ReferenceTensors&, Parallel&) = nullptr;
};

/// An op as data: its names, fields, families and baselines, and its stage if it has one alone.
struct OpFacts {
  std::string_view name, summary;  // literals
  std::vector<std::string> passes = {"fwd", "bwd"};
  std::vector<SizeField> sizes = {};
  std::vector<OptionField> options = {};
  std::string_view token_size = "m";
  bool rows_are_alike = true;
  std::vector<std::string> sharded_sizes = {};
  std::vector<KnownModel> (*known_models)() = nullptr;
  std::vector<std::vector<const Family*> (*)()> families = {};  // listed after each other
  std::vector<Baseline> (*baselines)(const Problem&, const DeviceFacts&) = nullptr;
  std::string (*contradiction)(const Problem&) = nullptr;
  SingleStage stage = {};
};

/// An op that is described by data. It has float_dtypes(). One of several stages overrides
/// tensors(), stages() and reference() instead.
class DescribedOp : public Op {
 public:
  explicit DescribedOp(OpFacts facts) : facts_(std::move(facts)) {}

  std::string_view name() const override { return facts_.name; }
  std::string_view summary() const override { return facts_.summary; }
  std::vector<std::string> passes() const override { return facts_.passes; }
  std::vector<SizeField> sizes() const override { return facts_.sizes; }
  std::vector<OptionField> options() const override { return facts_.options; }
  std::vector<DType> dtypes(DeviceKind kind) const override { return float_dtypes(kind); }
  std::string_view token_size() const override { return facts_.token_size; }
  bool rows_are_alike(const Problem&) const override { return facts_.rows_are_alike; }
  std::vector<std::string> sharded_sizes() const override { return facts_.sharded_sizes; }
  std::vector<KnownModel> known_models() const override {
    return facts_.known_models == nullptr ? std::vector<KnownModel>() : facts_.known_models();
  }
  std::vector<const Family*> families() const override;
  std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) const override {
    return facts_.baselines == nullptr ? std::vector<Baseline>() : facts_.baselines(problem, facts);
  }
  std::string contradiction(const Problem& problem) const override {
    return facts_.contradiction == nullptr ? "" : facts_.contradiction(problem);
  }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return facts_.stage.tensors(problem);
  }
  std::vector<StageSpec> stages(const Problem& problem) const override;
  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    facts_.stage.reference(problem, tensors, parallel);
  }

 private:
  OpFacts facts_;
};

/// The size that counts tokens, with its defaults on GPUs and on CPUs.
SizeField token_count(std::string name, std::string help, std::vector<std::int64_t> on_cuda,
                      std::vector<std::int64_t> on_cpu, std::int64_t max = SizeField().max,
                      std::int64_t example = SizeField().example);

/// For SizeField::when_absent: the value of another size, or a number.
using WhenAbsent = std::function<std::optional<std::int64_t>(const Problem&)>;
WhenAbsent same_as(std::string size);
WhenAbsent usually(std::int64_t value);

/// Fields that may be left out (SizeField::rare, OptionField::rare): a size, an option, and an
/// option that is a number, `usual` if left out.
SizeField rare_size(std::string name, std::string help, std::int64_t max, std::int64_t example,
                    WhenAbsent when_absent = nullptr);
/// The same field, which decides neither which variants are legal nor how fast they are.
SizeField neutral(SizeField field);
/// Heads of k and v, as many as those of q if left out.
SizeField kv_heads_size(std::string help, std::int64_t max, std::int64_t example);
OptionField rare_option(std::string name, std::string help, std::vector<std::string> choices,
                        std::string pass = {});
OptionField rare_number(std::string name, std::string help, std::string usual, NumberRange range,
                        std::string pass = {});

/// The tokens of a GEMM op: from one, which is bound by reading the weights, to enough to fill any
/// GPU.
SizeField product_tokens();
/// The tokens of a memory-bound op.
SizeField row_tokens();

/// Whether every column of y [m, n] is multiplied by an element of y_scale [n], before a residual
/// is added: layer scale, and the residual multiplier of Granite. And that tensor.
OptionField y_scale_option();
TensorSpec y_scale_tensor(std::int64_t n);
/// Whether y is added to a residual in the same pass.
OptionField residual_option();
/// Whether a row of the result has the same bits whatever other rows there are, and how many. And
/// whether a problem asks for it: its variants are then those of one order of sums for all numbers
/// of rows (docs/precision.md#batch-invariance).
OptionField batch_invariant_option();
bool is_batch_invariant(const Problem& problem);
/// Whether gradients are accumulated; `of` says whose: "the weights".
OptionField accumulate_option(const std::string& of);
bool accumulates(const Problem& problem);
/// With accumulate=yes: the name of the input to which a gradient is added, and the inputs to which
/// several are.
std::string initial_name(std::string_view gradient);
std::vector<TensorSpec> initial_values(std::vector<TensorSpec> gradients);
/// Whether the backward pass computes the gradient of x alone; `of` says whose are left out.
OptionField frozen_option(const std::string& of);
bool is_frozen(const Problem& problem);
/// Why gradients that are left out cannot be accumulated; empty where that is not asked for.
std::string frozen_contradiction(const Problem& problem);
/// The choices for saving intermediates of a gated feed-forward network for its backward pass.
/// `order` names the order of the saved rows if it is not that of the tokens: ", in the order of
/// the mask".
std::vector<OptionField> gated_save_options(const std::string& order = "");
/// Whether a backward pass computes gate and up again: save=input.
bool recomputes(const Problem& problem);
/// Whether gate and up are stored: for a backward pass (save=preact), or in the pass that computes
/// them again.
bool stores_gates(const Problem& problem);

/// The stage of an op that has one for each pass, by the pass.
constexpr const char* stage_forward = "forward";
constexpr const char* stage_backward = "backward";
constexpr const char* stage_of_pass(std::string_view pass) {
  return pass == "bwd" ? stage_backward : stage_forward;
}

/// A stage that reads every input and writes every output once; an updated tensor counts as both.
/// The caller sets the operations and the reduction length.
inline StageSpec whole_stage(std::string name, const std::vector<TensorSpec>& tensors) {
  StageSpec stage;
  stage.name = std::move(name);
  for (const auto& tensor : tensors) {
    const auto pass = [&](std::vector<std::string>& names) {
      names.push_back(tensor.name);
      stage.bytes += static_cast<double>(tensor.bytes());
    };
    if (tensor.role != Role::output) pass(stage.inputs);
    if (tensor.role != Role::input) pass(stage.outputs);
  }
  return stage;
}

/// Moves `more` behind the others.
template <typename Value>
void append(std::vector<Value>& all, std::vector<Value> more) {
  all.insert(all.end(), std::make_move_iterator(more.begin()), std::make_move_iterator(more.end()));
}

/// The largest magnitude; NaN if any value is NaN, so that a scale that comes from it is NaN too.
template <typename Value>
Value largest_magnitude(std::span<const Value> values) {
  Value largest = 0;
  for (const Value value : values) {
    const Value own = std::abs(value);
    if (own > largest || std::isnan(own)) largest = own;
  }
  return largest;
}

/// As Op::families() lists them, one list after the other.
template <class... Kinds>
std::vector<const Family*> addresses_of(const std::vector<Kinds>&... lists) {
  std::vector<const Family*> addresses;
  const auto add = [&](const auto& families) {
    for (const auto& family : families) addresses.push_back(&family);
  };
  (add(lists), ...);
  return addresses;
}

/// A tensor that the options leave out.
constexpr std::size_t absent = static_cast<std::size_t>(-1);

/// Positions of tensors by name.
class TensorPlaces {
 public:
  explicit TensorPlaces(std::vector<TensorSpec> tensors) : tensors_(std::move(tensors)) {}
  /// The op's tensors, followed by a baseline's own.
  TensorPlaces(std::vector<TensorSpec> tensors, const std::vector<TensorSpec>& extra)
      : tensors_(std::move(tensors)) {
    tensors_.insert(tensors_.end(), extra.begin(), extra.end());
  }

  /// The position of a tensor, or `absent`.
  std::size_t at(std::string_view name) const {
    return find_tensor(tensors_, name).value_or(absent);
  }
  std::size_t count() const { return tensors_.size(); }

 private:
  std::vector<TensorSpec> tensors_;
};

/// The tensor of that name; it must be there.
TensorArgument tensor_of(const TensorPlaces& places, std::string_view name);

/// A tensor's address as a kernel's argument, or a null pointer for one that is absent.
inline Argument tensor_or_null(std::size_t place) {
  if (place == absent) return std::int64_t{0};
  return TensorArgument{place};
}
inline Argument tensor_or_null(const TensorPlaces& places, std::string_view name) {
  return tensor_or_null(places.at(name));
}

/// The address of a tensor in a call of a host function, or null for one that is absent.
inline void* address_of(const HostCall& call, std::size_t place) {
  return place == absent ? nullptr : call.tensors[place];
}

/// A program of one host function, which is called with the op's first `tensors` tensors.
Program host_program(std::size_t tensors, HostFunction function);
Program host_program(std::size_t tensors, std::vector<Scratch> scratch, HostFunction function);

/// A struct with the sizes of a problem in the fields that are named beside them.
template <class Layer>
Layer sizes_of(const Problem& problem,
               std::initializer_list<std::pair<const char*, std::int64_t Layer::*>> fields) {
  Layer layer;
  for (const auto& [name, field] : fields) layer.*field = problem.size(name);
  return layer;
}

/// A size or an option that may be left out: its value, or the other one.
std::int64_t size_or(const Problem& problem, const std::string& name, std::int64_t otherwise);
std::string option_or(const Problem& problem, const std::string& name,
                      const std::string& otherwise);

/// An option that is a number and may be left out: its value, or the default of the op's list.
double number_or_default(const Op& op, const Problem& problem, std::string_view name);

}  // namespace fftune
