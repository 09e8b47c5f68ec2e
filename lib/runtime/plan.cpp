#include "runtime/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "core/error.hpp"
#include "core/memory.hpp"
#include "device/backend.hpp"
#include "device/host_threads.hpp"
#include "registry/catalog.hpp"
#include "registry/part_family.hpp"

namespace fftune {
namespace {

std::size_t align_up(std::size_t bytes) {
  constexpr std::size_t alignment = 256;
  return (bytes + alignment - 1) / alignment * alignment;
}

/// The offsets of a plan are 64-bit numbers: refuses tensors that no address reaches.
void check_addressable(const Problem& problem, const std::vector<TensorSpec>& tensors) {
  if (const double bytes = held_bytes(tensors, {}); bytes > 0x1p62)
    throw Error(ErrorKind::unavailable,
                fmt::format("{} has tensors of {:.2g} bytes, more than 2^62 have no addresses: use "
                            "smaller sizes",
                            problem.text(), bytes));
}

}  // namespace

double held_bytes(const std::vector<TensorSpec>& tensors, const Holders& holders) {
  double all = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!holders.empty() && holders[i] != i) continue;
    auto bytes = static_cast<double>(dtype_bytes(tensors[i].dtype));
    for (const auto extent : tensors[i].shape) bytes *= static_cast<double>(extent);
    all += bytes;
  }
  return all;
}

namespace {

/// Whether the times of a repetition are of several kinds: some have not all tensors.
bool has_kinds(const Repetition& repetition) {
  return std::any_of(repetition.places.begin(), repetition.places.end(), [](const auto& places) {
    return std::find(places.begin(), places.end(), nowhere) != places.end();
  });
}

/// Times with the same tensors take turns with the memory of two of them. A tensor that two times
/// have, such as the first one's output, has memory of its own.
void share_by_kind(const Repetition& repetition, const std::vector<TensorSpec>& tensors,
                   Holders& holders) {
  std::vector<int> times(tensors.size());
  for (const auto& places : repetition.places)
    for (const std::size_t place : places)
      if (place != nowhere) ++times[place];
  std::map<std::vector<bool>, std::vector<const std::vector<std::size_t>*>> before;
  for (const auto& own : repetition.places) {
    std::vector<bool> is_there;
    for (const std::size_t place : own) is_there.push_back(place != nowhere);
    auto& same = before[is_there];
    same.push_back(&own);
    if (same.size() < 3) continue;
    const auto& old = *same[same.size() - 3];
    for (std::size_t i = 0; i < own.size(); ++i)
      if (own[i] != nowhere && times[own[i]] == 1 && old[i] < own[i] &&
          tensors[own[i]].role == Role::intermediate && tensors[old[i]].role == Role::intermediate)
        holders[own[i]] = holders[old[i]];
  }
}

}  // namespace

Holders holders_of(const Op& op, const Problem& problem, const std::vector<TensorSpec>& tensors) {
  Holders holders(tensors.size());
  for (std::size_t i = 0; i < holders.size(); ++i) holders[i] = i;
  const auto repetition = op.repetition(problem);
  if (!repetition) return holders;
  const auto& places = repetition->places;
  if (has_kinds(*repetition)) {
    share_by_kind(*repetition, tensors, holders);
    return holders;
  }
  for (std::size_t time = 2; time < places.size(); ++time)
    for (std::size_t i = 0; i < places[time].size(); ++i) {
      const std::size_t own = places[time][i], before = places[time - 2][i];
      const bool both =
          tensors[own].role == Role::intermediate && tensors[before].role == Role::intermediate;
      // A tensor that a repetition reads from the one before has its place from there.
      if (both && holders[own] == own && before < own) holders[own] = holders[before];
    }
  return holders;
}

Holders holders_of(const Op& op, const Problem& problem, const std::vector<TensorSpec>& tensors,
                   const DeviceFacts& facts, const Recipe& recipe) {
  Holders holders = holders_of(op, problem, tensors);
  // Programs of a repetition have the tensors of one time.
  if (op.repetition(problem)) return holders;
  std::vector<bool> used(tensors.size());
  for (std::size_t place = 0; place < recipe.size(); ++place)
    mark_used(program_in(recipe, place, op, problem, facts), used);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].role == Role::intermediate && !used[i]) holders[i] = nowhere;
  return holders;
}

TensorLayout::TensorLayout(const Op& op, const Problem& problem) : tensors_(op.tensors(problem)) {
  if (tensors_.size() > most_tensors)
    throw Error(ErrorKind::internal, fmt::format("{} has {} tensors: a plan holds {}", op.name(),
                                                 tensors_.size(), most_tensors));
  check_addressable(problem, tensors_);
  const Holders holders = holders_of(op, problem, tensors_);
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].role != Role::intermediate) {
      ++buffer_count_;
      continue;
    }
    if (holders[i] != i) {
      intermediate_offsets_.push_back(intermediate_offsets_[holders[i] - buffer_count_]);
      continue;
    }
    intermediate_offsets_.push_back(scratch_offset_);
    scratch_offset_ += align_up(tensors_[i].bytes());
  }
}

void TensorLayout::leave_out_unused(const std::vector<bool>& used) {
  scratch_offset_ = 0;
  for (std::size_t i = buffer_count_; i < tensors_.size(); ++i) {
    intermediate_offsets_[i - buffer_count_] = scratch_offset_;
    if (used.at(i)) scratch_offset_ += align_up(tensors_[i].bytes());
  }
}

void mark_used(const Program& program, std::vector<bool>& used) {
  const auto mark_pointer = [&](const Pointer& pointer) {
    if (const auto* tensor = std::get_if<TensorArgument>(&pointer)) used.at(tensor->tensor) = true;
  };
  const auto mark = [&](const Argument& argument) {
    if (const auto* tensor = std::get_if<TensorArgument>(&argument)) used.at(tensor->tensor) = true;
    if (const auto* map = std::get_if<TensorMapArgument>(&argument)) mark_pointer(map->matrix);
  };
  for (const auto& step : program.steps) {
    if (const auto* launch = std::get_if<KernelLaunch>(&step)) {
      for (const Argument& argument : launch->arguments) mark(argument);
      if (launch->parameters)
        for (const auto& field : launch->parameters->fields) mark(field.value);
    } else if (const auto* gemm = std::get_if<LibraryGemm>(&step)) {
      for (const Pointer& pointer : {gemm->a, gemm->b, gemm->c}) mark_pointer(pointer);
      for (const auto& scale : {gemm->a_scale, gemm->b_scale})
        if (scale) mark_pointer(*scale);
    } else if (const auto* sum = std::get_if<LibrarySum>(&step)) {
      for (const Pointer& pointer : {sum->x, sum->y, sum->group}) mark_pointer(pointer);
    } else {
      std::fill_n(used.begin(), std::min(program.host_tensors, used.size()), true);
    }
  }
}

void check_workspace(const Problem& problem, std::size_t bytes, const DeviceFacts& facts) {
  if (facts.memory_bytes > 0)
    require_fit("the workspace of " + problem.text(), static_cast<double>(bytes),
                static_cast<double>(facts.memory_bytes), facts.name);
}

std::size_t TensorLayout::workspace_bytes(std::size_t scratch_bytes) const {
  return scratch_offset_ + align_up(scratch_bytes);
}

void TensorLayout::enqueue(const Executables& executables, void* const* buffers, void* workspace,
                           void* stream) const {
  std::array<void*, most_tensors> addresses;
  std::copy_n(buffers, buffer_count_, addresses.begin());
  auto* const base = static_cast<std::byte*>(workspace);
  for (std::size_t i = 0; i < intermediate_offsets_.size(); ++i)
    addresses[buffer_count_ + i] = base + intermediate_offsets_[i];
  void* const scratch = base ? base + scratch_offset_ : nullptr;
  for (const auto& executable : executables) executable->enqueue(addresses.data(), scratch, stream);
}

namespace {

/// Null if the program begins with another step.
KernelLaunch* first_launch(Program& program) {
  return program.steps.empty() ? nullptr : std::get_if<KernelLaunch>(&program.steps.front());
}

/// Whether the stages that a variant covers write one of the tensors.
bool writes_any(const Op& op, const Problem& problem, const Variant& variant,
                const std::vector<TensorArgument>& tensors) {
  if (tensors.empty()) return false;
  const auto covered = family_of(op, variant.family).stages();
  const auto specs = op.tensors(problem);
  for (const StageSpec& stage : op.stages(problem)) {
    if (std::find(covered.begin(), covered.end(), stage.name) == covered.end()) continue;
    for (const TensorArgument& tensor : tensors)
      if (std::find(stage.outputs.begin(), stage.outputs.end(), specs.at(tensor.tensor).name) !=
          stage.outputs.end())
        return true;
  }
  return false;
}

}  // namespace

void check_recipe(const Op& op, const Problem& problem, const DeviceFacts& facts,
                  const Recipe& recipe) {
  const auto stages = op.stages(unrepeated(op, problem));
  std::size_t covered = 0;
  for (const auto& variant : recipe) {
    if (const auto reason = illegality(op, problem, facts, variant); !reason.empty())
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} cannot run on {}: {}", problem.text(), facts.name, reason));
    for (const auto& stage : family_of(op, variant.family).stages()) {
      if (covered == stages.size() || stages[covered].name != stage)
        throw Error(ErrorKind::invalid_input,
                    fmt::format("{}: '{}' does not cover the stages of {} in order",
                                recipe_text(recipe), variant.id(), problem.text()));
      ++covered;
    }
  }
  if (covered < stages.size())
    throw Error(ErrorKind::invalid_input,
                fmt::format("'{}' leaves out stage '{}' of {}", recipe_text(recipe),
                            stages[covered].name, problem.text()));
}

namespace {

/// The program of a variant behind another, or behind none.
Program program_behind(const Variant* before, const Variant& variant, const Op& op,
                       const Problem& problem, const DeviceFacts& facts) {
  Program program = family_of(op, variant.family).program(problem, facts, variant.config);
  const KernelLaunch* const launch = first_launch(program);
  if (before != nullptr && launch != nullptr &&
      writes_any(op, unrepeated(op, problem), *before, launch->read_early))
    launch_normally(program);
  return program;
}

}  // namespace

Program program_in(const Recipe& recipe, std::size_t place, const Op& op, const Problem& problem,
                   const DeviceFacts& facts) {
  return program_behind(place > 0 ? &recipe[place - 1] : nullptr, recipe[place], op, problem,
                        facts);
}

void launch_normally(Program& program) {
  if (KernelLaunch* const launch = first_launch(program)) launch->programmatic = false;
}

std::shared_ptr<const Executable> executable_of(CompileResult result, const Variant& variant,
                                                const DeviceFacts& facts) {
  if (!result.executable)
    throw Error(ErrorKind::unavailable, fmt::format("{} does not compile for {}: {}", variant.id(),
                                                    facts.name, result.report.failure));
  return std::move(result.executable);
}

Executables compile_side_by_side(Backend& backend, const std::vector<VariantProgram>& programs) {
  std::set<std::pair<std::string, std::string>> kernels;
  for (const auto& [variant, program] : programs)
    for (const KernelSource& kernel : program.kernels)
      kernels.insert({kernel.file, kernel.expression});
  Executables executables(programs.size());
  std::vector<std::exception_ptr> errors(programs.size());
  HostThreads().run(
      static_cast<int>(programs.size()), static_cast<int>(kernels.size()), [&](int i) {
        const auto at = static_cast<std::size_t>(i);
        const auto& [variant, program] = programs[at];
        try {
          executables[at] = executable_of(backend.bind(program), variant, backend.facts());
        } catch (...) {
          errors[at] = std::current_exception();
        }
      });
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
  return executables;
}

namespace {

/// Those of a repetition whose times are of several kinds: a time has the stages whose tensors it
/// has.
Executables executables_of_kinds(const Op& op, const Problem& problem, const DeviceFacts& facts,
                                 const Recipe& recipe, const Repetition& repetition,
                                 const MakeExecutable& make) {
  const auto stages = op.stages(repetition.one);
  const auto tensors = op.tensors(repetition.one);
  const auto has_stage = [&](const std::vector<std::size_t>& places, std::size_t stage) {
    const auto is_there = [&](const std::string& name) {
      return places[tensor_index(tensors, name)] != nowhere;
    };
    return std::all_of(stages[stage].inputs.begin(), stages[stage].inputs.end(), is_there) &&
           std::all_of(stages[stage].outputs.begin(), stages[stage].outputs.end(), is_there);
  };
  struct Part {
    std::shared_ptr<const Executable> executable;
    std::size_t stage;  // the first that it covers
  };
  std::vector<Part> parts;
  std::size_t stage = 0;
  for (std::size_t place = 0; place < recipe.size(); ++place) {
    Program program = program_in(recipe, place, op, problem, facts);
    // The stage in front of a kind, and behind the last time, may be another than in the recipe.
    const auto is_other = [&](const auto& places) {
      return stage == 0 || has_stage(places, stage) != has_stage(places, stage - 1);
    };
    if (std::any_of(repetition.places.begin(), repetition.places.end(), is_other) ||
        stage == repetition.end)
      launch_normally(program);
    parts.push_back({make(recipe[place], program), stage});
    stage += family_of(op, recipe[place].family).stages().size();
  }
  Executables all;
  const auto add = [&](const Part& part, const std::vector<std::size_t>& places) {
    all.push_back(std::make_shared<PlacedExecutable>(part.executable, places, 0, false));
  };
  for (const Part& part : parts)
    if (part.stage < repetition.first) add(part, repetition.places.front());
  for (const auto& places : repetition.places)
    for (const Part& part : parts)
      if (part.stage >= repetition.first && part.stage < repetition.end &&
          has_stage(places, part.stage))
        add(part, places);
  for (const Part& part : parts)
    if (part.stage >= repetition.end) add(part, repetition.places.back());
  return all;
}

}  // namespace

Executables executables_of(const Op& op, const Problem& problem, const DeviceFacts& facts,
                           const Recipe& recipe, const MakeExecutable& make) {
  // Parts of an op do not know the kernels before them.
  const bool composed = !op.parts(problem).empty();
  const auto repetition = op.repetition(problem);
  if (repetition && has_kinds(*repetition))
    return executables_of_kinds(op, problem, facts, recipe, *repetition, make);
  Executables executables;
  for (std::size_t place = 0; place < recipe.size(); ++place) {
    Program program = program_in(recipe, place, op, problem, facts);
    if (composed && place == 0) launch_normally(program);
    executables.push_back(make(recipe[place], program));
  }
  if (!repetition) return executables;

  // The places of the recipe that are repeated, [first, end).
  std::size_t first = 0, end = 0, stage = 0;
  for (const Variant& variant : recipe) {
    const Family& family = family_of(op, variant.family);
    if (stage < repetition->first && !family.covers_repetition()) ++first;
    if (stage < repetition->end) ++end;
    stage += family.stages().size();
  }
  const auto place_once = [&](std::size_t place, const std::vector<std::size_t>& tensors) {
    return std::make_shared<PlacedExecutable>(executables[place], tensors, 0, false);
  };
  Executables all;
  for (std::size_t place = 0; place < first; ++place)
    all.push_back(place_once(place, repetition->places.front()));
  Executables times(executables.begin() + static_cast<std::ptrdiff_t>(first),
                    executables.begin() + static_cast<std::ptrdiff_t>(end));
  if (!family_of(op, recipe[first].family).covers_repetition()) {
    // From the second time on, the first variant is behind the last one.
    const auto first_time = times.front();
    if (composed)
      times.front() =
          make(recipe[first], program_behind(&recipe[end - 1], recipe[first], op, problem, facts));
    times = repeated(times, repetition->places, first_time);
  }
  all.insert(all.end(), times.begin(), times.end());
  for (std::size_t place = end; place < recipe.size(); ++place)
    all.push_back(place_once(place, repetition->places.back()));
  return all;
}

std::size_t scratch_bytes(const Executables& executables) {
  std::size_t most = 0;
  for (const auto& executable : executables) most = std::max(most, executable->workspace_bytes());
  return most;
}

Plan::Plan(Backend& backend, const Op& op, Problem problem, Recipe recipe)
    : op_(&op), problem_(std::move(problem)), recipe_(std::move(recipe)), layout_(op, problem_) {
  const DeviceFacts& facts = backend.facts();
  check_recipe(op, problem_, facts, recipe_);
  std::vector<VariantProgram> programs;
  if (facts.kind != DeviceKind::cpu && recipe_.size() > 1)
    for (std::size_t place = 0; place < recipe_.size(); ++place)
      programs.push_back({recipe_[place], program_in(recipe_, place, op, problem_, facts)});
  // The backend keeps their kernels for those below.
  const Executables compiled = compile_side_by_side(backend, programs);
  used_.resize(layout_.tensors().size());
  executables_ = executables_of(op, problem_, facts, recipe_,
                                [&](const Variant& variant, const Program& program) {
                                  mark_used(program, used_);
                                  return executable_of(backend.compile(program), variant, facts);
                                });
  // Programs of a repetition have the tensors of one time.
  if (op.repetition(problem_))
    used_.clear();
  else
    layout_.leave_out_unused(used_);
  workspace_bytes_ = layout_.workspace_bytes(scratch_bytes(executables_));
  check_workspace(problem_, workspace_bytes_, facts);
}

void Plan::run(void* const* buffers, void* workspace, void* stream) const {
  layout_.enqueue(executables_, buffers, workspace, stream);
}

}  // namespace fftune
