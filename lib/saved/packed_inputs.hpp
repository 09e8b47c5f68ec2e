// Packed weights of ops from the quantised weights of saved models.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "registry/op.hpp"
#include "saved/quantised.hpp"

namespace fftune {

/// Which tensor of a packed weight an input is.
enum class PackedPart { codes, scales, zeros };

/// "w_up" and its part, for an input of an op that may belong to a packed weight.
struct PackedName {
  std::string weight;
  PackedPart part = PackedPart::codes;
};
/// Nothing where the input has not the element type and the dimensions of such a tensor.
std::optional<PackedName> packed_name(const TensorSpec& spec);

/// The format of weights that kernels take together; `unfit` where there is none.
CodeFormat common_format(const std::vector<CodeFormat>& formats);
/// The words of an op's options `weights`, `group` and `zeros`, for a format that is fit.
std::vector<std::pair<std::string, std::string>> option_words(const CodeFormat& format);

/// A quantised weight [n, k], row by row.
struct CodedMatrix {
  std::int64_t n = 0, k = 0;
  CodeFormat format = {};
  std::function<void(std::int64_t row, std::span<Code> codes)> read = {};
};

/// Whether the op pack-weight packs the matrix with the sizes and groups that `spec` has.
bool fits(const Op& pack_weight, const CodedMatrix& matrix, PackedPart part,
          const TensorSpec& spec);
/// Fills `out` with the packed weight's part, as the op makes it, if it fits().
void pack(const Op& pack_weight, const CodedMatrix& matrix, PackedPart part, const TensorSpec& spec,
          std::span<std::byte> out, Parallel& parallel);

}  // namespace fftune
