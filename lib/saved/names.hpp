// How saved models name the inputs of ops: one table, in which a model or an op is a few lines.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace fftune {

/// Which rows of a saved tensor an input is. Gate and up in one tensor are halves, or alternate; of
/// experts in one tensor it is the half of each. q, k and v in one tensor follow each other.
enum class SavedRows { all, first_half, second_half, even, odd, q, k, v };

/// Whether `part`, an input, is half of the rows of each expert: of the second extent of `whole`.
bool is_of_each_expert(SavedRows rows, std::vector<std::int64_t> whole,
                       const std::vector<std::int64_t>& part);
/// The row of the tensor that is row `row` of the half of each expert, which has `each` rows.
std::int64_t row_of_half(SavedRows rows, std::int64_t row, std::int64_t each);

struct SavedName {
  /// Behind what comes ahead of every name of a layer. Several are stacked, row behind row; a '*'
  /// stands for each expert in turn, one matrix behind the other.
  std::vector<std::string_view> names;
  SavedRows rows = SavedRows::all;
};

struct SavedInput {
  std::string_view tensor;  // of the op
  /// Its extents: a size of the op, a product of sizes ("heads*dim"), or unknown ("").
  std::vector<std::string_view> extents;
  std::vector<SavedName> names;  // the first that the model has counts
  /// For a bias: the weight whose name it has, with .bias instead of .weight.
  std::string_view bias_of = {};
  /// It is the model's, not a layer's: find_in_model() has the first of each entry of `names`.
  bool of_model = false;
};

/// An option that has this value where the model has this input, or a tensor of the layer by this
/// name. If several entries exist for one option, the first that holds counts.
struct SavedOption {
  std::string_view option;
  std::string_view value;
  std::string_view tensor;
  std::string_view name = {};
};

/// An option or a size that config.json beside the model gives, by the first key that it has.
/// `words` translates values whose name here is not our_word().
struct ConfigField {
  std::string_view field;
  std::vector<std::string_view> keys;
  /// An option without which this one means nothing.
  std::string_view needs = {};
  std::vector<std::pair<std::string_view, std::string_view>> words = {};
  /// An option of the value none with which this one is refused.
  std::string_view not_with = {};
};

/// Facts of its layer that LayerConfig derives from a configuration, besides the configuration's
/// own keys.
constexpr std::string_view config_rotary = "features of a head to rotate";
constexpr std::string_view config_scale = "scale of scores";
constexpr std::string_view config_embedding = "factor of the embedding";

struct SavedOp {
  std::string_view op;
  std::vector<SavedInput> inputs;
  std::vector<SavedOption> options;
  std::vector<ConfigField> sizes;  // those that the tensors' extents leave open
  std::vector<ConfigField> settings;
  /// A model that has this is not of the op: the bias of a norm.
  std::string_view foreign = {};
  /// All that a layer or a model computes, so that each key of the configuration counts.
  bool is_whole = false;
  /// It has inputs of the model around its layers.
  bool is_of_model = false;
};

const std::vector<SavedOp>& saved_ops();
/// Null where nothing is known of the op.
const SavedOp* find_saved_op(std::string_view op);
const SavedInput* find_saved_input(const SavedOp& op, std::string_view tensor);

/// Translates a word of config.json: "gelu_pytorch_tanh" is gelu-tanh. Any other word stays.
std::string_view our_word(std::string_view word);

/// "w_q" in layer 3 of "layers.3.w_q", as ops of several layers name their inputs.
std::pair<std::string_view, std::int64_t> split_layer(std::string_view tensor);

/// Names of the embedding and of learned positions, for find_in_model().
const std::vector<std::string_view>& embedding_names();
constexpr std::string_view positions_name = "wpe.weight";

/// Possible prefixes of the names of layer N, with N as "#".
const std::vector<std::string_view>& layer_prefixes();

/// Whether a tensor of this name is of GPT-2's Conv1D, which keeps [in, out] instead of [out, in].
bool is_conv1d(std::string_view name);

/// Whether a tensor of this name has the matrices of all experts. Those of gpt-oss, which have
/// biases by the same name with _bias behind it, are [in, out].
bool is_stack_of_experts(std::string_view name);

}  // namespace fftune
