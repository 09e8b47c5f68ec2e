#include "families/small_problems.hpp"

#include <tuple>

namespace fftune::test {

std::vector<Options> forms_of(const Op& op, const std::string& pass) {
  std::vector<Options> forms{{}};
  for (const auto& field : options_of(op, pass))
    for (std::size_t i = 1; field.rare && i < field.choices.size(); ++i)
      forms.push_back({{field.name, field.choices[i]}});
  return forms;
}

std::int64_t elements_of(const Op& op, const Problem& problem) {
  std::int64_t elements = 0;
  for (const TensorSpec& tensor : op.tensors(problem)) elements += tensor.elements();
  return elements;
}

bool is_small_whole(const Op& op, const Problem& problem) {
  return !op.parts(problem).empty() && elements_of(op, problem) <= few_elements;
}

Problem example_problem(const Op& op, const std::string& pass, DType dtype,
                        const Options& options) {
  Problem problem{std::string(op.name()), pass, dtype, {}, options};
  for (const SizeField& size : op.sizes())
    if (!size.rare) problem.sizes[size.name] = size.example;
  return problem;
}

bool is_nested(const Op& op) {
  const Problem problem = example_problem(op, op.passes().front(), DType::f32);
  return has_nested_parts(op, canonical(op, problem, DeviceKind::cpu));
}

Problem shrunk(const Op& op, const Family& family, Problem problem, const DeviceFacts& facts) {
  for (const auto& size : op.sizes())
    for (const std::int64_t less : {5, 6, 16, 24, 32, 40, 64}) {
      if (elements_of(op, problem) <= few_elements) return problem;
      if (size.rare || size.name == op.token_size() || problem.size(size.name) <= less) continue;
      if (std::any_of(problem.sizes.begin(), problem.sizes.end(),
                      [&](const auto& other) { return other.second == less; }))
        continue;
      try {
        const Problem smaller = canonical(op, problem.with_size(size.name, less), facts.kind);
        if (!family.refusal(smaller, facts)) problem = smaller;
      } catch (const Error&) {  // sizes that do not go together
      }
    }
  return problem;
}

namespace {

/// Problems of this pass, dtype and form, whatever family serves them: made once, since every
/// family is asked.
const std::vector<Problem>& candidates(const Op& op, const std::string& pass, DType dtype,
                                       const Options& options, DeviceKind kind) {
  static std::map<std::tuple<const Op*, std::string, DType, Options, DeviceKind>,
                  std::vector<Problem>>
      known;
  const auto [place, fresh] = known.try_emplace({&op, pass, dtype, options, kind});
  std::vector<Problem>& problems = place->second;
  if (!fresh) return problems;
  constexpr double most_elements = 1 << 25;  // of a tensor with all extents
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
        problem.sizes[size.name] = size.name == op.token_size() ? tokens : std::min(next, size.max);
        product *= static_cast<double>(problem.sizes[size.name]);
        if (size.name != op.token_size()) next += extent;
      }
      try {
        problem = canonical(op, problem, kind);
      } catch (const Error&) {
        continue;  // extents that do not go together
      }
      if (product <= most_elements || is_small_whole(op, problem)) problems.push_back(problem);
    }
  return problems;
}

}  // namespace

std::optional<Problem> small_problem(const Op& op, const Family& family, const std::string& pass,
                                     DType dtype, const Options& options,
                                     const DeviceFacts& facts) {
  if (const auto link = options.find("link"); link != options.end() && link->second != "loopback")
    return std::nullopt;
  for (const Problem& problem : candidates(op, pass, dtype, options, facts.kind))
    if (!family.refusal(problem, facts)) return shrunk(op, family, problem, facts);
  return std::nullopt;
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

}  // namespace fftune::test
