// Which layers the one launch of layer/persistent.cu computes, as configurations of the kernel: the
// form of a problem, and the space of what is left to choose.
#pragma once

#include "core/dtype.hpp"  // its names come before those of device headers

#include "kernels/layer/persistent.cuh"

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "kernels/attention/attention.hpp"
#include "kernels/common/activation.hpp"
#include "kernels/common/typed_space.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/qkv/qkv.hpp"

namespace fftune::layer {

/// The feed-forward network of the layers.
enum class Network {
  dense,
  experts,   // a mixture
  shared,    // and a shared expert beside it
  weighted,  // which a gate weights
  slices,    // a rank's of layers
};
Network network_of(const Problem& problem);
const char* words_of(Network network);

/// Which weights of the layers are packed.
enum class Packing { none, network, all };
Packing packing_of(const Problem& problem);
const char* words_of(Packing packing);

/// The layer options that the kernel reads and its configuration does not say.
struct Layer {
  qkv::Layer heads;
  attention::Layer attention;
  norm::Layer norm;
  Activation activation = Activation::silu;
  std::int64_t cache = 0;
  std::optional<moe_route::Router> router;  // of a mixture of experts

  explicit Layer(const Problem& problem);
};

/// The kernel's configuration but for what the space decides.
persistent_config form_of(const Problem& problem, const Layer& layer, const DeviceFacts& facts);

/// A configuration of a form, whose stages are counted where they are asked for: as many as fit.
class Draft {
 public:
  Draft(const persistent_config& form, const DeviceFacts& facts);
  Draft(const persistent_config& form, const DeviceFacts& facts, const Config& config);

  /// But for the stages.
  const persistent_config& sizes() const { return config_; }
  const persistent_config& whole() const {
    if (!std::exchange(counted_, true)) count_stages();
    return config_;
  }

  /// A field that shared memory does not depend on.
  template <auto field>
  static void set_apart(Draft& draft, std::int64_t value) {
    draft.config_.*field = static_cast<int>(value);
  }
  template <auto field>
  static void set(Draft& draft, std::int64_t value) {
    set_apart<field>(draft, value);
    draft.counted_ = false;
  }
  static void set_ahead_kb(Draft& draft, std::int64_t value) {
    set_apart<&persistent_config::ahead>(draft, value * 1024);
  }
  static void set_input_kb(Draft& draft, std::int64_t value) {
    set<&persistent_config::input_limit>(draft, value * 1024);
  }

 private:
  void count_stages() const;

  mutable persistent_config config_;
  std::int64_t limit_;
  mutable bool counted_ = false;
};

/// Experts of a token, and parts of a shared expert, which are as large.
std::int64_t experts_of_token(const Problem& problem);

/// The first of the options that the kernel does not know.
std::optional<std::string> unknown_option(const Problem& problem, bool experts);

/// The configuration as a template argument.
std::string text_of(const persistent_config& c);

TypedSpace<Draft> drafts_of(const persistent_config& form, const DeviceFacts& facts);

}  // namespace fftune::layer
