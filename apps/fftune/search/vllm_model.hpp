// The layers that vLLM runs, as a model's config.json describes them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "saved/model_config.hpp"
#include "store/json.hpp"

namespace fftune::tool::vllm {

constexpr std::int64_t scale_block = 128;  // rows and columns of a weight with one fp8 scale

[[noreturn]] void fail(const std::string& why);

using config_names::Names;

/// Fields of a configuration and of the part for text within it; null counts as absent.
class Config {
 public:
  explicit Config(std::vector<const JsonValue*> levels) : levels_(std::move(levels)) {}

  const JsonValue* find(std::string_view name) const { return find_in(levels_, name); }
  /// The first of these names that is there, with its name; null if none is.
  std::pair<std::string_view, const JsonValue*> first(const Names& names) const;
  std::optional<std::int64_t> integer_if_any(const Names& names) const;
  std::int64_t integer(const Names& names) const;
  /// One number for all layers, or a list with one for each layer or kind of experts.
  std::vector<std::int64_t> integers(const Names& names) const;
  bool flag(const Names& names, bool otherwise = false) const;
  std::string text(const Names& names, std::string otherwise) const;
  /// The same configuration, whose outermost part counts first.
  Config from_outside() const { return Config({levels_.rbegin(), levels_.rend()}); }
  const JsonValue& root() const { return *levels_.front(); }
  const JsonValue& innermost() const { return *levels_.back(); }

 private:
  static std::int64_t number(std::string_view name, const JsonValue& found);

  std::vector<const JsonValue*> levels_;
};

std::int64_t slice(std::string_view what, std::int64_t whole, std::int64_t devices);

/// How a model's weights are quantised, as the plugin sees it.
struct Quantisation {
  enum class Kind { none, integers, fp8_blocks, fp8_tokens, mxfp4, other } kind = Kind::none;
  std::string name;        // for people
  std::int64_t bits = 4;   // of integers
  std::int64_t group = 0;  // inputs with one scale; 0: all
  bool zeros = false;      // zero points of each group
  bool ordered = false;    // inputs in the order of activations
  std::string unfit = {};  // why no linear layer is fftune's; empty: they are
  bool differs = false;    // some layers have other settings
};

Quantisation quantisation_of(const Config& config);

bool is_fp8(const Quantisation& quantisation);

/// The architectures whose layers the plugin knows.
enum class Architecture {
  other,
  llama,
  mistral,
  qwen2,
  qwen3,
  qwen3_moe,
  gpt_oss,
  gemma2,
  gemma3,
  with_states
};

/// Those whose layers have norms behind attention and the network: the op layer alone has these.
bool is_gemma(Architecture architecture);

/// The architecture that vLLM runs: the root's. A part for text may have none.
std::string architecture_name(const Config& config);

/// The architecture of the language model. One with vision or sound has its part for text run by
/// vLLM's model of that type.
Architecture architecture_of(const Config& config);

/// Elements as vLLM computes with them: float32 models run in bfloat16.
std::string element_type(const Config& config);

struct Experts {
  std::int64_t count = 0, choices = 0, d = 0, h = 0;

  bool operator==(const Experts&) const = default;
};

/// The kinds of experts that a model has: where a configuration lists numbers for each layer, or
/// for each kind, several. Empty for a model without mixtures.
std::vector<Experts> experts_of(const Config& config);

std::string activation_word(const Config& config);

/// The name that fftune has for an activation with a gate; empty: none.
std::string activation_of(const Config& config);

/// Whether a field has a number or a list of them.
bool has_any(const Config& config, const Names& names);

bool is_gpt_oss(const Config& config);

/// The windows that layers have, as vLLM finds them; 0 is none.
std::vector<std::int64_t> windows_of(const Config& config, Architecture architecture);

/// Sizes of a decoder layer on one device.
struct LayerSizes {
  std::int64_t d = 0, heads = 0, kv_heads = 0, dim = 0;

  std::int64_t attended() const { return heads * dim; }
  std::int64_t qkv_rows() const { return (heads + 2 * kv_heads) * dim; }
};

LayerSizes sizes_of(const Config& config, std::int64_t devices);

/// Whether q, k and v have biases, and the output product.
bool has_qkv_bias(const Config& config);
bool has_out_bias(const Config& config);

/// Whether every layer has a mixture instead of a network.
bool are_all_mixtures(const Config& config, const std::vector<Experts>& experts);

}  // namespace fftune::tool::vllm
