// The baseline that a user would write without fftune: a mask of blocked ids, then the masked
// logits.
#include <fmt/format.h>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/ngram_block/ngram_block.hpp"

namespace fftune::ngram_block {

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  const Rows rows = rows_of(problem);
  if (facts.kind == DeviceKind::cpu || rows.own_lengths || rows.own_n) return {};
  constexpr const char* file = "ngram_block/baseline.cu";
  constexpr std::uint32_t threads = 256;
  const TensorPlaces at(ngram_block_op().tensors(problem));
  const auto len = static_cast<std::int32_t>(rows.prefix + rows.len);
  const auto vocab = static_cast<std::int32_t>(rows.vocab);
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = "a mask of the blocked tokens, cleared and marked, then the logits by it";
  Program& program = baseline.program;
  program.scratch = {{static_cast<std::size_t>(rows.b * rows.vocab), true},
                     {static_cast<std::size_t>(rows.b) * sizeof(std::int32_t), true}};
  // The texts of all rows: ids, or memory in which prefixes and ids are joined.
  const auto texts = [&]() -> Argument {
    if (rows.prefix > 0) return ScratchArgument{2};
    return tensor_of(at, "ids");
  };
  if (rows.prefix > 0) {
    program.scratch.push_back(
        {static_cast<std::size_t>(rows.b * len) * dtype_bytes(rows.ids), false});
    append_kernel(program, file, fmt::format("baseline_join<{}>", integer_type(rows.ids)),
                  grid_of_matrix(rows.b, len, threads), threads,
                  {tensor_of(at, "prefix"), tensor_of(at, "ids"), texts(), rows.b,
                   static_cast<std::int32_t>(rows.beams), static_cast<std::int32_t>(rows.prefix),
                   static_cast<std::int32_t>(rows.len)});
  }
  append_kernel(program, file, fmt::format("baseline_mark<{}>", integer_type(rows.ids)),
                grid_of_matrix(rows.b, len, threads), threads,
                {texts(), ScratchArgument{0}, ScratchArgument{1}, rows.b, len, vocab,
                 static_cast<std::int32_t>(rows.n), rows.padding});
  append_kernel(program, file, fmt::format("baseline_fill<{}>", element_type(rows.dtype)),
                grid_of_matrix(rows.b, rows.vocab, threads), threads,
                {ScratchArgument{0}, tensor_of(at, "logits"), rows.b, vocab});
  append_kernel(program, file, "baseline_copy_counts",
                {static_cast<std::uint32_t>(quotient_up(rows.b, threads)), 1, 1}, threads,
                {ScratchArgument{1}, tensor_of(at, "invalid"), rows.b});
  return {baseline};
}

}  // namespace fftune::ngram_block
