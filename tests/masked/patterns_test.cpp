// Every family over every kind of mask, and over numbers of tokens that no tile divides.
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernels/masked/masked.hpp"
#include "masked/problems.hpp"
#include "support/verify_variants.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// All and none, one token at either end, blocks, alternating, random at five densities.
std::vector<std::string> masks_of(std::int64_t m) {
  const std::string one = std::to_string(1 / static_cast<double>(m));
  return {"all",      "none",        "block:" + one, "tail:" + one, "block:0.33", "tail:0.6",
          "even:0.5", "random:0.02", "random:0.2",   "random:0.5",  "random:0.8", "random:0.98"};
}

/// Forms of masked-ffn's backward pass.
const std::vector<Options> backward_forms{{},
                                          {{"save", "input"}},
                                          {{"accumulate", "yes"}, {"act", "gelu"}},
                                          {{"frozen", "yes"}},
                                          {{"save", "input"}, {"frozen", "yes"}}};
/// The same of masked-linear's.
const std::vector<Options> linear_forms{{}, {{"accumulate", "yes"}}, {{"frozen", "yes"}}};

/// One compiled variant and the stages that it covers.
struct Candidate {
  std::string id;
  std::size_t first = 0, count = 0;
  std::shared_ptr<const Executable> executable;
};

using Choice = std::function<bool(const Config&)>;

bool any(const Config&) {
  return true;
}

/// Every family that serves the problem: its default, and `more` configurations drawn at random,
/// of those that are wanted.
std::vector<Candidate> candidates_of(Backend& backend, const Op& op, const Problem& problem,
                                     std::mt19937_64& random, int more,
                                     const Choice& wanted = any) {
  const DeviceFacts& facts = backend.facts();
  const auto stages = op.stages(problem);
  std::vector<Candidate> candidates;
  std::vector<std::future<CompileResult>> compilations;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind || family->refusal(problem, facts)) continue;
    const std::size_t first = first_stage_of(*family, stages);
    std::vector<Config> configs{family->default_config(problem, facts)};
    std::erase_if(configs, std::not_fn(wanted));
    auto feasible = family->space(problem, facts).feasible();
    std::erase_if(feasible, std::not_fn(wanted));
    for (int i = 0; i < more && !feasible.empty(); ++i)
      configs.push_back(feasible[random() % feasible.size()]);
    for (const Config& config : configs) {
      candidates.push_back({Variant{std::string(family->name()), config}.id(), first,
                            family->stages().size(), nullptr});
      compilations.push_back(std::async(
          std::launch::async, [&backend, program = family->program(problem, facts, config)] {
            return backend.compile(program);
          }));
    }
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const auto compiled = compilations[i].get();
    CAPTURE(problem.text(), candidates[i].id, compiled.report.failure);
    REQUIRE(compiled.executable);
    candidates[i].executable = compiled.executable;
  }
  return candidates;
}

/// Each variant under every mask; the problem's own is the one that they were chosen for.
int verify_masks(Backend& backend, const Op& op, Problem problem,
                 const std::vector<Candidate>& candidates, std::mt19937_64& random) {
  int verified = 0;
  for (const std::string& mask : masks_of(problem.size("m"))) {
    problem.options["mask"] = mask;
    Verifier verifier(backend, op, problem, random());
    for (const Candidate& candidate : candidates) {
      const auto result = verifier.verify(candidate.first, candidate.count, {candidate.executable});
      CAPTURE(problem.text(), candidate.id, result.failure, result.error, result.tolerance);
      CHECK(result.passed);
      ++verified;
    }
  }
  return verified;
}

/// A variant's kernels are compiled once, whatever the mask.
int verify_patterns(Backend& backend, const Op& op, DType dtype,
                    const std::vector<std::int64_t>& tokens, const std::vector<std::int64_t>& sizes,
                    int more, const std::string& pass = "fwd", const Options& options = {}) {
  std::mt19937_64 random(1);
  int verified = 0;
  for (const std::int64_t m : tokens) {
    const Problem problem =
        masked_problem(op, backend.facts().kind, dtype, m, sizes, "none", pass, options);
    verified += verify_masks(backend, op, problem,
                             candidates_of(backend, op, problem, random, more), random);
  }
  return verified;
}

/// The sums over tokens that are chosen for scattered ones: gathered by four warps, or sorted. A
/// section of each, so that one can be asked for by its name.
void verify_scattered(Backend& backend, const Op& op, DType dtype,
                      const std::vector<std::int64_t>& tokens,
                      const std::vector<std::int64_t>& sizes, int more,
                      const Options& options = {}) {
  for (const std::int64_t m : tokens)
    for (const auto& [parameter, value] : {std::pair{"gather_warps", 4}, {"pre_permute", 1}}) {
      const Problem problem =
          masked_problem(op, DeviceKind::cuda, dtype, m, sizes, "random:0.5", "bwd", options);
      DYNAMIC_SECTION(problem.text() << " " << parameter << "=" << value) {
        std::mt19937_64 random(1);
        const auto wanted = [name = parameter, at = value](const Config& config) {
          return config.contains(name) && config.at(name) == at;
        };
        const auto candidates = candidates_of(backend, op, problem, random, more, wanted);
        if (candidates.empty()) WARN("no family here has it");
        verify_masks(backend, op, problem, candidates, random);
      }
    }
}

}  // namespace

TEST_CASE("masked layers are right on the CPU under every mask") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const DType dtype : {DType::f32, DType::bf16}) {
    CHECK(verify_patterns(*backend, masked_linear_op(), dtype, {1, 2, 37, 130}, {72, 70}, 1) > 0);
    CHECK(verify_patterns(*backend, masked_ffn_op(), dtype, {1, 2, 131}, {40, 67}, 1) > 0);
    CHECK(verify_patterns(*backend, masked_ffn_op(), dtype, {131}, {40, 67}, 1, "fwd",
                          {{"save", "preact"}}) > 0);
    for (const Options& form : backward_forms)
      CHECK(verify_patterns(*backend, masked_ffn_op(), dtype, {1, 2, 131}, {40, 67}, 1, "bwd",
                            form) > 0);
    for (const Options& form : linear_forms)
      CHECK(verify_patterns(*backend, masked_linear_op(), dtype, {1, 2, 131}, {70, 33}, 1, "bwd",
                            form) > 0);
  }
}

TEST_CASE("a verification sees tokens that went through the wrong expert") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  const Op& op = masked_linear_op();
  const Problem problem =
      masked_problem(op, DeviceKind::cpu, DType::f32, 500, {16, 16}, "random:0.5");
  const Family& family = family_of(op, "cpu_plain");
  for (const bool swapped : {false, true}) {
    auto program = family.program(problem, backend->facts(), {});
    const auto right = std::get<HostFunction>(program.steps.front());
    program.steps.front() = HostFunction([=](const HostCall& call) {
      std::vector<void*> tensors(call.tensors, call.tensors + 5);
      if (swapped) std::swap(tensors[2], tensors[3]);
      right({tensors.data(), call.scratch, call.parallel});
    });
    Verifier verifier(*backend, op, problem, 1);
    const auto compiled = backend->compile(program);
    REQUIRE(compiled.executable);
    CHECK(verifier.verify(0, 1, {compiled.executable}).passed == !swapped);
  }
}

TEST_CASE("masked linear layers are right on a GPU under every mask", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::f32})
    CHECK(verify_patterns(*backend, masked_linear_op(), dtype, {1, 2, 131}, {72, 136}, 3) > 0);
  CHECK(verify_patterns(*backend, masked_linear_op(), DType::fp16, {2049}, {520, 264}, 8) > 0);
}

TEST_CASE("masked networks are right on a GPU under every mask", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const DType dtype : {DType::bf16, DType::f32})
    CHECK(verify_patterns(*backend, masked_ffn_op(), dtype, {1, 65, 515}, {136, 200}, 3) > 0);
  // More than 16 tokens a chunk of the mask.
  CHECK(verify_patterns(*backend, masked_ffn_op(), DType::bf16, {20011}, {128, 264}, 4) > 0);
}

TEST_CASE("gradients of masked linear layers are right on a GPU under every mask", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Op& op = masked_linear_op();
  CHECK(verify_patterns(*backend, op, DType::f32, {1, 515}, {70, 133}, 0, "bwd") > 0);
  CHECK(verify_patterns(*backend, op, DType::bf16, {1, 2, 63, 131}, {72, 136}, 4, "bwd") > 0);
  CHECK(verify_patterns(*backend, op, DType::bf16, {515}, {264, 136}, 12, "bwd") > 0);
  CHECK(verify_patterns(*backend, op, DType::fp16, {2049}, {520, 264}, 12, "bwd",
                        {{"accumulate", "yes"}}) > 0);
}

TEST_CASE("gradients of masked networks are right on a GPU under every mask", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  const Op& op = masked_ffn_op();
  for (const Options& form : backward_forms) {
    CHECK(verify_patterns(*backend, op, DType::f32, {65}, {35, 67}, 0, "bwd", form) > 0);
    CHECK(verify_patterns(*backend, op, DType::bf16, {1, 63, 131}, {72, 136}, 3, "bwd", form) > 0);
    CHECK(verify_patterns(*backend, op, DType::fp16, {515}, {264, 328}, 6, "bwd", form) > 0);
  }
  CHECK(verify_patterns(*backend, op, DType::bf16, {515}, {136, 200}, 4, "fwd",
                        {{"save", "preact"}}) > 0);
}

TEST_CASE("gradients of layers are right on a GPU however scattered tokens come", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  verify_scattered(*backend, masked_linear_op(), DType::bf16, {1, 63, 131}, {72, 136}, 3);
  verify_scattered(*backend, masked_linear_op(), DType::bf16, {2049}, {520, 264}, 16);
  verify_scattered(*backend, masked_linear_op(), DType::fp16, {515}, {264, 136}, 8,
                   {{"accumulate", "yes"}});
}

TEST_CASE("gradients of networks are right on a GPU however scattered tokens come", "[gpu]") {
  FFTUNE_FIRST_CUDA(backend);
  for (const Options& form : backward_forms)
    verify_scattered(*backend, masked_ffn_op(), DType::bf16, {1, 515}, {264, 328}, 5, form);
}
