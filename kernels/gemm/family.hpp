// A family of GEMM stages: an engine applied to one stage of an op, or to several in a row.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/gemm/engine.hpp"
#include "registry/family.hpp"
#include "registry/op.hpp"

namespace fftune {

/// A stage of an op that is one GEMM.
struct GemmStage {
  std::string_view name;  // "gate_up"
  const Op& (*op)() = nullptr;
  /// Only called for problems that have the stage.
  GemmProblem (*gemm)(const Problem&) = nullptr;
  /// The one pass in which the family serves it; empty: every pass that has the stage.
  std::string_view pass = {};
  /// It is for problems with packed weights, or with quantised tokens, alone.
  bool packed = false;
};

/// The stage as the op lists it: every tensor of the GEMM by its name, and what it counts.
/// `tensors` are the op's.
StageSpec stage_spec(std::string_view name, const GemmProblem& gemm,
                     const std::vector<TensorSpec>& tensors);

class GemmFamily final : public Family {
 public:
  /// `summary` is a string literal. A problem must have every stage in `stages`.
  GemmFamily(const Engine& engine, std::vector<GemmStage> stages, std::string name,
             std::string_view summary);

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return engine_.device_kind; }
  std::vector<std::string> stages() const override;
  bool is_fallback() const override { return engine_.is_fallback; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override;
  Space space(const Problem&, const DeviceFacts&) const override;
  Config default_config(const Problem&, const DeviceFacts&) const override;
  std::optional<double> estimate(const Problem&, const DeviceFacts&, const Config&) const override;
  bool is_preferred(const Problem&, const DeviceFacts&) const override;
  Program program(const Problem&, const DeviceFacts&, const Config&) const override;
  std::vector<std::string> sources() const override { return sources_of(engine_); }

 private:
  GemmChain chain(const Problem&) const;

  const Engine& engine_;
  std::vector<GemmStage> stages_;
  std::string name_;
  std::string_view summary_;
};

// Summaries of families of several ops.
constexpr const char* mma_sync_summary =
    "mma.sync and cp.async, transposed operands by ldmatrix.trans";
constexpr const char* simt_summary = "any sizes, alignment and type: the fallback";
constexpr const char* blas_summary = "blocks over OpenBLAS, each finished where it is made";
constexpr const char* plain_summary = "plain loops for any sizes: the fallback";

/// A line of an op's table of families: a family of all of its stages; or, if the name has {}, one
/// for each of them, with the stage's name in that place.
struct GemmRow {
  const Engine& engine;
  std::vector<GemmStage> stages;
  std::string_view name, summary;  // literals
};
std::vector<GemmFamily> families_of(const std::vector<GemmRow>& rows);

}  // namespace fftune
