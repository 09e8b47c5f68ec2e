#include "kernels/gemm/library_gemm.hpp"

#include <algorithm>

#include "kernels/gemm/launch.hpp"

namespace fftune {

GemmProblem of_group(GemmProblem gemm, std::size_t group) {
  for (auto* matrices : {&gemm.a, &gemm.b, &gemm.c, &gemm.epilogue.source})
    for (TensorNames& matrix : *matrices) matrix = {matrix.at(std::min(group, matrix.size() - 1))};
  gemm.groups = {};
  gemm.a_sorted = gemm.b_sorted = gemm.c_sorted = false;
  return gemm;
}

void append_library_gemms(Program& program, const GemmProblem& gemm, const TensorPlaces& places,
                          const std::vector<std::string_view>& outputs) {
  const auto scale = [&](std::string_view name) {
    return name.empty() ? std::nullopt : std::optional<Pointer>(tensor_of(places, name));
  };
  const Quantisation& scales = gemm.quantisation;
  const std::size_t pairs = std::max(gemm.a.size(), gemm.b.size());
  for (std::size_t i = 0; i < pairs; ++i) {
    const std::size_t a = std::min(i, gemm.a.size() - 1), b = std::min(i, gemm.b.size() - 1);
    // K-concatenated pairs share one C.
    const std::size_t c = gemm.form == GemmForm::k_concatenated ? 0 : i;
    const std::string_view output = outputs.empty() ? gemm.c.at(c).front() : outputs.at(c);
    program.steps.emplace_back(
        LibraryGemm{.dtype = gemm.dtype,
                    .m = gemm.m,
                    .n = gemm.n,
                    .k = gemm.k,
                    .a = tensor_of(places, gemm.a[a].front()),
                    .b = tensor_of(places, gemm.b[b].front()),
                    .c = tensor_of(places, output),
                    .a_transposed = gemm.a_major == Major::mn,
                    .b_transposed = gemm.b_major == Major::mn,
                    .accumulates = c != i || !gemm.epilogue.source.empty(),
                    .a_scale = scale(scales.a_scale),
                    .b_scale = scale(b < scales.b_scale.size() ? scales.b_scale[b] : "")});
  }
}

}  // namespace fftune
