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

template <typename Compile>
void with_compiler(const std::string& arch, const Compile& compile) {
  const Environment environment = read_environment();
  std::unique_ptr<Compiler> compiler;
  try {
    compiler = make_cuda_compiler(arch, *builtin_catalog().sources,
                                  {environment.cache_folder, environment.toolkit_folders});
  } catch (const Error& error) {
    FFTUNE_SKIP(error.what());
  }
  const DeviceFacts facts = facts_of_architecture(arch);
  compile([&](const Problem& problem) { compile_defaults(*compiler, facts, problem); });
}

void compile_random(const std::string& arch) {
  // A kernel of wgmma takes some ten seconds.
  constexpr int count = 4;
  with_compiler(arch, [&](const auto& compile) {
    Draw draw(5);
    for (int i = 0; i < count; ++i)
      compile(random_attention(DeviceKind::cuda, draw, std::int64_t{1} << 20));
  });
}

/// Heads in accesses of 4 and 8 bytes, and of more features than registers hold.
void compile_head_dims(const std::string& arch) {
  with_compiler(arch, [](const auto& compile) {
    const auto problem = [](const char* pass, DType dtype, std::int64_t s, std::int64_t dim,
                            std::map<std::string, std::int64_t> more,
                            std::map<std::string, std::string> options) {
      more.insert({{"s", s}, {"kv", 300}, {"b", 3}, {"heads", 4}, {"kv-heads", 2}, {"dim", dim}});
      options.emplace("mask", "causal");
      return attention_problem(DeviceKind::cuda, pass, dtype, std::move(more), std::move(options));
    };
    compile(problem("fwd", DType::bf16, 1, 20, {{"page", 16}, {"window", 40}},
                    {{"lengths", "yes"}, {"sinks", "yes"}, {"lse", "yes"}}));
    compile(problem("fwd", DType::fp16, 2, 6, {}, {}));
    compile(problem("fwd", DType::fp16, 300, 10, {}, {{"layout", "thd"}}));
    compile(problem("fwd", DType::bf16, 300, 100, {{"page", 64}}, {{"sinks", "yes"}}));
    compile(problem("bwd", DType::bf16, 300, 100, {}, {{"softcap", "5"}}));
    compile(problem("fwd", DType::bf16, 300, 72, {{"page", 16}}, {{"lse", "yes"}}));
    compile(problem("fwd", DType::fp16, 300, 66, {}, {{"layout", "thd"}, {"lse", "yes"}}));
    compile(problem("bwd", DType::bf16, 300, 152, {}, {{"layout", "thd"}}));
    compile(problem("fwd", DType::bf16, 300, 512, {}, {}));
    compile(problem("fwd", DType::fp16, 300, 328, {{"page", 16}}, {{"lse", "yes"}}));
    compile(problem("fwd", DType::bf16, 60, 330, {{"page", 16}}, {{"bias", "yes"}}));
  });
}

}  // namespace

TEST_CASE("random forms of attention compile for sm_90a") {
  compile_random("sm_90a");
}

TEST_CASE("random forms of attention compile for sm_80") {
  compile_random("sm_80");
}

TEST_CASE("attention of heads of every alignment compiles for sm_90a") {
  compile_head_dims("sm_90a");
}

TEST_CASE("attention of heads of every alignment compiles for sm_80") {
  compile_head_dims("sm_80");
}
