// One list for every family that exists: its default and its extreme variants are right, in every
// dtype and form. Small sizes, so that it also runs under compute-sanitizer.
#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "registry/part_family.hpp"
#include "runtime/devices.hpp"
#include "runtime/environment.hpp"
#include "support/catch.hpp"
#include "support/each_op.hpp"
#include "support/verify_variants.hpp"
#include "verify/host_threads.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The default and the extremes. A family of a part has its extremes among those of its own op.
std::vector<Config> few_configs(const Family& family, const Problem& problem,
                                const DeviceFacts& facts) {
  std::vector<Config> configs{family.default_config(problem, facts)};
  if (dynamic_cast<const PartFamily*>(&family)) return configs;
  const auto feasible = family.space(problem, facts).feasible();
  REQUIRE_FALSE(feasible.empty());
  for (const auto& config : {feasible.front(), feasible.back()})
    if (std::find(configs.begin(), configs.end(), config) == configs.end())
      configs.push_back(config);
  return configs;
}

/// A family's problem and the configurations that are tried on it.
struct Few {
  const Family* family;
  Problem problem;
  std::vector<Config> configs;
  std::vector<CompileResult> compiled = {};
};

/// Compiles on all cores, which is nearly all of the time that small problems take on a GPU; then
/// verifies one after the other.
void verify_few(Backend& backend, const Op& op, std::vector<Few> all, HostThreads& threads) {
  const DeviceFacts& facts = backend.facts();
  threads.run(static_cast<int>(all.size()), threads.max_threads(), [&](int i) {
    Few& few = all[static_cast<std::size_t>(i)];
    for (const Config& config : few.configs)
      few.compiled.push_back(backend.compile(few.family->program(few.problem, facts, config)));
  });
  for (const Few& few : all) {
    const std::size_t first = first_stage(op, *few.family, few.problem);
    Verifier verifier(backend, op, few.problem, 1);
    for (std::size_t i = 0; i < few.configs.size(); ++i) {
      CAPTURE(few.problem.text(), Variant{std::string(few.family->name()), few.configs[i]}.id());
      CAPTURE(few.compiled[i].report.failure);
      REQUIRE(few.compiled[i].executable);
      const auto result =
          verifier.verify(first, few.family->stages().size(), {few.compiled[i].executable});
      CAPTURE(result.failure, result.error, result.tolerance);
      CHECK(result.passed);
    }
  }
}

/// Verifies a few variants of every family of the op for this device on a part of their problems;
/// returns how many families there are.
int verify_families(Backend& backend, const Op& op, Part part = {}) {
  constexpr std::size_t at_once = 32;
  const DeviceFacts& facts = backend.facts();
  const bool nested = is_nested(op);
  HostThreads threads;
  std::vector<Few> waiting;
  std::size_t problems = 0;
  int families = 0;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind) continue;
    bool served = false;
    for (const auto& pass : op.passes())
      for (const DType dtype : op.dtypes_of_pass(facts.kind, pass))
        for (const Options& form : forms_of(op, pass)) {
          if (nested && !form.empty()) continue;
          const auto problem = small_problem(op, *family, pass, dtype, form, facts);
          if (!problem) continue;
          served = true;
          if (!part.has(problems++)) continue;
          waiting.push_back({family, *problem, few_configs(*family, *problem, facts)});
          if (waiting.size() == at_once)
            verify_few(backend, op, std::exchange(waiting, {}), threads);
        }
    if (!served) {
      WARN(family->name() << " serves no small problem on " << facts.name);
      continue;
    }
    ++families;
  }
  verify_few(backend, op, std::move(waiting), threads);
  return families;
}

void verify_families_on_cpu(const Op& op) {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  REQUIRE(verify_families(*backend, op) > 0);
}

void verify_families_on_gpu(const Op& op, Part part) {
  FFTUNE_FIRST_CUDA(backend);
  REQUIRE(verify_families(*backend, op, part) > 0);
}

/// Each part has at most 300 variants.
std::size_t parts_on_gpu(const Op& op) {
  static const std::map<std::string_view, std::size_t> parts{
      {"ffn", 4}, {"layer", 6},   {"linear", 2}, {"masked-ffn", 2},
      {"qkv", 2}, {"moe-ffn", 4}, {"head", 2}};
  const auto found = parts.find(op.name());
  return found == parts.end() ? 1 : found->second;
}

}  // namespace

TEST_CASE("no small problem of any link needs a group, which one process has not") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  int links = 0;
  for (const Op* op : builtin_catalog().ops)
    for (const auto& pass : op->passes())
      for (const Options& form : forms_of(*op, pass))
        for (const Family* family : op->families()) {
          if (!form.contains("link") || family->device_kind() != facts.kind) continue;
          ++links;
          CAPTURE(op->name(), family->name(), form.at("link"));
          const auto problem = small_problem(*op, *family, pass, DType::bf16, form, facts);
          if (!problem) continue;
          for (const TensorSpec& tensor : op->tensors(*problem)) CHECK(tensor.name != "group");
        }
  CHECK(links > 0);
}

FFTUNE_TEST_EACH_OP(verify_families_on_cpu, "a few variants of every CPU family are right", "");
FFTUNE_TEST_EACH_OP_IN_PARTS(verify_families_on_gpu, parts_on_gpu,
                             "a few variants of every CUDA family are right", "[gpu][few]");
