// The host side of the kernels of gated-delta-rule: their form and parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"
#include "kernels/gated_delta_rule/params.cuh"

namespace fftune::gated_delta_rule {

/// A delta_rule_form as a template argument.
std::string template_argument(const Layer& layer);

/// A delta_rule_params of the problem.
ParameterStruct parameters_of(const Problem& problem);
/// Sets the sizes, and the tensors that have the same names in all ops with such a state.
void set_layer(const Layer& layer, const TensorPlaces& places,
               ParameterFields<delta_rule_params>& fields);

// The space of kernels with a state in the registers of warps (recurrent_tile.cuh).
Space recurrent_space(const Layer& layer, const DeviceFacts& facts);
Config recurrent_default(const Layer& layer, const DeviceFacts& facts);
/// A delta_recurrent_config as a template argument.
std::string recurrent_argument(const Config& config);
/// CTAs that share the rows of a state.
std::int64_t blocks_of_state(const Layer& layer, const Config& config);
/// The family with them: `recurrent`, or with pass "bwd" `recurrent_backward`.
StageFamily recurrent_family(std::string_view pass, std::vector<std::string> sources,
                             SearchSide<Problem> search,
                             decltype(StageFamilyFacts::program) program);
/// Appends the forward kernel `prefix`recurrent, or for one token of each sequence `prefix`decode.
struct ForwardFiles {
  const char* recurrent;
  const char* decode;
};
void append_forward(Program& program, const DeviceFacts& facts, const ForwardFiles& files,
                    const std::string& prefix, const std::string& form, const Layer& layer,
                    const Config& config, ParameterStruct parameters);
/// Appends the walks of a pass back (recurrent_walk.cuh): the kernels `file`: `prefix`checkpoints
/// and reverse. Their scratch memory joins the parameters, which have a delta_backward_params at 0.
void append_walks(Program& program, ParameterStruct& parameters, const DeviceFacts& facts,
                  const char* file, const std::string& prefix, const std::string& form,
                  const Layer& layer, const Config& config);

KernelLaunch& append_launch(Program& program, const DeviceFacts& facts, const char* file,
                            const std::string& expression, std::int64_t ctas, std::int64_t threads,
                            ParameterStruct parameters);

}  // namespace fftune::gated_delta_rule
