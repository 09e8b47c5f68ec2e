// One list for every family that exists: its default and its extreme variants are right, in every
// dtype and form. Small sizes, so that it also runs under compute-sanitizer.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "runtime/devices.hpp"
#include "runtime/environment.hpp"
#include "support/catch.hpp"
#include "verify/verifier.hpp"

using namespace fftune;

namespace {

using Options = std::map<std::string, std::string>;

/// The usual form of the pass, and each rare one by itself.
std::vector<Options> forms_of(const Op& op, const std::string& pass) {
  std::vector<Options> forms{{}};
  for (const auto& field : options_of(op, pass))
    for (std::size_t i = 1; field.rare && i < field.choices.size(); ++i)
      forms.push_back({{field.name, field.choices[i]}});
  return forms;
}

/// The first small problem of this pass, dtype and form that the family does not refuse.
std::optional<Problem> small_problem(const Op& op, const Family& family, const std::string& pass,
                                     DType dtype, const Options& options,
                                     const DeviceFacts& facts) {
  constexpr double most_elements = 1 << 25;
  for (const std::int64_t tokens : {33, 5, 128, 1})
    for (const std::int64_t extent : {72, 128, 8, 37, 512}) {
      Problem problem;
      problem.op = op.name();
      problem.pass = pass;
      problem.dtype = dtype;
      problem.options = options;
      // Unlike extents, so that one taken for another is seen.
      std::int64_t next = extent;
      double product = 1;
      for (const auto& size : op.sizes()) {
        if (size.rare) continue;
        problem.sizes[size.name] = size.name == op.token_size() ? tokens : next;
        product *= static_cast<double>(problem.sizes[size.name]);
        if (size.name != op.token_size()) next += extent;
      }
      if (product > most_elements) continue;  // of a tensor with all of them
      try {
        problem = canonical(op, problem, facts.kind);
      } catch (const Error&) {
        continue;  // extents that do not go together
      }
      if (!family.refusal(problem, facts)) return problem;
    }
  return std::nullopt;
}

std::vector<Config> few_configs(const Family& family, const Problem& problem,
                                const DeviceFacts& facts) {
  std::vector<Config> configs{family.default_config(problem, facts)};
  const auto feasible = family.space(problem, facts).feasible();
  REQUIRE_FALSE(feasible.empty());
  for (const auto& config : {feasible.front(), feasible.back()})
    if (std::find(configs.begin(), configs.end(), config) == configs.end())
      configs.push_back(config);
  return configs;
}

std::size_t first_stage(const Op& op, const Family& family, const Problem& problem) {
  const auto stages = op.stages(problem);
  const auto own = family.stages();
  const auto first = std::find_if(stages.begin(), stages.end(), [&](const StageSpec& stage) {
    return stage.name == own.front();
  });
  REQUIRE(first != stages.end());
  return static_cast<std::size_t>(std::distance(stages.begin(), first));
}

void verify_few(Backend& backend, const Op& op, const Family& family, const Problem& problem) {
  const DeviceFacts& facts = backend.facts();
  const std::size_t first = first_stage(op, family, problem);
  Verifier verifier(backend, op, problem, 1);
  for (const auto& config : few_configs(family, problem, facts)) {
    CAPTURE(problem.text(), Variant{std::string(family.name()), config}.id());
    const auto compiled = backend.compile(family.program(problem, facts, config));
    CAPTURE(compiled.report.failure);
    REQUIRE(compiled.executable);
    const auto result = verifier.verify(first, family.stages().size(), {compiled.executable});
    CAPTURE(result.failure, result.error, result.tolerance);
    CHECK(result.passed);
  }
}

/// Verifies a few variants of every family of the op for this device; returns how many families
/// there were.
int verify_families(Backend& backend, const Op& op) {
  const DeviceFacts& facts = backend.facts();
  int families = 0;
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind) continue;
    bool served = false;
    for (const auto& pass : op.passes())
      for (const DType dtype : op.dtypes_of_pass(facts.kind, pass))
        for (const Options& form : forms_of(op, pass)) {
          const auto problem = small_problem(op, *family, pass, dtype, form, facts);
          if (!problem) continue;
          served = true;
          verify_few(backend, op, *family, *problem);
        }
    if (!served) {
      WARN(family->name() << " serves no small problem on " << facts.name);
      continue;
    }
    ++families;
  }
  return families;
}

}  // namespace

TEST_CASE("a few variants of every CPU family are right") {
  const auto backend = open_device("cpu", *builtin_catalog().sources, read_environment());
  for (const Op* op : builtin_catalog().ops) DYNAMIC_SECTION(op->name()) {
      REQUIRE(verify_families(*backend, *op) > 0);
    }
}

TEST_CASE("a few variants of every CUDA family are right", "[gpu]") {
  const Environment environment = read_environment();
  const auto devices = list_devices(environment);
  const auto cuda =
      std::find_if(devices.found.begin(), devices.found.end(),
                   [](const auto& device) { return device.facts.kind == DeviceKind::cuda; });
  if (cuda == devices.found.end()) FFTUNE_SKIP("there is no CUDA device here");
  const auto backend = open_device(cuda->spec, *builtin_catalog().sources, environment);
  // A section of each, so that one op can be asked for by itself: -c ffn.
  for (const Op* op : builtin_catalog().ops) DYNAMIC_SECTION(op->name()) {
      REQUIRE(verify_families(*backend, *op) > 0);
    }
}
