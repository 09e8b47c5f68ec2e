// Every CPU engine against float64: the list of cases.hpp, and chains of a gated layer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cpu/machine.hpp"
#include "cpu/pool.hpp"
#include "gemm/cases.hpp"
#include "kernels/gemm/engine.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr int threads = 3;

DeviceFacts cpu_facts() {
  DeviceFacts facts;
  facts.kind = DeviceKind::cpu;
  facts.arch = vector_isa();
  facts.multiprocessors = threads;
  facts.l2_bytes = 1 << 25;
  return facts;
}

/// The tensors of GEMMs in memory: encoded, and with bytes of 0xff, which are NaN in every type, in
/// outputs, in scratch and behind every tensor.
class Memory {
 public:
  Memory(std::vector<TensorSpec> specs, const ReferenceTensors& values) : specs_(std::move(specs)) {
    for (const TensorSpec& spec : specs_) {
      std::vector<std::byte> bytes(spec.bytes() + margin, std::byte{0xff});
      if (spec.role == Role::input || spec.role == Role::updated)
        encode(spec.dtype, values.at(spec.name), bytes.data());
      tensors_.push_back(std::move(bytes));
    }
  }

  void run(const Program& program, Parallel& parallel) {
    std::vector<std::vector<std::byte>> scratch;
    std::vector<void*> places;
    for (auto& bytes : tensors_) places.push_back(bytes.data());
    HostCall call{places.data(), {}, parallel};
    for (const Scratch& area : program.scratch)
      scratch.emplace_back(area.bytes + margin, std::byte{0xff});
    for (auto& area : scratch) call.scratch.push_back(area.data());
    for (const Step& step : program.steps) std::get<HostFunction>(step)(call);
    for (std::size_t i = 0; i < specs_.size(); ++i) check_margin(tensors_[i], specs_[i].bytes());
    for (std::size_t i = 0; i < scratch.size(); ++i)
      check_margin(scratch[i], program.scratch[i].bytes);
  }

  std::vector<double> values(std::string_view name) const {
    const std::size_t place = tensor_index(specs_, name);
    std::vector<double> values(static_cast<std::size_t>(specs_[place].elements()));
    decode(specs_[place].dtype, tensors_[place].data(), std::span<double>(values));
    return values;
  }
  const std::vector<TensorSpec>& specs() const { return specs_; }

 private:
  static constexpr std::size_t margin = 64;

  static void check_margin(const std::vector<std::byte>& bytes, std::size_t from) {
    for (std::size_t i = from; i < bytes.size(); ++i)
      if (bytes[i] != std::byte{0xff}) FAIL("bytes behind a tensor or a scratch area are written");
  }

  std::vector<TensorSpec> specs_;
  std::vector<std::vector<std::byte>> tensors_;
};

/// The default and the ends of the space.
std::vector<Config> default_and_ends(const Engine& engine, const GemmChain& chain,
                                     const DeviceFacts& facts) {
  if (engine.is_fallback) return {Config()};
  const Space space = engine.search.space(chain, facts);
  const auto feasible = space.feasible();
  REQUIRE_FALSE(feasible.empty());
  const Config usual = engine.search.default_config(chain, facts);
  REQUIRE(space.violations(usual).empty());
  return {usual, feasible.front(), feasible.back()};
}

Memory run(const Engine& engine, const GemmChain& chain, const Config& config,
           const std::vector<TensorSpec>& specs, const ReferenceTensors& inputs, Pool& pool) {
  Program program;
  const TensorPlaces places(specs);
  program.host_tensors = places.count();
  engine.append(program, chain, places, cpu_facts(), config);
  Memory memory(specs, inputs);
  memory.run(program, pool);
  return memory;
}

void check_case(const Engine& engine, const GemmCase& gemm_case, const ReferenceTensors& inputs,
                const ReferenceTensors& expected, const ReferenceTensors& magnitudes, Pool& pool) {
  const GemmProblem& gemm = gemm_case.gemm;
  const GemmChain chain{gemm};
  for (const Config& config : default_and_ends(engine, chain, cpu_facts())) {
    INFO(engine.name << ": " << gemm_case.name << " " << config.text());
    const Memory memory = run(engine, chain, config, tensors_of(gemm), inputs, pool);
    const auto wrong = wrong_output(gemm, expected, magnitudes,
                                    [&](const std::string& name) { return memory.values(name); });
    if (wrong) FAIL(*wrong);
  }
  SUCCEED();
}

/// Each engine serves each case, and agrees with its one reference.
void check_cases(const std::vector<const Engine*>& engines, const std::vector<GemmCase>& cases) {
  Pool pool(threads);
  for (const GemmCase& gemm_case : cases) {
    const ReferenceTensors inputs = draw_inputs(gemm_case, 7);
    ReferenceTensors expected = inputs, magnitudes;
    reference_gemm(gemm_case.gemm, expected, magnitudes);
    for (const Engine* engine : engines) {
      INFO(engine->name << ": " << gemm_case.name);
      CHECK_FALSE(engine->can_implement({gemm_case.gemm}, cpu_facts()));
      check_case(*engine, gemm_case, inputs, expected, magnitudes, pool);
    }
  }
}

/// Weights are scaled so that y is about 1.
void check_chain(const Engine& engine, const GemmChain& chain, Pool& pool) {
  const auto specs = tensors_of_chain(chain);
  ReferenceTensors inputs = draw_inputs({"", chain[0]}, 3), magnitudes;
  inputs.merge(draw_inputs({"", chain[1]}, 5));
  for (const TensorSpec& spec : specs)
    if (spec.name.starts_with("w_"))
      for (double& value : inputs.at(spec.name))
        value = round_to(spec.dtype, value / std::sqrt(static_cast<double>(spec.shape[1])));
  ReferenceTensors expected = inputs;
  reference_gemm(chain[0], expected, magnitudes);
  for (double& value : expected.at("hidden")) value = round_to(chain[0].c_dtype, value);
  reference_gemm(chain[1], expected, magnitudes);
  const bool is_f32 = chain[0].dtype == DType::f32;
  std::vector<Config> configs{Config()};
  if (!engine.is_fallback) configs = engine.search.space(chain, cpu_facts()).feasible();
  if (!engine.is_fallback)
    REQUIRE(engine.search.space(chain, cpu_facts())
                .violations(engine.search.default_config(chain, cpu_facts()))
                .empty());
  for (const Config& config : configs) {
    INFO(engine.name << " m " << chain[0].m << " d " << chain[0].k << " h " << chain[0].n << " "
                     << dtype_name(chain[0].dtype) << " " << config.text());
    const Memory memory = run(engine, chain, config, specs, inputs, pool);
    for (const char* name : {"y", "gate", "up"}) {
      if (!find_tensor(specs, name)) continue;
      const auto got = memory.values(name);
      const auto& exact = expected.at(name);
      double error = 0, size = 0;
      for (std::size_t i = 0; i < got.size(); ++i) {
        error += (got[i] - exact[i]) * (got[i] - exact[i]);
        size += exact[i] * exact[i];
      }
      INFO(name);
      REQUIRE(std::sqrt(error) <= (is_f32 ? 2e-6 : 4e-3) * std::sqrt(size));
    }
  }
}

}  // namespace

TEST_CASE("cpu_blas and cpu_plain: every form, grouping and epilogue is the one of float64") {
  for (const DType dtype : {DType::f32, DType::bf16})
    check_cases({&cpu_blas_engine, &cpu_plain_engine}, gemm_cases(dtype));
}

TEST_CASE("cpu_plain: fp8 with scales of tensors and of blocks") {
  check_cases({&cpu_plain_engine}, quantised_gemm_cases());
  check_cases({&cpu_plain_engine}, grouped_quantised_gemm_cases());
}

TEST_CASE("a gated layer's chain on every CPU engine, in every configuration") {
  Pool pool(threads);
  for (const Engine* engine :
       {&cpu_blas_engine, &cpu_plain_engine, &cpu_stream_engine, &cpu_tiles_engine}) {
    int served = 0;
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const std::int64_t m : {1, 3, 8, 45, 150}) {
        const GemmChain chain = gated_layer(dtype, m, 97, 300);
        if (engine->can_implement(chain, cpu_facts())) continue;
        check_chain(*engine, chain, pool);
        ++served;
      }
    CHECK(served >= 6);
  }
}

TEST_CASE("a fused chain stores gate and up, and adds bias and source to y") {
  Pool pool(threads);
  for (const Engine* engine : {&cpu_blas_engine, &cpu_plain_engine})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const std::int64_t m : {1, 45, 150}) {
        GemmChain chain = gated_layer(dtype, m, 97, 300);
        chain[0].epilogue.gate = "gate";
        chain[0].epilogue.up = "up";
        chain[1].epilogue.row(row_broadcast::bias) = "bias";
        chain[1].epilogue.source = {{"residual"}};
        check_chain(*engine, chain, pool);
        for (const Engine* plain_only : {&cpu_stream_engine, &cpu_tiles_engine})
          CHECK(plain_only->can_implement(chain, cpu_facts()).has_value());
      }
}

TEST_CASE("a masked layer's chain: the intermediate in the order of the mask") {
  Pool pool(threads);
  for (const Engine* engine : {&cpu_blas_engine, &cpu_plain_engine})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      GemmChain chain = gated_layer(dtype, 150, 97, 200);
      for (GemmProblem& gemm : chain) {
        gemm.groups = {.by = Grouping::rows, .count = 2, .mask = "mask"};
        for (TensorNames& names : gemm.b)
          names = {names[0], names[0] == "w_gate" ? "w_gate_false"
                             : names[0] == "w_up" ? "w_up_false"
                                                  : "w_down_false"};
      }
      chain[0].c_sorted = chain[1].a_sorted = true;
      const auto specs = tensors_of_chain(chain);
      const GemmCase first{"", chain[0], {60, 90}}, second{"", chain[1], {60, 90}};
      ReferenceTensors inputs = draw_inputs(first, 3), magnitudes;
      inputs.merge(draw_inputs(second, 5));
      ReferenceTensors expected = inputs;
      for (const GemmProblem& gemm : chain) reference_gemm(gemm, expected, magnitudes);
      for (const Config& config : default_and_ends(*engine, chain, cpu_facts())) {
        const auto got = run(*engine, chain, config, specs, inputs, pool).values("y");
        double error = 0, size = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          error += std::pow(got[i] - expected.at("y")[i], 2);
          size += std::pow(expected.at("y")[i], 2);
        }
        CHECK(std::sqrt(error / size) <= (dtype == DType::f32 ? 2e-6 : 4e-3));
      }
    }
}

TEST_CASE("engines of f32 products refuse fp8, and those of a gated layer everything else") {
  for (const GemmCase& gemm_case : quantised_gemm_cases())
    CHECK(cpu_blas_engine.can_implement({gemm_case.gemm}, cpu_facts()).has_value());
  for (const GemmCase& gemm_case : gemm_cases(DType::f32))
    for (const Engine* engine : {&cpu_stream_engine, &cpu_tiles_engine})
      CHECK(engine->can_implement({gemm_case.gemm}, cpu_facts()).has_value());
}
