#include "registry/part_family.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <variant>

#include "core/error.hpp"

namespace fftune {
namespace {

/// Behind the name of an input, in OpPart::names. No tensor is called so.
constexpr const char* first_suffix = " from element";

/// The places of everything that a step names, moved.
class Move {
 public:
  Move(const std::vector<Pointer>& places, const std::vector<std::size_t>& kernels,
       std::size_t first_scratch)
      : places_(places), kernels_(kernels), first_scratch_(first_scratch) {}

  void operator()(KernelLaunch& launch) const {
    launch.kernel = kernels_.at(launch.kernel);
    std::vector<TensorArgument> early;
    for (const TensorArgument& tensor : launch.read_early) {
      const Pointer place = moved(tensor);
      if (const auto* moved_tensor = std::get_if<TensorArgument>(&place))
        early.push_back(*moved_tensor);
      else
        launch.programmatic = false;  // an earlier launch of the program writes it
    }
    launch.read_early = std::move(early);
    for (Argument& argument : launch.arguments) move(argument);
    if (launch.parameters)
      for (auto& field : launch.parameters->fields) move(field.value);
  }
  void operator()(LibraryGemm& gemm) const {
    for (Pointer* pointer : {&gemm.a, &gemm.b, &gemm.c}) move(*pointer);
    for (auto* scale : {&gemm.a_scale, &gemm.b_scale})
      if (*scale) move(**scale);
  }
  void operator()(LibrarySum& sum) const {
    for (Pointer* pointer : {&sum.x, &sum.y, &sum.group}) move(*pointer);
  }
  void operator()(HostFunction& function) const {
    function = [own = std::move(function), places = places_,
                first = first_scratch_](const HostCall& call) {
      std::vector<void*> tensors;
      for (const Pointer& place : places) tensors.push_back(address_of(call, place));
      own({tensors.data(),
           {call.scratch.begin() + static_cast<std::ptrdiff_t>(first), call.scratch.end()},
           call.parallel});
    };
  }

 private:
  Pointer moved(const TensorArgument& tensor) const {
    Pointer pointer = places_.at(tensor.tensor);
    std::visit([&](auto& place) { place.offset += tensor.offset; }, pointer);
    return pointer;
  }
  Pointer moved(ScratchArgument scratch) const {
    scratch.scratch += first_scratch_;
    return scratch;
  }
  void move(Pointer& pointer) const {
    pointer = std::visit([&](const auto& place) { return moved(place); }, pointer);
  }
  void move(Argument& argument) const {
    if (const auto* tensor = std::get_if<TensorArgument>(&argument))
      argument = argument_of(moved(*tensor));
    else if (const auto* scratch = std::get_if<ScratchArgument>(&argument))
      argument = argument_of(moved(*scratch));
    else if (auto* map = std::get_if<TensorMapArgument>(&argument))
      move(map->matrix);
  }

  const std::vector<Pointer>& places_;
  const std::vector<std::size_t>& kernels_;
  std::size_t first_scratch_;
};

}  // namespace

const OpPart* part_named(const std::vector<OpPart>& parts, std::string_view name) {
  const auto found = std::find_if(parts.begin(), parts.end(),
                                  [&](const OpPart& part) { return part.name == name; });
  return found == parts.end() ? nullptr : &*found;
}

void set_first(OpPart& part, const std::string& own, std::int64_t elements) {
  part.names[own + first_suffix] = std::to_string(elements);
}

std::int64_t first_of(const OpPart& part, const std::string& own) {
  const auto found = part.names.find(own + first_suffix);
  return found == part.names.end() ? 0 : std::stoll(found->second);
}

std::string part_family_name(std::string_view part, std::string_view family) {
  return fmt::format("{}.{}", part, family);
}

void append_moved(Program& program, Program from, const std::vector<Pointer>& places,
                  std::size_t tensors, std::optional<std::size_t> first_scratch) {
  std::vector<std::size_t> kernels;  // those that the program has already are not compiled again
  for (KernelSource& kernel : from.kernels) {
    const auto same = std::find_if(
        program.kernels.begin(), program.kernels.end(), [&](const KernelSource& other) {
          return other.file == kernel.file && other.expression == kernel.expression;
        });
    kernels.push_back(static_cast<std::size_t>(same - program.kernels.begin()));
    if (same == program.kernels.end()) program.kernels.push_back(std::move(kernel));
  }
  const Move move(places, kernels, first_scratch.value_or(program.scratch.size()));
  if (!first_scratch)
    program.scratch.insert(program.scratch.end(), from.scratch.begin(), from.scratch.end());
  for (Step& step : from.steps) {
    if (std::holds_alternative<HostFunction>(step)) program.host_tensors = tensors;
    std::visit(move, step);
    program.steps.push_back(std::move(step));
  }
}

void append_moved(Program& program, Program from, const std::vector<std::size_t>& places,
                  std::size_t tensors) {
  std::vector<Pointer> pointers;
  for (const std::size_t place : places) pointers.emplace_back(TensorArgument{place});
  append_moved(program, std::move(from), pointers, tensors);
}

PartFamily::PartFamily(const Op& (*whole)(), std::string part, const Family& family, Adjust adjust)
    : whole_(whole),
      part_(std::move(part)),
      name_(part_family_name(part_, family.name())),
      family_(family),
      adjust_(adjust) {}

std::vector<std::string> PartFamily::stages() const {
  std::vector<std::string> names;
  for (const std::string& stage : family_.stages())
    names.push_back(fmt::format("{}.{}", part_, stage));
  return names;
}

std::shared_ptr<const PartFamily::Part> PartFamily::part_of(const Problem& problem) const {
  return part_of_last_.of(problem, [&]() -> Part {
    auto parts = whole_().parts(problem);
    const auto own = std::find_if(parts.begin(), parts.end(),
                                  [&](const OpPart& part) { return part.name == part_; });
    if (own == parts.end()) return std::nullopt;
    return std::move(*own);
  });
}

const OpPart& PartFamily::existing(const Part& part, const Problem& problem) const {
  if (!part)
    throw Error(ErrorKind::internal, fmt::format("{} has no part '{}'", problem.text(), part_));
  return *part;
}

std::optional<std::string> PartFamily::refusal(const Problem& problem,
                                               const DeviceFacts& facts) const {
  const auto found = part_of(problem);
  if (!*found) return fmt::format("the problem has no {}", part_);
  const OpPart& part = **found;
  if (covers_repetition()) {
    const auto parts = whole_().parts(problem);
    if (std::count_if(parts.begin(), parts.end(),
                      [&](const OpPart& other) { return other.op == part.op; }) > 1)
      return fmt::format("its program is of all of {}, and the problem has other ones between them",
                         part_);
  }
  const auto stages = part.op->stages(unrepeated(*part.op, part.problem));
  for (const std::string& stage : family_.stages())
    if (std::none_of(stages.begin(), stages.end(),
                     [&](const StageSpec& spec) { return spec.name == stage; }))
      return fmt::format("the problem has no stage {}", part.stage(stage));
  return family_.refusal(part.problem, facts);
}

Space PartFamily::space(const Problem& problem, const DeviceFacts& facts) const {
  return family_.space(existing(*part_of(problem), problem).problem, facts);
}

Config PartFamily::default_config(const Problem& problem, const DeviceFacts& facts) const {
  return family_.default_config(existing(*part_of(problem), problem).problem, facts);
}

std::optional<double> PartFamily::estimate(const Problem& problem, const DeviceFacts& facts,
                                           const Config& config) const {
  return family_.estimate(existing(*part_of(problem), problem).problem, facts, config);
}

bool PartFamily::is_preferred(const Problem& problem, const DeviceFacts& facts) const {
  return family_.is_preferred(existing(*part_of(problem), problem).problem, facts);
}

Program PartFamily::program(const Problem& problem, const DeviceFacts& facts,
                            const Config& config) const {
  const auto placed = placed_last_.of(problem, [&] {
    const Problem own = covers_repetition() ? problem : unrepeated(whole_(), problem);
    Placed found{existing(*part_of(own), own), {}};
    const auto tensors = whole_().tensors(own);
    for (const TensorSpec& tensor : found.part.op->tensors(found.part.problem))
      found.places.emplace_back(TensorArgument{
          tensor_index(tensors, found.part.tensor(tensor.name)),
          static_cast<std::size_t>(first_of(found.part, tensor.name)) * dtype_bytes(tensor.dtype)});
    found.tensors = tensors.size();
    return found;
  });
  Program program;
  append_moved(program, family_.program(placed->part.problem, facts, config), placed->places,
               placed->tensors);
  if (adjust_ != nullptr) adjust_(*this, problem, facts, program);
  return program;
}

bool is_repeated_by_family(const Op& op, const Recipe& recipe) {
  return std::any_of(recipe.begin(), recipe.end(), [&](const Variant& variant) {
    return family_of(op, variant.family).covers_repetition();
  });
}

}  // namespace fftune
