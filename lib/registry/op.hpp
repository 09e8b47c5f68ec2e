// An operation as the registry knows it: everything the CLI, tuner, check, bench and API need.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/problem.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "registry/family.hpp"

namespace fftune {

struct SizeField {
  std::string name;                                // "m"
  std::string help;                                // "tokens"
  std::int64_t max = (std::int64_t{1} << 31) - 1;  // the least is 1
  /// Counts tokens: the CLI takes a list of it, and these are its defaults. Empty: required.
  std::vector<std::int64_t> default_on_cuda = {};
  std::vector<std::int64_t> default_on_cpu = {};
  std::int64_t example = 1024;  // a typical value, for listings and for compiling without a problem
  /// May be left out, with the meaning that `help` says. Problems with and without it share no
  /// presets, unless it is performance-neutral or `compared_when_absent`.
  bool rare = false;
  /// The field decides neither which variants are legal nor how fast they are, such as the rows of
  /// a table from which a token reads one. Problems and records have it as any other, but presets
  /// are compared without it: a record serves problems with any value and without one, and replaces
  /// those that differ in such fields alone.
  bool performance_neutral = false;
  /// For one that is not rare: whether the problem needs it, by its options. All do if empty; the
  /// others are stated without it.
  std::function<bool(const Problem&)> is_needed = nullptr;
  /// For a rare size: the value that leaving it out means in a problem that does. Empty, or
  /// nothing: leaving it out is another form, such as no window. The canonical form leaves out what
  /// is the value for any number of tokens.
  std::function<std::optional<std::int64_t>(const Problem&)> when_absent = nullptr;
  /// Presets are compared as if every problem stated it: heads of k and v, as many as those of q.
  bool compared_when_absent = false;
};

/// Whether a problem of these options must state the size.
inline bool needs_size(const SizeField& field, const Problem& problem) {
  return !field.rare && (!field.is_needed || field.is_needed(problem));
}

/// The value of the size, or the one that leaving it out means; nothing if that is another form.
std::optional<std::int64_t> size_or_absent(const SizeField& field, const Problem& problem);

/// The numbers that a numeric option may take, both ends included.
struct NumberRange {
  double least = 0;
  double most = 0;
};

struct OptionField {
  std::string name;  // "act"
  std::string help;
  /// The first is the default. An option with one choice that is neither a number nor a pattern
  /// takes any other text too, such as the sizes of a kind of layers; contradiction() judges it.
  std::vector<std::string> choices;
  /// The canonical form leaves it out if it has its default: for options that few problems use, so
  /// that the text and the presets of the others do not contain it.
  bool rare = false;
  /// Any number within it may be given, and `choices` holds the default alone ("1e-06"). A number
  /// is an argument of the kernels: it decides nothing about tensors, families or speed, so presets
  /// tuned with one serve every other.
  std::optional<NumberRange> number = std::nullopt;
  /// Any pattern may be given (core/distribution.hpp), and `choices` holds the default alone. It
  /// describes an input that sorts the tokens: it decides test data and, through presets, speed,
  /// but no result. A record tuned with one pattern serves every other, the nearest first.
  bool pattern = false;
  /// The same with routings (core/distribution.hpp): how often a mixture's experts are chosen.
  bool routing = false;
  /// The one pass that has it; empty: every pass. An option whose choices depend on the pass is a
  /// field for each.
  std::string pass = {};
  /// As of a size: it decides neither which variants are legal nor how fast they are. The rule by
  /// which the angles in a product's epilogue come about is such an option; in rope, whose kernels
  /// do nothing else, it is not.
  bool performance_neutral = false;

  /// Whether it takes one of several choices.
  bool has_choices() const { return !number && !pattern && !routing && choices.size() > 1; }
  /// Whether it takes any text, which Op::contradiction() judges.
  bool is_text() const { return !number && !pattern && !routing && choices.size() == 1; }
};

/// "no, yes", "a number from 0 to 1" or the kinds of patterns: the accepted values.
std::string choices_text(const OptionField& field);

/// `updated`: read and written in place, an input and an output in one buffer.
enum class Role { input, updated, output, intermediate };

/// "input", "updated", "output", "intermediate".
std::string_view role_name(Role role);

/// How ids are chosen from a row of scores: the largest one's place. An id whose score is as large
/// but for rounding is right too.
struct IdChoice {
  std::string from;             // the tensor [rows, ids] that scores are made of; empty: no ids
  std::vector<std::string> by;  // inputs [rows] that decide about a row's scores
  /// Makes the scores of a row of `from`, with the row's value of each in `by`. Returns by how much
  /// a score grows with its element. An id that a filter leaves out has -infinity. With `slack`
  /// above 0 that are only ids that it leaves out whatever errors of at most `slack` the elements
  /// have; below 0, all ids that it leaves out with some such errors.
  std::function<double(std::span<double> row, const std::vector<double>& by, double slack)> score;
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;  // row-major
  Role role = Role::input;
  double scale = 1;  // standard deviation of its random values where it is an input
  double mean = 0;   // of its random values: 1 for factors such as a reciprocal deviation
  /// Fills all elements of an input that is no noise, such as ids or offsets: the same for the same
  /// seed. Empty: normal values.
  std::function<void(std::uint64_t seed, std::span<double> values)> draw = {};
  /// For a view with strides: the elements of its shape behind its last one. They belong to nobody.
  std::int64_t behind = 0;
  /// The share of its bytes that the op should read, for the roofline: less than 1 where the data
  /// decide which of many weights take part.
  double read_share = 1;
  bool kept = false;  // of a backward pass: what the forward pass has to keep for it
  /// Not empty for an input [tokens] of bytes that sorts the tokens into those that it marks and
  /// the others (core/distribution.hpp): the pattern of its test data. Row i of the other tensors
  /// then depends on byte i too. An op has one at most.
  std::string pattern = {};
  /// Whether the rows are in the order of the marks (sorted_by_mark), instead of the tokens'.
  bool sorted = false;
  /// For an output that does not count tokens: it is a sum over them, to which each token adds the
  /// contribution of its own rows and its mark. Where all such outputs are, the reference of more
  /// tokens goes on from that of fewer: S(m + 1) = S(m) + S({token m}).
  bool sums_tokens = false;
  /// For an input: the output that may be the same buffer, such as the gradient that is added to
  /// it. One that does not count tokens is the initial value of that output, a sum over them.
  std::string may_alias = {};
  /// For an output whose rows differ in size, as averages over few and over many values do: how
  /// many neighbouring elements of a row have the same size. The bound of an element then follows
  /// from the size of these, instead of that of the whole tensor. 0: all elements.
  std::int64_t alike = 0;
  /// For an output that is accumulated in the order in which blocks finish: two runs may differ in
  /// the last bits.
  bool any_order = false;
  /// For an input that does not count tokens and is many matrices in one tensor: the reference
  /// takes it from ReferenceTensors::encoded if it is there, a matrix at a time. In float64 all of
  /// them together may exceed the host's memory, and making its pages takes longer than the
  /// products.
  bool read_in_parts = false;
  /// Not empty for tensors that stages write with rows sorted into groups: the tensor whose last
  /// element is the number of rows, from the first on, that belong to a group. The others belong to
  /// none, and may be left unwritten.
  std::string live_rows = {};
  /// For an output [rows] of ids that are chosen from scores, or [rows, n] of the n best in order.
  /// `of_choice`: of another output of that shape, the name of the ids to which its values belong.
  IdChoice choice = {};
  std::string of_choice = {};

  std::int64_t elements() const;
  std::size_t bytes() const;
  /// Bytes from the first element to the end of the last one.
  std::size_t extent_bytes() const {
    return bytes() - static_cast<std::size_t>(behind) * dtype_bytes(dtype);
  }
};

/// The sizes that a layer of a known model has, but for the tokens, and its options.
struct KnownModel {
  std::string name;  // "mixtral-8x7b"
  std::map<std::string, std::int64_t> sizes;
  std::map<std::string, std::string> options = {};
};

struct StageSpec {
  std::string name;                 // "gate_up"
  std::vector<std::string> inputs;  // tensor names
  std::vector<std::string> outputs;
  std::int64_t reduction_length = 1;  // the longest sum behind one output element
  double flops = 0;
  double bytes = 0;  // each input read once, each output written once
  /// How often the summands are rounded to the op's dtype within the stage, as the weights of a
  /// softmax are for the tensor cores.
  int inner_roundings = 0;
  /// How many such values there are: the errors of few do not average out. 0: many.
  double inner_values = 0;
  /// Weights that it makes of packed ones, and rounds.
  int expanded_weights = 0;
};

/// An input in its dtype, row-major.
struct EncodedTensor {
  DType dtype = DType::f32;
  std::span<const std::byte> bytes = {};
};

/// Tensors in float64, row-major, by name.
struct ReferenceTensors : std::map<std::string, std::vector<double>> {
  using map::map;
  /// Inputs that are not there in float64 (TensorSpec::read_in_parts).
  std::map<std::string, EncodedTensor> encoded = {};
};

/// A pipeline that a user would write without fftune. Its tensors are the op's, then `extra`.
struct Baseline {
  std::string name;  // "unfused", "merged"
  std::string summary;
  std::vector<TensorSpec> extra;
  Program program;
};

class Op;

/// A problem of another op that serves some consecutive stages of an op made of parts.
struct OpPart {
  std::string name;  // "qkv": unique within the whole; its families are "qkv.product_sm90", ...
  const Op* op = nullptr;
  Problem problem;  // canonical
  /// Tensors that have another name in the whole, by their names in the part.
  std::map<std::string, std::string> names;

  /// The whole's name of a tensor or a stage of the part.
  const std::string& tensor(const std::string& own) const;
  std::string stage(std::string_view own) const;
};

/// A problem that is another problem several times, one after the other, as the layers of a model
/// are: each has tensors of its own, and reads the previous one's results.
struct Repetition {
  Problem one;
  /// For each time in order: where the tensors of `one` are among those of the whole. Times of
  /// several kinds, such as layers with attention and with states, have `nowhere` for tensors of
  /// the other kinds, and leave out the stages that need these.
  std::vector<std::vector<std::size_t>> places;
  /// The stages of `one` that are repeated; all if they are all. Those before them run once with
  /// the tensors of the first time, and those behind them with the tensors of the last.
  std::size_t first = 0, end = static_cast<std::size_t>(-1);
};

class Op {
 public:
  virtual ~Op() = default;

  virtual std::string_view name() const = 0;     // "ffn"
  virtual std::string_view summary() const = 0;  // one line, with the formula
  virtual std::vector<std::string> passes() const = 0;
  virtual std::vector<SizeField> sizes() const = 0;
  virtual std::vector<OptionField> options() const = 0;
  /// The first is the default.
  virtual std::vector<DType> dtypes(DeviceKind) const = 0;
  /// Those of one pass, for an op that does not have all of them in every pass.
  virtual std::vector<DType> dtypes_of_pass(DeviceKind kind, std::string_view /*pass*/) const {
    return dtypes(kind);
  }

  /// The size that counts tokens ("m"): presets are tuned over a list of it, and row i of every
  /// tensor that has it as its first dimension depends on row i of the others alone. So a check
  /// may repeat a few distinct rows, unless an output lacks that dimension: a sum over the tokens
  /// (a weight's gradient) is checked on rows that are all distinct.
  virtual std::string_view token_size() const = 0;

  /// Whether token_size's promise about rows holds; not if a row's place counts, as in a sequence.
  /// Every row is then distinct in a check.
  virtual bool rows_are_alike(const Problem&) const { return true; }

  /// Models whose layers may be asked for by name.
  virtual std::vector<KnownModel> known_models() const { return {}; }
  /// The sizes that tensor parallelism divides among devices; empty: there are none.
  virtual std::vector<std::string> sharded_sizes() const { return {}; }

  /// Why fields that are good each by itself do not go together ("rotary=96 exceeds dim=64"), one
  /// line; empty: they do. Not asked of the token size.
  virtual std::string contradiction(const Problem&) const { return ""; }

  /// Inputs, then outputs (together the C API's buffer order), then intermediates. Updated tensors
  /// are among the inputs.
  virtual std::vector<TensorSpec> tensors(const Problem&) const = 0;
  virtual std::vector<StageSpec> stages(const Problem&) const = 0;

  /// The definition, in float64: computes the outputs of stage `stage` from its inputs, both in
  /// `tensors`. Written independently of every kernel.
  virtual void reference(const Problem&, std::size_t stage, ReferenceTensors& tensors,
                         Parallel& parallel) const = 0;

  /// The problems of other ops that the stages are made of, in order; none: the op is no
  /// composition. Where there is no record of the whole, records of the parts serve.
  virtual std::vector<OpPart> parts(const Problem&) const { return {}; }

  /// Nothing: the problem is not made of equal ones. Else variants, recipes, programs and records
  /// are those of `Repetition::one`; tensors() and stages() are those of the whole, stages in the
  /// order of the times.
  virtual std::optional<Repetition> repetition(const Problem&) const { return std::nullopt; }

  virtual std::vector<const Family*> families() const = 0;
  virtual std::vector<Baseline> baselines(const Problem&, const DeviceFacts&) const = 0;
};

/// The problem that variants, recipes and records are of: Repetition::one, or the problem itself.
Problem unrepeated(const Op& op, const Problem& problem);
/// Whether the problem is made of parts that are made of parts. These are tried by themselves.
bool has_nested_parts(const Op& op, const Problem& problem);

/// The options of a pass.
std::vector<OptionField> options_of(const Op& op, std::string_view pass);

/// The whole op's floating-point operations and least bytes: stages' flops added up; inputs and
/// outputs counted once, intermediates not at all. An op of one stage says it there.
struct Cost {
  double flops = 0;
  double bytes = 0;
};
Cost cost_of(const Op& op, const Problem& problem);

/// The bytes that the forward pass keeps for this problem of the pass bwd; else 0.
std::size_t kept_bytes(const std::vector<TensorSpec>& tensors);

/// The problem without sizes of the value that leaving them out means for any number of tokens.
Problem without_defaults(const std::vector<SizeField>& fields, std::string_view token_size,
                         Problem problem);

/// Fills in defaults, those of rare options excepted, leaves out rare sizes that state them, writes
/// numbers in their shortest form, and checks names, choices and ranges; throws
/// Error(invalid_input) with one line that names the field. The canonical form is what presets
/// store and compare.
Problem canonical(const Op& op, Problem problem, DeviceKind kind);

/// The place of a tensor in op.tensors(problem), if it is there; tensor_index throws
/// Error(internal) if not.
std::optional<std::size_t> find_tensor(const std::vector<TensorSpec>& tensors,
                                       std::string_view name);
std::size_t tensor_index(const std::vector<TensorSpec>& tensors, std::string_view name);

}  // namespace fftune
