#include "tuning/evaluate/local_state.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "core/memory.hpp"
#include "core/parallel_until.hpp"
#include "device/backend.hpp"
#include "registry/part_family.hpp"
#include "runtime/plan.hpp"
#include "tuning/evaluate/local_evaluator.hpp"

namespace fftune {

void LocalEvaluator::State::release() {
  extras.clear();
  sets.reset();
  workspace.reset();
  compiled.clear();
  pass_seconds.clear();
}

void LocalEvaluator::State::make_verifier(const Problem& before) {
  const auto token = op->token_size();
  const auto tokens = problem.size(token);
  const Problem one = unrepeated(*op, problem);
  if (verifier && before.op == problem.op &&
      unrepeated(*op, before).with_size(token, tokens) == one) {
    verifier->retoken(tokens);
    return;
  }
  verifier.reset();
  verifier = std::make_unique<Verifier>(backend, *op, one, data,
                                        references ? &*references : nullptr, cancel);
}

void LocalEvaluator::State::find_if_lost() {
  try {
    backend.synchronize();
    // The fault may be the last thing that worked: only new work shows.
    backend.allocate(256);
    backend.synchronize();
  } catch (const Error& error) {
    lost = error.what();
  }
}

CompileResult LocalEvaluator::State::compile_program(const std::string& key,
                                                     const std::function<Program()>& program) {
  {
    const std::lock_guard lock(mutex);
    if (const auto found = compiled.find(key); found != compiled.end()) return found->second;
  }
  CompileResult result;
  try {
    const Program made = program();
    if (auto lacking = without_memory(made); !lacking.empty())
      result.report.failure = std::move(lacking);
    else
      result = backend.compile(made);
  } catch (const std::exception& error) {
    result.report.failure = error.what();
  }
  if (!result.executable && result.report.failure.empty())
    result.report.failure = "the compiler gave no reason";
  const std::lock_guard lock(mutex);
  return compiled.emplace(key, std::move(result)).first->second;
}

CompileResult LocalEvaluator::State::compile_variant(const Recipe& recipe, std::size_t place,
                                                     bool first) {
  const std::string where = first ? "first" : place == 0 ? "again" : recipe[place - 1].family;
  return compile_program(fmt::format("{} {}", recipe[place].id(), where), [&] {
    Program program = program_in(recipe, place, *op, unrepeated(*op, problem), backend.facts());
    if (first) launch_normally(program);
    return program;
  });
}

const Baseline& LocalEvaluator::State::baseline(const std::string& name) const {
  const auto found = std::find_if(baselines.begin(), baselines.end(),
                                  [&](const Baseline& entry) { return entry.name == name; });
  if (found == baselines.end())
    throw Error(ErrorKind::invalid_input, fmt::format("there is no baseline '{}'", name));
  return *found;
}

std::vector<CompileResult> LocalEvaluator::State::compile_all(const Candidate& candidate) {
  std::vector<CompileResult> results;
  for (std::size_t place = 0; place < candidate.recipe.size(); ++place)
    results.push_back(compile_variant(candidate.recipe, place, place == 0));
  if (!candidate.baseline.empty())
    results.push_back(
        compile_program(candidate.baseline, [&] { return baseline(candidate.baseline).program; }));
  return results;
}

Executables LocalEvaluator::State::executables(const Candidate& candidate) {
  // At once, what is not compiled yet: the stages of the untuned recipe, before anything else runs.
  parallel_until(candidate.recipe.size(), compile_threads(), [&](std::size_t i) {
    compile_variant(candidate.recipe, i, i == 0);
    return true;
  });
  Executables all;
  for (auto& result : compile_all(candidate)) {
    if (!result.executable) throw Error(ErrorKind::unavailable, result.report.failure);
    all.push_back(std::move(result.executable));
  }
  return all;
}

Executables LocalEvaluator::State::timed_executables(const Candidate& candidate) {
  Executables one = executables(candidate);
  if (!op->repetition(problem) || !candidate.baseline.empty()) return one;
  return executables_of(*op, problem, backend.facts(), candidate.recipe,
                        [&](const Variant& variant, const Program& program) {
                          const bool waits =
                              !program.steps.empty() &&
                              std::holds_alternative<KernelLaunch>(program.steps[0]) &&
                              !std::get<KernelLaunch>(program.steps[0]).programmatic;
                          auto made = compile_program(
                              fmt::format("{} of all {}", variant.id(), waits ? "first" : "again"),
                              [&] { return program; });
                          if (!made.executable)
                            throw Error(ErrorKind::unavailable, made.report.failure);
                          return std::move(made.executable);
                        });
}

std::size_t LocalEvaluator::State::stage_count(const Candidate& candidate) const {
  std::size_t count = 0;
  for (const auto& variant : candidate.recipe)
    count += family_of(*op, variant.family).stages().size();
  return count;
}

std::vector<bool> LocalEvaluator::State::used_by(const Candidate& candidate) const {
  const Problem one = unrepeated(*op, problem);
  std::vector<bool> used(op->tensors(one).size());
  for (std::size_t place = 0; place < candidate.recipe.size(); ++place)
    mark_used(program_in(candidate.recipe, place, *op, one, backend.facts()), used);
  return used;
}

void LocalEvaluator::State::choose_holders(std::size_t there, Setup& setup) {
  // Verification has tensors of its own.
  const double verified = held_bytes(op->tensors(unrepeated(*op, problem)), {});
  holders = holders_of(*op, problem, tensors);
  const double all = held_bytes(tensors, holders) + verified;
  if (all <= static_cast<double>(there)) return;
  const Holders fewer = holders_of(*op, problem, tensors, backend.facts(),
                                   default_recipe(*op, problem, backend.facts()));
  std::vector<std::string> names;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (fewer[i] == nowhere)
      names.push_back(fmt::format("{} ({})", tensors[i].name,
                                  bytes_text(static_cast<double>(tensors[i].bytes()))));
  if (names.empty()) return;
  holders = fewer;
  setup.left_out = fmt::format("variants that write {} are left out, for which there is no memory",
                               fmt::join(names, " or "));
  setup.for_now = all <= static_cast<double>(backend.facts().memory_bytes);
}

std::string LocalEvaluator::State::without_memory(const Program& program) const {
  std::vector<bool> used(most_tensors);
  mark_used(program, used);
  for (std::size_t i = 0; i < holders.size(); ++i)
    if (used[i] && holders[i] == nowhere)
      return fmt::format("it needs {} for '{}', which has no memory beside the other tensors",
                         bytes_text(static_cast<double>(tensors[i].bytes())), tensors[i].name);
  return "";
}

void LocalEvaluator::State::reserve_workspace(const Executables& all) {
  std::size_t bytes = 0;
  for (const auto& executable : all) bytes = std::max(bytes, executable->workspace_bytes());
  if (workspace && workspace->bytes() >= bytes) return;
  workspace.reset();
  if (bytes > 0) workspace = backend.allocate(bytes);
}

bool LocalEvaluator::State::is_avoided(const Candidate& candidate) const {
  return avoided.count(candidate.id()) > 0 ||
         std::any_of(candidate.recipe.begin(), candidate.recipe.end(),
                     [&](const Variant& variant) { return avoided.count(variant.id()) > 0; });
}

void LocalEvaluator::State::compute_intermediates() {
  if (op->repetition(problem)) return;  // the whole is timed alone, and computes them itself
  for (const bool fallback : {false, true}) {
    const auto failure = attempt([&] {
      Candidate untuned;
      untuned.recipe = fallback ? fallback_recipe(*op, problem, backend.facts())
                                : default_recipe(*op, problem, backend.facts());
      if (is_avoided(untuned)) throw Error(ErrorKind::unavailable, "it is to be avoided");
      announce(0, untuned, 0);
      const auto all = executables(untuned);
      if (const auto result = verifier->verify(0, stages.size(), all, used_by(untuned));
          !result.passed)
        throw Error(ErrorKind::unavailable, result.failure);
      reserve_workspace(all);
      announce(0, untuned, 0);
      for (const auto& executable : all)
        executable->enqueue(sets->tensors(0).data(), workspace ? workspace->data() : nullptr,
                            backend.stream());
      backend.synchronize();
    });
    if (!failure || failure->cancelled || !lost.empty()) return;
  }
}

std::vector<std::vector<void*>> LocalEvaluator::State::tensors_of(const Candidate& candidate) {
  std::vector<std::vector<void*>> all;
  for (int set = 0; set < sets->count(); ++set) all.push_back(sets->tensors(set));
  if (candidate.baseline.empty()) return all;
  auto& extra = extras[candidate.baseline];
  if (!extra) {
    extra.emplace(backend, baseline(candidate.baseline).extra, sets->count(), data.seed + 1);
    extra->replicate();
  }
  for (int set = 0; set < sets->count(); ++set) {
    auto& addresses = all[static_cast<std::size_t>(set)];
    addresses.insert(addresses.end(), extra->tensors(set).begin(), extra->tensors(set).end());
  }
  return all;
}

}  // namespace fftune
