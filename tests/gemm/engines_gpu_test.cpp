// Every CUDA engine against float64: the list of cases.hpp and the chain of a gated layer, with
// poisoned outputs between guard regions.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gemm/cases.hpp"
#include "kernels/gemm/engine.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/gemm/padded/padded.hpp"
#include "support/catch.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// A GEMM, or a chain, on an engine in one configuration.
struct Run {
  const Engine* engine;
  GemmCase gemm_case;  // of a chain the last
  GemmChain chain;
  Config config;
  CompileResult compiled = {};

  std::string text() const {
    return std::string(engine->name) + ": " + gemm_case.name + " " + config.text();
  }
};

/// The tensors on the device, each between guard regions; what is no input, the guards and the
/// workspace are bytes of 0xff, which are NaN in every type.
class DeviceMemory {
 public:
  DeviceMemory(Backend& backend, std::vector<TensorSpec> specs, const ReferenceTensors& inputs)
      : backend_(backend), specs_(std::move(specs)) {
    for (const TensorSpec& spec : specs_) {
      std::vector<std::byte> bytes(spec.bytes() + 2 * guard, std::byte{0xff});
      if (spec.role == Role::input || spec.role == Role::updated)
        encode(spec.dtype, inputs.at(spec.name), bytes.data() + guard);
      buffers_.push_back(backend.allocate(bytes.size()));
      backend.write(buffers_.back()->data(), bytes.data(), bytes.size());
      before_.push_back(std::move(bytes));
      addresses_.push_back(static_cast<std::byte*>(buffers_.back()->data()) + guard);
    }
  }

  void run(const Executable& executable) {
    const std::size_t bytes = executable.workspace_bytes();
    const auto workspace = backend_.allocate(bytes + guard);
    backend_.fill(workspace->data(), 0xff, bytes + guard);
    executable.enqueue(addresses_.data(), workspace->data(), backend_.stream());
    backend_.synchronize();
    std::vector<std::byte> behind(guard);
    backend_.read(behind.data(), static_cast<std::byte*>(workspace->data()) + bytes, guard);
    CHECK(behind == std::vector<std::byte>(guard, std::byte{0xff}));
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      std::vector<std::byte> after(before_[i].size());
      backend_.read(after.data(), buffers_[i]->data(), after.size());
      // All of what the engine must not write.
      const std::size_t own = specs_[i].role == Role::input ? 0 : specs_[i].bytes();
      INFO(specs_[i].name);
      CHECK(std::equal(after.begin(), after.begin() + guard, before_[i].begin()));
      CHECK(std::equal(after.begin() + static_cast<std::ptrdiff_t>(guard + own), after.end(),
                       before_[i].begin() + static_cast<std::ptrdiff_t>(guard + own)));
      after_.push_back(std::move(after));
    }
  }

  std::vector<double> values(std::string_view name) const {
    const std::size_t place = tensor_index(specs_, name);
    std::vector<double> values(static_cast<std::size_t>(specs_[place].elements()));
    decode(specs_[place].dtype, after_.at(place).data() + guard, std::span<double>(values));
    return values;
  }

 private:
  static constexpr std::ptrdiff_t guard = 256;

  Backend& backend_;
  std::vector<TensorSpec> specs_;
  std::vector<std::vector<std::byte>> before_, after_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::vector<void*> addresses_;
};

/// The default, and of the others some that differ from run to run of the list, not of the program.
std::vector<Config> default_and_random(const Engine& engine, const GemmChain& chain,
                                       const DeviceFacts& facts, std::mt19937& random) {
  if (engine.is_fallback) return {Config()};
  std::vector<Config> configs{engine.search.default_config(chain, facts)};
  const Space space = engine.search.space(chain, facts);
  CHECK(space.violations(configs.front()).empty());
  const auto feasible = space.feasible();
  REQUIRE_FALSE(feasible.empty());
  if (random() % 2 == 0) configs.push_back(feasible[random() % feasible.size()]);
  return configs;
}

std::vector<Run> runs_of(const Engine& engine, const std::vector<GemmCase>& cases,
                         const DeviceFacts& facts, std::mt19937& random) {
  std::vector<Run> runs;
  for (const GemmCase& gemm_case : cases) {
    const GemmChain chain{gemm_case.gemm};
    if (engine.can_implement(chain, facts)) continue;
    for (Config& config : default_and_random(engine, chain, facts, random))
      runs.push_back({&engine, gemm_case, chain, std::move(config)});
  }
  return runs;
}

/// Compiles on all cores.
void compile(Backend& backend, std::vector<Run>& runs, const DeviceFacts& facts) {
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < runs.size(); i = next++) {
      Program program;
      const TensorPlaces places(tensors_of_chain(runs[i].chain));
      runs[i].engine->append(program, runs[i].chain, places, facts, runs[i].config);
      runs[i].compiled = backend.compile(program);
    }
  };
  std::vector<std::thread> threads(std::max(1u, std::thread::hardware_concurrency()));
  for (std::thread& thread : threads) thread = std::thread(work);
  for (std::thread& thread : threads) thread.join();
}

/// Sums of fp8 products are kept in fewer bits within a K block by wgmma.
double accumulation_of(const Run& run) {
  return run.engine->name == "sm90" && run.gemm_case.gemm.dtype == DType::fp8 ? 1e-3 : 4e-6;
}

void check(Backend& backend, const Run& run) {
  INFO(run.text());
  REQUIRE(run.compiled.report.failure == "");
  const GemmProblem& gemm = run.gemm_case.gemm;
  const ReferenceTensors inputs = draw_inputs(run.gemm_case, 7);
  ReferenceTensors expected = inputs, magnitudes;
  reference_gemm(gemm, expected, magnitudes);
  DeviceMemory memory(backend, tensors_of(gemm), inputs);
  memory.run(*run.compiled.executable);
  const auto wrong = wrong_output(
      gemm, expected, magnitudes, [&](const std::string& name) { return memory.values(name); },
      accumulation_of(run));
  if (wrong) FAIL_CHECK(*wrong);
}

void check_all(Backend& backend, const Engine& engine, const std::vector<GemmCase>& cases,
               std::size_t least, const DeviceFacts& facts) {
  std::mt19937 random(11);
  auto runs = runs_of(engine, cases, facts, random);
  CHECK(runs.size() >= least);
  compile(backend, runs, facts);
  for (const Run& run : runs) check(backend, run);
}

/// The device as another architecture: on compute capability 9.0 the sm80 engine leaves all but few
/// tokens to wgmma, and its splits meet in a workspace before that, in clusters after.
DeviceFacts as_architecture(DeviceFacts facts, int compute_capability) {
  facts.compute_capability = compute_capability;
  return facts;
}

}  // namespace

TEST_CASE("sm90: every form, grouping and epilogue is the one of float64", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  if (facts.compute_capability != 90) FFTUNE_SKIP("wgmma needs compute capability 9.0");
  for (const DType dtype : {DType::bf16, DType::fp16})
    check_all(*backend, sm90_engine, gemm_cases(dtype, 8), 300, facts);
  auto quantised = quantised_gemm_cases();
  for (GemmCase& one : quantised) {  // rows of 16 bytes, of fp8 too
    one.gemm.n = ceil_div(one.gemm.n, 16) * 16;
    one.gemm.k = ceil_div(one.gemm.k, 16) * 16;
  }
  check_all(*backend, sm90_engine, quantised, quantised.size(), facts);
  // With scattered groups the space has more parameters.
  auto scattered = gemm_cases(DType::bf16, 8);
  std::erase_if(scattered, [](const GemmCase& one) { return !one.gemm.groups.any(); });
  for (GemmCase& one : scattered) one.gemm.groups.scattered = true;
  check_all(*backend, sm90_engine, scattered, 200, facts);
}

TEST_CASE("sm90: MMAs are as wide as the rows of a group's tiles need", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  if (facts.compute_capability != 90) FFTUNE_SKIP("wgmma needs compute capability 9.0");
  std::vector<Run> runs;
  for (const GemmCase& one : uneven_gemm_cases(DType::bf16)) {
    const GemmChain chain{one.gemm};
    std::set<std::vector<int>> seen;
    for (const Config& config : sm90_engine.search.space(chain, facts).feasible()) {
      const int height = config.get("bm");
      const bool levels = config.word("schedule") == "swap_ab" && (height == 144 || height == 176);
      if (levels && seen.insert({height, config.get("cluster_m"), config.get("cluster_n")}).second)
        runs.push_back({&sm90_engine, one, chain, config});
    }
  }
  CHECK(runs.size() >= 12);
  compile(*backend, runs, facts);
  for (const Run& run : runs) check(*backend, run);
}

TEST_CASE("one GEMM of every compile-time form, for compute-sanitizer", "[gpu][forms]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  std::vector<Run> runs;
  for (const Engine* engine : {&sm90_engine, &sm80_engine, &decode_engine, &simt_engine}) {
    // The sm80 engine leaves compute capability 9.0 to wgmma.
    const DeviceFacts own = engine == &sm80_engine ? as_architecture(facts, 80) : facts;
    std::set<std::string> seen;
    auto cases = gemm_cases(DType::bf16, 8);
    for (GemmCase& one : cases) {
      one.gemm.groups.scattered = one.gemm.groups.any();
      const GemmChain chain{one.gemm};
      if (engine->can_implement(chain, own)) continue;
      if (!seen.insert(template_argument(form_of(one.gemm))).second) continue;
      Config config = engine->is_fallback ? Config() : engine->search.default_config(chain, own);
      runs.push_back({engine, one, chain, std::move(config)});
    }
    CHECK(!seen.empty());
  }
  compile(*backend, runs, facts);
  for (const Run& run : runs) check(*backend, run);
}

TEST_CASE("sm80: every form, grouping and epilogue is the one of float64", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  check_all(*backend, sm80_engine, gemm_cases(DType::bf16, 8), 300, as_architecture(facts, 80));
  if (facts.compute_capability >= 90)
    check_all(*backend, sm80_engine, gemm_cases(DType::fp16, 8), 300, as_architecture(facts, 100));
}

TEST_CASE("padded: every form, grouping and epilogue at any size", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    if (facts.compute_capability == 90)
      check_all(*backend, padded_sm90_engine, gemm_cases(dtype), 250, facts);
    check_all(*backend, padded_sm80_engine, gemm_cases(dtype), 250, as_architecture(facts, 80));
  }
}

TEST_CASE("unaligned decode: up to 16 rows of every epilogue at any size", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const std::int64_t m : {1, 8, 13, 16})
      for (const std::int64_t k : {517, 518, 520, 1004, 7}) {
        auto cases = gemm_cases(dtype);
        std::erase_if(cases, [](const GemmCase& one) { return one.gemm.groups.any(); });
        for (GemmCase& one : cases) {
          one.gemm.m = m, one.gemm.k = k;
          one.gemm.n = one.gemm.n / 8 * 8 + 3;
        }
        check_all(*backend, unaligned_decode_engine, cases, 8, backend->facts());
      }
}

TEST_CASE("unaligned rows: a NaN in a row of A or B stays in its row or column", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  constexpr std::size_t row = 5, token = 1, n = 43;
  for (const std::int64_t k : {7, 517, 1030, 1032})
    for (const Engine* engine : {&padded_sm90_engine, &unaligned_decode_engine}) {
      GemmProblem gemm{.m = 3, .n = n, .k = k};
      gemm.a = {{"a"}}, gemm.b = {{"b"}}, gemm.c = {{"c"}};
      ReferenceTensors inputs = draw_inputs({"", gemm}, 3);
      for (std::size_t i = 0; i < static_cast<std::size_t>(k); ++i) {
        inputs.at("a")[token * static_cast<std::size_t>(k) + i] = NAN;
        inputs.at("b")[row * static_cast<std::size_t>(k) + i] = NAN;
      }
      if (engine->can_implement({gemm}, backend->facts())) continue;
      const Config untuned = engine->search.default_config({gemm}, backend->facts());
      std::vector<Run> runs{{engine, {"NaN", gemm}, {gemm}, untuned}};
      if (untuned.contains("staged") && k % 8 != 0) {
        Config other = untuned;
        other.set("staged", 1 - untuned.at("staged"));
        runs.push_back({engine, {"NaN", gemm}, {gemm}, other});
      }
      compile(*backend, runs, backend->facts());
      for (const Run& run : runs) {
        CAPTURE(run.text());
        REQUIRE(run.compiled.report.failure == "");
        DeviceMemory memory(*backend, tensors_of(gemm), inputs);
        memory.run(*run.compiled.executable);
        const auto c = memory.values("c");
        for (std::size_t i = 0; i < c.size(); ++i)
          CHECK(std::isnan(c[i]) == (i % n == row || i / n == token));
      }
    }
}

TEST_CASE("unaligned decode: groups of k, their rest, and both ways to shift tokens",
          "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  std::vector<Run> runs;
  for (const std::int64_t m : {1, 11})
    for (const std::int64_t k : {5, 127, 517, 1028, 1032, 2177}) {
      GemmProblem gemm{.m = m, .n = 75, .k = k};
      gemm.a = {{"a"}}, gemm.b = {{"b"}}, gemm.c = {{"c"}};
      const Space space = unaligned_decode_engine.search.space({gemm}, facts);
      for (const int staged : {0, 1})
        for (const int rows : {8, 16})
          for (const int unroll : {1, 4}) {
            const Config config{
                {"rows", rows}, {"warps", 4}, {"unroll", unroll}, {"staged", staged}};
            if (space.violations(config).empty())
              runs.push_back({&unaligned_decode_engine, {"", gemm}, {gemm}, config});
          }
    }
  CHECK(runs.size() > 40);
  compile(*backend, runs, facts);
  for (const Run& run : runs) check(*backend, run);
}

TEST_CASE("unaligned rows: some forms and epilogues", "[gpu][small]") {
  FFTUNE_FIRST_CUDA(backend);
  const DeviceFacts& facts = backend->facts();
  for (const Engine* engine :
       {&padded_sm90_engine, &padded_sm80_engine, &unaligned_decode_engine}) {
    const DeviceFacts own = engine == &padded_sm80_engine ? as_architecture(facts, 80) : facts;
    std::set<std::string> seen;
    std::vector<Run> runs;
    for (GemmCase& one : gemm_cases(DType::bf16)) {
      if (engine == &unaligned_decode_engine) one.gemm.m = 11;
      const GemmChain chain{one.gemm};
      if (engine->can_implement(chain, own)) continue;
      if (!seen.insert(template_argument(form_of(one.gemm))).second) continue;
      if (engine != &unaligned_decode_engine && seen.size() % 16 != 1) continue;
      runs.push_back({engine, one, chain, engine->search.default_config(chain, own)});
    }
    compile(*backend, runs, facts);
    for (const Run& run : runs) check(*backend, run);
  }
}

TEST_CASE("decode: up to 16 rows of every epilogue", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const std::int64_t m : {1, 8, 13, 16}) {
      auto cases = gemm_cases(dtype, 8);
      for (GemmCase& one : cases) one.gemm.m = m;
      std::erase_if(cases, [](const GemmCase& one) { return one.gemm.groups.any(); });
      check_all(*backend, decode_engine, cases, 12, backend->facts());
    }
}

TEST_CASE("simt: every form, grouping and epilogue at any size", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::f32, DType::bf16, DType::fp16}) {
    const auto cases = gemm_cases(dtype);
    check_all(*backend, simt_engine, cases, cases.size(), backend->facts());
  }
  for (const auto& cases : {quantised_gemm_cases(), grouped_quantised_gemm_cases()})
    check_all(*backend, simt_engine, cases, cases.size(), backend->facts());
}

TEST_CASE("fused decode: both GEMMs of a gated layer, again and again", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  std::mt19937 random(3);
  std::vector<Run> runs;
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (const std::int64_t m : {1, 5, 8}) {
      const GemmChain chain = gated_layer(dtype, m, 520, 1000);
      REQUIRE_FALSE(fused_decode_engine.can_implement(chain, backend->facts()).has_value());
      for (const Config& config :
           fused_decode_engine.search.space(chain, backend->facts()).feasible())
        if (random() % 3 == 0)
          runs.push_back({&fused_decode_engine, {"gated layer", chain[1]}, chain, config});
    }
  CHECK(runs.size() >= 6);
  compile(*backend, runs, backend->facts());
  for (const Run& run : runs) {
    INFO(run.text());
    REQUIRE(run.compiled.report.failure == "");
    const GemmChain& chain = run.chain;
    ReferenceTensors inputs = draw_inputs({"", chain[0]}, 3), magnitudes;
    inputs.merge(draw_inputs({"", chain[1]}, 5));
    for (const char* name : {"w_gate", "w_up", "w_down"})
      for (double& value : inputs.at(name)) value = round_to(chain[0].dtype, value / 24);
    ReferenceTensors expected = inputs;
    reference_gemm(chain[0], expected, magnitudes);
    reference_gemm(chain[1], expected, magnitudes);
    auto specs = tensors_of_chain(chain);
    for (int repeat = 0; repeat < 2; ++repeat) {
      DeviceMemory memory(*backend, specs, inputs);
      memory.run(*run.compiled.executable);
      const auto y = memory.values("y");
      double error = 0, size = 0;
      for (std::size_t i = 0; i < y.size(); ++i) {
        error += std::pow(y[i] - expected.at("y")[i], 2);
        size += std::pow(expected.at("y")[i], 2);
      }
      CHECK(std::sqrt(error) <= 4e-3 * std::sqrt(size));
    }
  }
}
