// A launch has the arguments that its kernel takes: as many, each as large. A driver would say so
// only on a GPU.
#include <cstddef>
#include <regex>
#include <string>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/ptx.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The sizes in bytes of the parameters of the only kernel of a text.
std::vector<std::size_t> parameters_of(const std::string& ptx) {
  std::smatch entry;
  REQUIRE(std::regex_search(ptx, entry, std::regex(R"(\.entry\s+\S+\(([^)]*)\))")));
  const std::string list = entry[1];
  // ".param .u64 name", or ".param .align 8 .b8 name[24]"
  static const std::regex parameter(
      R"(\.param\s+(\.align\s+\d+\s+)?\.[a-z](\d+)\s+\w+(\[(\d+)\])?)");
  std::vector<std::size_t> bytes;
  for (std::sregex_iterator each(list.begin(), list.end(), parameter), end; each != end; ++each)
    bytes.push_back(std::stoul((*each)[2]) / 8 *
                    ((*each)[4].matched ? std::stoul((*each)[4]) : std::size_t{1}));
  return bytes;
}

/// The PTX of one kernel of a program; none without NVRTC.
std::string ptx_of_kernel(const Program& program, std::size_t kernel) {
  Program one;
  one.kernels = {program.kernels[kernel]};
  KernelLaunch launch;
  launch.block.x = 32;
  one.steps.emplace_back(launch);
  try {
    return ptx_of(one, *builtin_catalog().sources);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    return "";
  }
}

void check_launches(const Program& program) {
  for (const Step& step : program.steps) {
    const auto* const launch = std::get_if<KernelLaunch>(&step);
    if (!launch || launch->arguments.empty()) continue;
    const std::string ptx = ptx_of_kernel(program, launch->kernel);
    if (ptx.empty()) continue;
    CAPTURE(program.kernels[launch->kernel].expression);
    std::vector<std::size_t> given;
    for (const Argument& argument : launch->arguments) given.push_back(argument_bytes(argument));
    CHECK(given == parameters_of(ptx));
  }
}

}  // namespace

TEST_CASE("the launches of ops of linear attention have the arguments of their kernels") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  for (const char* name : {"causal-conv1d", "gated-rmsnorm"}) {
    const Op& op = builtin_catalog().op(name);
    for (const Family* family : op.families())
      for (const std::string& pass : op.passes()) {
        if (family->device_kind() != DeviceKind::cuda) continue;
        const auto problem = small_problem(op, *family, pass, DType::bf16, {}, facts);
        if (!problem) continue;
        CAPTURE(problem->text(), family->name());
        check_launches(family->program(*problem, facts, family->default_config(*problem, facts)));
      }
  }
}
