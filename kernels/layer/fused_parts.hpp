// A family of two parts of a layer: the last stage of one and the first of the next in one launch.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/gemm/engine.hpp"
#include "registry/op.hpp"

namespace fftune::layer {

/// A stage of a part, both by their names.
struct PartStage {
  std::string part, stage;

  std::string name() const { return part + "." + stage; }
};

/// The stages that such a family covers; the second part reads the result y of the first as its x.
struct FusedStages {
  std::string_view family, summary;
  PartStage first, second;
  const Engine& engine;  // of the product
};

class FusedParts : public Family {
 public:
  std::string_view name() const override { return of_.family; }
  std::string_view summary() const override { return of_.summary; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override { return {of_.first.name(), of_.second.name()}; }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return of_.engine.search.space(chain(parts(problem)), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return of_.engine.search.default_config(chain(parts(problem)), facts);
  }

 protected:
  struct Parts {
    OpPart first, second;
  };

  explicit FusedParts(FusedStages of) : of_(std::move(of)) {}

  /// Why the layer of these parts has not the two stages, one line.
  std::optional<std::string> refuse_parts(const std::vector<OpPart>& all) const;
  /// The two parts of a layer that is not refused.
  Parts parts(const Problem& problem) const;
  /// The product as the launch computes it.
  virtual GemmChain chain(const Parts& parts) const = 0;

  const FusedStages of_;
};

/// Appends a program to one of a layer; `names` are its tensors, by their names in the layer.
void append_in_layer(Program& program, Program from, const Problem& problem,
                     const std::vector<std::string>& names);

}  // namespace fftune::layer
