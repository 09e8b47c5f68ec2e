// Random forms of the CUDA families, compiled for architectures that need not be here.
#include <memory>
#include <string>

#include "attention/problems.hpp"
#include "core/error.hpp"
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
    CHECK(compiler.compile(family->program(problem, facts, config)).failure == "");
  }
}

void compile_random(const std::string& arch) {
  const Environment environment = read_environment();
  std::unique_ptr<Compiler> compiler;
  try {
    compiler = make_cuda_compiler(arch, *builtin_catalog().sources,
                                  {environment.cache_folder, environment.toolkit_folders});
  } catch (const Error& error) {
    FFTUNE_SKIP(error.what());
  }
  // A kernel of wgmma takes some ten seconds.
  constexpr int count = 4;
  Draw draw(5);
  for (int i = 0; i < count; ++i)
    compile_defaults(*compiler, facts_of_architecture(arch),
                     random_attention(DeviceKind::cuda, draw, std::int64_t{1} << 20));
}

}  // namespace

TEST_CASE("random forms of attention compile for sm_90a") {
  compile_random("sm_90a");
}

TEST_CASE("random forms of attention compile for sm_80") {
  compile_random("sm_80");
}
