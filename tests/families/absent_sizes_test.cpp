// A size that is left out has the value that its op documents: a problem that states the value is
// the same problem to every family.
#include <cctype>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
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

std::optional<Problem> canonical_if_any(const Op& op, Problem problem, DeviceKind kind) {
  try {
    return canonical(op, std::move(problem), kind);
  } catch (const Error&) {
    return std::nullopt;  // fields that do not go together
  }
}

/// The pass with examples of the required sizes in every form, each alone and with each rare size.
/// And one of the op's models, or of those of a layer, for each set of sizes, also with each rare
/// size and in every form: some belong together.
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
    for (const SizeField& field : op.sizes())
      if (field.is_needed && !field.is_needed(problem) && sizes.count(field.name) == 0)
        problem.sizes.erase(field.name);
    if (auto good = canonical_if_any(op, std::move(problem), kind)) all.insert(*std::move(good));
  };
  for (const Options& options : forms_of(op, pass))
    for (const Sizes& sizes : rare) add(sizes, options);
  std::set<std::set<std::string>> known;
  std::vector<KnownModel> models = op.known_models();
  if (op.name() == "decode")
    for (const KnownModel& model : builtin_catalog().op("layer").known_models())
      models.push_back(model);
  for (const KnownModel& model : models) {
    std::set<std::string> names;
    for (const auto& [name, value] : model.sizes) names.insert(name);
    if (!known.insert(names).second) continue;
    for (Sizes sizes : rare) {
      sizes.insert(model.sizes.begin(), model.sizes.end());
      add(sizes, model.options);
    }
    for (Options options : forms_of(op, pass)) {
      options.insert(model.options.begin(), model.options.end());
      add(model.sizes, options);
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

/// The answers of a family about a problem.
struct Answer {
  std::optional<std::string> refusal;
  Config config = {};  // the default
  std::optional<double> estimate = {};
  std::vector<std::vector<ParameterValue>> values = {};  // of the space's parameters
  std::vector<Config> feasible = {};                     // where there are few
  std::vector<Launch> launches = {};
};

Answer answer_of(const Family& family, const Problem& problem, const DeviceFacts& facts) {
  Answer answer{family.refusal(problem, facts)};
  if (answer.refusal) return answer;
  answer.config = family.default_config(problem, facts);
  answer.estimate = family.estimate(problem, facts, answer.config);
  const Space space = family.space(problem, facts);
  for (const Parameter& parameter : space.parameters()) answer.values.push_back(parameter.values);
  if (space.size() <= most_compared) answer.feasible = space.feasible();
  answer.launches =
      launches_of(family.program(problem, facts, answer.config), problem.sizes.contains("ranks"));
  return answer;
}

/// The untuned choice for a problem, and the answers of families. One problem is asked about after
/// the other: the parts that families share are made once.
struct Answers {
  std::string recipe;
  std::optional<double> estimate;
  std::size_t baselines = 0;
  std::vector<std::pair<std::string, Answer>> families = {};
};

/// Nothing of a problem that no family of the device runs, such as sums by NCCL on a CPU.
std::optional<Answers> answers_of(const Op& op, const Problem& problem, const DeviceFacts& facts) {
  Recipe recipe;
  try {
    recipe = default_recipe(op, problem, facts);
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find("no family can run stage") != std::string::npos);
    return std::nullopt;
  }
  Answers all{recipe_text(recipe), estimate_of(op, problem, facts, recipe),
              op.baselines(problem, facts).size()};
  const bool nested = has_nested_parts(op, problem);
  for (const Family* family : op.families()) {
    if (family->device_kind() != facts.kind) continue;
    // Families of parts, as layer.attention_decode, are asked with these.
    if (nested && family->name().find('.') != std::string_view::npos) continue;
    all.families.emplace_back(family->name(), answer_of(*family, problem, facts));
  }
  return all;
}

void expect_same_answers(const std::optional<Answers>& of_left_out,
                         const std::optional<Answers>& of_stated) {
  REQUIRE(of_left_out.has_value() == of_stated.has_value());
  if (!of_stated) return;
  const Answers &left_out = *of_left_out, &stated = *of_stated;
  CHECK(left_out.recipe == stated.recipe);
  CHECK(left_out.estimate == stated.estimate);
  CHECK(left_out.baselines == stated.baselines);
  for (std::size_t i = 0; i < left_out.families.size(); ++i) {
    const auto& [name, a] = left_out.families[i];
    const Answer& b = stated.families[i].second;
    CAPTURE(name);
    CHECK(a.refusal == b.refusal);
    CHECK(a.config.text() == b.config.text());
    CHECK(a.estimate == b.estimate);
    CHECK(a.values == b.values);
    CHECK(a.feasible == b.feasible);
    CHECK(a.launches == b.launches);
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
          REQUIRE(op.contradiction(stated).empty());
          const bool of_tokens = field.when_absent(base.with_size(op.token_size(), 4099)) != value;
          CHECK(canonical(op, stated, facts.kind) == (of_tokens ? stated : base));
          expect_alike(op.tensors(base), op.tensors(stated));
          expect_alike(op.stages(base), op.stages(stated));
          if (i * most_bases / without.size() != (i + 1) * most_bases / without.size())
            expect_same_answers(answers_of(op, unrepeated(op, base), facts),
                                answers_of(op, unrepeated(op, stated), facts));
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
