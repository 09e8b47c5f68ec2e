// Inputs of an op from saved files: the weights of a layer of a model, and recorded activations.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/fftune/command_line/problem_options.hpp"
#include "apps/fftune/saved/packed_inputs.hpp"
#include "apps/fftune/saved/saved_config.hpp"
#include "apps/fftune/saved/saved_names.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "safetensors/model.hpp"
#include "verify/input_data.hpp"

namespace fftune::tool {

class SavedInputs final : public GivenTensors {
 public:
  /// Opens the files. Throws Error(io) or Error(invalid_input), one line. `op` must outlive it.
  SavedInputs(const Op& op, WeightOptions options);

  /// Whether the files have every weight that the table of names knows of the op.
  bool has_weights() const;

  /// Why the op does not compute what the model does, or a weight of the op cannot be read: one
  /// line; empty if neither is so.
  std::string why_not() const;

  /// Whether the size is one that weights or a configuration tell, of a model that has them.
  bool tells(std::string_view size) const;

  /// The given options, completed by the sizes, options and element type that the files give.
  ProblemOptions complete(ProblemOptions given, DeviceKind kind) const;

  /// Throws Error(invalid_input) if the model has none of the weights that the op is known by.
  void require_any() const;

  /// Throws Error(invalid_input) if an input that should be saved is missing, or if one that is
  /// has another shape than the problem says.
  void require_fit(const Problem& problem) const;

  bool fill(const TensorSpec& spec, std::span<std::byte> out, Parallel& parallel) const override;

  const Op& op() const { return *op_; }
  /// "layer 3 of DIR", for people.
  std::string text() const;
  /// The options for a process that is to have the same inputs.
  std::vector<std::string> words() const;

 private:
  /// Where the values of an input are.
  struct Source {
    std::vector<const SavedModel::Tensor*> parts;  // stacked, or one for each expert
    bool experts = false;
    bool transposed = false;  // [in, out] in the file
    SavedRows rows = SavedRows::all;
    bool recorded = false;  // of --input: rows may be tokens

    const std::string& name() const { return parts.front()->saved.name; }
  };

  void find_prefix();
  void parse_map(const std::string& text);
  std::string prefix(std::int64_t layer) const;
  /// Source of a name of the files that --map gave; throws Error(invalid_input) if there is none.
  Source mapped(const std::string& name, std::int64_t layer) const;
  std::optional<Source> known(const SavedInput& input, std::int64_t layer) const;
  std::optional<Source> find(std::string_view tensor) const;
  std::optional<Source> named(const SavedName& name, std::int64_t layer) const;
  bool is_transposed(const SavedTensor& tensor) const;

  /// The tensor in the op's layout: [in, out] is transposed, several tensors are joined.
  std::vector<std::int64_t> shape_of(const Source& source) const;
  /// The first row of the source that is the input's; throws Error(invalid_input) if their shapes
  /// contradict each other.
  std::int64_t first_row(const Source& source, const TensorSpec& spec) const;
  [[noreturn]] void fail_missing(const SavedInput& input, std::int64_t layer) const;
  /// The source of a packed weight, by the name of any of its tensors; nothing if it is not saved.
  std::optional<Source> packed_source(const PackedName& name) const;
  /// Its codes. Throws Error(invalid_input) where kernels have no such codes.
  CodedMatrix coded(const Source& source) const;
  /// The format of all weights of the op in the model, and whether those of attention are dense;
  /// nothing where not all have one.
  struct Packing {
    CodeFormat format = {};
    bool dense_attention = false;
  };
  std::optional<Packing> packing() const;
  void require_packable(const PackedName& name, const TensorSpec& spec,
                        const Problem& problem) const;
  void fill_from(const Source& source, const TensorSpec& spec, std::span<std::byte> out,
                 Parallel& parallel) const;
  void require_all_rows_used(const Problem& problem) const;
  void infer_sizes(std::map<std::string, std::int64_t, std::less<>>& sizes) const;

  const Op* op_;
  const SavedOp* table_;
  WeightOptions options_;
  std::int64_t layer_ = 0;
  std::optional<SavedModel> model_;
  std::optional<SavedModel> input_;
  std::string_view prefix_;  // with '#' for the layer
  std::map<std::string, std::string, std::less<>> map_;
  SavedConfig config_;
};

/// The files that were given; null if none were. Where the op has an option `weights` of its own, a
/// value that is none of its words is the path of a saved model, as of --saved-weights: it is taken
/// out of `problem`. Throws as SavedInputs() and check_weight_options() do, and
/// Error(invalid_input) if the value is neither.
std::unique_ptr<const SavedInputs> saved_inputs(const Op& op, ProblemOptions& problem,
                                                WeightOptions values);

/// Problems that fit the given options and, if it is not null, the saved model. Throws
/// Error(invalid_input).
std::vector<Problem> saved_problems(const Op& op, const ProblemOptions& given,
                                    const SavedInputs* saved, DeviceKind kind);

}  // namespace fftune::tool
