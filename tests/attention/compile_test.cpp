// The CUDA families compiled for architectures that need not be here. Hidden, because it takes many
// minutes: run it with the tag [.compile] after a change of a kernel.
#include <iterator>
#include <memory>
#include <string>

#include "attention/problems.hpp"
#include "cuda/open.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The default of every family that serves the problem.
void compile_defaults(Compiler& compiler, const DeviceFacts& facts, const Problem& problem) {
  for (const Family* family : attention_op().families()) {
    if (family->device_kind() != DeviceKind::cuda || family->refusal(problem, facts)) continue;
    const Config config = family->default_config(problem, facts);
    CAPTURE(problem.text(), family->name(), config.text());
    const auto report = compiler.compile(family->program(problem, facts, config));
    CHECK(report.failure == "");
    for (const auto& kernel : report.kernels) {
      CAPTURE(kernel.name);
      CHECK((kernel.spill_bytes == 0 || family->is_fallback()));
    }
  }
}

void compile_random(const std::string& arch, int count) {
  const Environment environment = read_environment();
  const auto compiler = make_cuda_compiler(arch, *builtin_catalog().sources,
                                           {environment.cache_folder, environment.toolkit_folders});
  const DeviceFacts facts = facts_of_architecture(arch);
  Draw draw(5);
  for (int i = 0; i < count; ++i)
    compile_defaults(*compiler, facts,
                     random_attention(DeviceKind::cuda, draw, std::int64_t{1} << 20));
}

}  // namespace

TEST_CASE("random forms of attention compile for sm_90a", "[.compile]") {
  compile_random("sm_90a", 100);
}

TEST_CASE("random forms of attention compile for sm_80", "[.compile]") {
  compile_random("sm_80", 100);
}
