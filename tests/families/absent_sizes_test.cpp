// A size that is left out has the value that its op documents: a problem that states the value is
// the same problem to every family.
#include <cctype>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/error.hpp"
#include "cpu/open.hpp"
#include "families/small_problems.hpp"
#include "registry/catalog.hpp"
#include "registry/op.hpp"
#include "runtime/choice.hpp"
#include "support/catch.hpp"
#include "support/each_op.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

constexpr std::size_t most_compared = 1024;  // configurations of a family
constexpr std::size_t most_bases = 12;       // in which families are asked about a size

using Sizes = std::map<std::string, std::int64_t>;

std::optional<Problem> canonical_if_any(const Op& op, Problem problem, DeviceKind kind) {
  try {
    return canonical(op, std::move(problem), kind);
  } catch (const Error&) {
    return std::nullopt;  // fields that do not go together
  }
}

/// The pass with examples of the required sizes in every form, each alone and with each rare size.
/// And one of the op's models for each set of sizes, also with each rare size: some belong
/// together.
std::vector<Problem> bases_of(const Op& op, const std::string& pass, DeviceKind kind) {
  Problem usual{std::string(op.name()), pass, op.dtypes_of_pass(kind, pass).front(), {}, {}};
  std::vector<Sizes> rare{{}};
  for (const SizeField& field : op.sizes())
    (field.rare ? rare.emplace_back() : usual.sizes)[field.name] = field.example;
  std::set<Problem> all;
  const auto add = [&](const Sizes& sizes, const Options& options) {
    Problem problem = usual;
    for (const auto& [name, value] : sizes) problem.sizes[name] = value;
    for (const auto& [name, value] : options) problem.options[name] = value;
    if (auto good = canonical_if_any(op, std::move(problem), kind)) all.insert(*std::move(good));
  };
  for (const Options& options : forms_of(op, pass))
    for (const Sizes& sizes : rare) add(sizes, options);
  std::set<std::set<std::string>> known;
  for (const KnownModel& model : op.known_models()) {
    std::set<std::string> names;
    for (const auto& [name, value] : model.sizes) names.insert(name);
    if (!known.insert(names).second) continue;
    for (Sizes sizes : rare) {
      sizes.insert(model.sizes.begin(), model.sizes.end());
      add(sizes, model.options);
    }
  }
  return {all.begin(), all.end()};
}

struct Launch {
  std::string kernel;
  std::vector<std::uint32_t> extents;
  std::vector<std::size_t> arguments;  // the kind of each, and the values of numbers
  bool operator==(const Launch&) const = default;
};

std::vector<Launch> launches_of(const Program& program, bool has_ranks) {
  std::vector<Launch> all;
  for (const Step& step : program.steps) {
    const auto* launch = std::get_if<KernelLaunch>(&step);
    if (launch == nullptr) continue;
    Launch one{program.kernels[launch->kernel].expression,
               {launch->grid.x, launch->grid.y, launch->grid.z, launch->block.x, launch->cluster.x,
                launch->shared_bytes},
               {}};
    std::vector<Argument> arguments = launch->arguments;
    if (launch->parameters)
      for (const auto& field : launch->parameters->fields) arguments.push_back(field.value);
    for (const Argument& argument : arguments) {
      one.arguments.push_back(argument.index());
      // Ranks know each other's runs by a hash of the problem's text, which is canonical there.
      const auto* word = std::get_if<std::int32_t>(&argument);
      if (word != nullptr && !has_ranks) one.arguments.push_back(static_cast<std::size_t>(*word));
      if (const auto* number = std::get_if<std::int64_t>(&argument))
        one.arguments.push_back(static_cast<std::size_t>(*number));
    }
    all.push_back(std::move(one));
  }
  return all;
}

bool alike(const TensorSpec& a, const TensorSpec& b) {
  return a.name == b.name && a.shape == b.shape && a.role == b.role && a.scale == b.scale &&
         a.behind == b.behind && a.read_share == b.read_share;
}

bool alike(const StageSpec& a, const StageSpec& b) {
  return a.name == b.name && a.inputs == b.inputs && a.outputs == b.outputs &&
         a.reduction_length == b.reduction_length && a.flops == b.flops && a.bytes == b.bytes &&
         a.inner_values == b.inner_values;
}

template <typename Spec>
void expect_alike(const std::vector<Spec>& all, const std::vector<Spec>& others) {
  REQUIRE(all.size() == others.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    if (!alike(all[i], others[i])) FAIL_CHECK(all[i].name << " differs");
}

/// Families of the whole, and of parts that are no op with parts of its own: those are tried there.
void expect_same_families(const Op& op, const Problem& left_out, const Problem& stated,
                          const DeviceFacts& facts) {
  const Recipe recipe = default_recipe(op, left_out, facts);
  CHECK(recipe_text(recipe) == recipe_text(default_recipe(op, stated, facts)));
  CHECK(estimate_of(op, left_out, facts, recipe) == estimate_of(op, stated, facts, recipe));
  CHECK(op.baselines(left_out, facts).size() == op.baselines(stated, facts).size());
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind) continue;
    CAPTURE(family->name());
    const auto refusal = family->refusal(left_out, facts);
    REQUIRE(refusal == family->refusal(stated, facts));
    if (refusal) continue;
    const Config config = family->default_config(left_out, facts);
    REQUIRE(config.text() == family->default_config(stated, facts).text());
    CHECK(family->estimate(left_out, facts, config) == family->estimate(stated, facts, config));
    const Space space = family->space(left_out, facts), other = family->space(stated, facts);
    REQUIRE(space.parameters().size() == other.parameters().size());
    for (std::size_t i = 0; i < space.parameters().size(); ++i)
      REQUIRE(space.parameters()[i].values == other.parameters()[i].values);
    if (space.size() <= most_compared) CHECK(space.feasible() == other.feasible());
    const bool has_ranks = stated.sizes.contains("ranks");
    CHECK(launches_of(family->program(left_out, facts, config), has_ranks) ==
          launches_of(family->program(stated, facts, config), has_ranks));
  }
}

void expect_no_difference(const Op& op) {
  std::set<std::string> seen, declared;
  for (const SizeField& field : op.sizes())
    if (field.when_absent) declared.insert(field.name);
  if (declared.empty()) return;
  for (const DeviceFacts& facts : {facts_of_architecture("sm_90a"), cpu_facts()})
    for (const std::string& pass : op.passes()) {
      const auto bases = bases_of(op, pass, facts.kind);
      for (const SizeField& field : op.sizes()) {
        std::vector<const Problem*> without;
        for (const Problem& base : bases)
          if (!base.sizes.contains(field.name) && field.when_absent && field.when_absent(base))
            without.push_back(&base);
        for (std::size_t i = 0; i < without.size(); ++i) {
          const Problem& base = *without[i];
          const std::int64_t value = *field.when_absent(base);
          seen.insert(field.name);
          CAPTURE(base.text(), field.name, value, facts.name);
          const Problem stated = base.with_size(field.name, value);
          REQUIRE(op.contradiction(stated) == "");
          const bool of_tokens = field.when_absent(base.with_size(op.token_size(), 4099)) != value;
          CHECK(canonical(op, stated, facts.kind) == (of_tokens ? stated : base));
          expect_alike(op.tensors(base), op.tensors(stated));
          expect_alike(op.stages(base), op.stages(stated));
          if (i * most_bases / without.size() != (i + 1) * most_bases / without.size())
            expect_same_families(op, unrepeated(op, base), unrepeated(op, stated), facts);
        }
      }
    }
  CHECK(seen == declared);  // each was left out of a problem in which that means a value
}

}  // namespace

FFTUNE_TEST_EACH_OP(expect_no_difference, "a size that is left out is the value that it stands for",
                    "");

TEST_CASE("a size whose description names the value of leaving it out declares it") {
  for (const Op* op : builtin_catalog().ops) {
    std::set<std::string> names;
    for (const SizeField& field : op->sizes()) names.insert(field.name);
    for (const SizeField& field : op->sizes()) {
      const auto end = field.help.find(" if left out");
      if (end == std::string::npos) continue;
      const auto begin = field.help.find_last_of(" ;", end - 1) + 1;
      const std::string word = field.help.substr(begin, end - begin);
      CAPTURE(op->name(), field.name, field.help);
      if (names.contains(word) || std::isdigit(static_cast<unsigned char>(word.front())) != 0)
        CHECK(field.when_absent != nullptr);
    }
  }
}
