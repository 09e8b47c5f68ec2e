#include "runtime/token_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "runtime/plan.hpp"

namespace fftune {
namespace {

/// Bindings take some kilobytes each.
constexpr std::int64_t most_slots = 16384;

/// An op whose kernels are specialised to more token counts than this needs a plan for each.
constexpr std::size_t most_kernels = 64;

/// Beyond the token counts that are scanned one by one, scratch may be a little more between two.
constexpr std::int64_t scanned_one_by_one = 8192;

std::size_t slots_for(std::int64_t tokens) {
  return static_cast<std::size_t>(std::min(tokens + 1, most_slots));
}

/// Scratch of a recipe, whose variants share it unless they are repeated: then each keeps its own
/// from one time to the next.
class ScratchOfRecipe {
 public:
  explicit ScratchOfRecipe(bool repeated) : repeated_(repeated) {}

  void add(std::size_t bytes) {
    constexpr std::size_t alignment = 256;
    const std::size_t part = (bytes + alignment - 1) / alignment * alignment;
    bytes_ = repeated_ ? bytes_ + part : std::max(bytes_, part);
  }
  std::size_t bytes() const { return bytes_; }

 private:
  bool repeated_;
  std::size_t bytes_ = 0;
};

}  // namespace

TokenPlan::TokenPlan(const Catalog& catalog, Backend& backend, const Op& op, Problem most,
                     const PresetLibrary& presets)
    : backend_(&backend),
      op_(&op),
      most_(std::move(most)),
      segments_(token_segments(catalog, op, most_, backend.facts(), presets)),
      layout_(op, most_),
      slots_(slots_for(most_tokens())) {
  for (const auto& segment : segments_)
    check_recipe(op, most_.with_size(op.token_size(), segment.chosen_at), backend.facts(),
                 segment.choice.recipe);
  compile();
}

void TokenPlan::compile() {
  std::vector<VariantProgram> jobs;
  std::set<std::string> known;
  std::vector<bool> used(layout_.tensors().size());
  for (const auto& segment : segments_) {
    const auto tokens = scanned_tokens(segment);
    for (const auto count : tokens) {
      const Problem problem = most_.with_size(op_->token_size(), count);
      ScratchOfRecipe scratch(op_->repetition(problem).has_value());
      for (const auto& variant : recipe_at(*op_, most_, backend_->facts(), segment, count)) {
        auto program =
            family_of(*op_, variant.family).program(problem, backend_->facts(), variant.config);
        scratch.add(backend_->workspace_bytes(program));
        mark_used(program, used);
        // Programs of one segment differ in numbers alone, but for the kernels named here.
        bool first = count == tokens.front();
        for (const auto& kernel : program.kernels)
          if (known.insert(kernel.file + " " + kernel.expression).second) first = true;
        if (first) jobs.push_back({variant, std::move(program)});
        if (known.size() > most_kernels)
          throw Error(
              ErrorKind::invalid_input,
              fmt::format(
                  "{} compiles kernels for single numbers of {}: make a plan for each instead "
                  "of one for up to {}",
                  op_->name(), op_->token_size(), most_tokens()));
      }
      scratch_bytes_ = std::max(scratch_bytes_, scratch.bytes());
    }
  }
  if (most_tokens() > scanned_one_by_one) scratch_bytes_ += scratch_bytes_ / 8;
  if (!op_->repetition(most_)) layout_.leave_out_unused(used);
  check_workspace(most_, workspace_bytes(), backend_->facts());

  compiled_ = compile_side_by_side(*backend_, jobs);
}

std::shared_ptr<const TokenPlan::Binding> TokenPlan::bind(std::int64_t tokens) const {
  const Problem problem = most_.with_size(op_->token_size(), tokens);
  const DeviceFacts& facts = backend_->facts();
  const auto segment = std::find_if(segments_.begin(), segments_.end(),
                                    [&](const TokenSegment& each) { return tokens <= each.last; });
  auto binding = std::make_shared<Binding>();
  binding->tokens = tokens;
  binding->executables =
      executables_of(*op_, problem, facts, recipe_at(*op_, most_, facts, *segment, tokens),
                     [&](const Variant& variant, const Program& program) {
                       return executable_of(backend_->bind(program), variant, facts);
                     });
  if (const auto needed = scratch_bytes(binding->executables); needed > scratch_bytes_)
    throw Error(ErrorKind::unavailable,
                fmt::format("{} needs {} bytes of scratch where its plan for up to {} has {}: make "
                            "a plan for it alone",
                            problem.text(), needed, most_tokens(), scratch_bytes_));
  return binding;
}

std::shared_ptr<const TokenPlan::Binding> TokenPlan::binding(std::int64_t tokens) const {
  auto& slot = slots_[static_cast<std::size_t>(tokens) % slots_.size()];
  auto binding = slot.load(std::memory_order_acquire);
  if (binding && binding->tokens == tokens) return binding;
  binding = bind(tokens);
  slot.store(binding, std::memory_order_release);
  return binding;
}

void TokenPlan::prepare(std::int64_t tokens) const {
  if (tokens < 1 || tokens > most_tokens())
    throw Error(ErrorKind::invalid_input,
                fmt::format("{}={} is out of range: this plan is for 1 to {}", op_->token_size(),
                            tokens, most_tokens()));
  binding(tokens);
}

void TokenPlan::run(std::int64_t tokens, void* const* buffers, void* workspace,
                    void* stream) const {
  layout_.enqueue(binding(tokens)->executables, buffers, workspace, stream);
}

}  // namespace fftune
