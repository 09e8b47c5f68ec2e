// The token mixer of a layer: what is between the normalised x and the sum with the residual, such
// as attention over a cache of keys and values. A mixer is a list of parts, with the fields of a
// problem and the tensors that belong to it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/layer/layer.hpp"
#include "registry/op.hpp"

namespace fftune::layer {

constexpr const char* usual_eps = "1e-06";

/// The parts of a layer, in the order in which they are added.
class PartList {
 public:
  using Sizes = std::map<std::string, std::int64_t>;
  using Options = std::map<std::string, std::string>;
  using Names = std::map<std::string, std::string>;  // of tensors that have another name here

  explicit PartList(const Problem& problem);

  const Problem& problem() const { return problem_; }
  std::int64_t tokens() const { return tokens_; }
  std::vector<OpPart> take() { return std::move(parts_); }

  /// Returns the part, until the next one is added.
  OpPart& add(const char* name, const Op& op, Sizes sizes, Options options, Names names,
              std::optional<DType> dtype = std::nullopt);

  /// Beside the option weights: groups and zero points of packed weights.
  void add_format(Options& options) const;
  std::string quantise() const;
  /// Whether a vector multiplies what is added to the residual, and the name of that of a part.
  std::string scales() const;
  std::string scale_of(const char* part) const;

 private:
  const Problem& problem_;
  std::int64_t tokens_;
  std::vector<OpPart> parts_;
};

/// Where a mixer stands in its layer.
struct MixerPlace {
  const char* x;  // the tensor that it reads
  const char* y;  // the one that it writes
  bool adds;      // whether its last product adds `residual`
  const char* residual = "x";
};

struct Mixer {
  std::string_view name;  // the choice of the option `mixer`
  std::string_view summary;
  /// Sizes that it needs; and sizes and options that it may have. A mixer refuses those that other
  /// mixers have and it has not.
  std::vector<std::string> needed, fields;
  /// Its tensors among those that all layers share, and those of a layer, in the buffers' order.
  std::vector<const char*> shared_inputs, inputs;
  void (*add_parts)(PartList& parts, const MixerPlace& place);
  /// The kinds of its parts, but for the output product.
  std::vector<PartKind> (*part_kinds)();
  /// Why its fields do not go together; asked before its parts are made, and after.
  std::string (*contradiction)(const Problem& problem) = nullptr;
  std::string (*contradiction_of_parts)(const Problem& problem) = nullptr;
  /// Test data of tensors that are no noise.
  void (*set_draw)(const Problem& problem, TensorSpec& tensor) = nullptr;
};

/// The first is the default of the option.
const std::vector<const Mixer*>& mixers();
const Mixer& mixer_of(const Problem& problem);

/// Whether the problem's mixer, or every layer, has the field.
bool is_field_of_mixer(const Problem& problem, const std::string& name);

/// Why the problem has fields of other mixers, or lacks one; empty: it has its own.
std::string contradiction_of_mixer(const Problem& problem);

/// Whether the problem's mixer needs the size.
bool mixer_needs(const Problem& problem, const std::string& size);

/// A product within a mixer, whose weight `w` has the format of the layer's: linear with these
/// fields and names of tensors.
void add_mixer_product(PartList& parts, const char* name, PartList::Sizes sizes,
                       PartList::Options options, PartList::Names names, const std::string& w,
                       const char* bias);
PartKind mixer_product_kind(const char* name);

/// The product in front of a mixer without q, k and v, to `columns` of "projected", and its kind.
void add_in_product(PartList& parts, const MixerPlace& place, std::int64_t columns,
                    const std::string& bias);

/// Sigmoids of a product that multiply "attended" [tokens, heads, dim], where there are such;
/// returns the output's name.
const char* add_output_gate(PartList& parts, const MixerPlace& place, std::int64_t dim);
PartKind output_gate_kind();

/// With query-scale=rows a factor of each token's queries, from the tensor `from` of `features` to
/// `to`; returns the name of that with the result.
const char* add_query_scale(PartList& parts, const char* from, const char* to,
                            std::int64_t features);
PartKind query_scale_kind();

/// One of a mixer's products without a bias, of x [tokens, k] to n columns.
struct PlainProduct {
  const char *name, *x, *w, *y;
};
void add_plain_product(PartList& parts, const PlainProduct& product, std::int64_t k,
                       std::int64_t n);

/// Columns of a tensor whose rows have so many elements: those from `first` on. With `groups` a
/// convolution's are in blocks, by its sizes x-groups and x-keys.
struct Columns {
  std::int64_t first = 0, row = 0;
  std::int64_t groups = 0, keys = 0;
};
/// Why vectors of the columns are less aligned than their rows are, one line; empty: they are not.
std::string contradiction_of_columns(const Problem& problem, const char* name,
                                     const Columns& columns);

/// A convolution with SiLU, whose state has these channels among `state_channels` of a sequence.
/// Its inputs may be columns of x.
struct StateConv {
  const char *name, *x, *w, *bias, *state, *y;
};
void add_state_conv(PartList& parts, const StateConv& conv, std::int64_t channels,
                    std::int64_t state_channels, const std::string& has_bias,
                    const Columns& of_x = {});

/// The fields of states of a convolution, and those of mixers that have states of heads too.
std::vector<std::string> conv_state_fields();
std::vector<std::string> head_state_fields();
std::vector<std::string> with_fields(std::vector<std::string> fields,
                                     const std::vector<std::string>& more);

/// How the states of a convolution lie in memory, with `channels` of a sequence, and whether
/// state_indices find them.
void add_conv_states(const Problem& problem, std::int64_t channels, PartList::Sizes& sizes,
                     PartList::Options& options, PartList::Names& names);
/// The same for `states`, which state_indices always find.
void add_head_states(const Problem& problem, PartList::Sizes& sizes, PartList::Options& options);
/// Test data of state_indices that serve both.
void set_index_draw(const Problem& problem, TensorSpec& tensor);

/// Test data of such a convolution's taps, bias and state, by which its results are about as large
/// as each other. What a token adds to a state is a product of them: otherwise a few elements would
/// be far larger than all others, and as far off.
void set_alike_draw(TensorSpec& tensor, const StateConv& conv, std::int64_t width);

/// The product behind a mixer, of `x` [tokens, features]: its part, its weight, its bias, and the
/// vector that multiplies its result.
struct OutProduct {
  const char *name = "out", *w = "w_o", *bias = "b_o", *scale = "out_scale";
};
void add_out_product(PartList& parts, const MixerPlace& place, const char* x, std::int64_t features,
                     const OutProduct& product = {});

/// Attention over a cache of keys and values: attention_mixer.cpp.
const Mixer& attention_mixer();
/// A gated short convolution: conv_mixer.cpp.
const Mixer& conv_mixer();
/// Latent attention over a cache of latents: mla_mixer.cpp.
const Mixer& mla_mixer();
/// Linear attention by the gated delta rule, with decays of heads or of features (Kimi Delta
/// Attention): gated_delta_mixer.cpp.
const Mixer& gated_delta_mixer();
const Mixer& kimi_delta_mixer();
/// State space duality, as in Mamba-2: ssd_mixer.cpp.
const Mixer& ssd_mixer();
/// Both on the same normed input, whose results are added: attention_ssd_mixer.cpp.
const Mixer& attention_ssd_mixer();
/// Whether the problem has that mixer: sizes and weights of ssd then have names of their own.
bool has_both(const Problem& problem);
/// None: the layer is its feed-forward network.
const Mixer& no_mixer();

}  // namespace fftune::layer
