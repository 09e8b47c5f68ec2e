// Inputs of an op from saved files: the weights of a layer of a model, and recorded activations.
// complete_problem.cpp has what the model says of the op's problem.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "registry/catalog.hpp"
#include "saved/layer_config.hpp"
#include "saved/model.hpp"
#include "saved/names.hpp"
#include "saved/packed_inputs.hpp"
#include "verify/input_data.hpp"

namespace fftune {

/// Where the inputs of an op are saved.
struct SavedValues {
  std::string weights = {};                // a .safetensors file, an index or a folder
  std::optional<std::int64_t> layer = {};  // of the model; 0 where it is not given
  std::string input = {};                  // a .safetensors file
  std::string map = {};                    // "w=model.layers.0.mlp.up_proj.weight,bias=…"

  bool given() const { return !weights.empty() || !input.empty(); }
};

constexpr std::int64_t most_layers = 100'000;

/// The sizes, options and types that a caller gives; the model knows others.
struct GivenProblem {
  std::map<std::string, std::string> sizes = {};    // as given; absent or empty: not given
  std::map<std::string, std::string> options = {};  // likewise
  std::string dtypes = {};
  std::string pass = {};
};

class SavedInputs final : public GivenTensors {
 public:
  /// Opens the files. Throws Error(io) or Error(invalid_input), one line. `catalog` and `op` must
  /// outlive it.
  SavedInputs(const Catalog& catalog, const Op& op, SavedValues values);
  /// The same for a model that is open. Errors name the arguments of the C API, not the tool's
  /// options.
  SavedInputs(const Catalog& catalog, const Op& op, std::shared_ptr<const SavedModel> model,
              std::int64_t layer, std::string map);

  /// Whether the files have every weight that the table of names knows of the op.
  bool has_weights() const;

  /// Why the op does not compute what the model does, or a weight of the op cannot be read: one
  /// line; empty if neither is so.
  std::string why_not() const;

  /// Whether the size is one that weights or a configuration tell, of a model that has them.
  bool tells(std::string_view size) const;

  /// The given options, completed by the sizes, options and element type that the files give.
  void complete(GivenProblem& given, DeviceKind kind) const;

  /// Throws Error(invalid_input) if the model has none of the weights that the op is known by.
  void require_any() const;

  /// Throws Error(invalid_input) if an input that should be saved is missing, or if one that is
  /// has another shape than the problem says.
  void require_fit(const Problem& problem) const;

  /// Throws Error(invalid_input) if the layers of an op that computes whole layers have a tensor
  /// that the problem does not take: without it the result would be another model's.
  void require_all_used(const Problem& problem) const;

  /// The saved tensors of an input and how it has them; inputs with the same text have the same
  /// bytes. Empty if it is not saved.
  std::string source_text(const TensorSpec& spec) const;

  bool fill(const TensorSpec& spec, std::span<std::byte> out, Parallel& parallel) const override;

  const Op& op() const { return *op_; }
  const SavedValues& values() const { return options_; }
  /// "layer 3 of DIR", for people.
  std::string text() const;

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

  void open_layer();
  void parse_map(const std::string& text);
  /// An option as the caller knows it: "--map", or "map".
  std::string option(std::string_view name) const;
  std::string weights_option() const;
  const Op& pack_weight() const { return catalog_->op("pack-weight"); }
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

  const Catalog* catalog_;
  const Op* op_;
  const SavedOp* table_;
  SavedValues options_;
  bool of_tool_ = true;
  std::int64_t layer_ = 0;
  std::shared_ptr<const SavedModel> model_;
  std::optional<SavedModel> input_;
  std::string_view prefix_;  // with '#' for the layer
  std::map<std::string, std::string, std::less<>> map_;
  LayerConfig config_;
};

}  // namespace fftune
