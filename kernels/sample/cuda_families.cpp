#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/sample/sample.hpp"

namespace fftune::sample {
namespace {

constexpr const char* kernel_file = "sample/choose.cu";

std::string template_argument(const Form& form) {
  return StructText("choice_form", "draws", form.draws, "sums", form.logprobs);
}

/// The kernel that writes the best ids, which reads all logits again.
void append_best(Program& program, const Problem& problem, const Form& form,
                 const TensorPlaces& places, const DeviceFacts& facts) {
  if (form.best == 0) return;
  append_pdl_kernel(
      program, facts, kernel_file, fmt::format("choose_best<{}>", element_type(problem.dtype)),
      {static_cast<std::uint32_t>(problem.size("m"))}, 1024,
      {tensor_of(places, "logits"), tensor_of(places, "best_ids"),
       tensor_of(places, "best_logprobs"), form.softcap,
       static_cast<std::int32_t>(problem.size("vocab")), static_cast<std::int32_t>(form.best)});
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Form form = form_of(problem);
  const TensorPlaces places(sample_op().tensors(problem));
  const std::int64_t rows = problem.size("m"), vocab = problem.size("vocab");
  const auto given = [&](const char* name) { return tensor_or_null(places, name); };
  Program program;
  if (form.filters) {
    append_pdl_kernel(program, facts, kernel_file,
                      fmt::format("choose_filtered<{}, {}>", element_type(problem.dtype),
                                  template_argument(form)),
                      {static_cast<std::uint32_t>(rows)}, 1024,
                      {given("logits"), given("temperature"), given("seeds"), given("steps"),
                       given("top_k"), given("top_p"), given("min_p"), given("ids"), given("logit"),
                       given("logprob"), form.softcap, static_cast<std::int32_t>(vocab)});
    append_best(program, problem, form, places, facts);
    return program;
  }
  // Two blocks for each SM, and 2048 ids for a block at least.
  const std::int64_t most_parts = std::clamp<std::int64_t>(
      quotient_up(2 * std::max(facts.multiprocessors, 1), rows), 1, quotient_up(vocab, 2048));
  const std::int64_t of_part = quotient_up(quotient_up(vocab, most_parts), 4) * 4;
  const std::int64_t parts = quotient_up(vocab, of_part);
  program.scratch.push_back({static_cast<std::size_t>(rows * parts * partial_bytes), false});
  append_pdl_kernel(
      program, facts, kernel_file,
      fmt::format("choose_parts<{}, {}>", element_type(problem.dtype), template_argument(form)),
      {static_cast<std::uint32_t>(parts * rows)}, 256,
      {given("logits"), given("temperature"), given("seeds"), given("steps"), ScratchArgument{0},
       form.softcap, static_cast<std::int32_t>(vocab), static_cast<std::int32_t>(of_part),
       static_cast<std::int32_t>(parts)});
  append_finish(program, form, places, facts, 0, rows, parts);
  append_best(program, problem, form, places, facts);
  return program;
}

}  // namespace

void append_finish(Program& program, const Form& form, const TensorPlaces& places,
                   const DeviceFacts& facts, std::size_t partials, std::int64_t rows,
                   std::int64_t count) {
  append_pdl_kernel(
      program, facts, kernel_file, fmt::format("choose_finish<{}>", template_argument(form)),
      {static_cast<std::uint32_t>(rows)}, 256,
      {ScratchArgument{partials}, tensor_of(places, "ids"), tensor_of(places, "logit"),
       tensor_or_null(places, "logprob"), static_cast<std::int32_t>(count)});
}

std::vector<const Family*> cuda_families() {
  static const StageFamily family({.name = "choose",
                                   .summary =
                                       "parts of rows, then the best of them; filtered: a block a "
                                       "row, the least key that stays digit by digit",
                                   .stage = sample::stage,
                                   .sources = {kernel_file},
                                   .is_fallback = true,
                                   .program = program});
  return {&family};
}

}  // namespace fftune::sample
