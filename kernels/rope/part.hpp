// RoPE as part of another op, such as qkv: its options, tensors and rule, under the names that the
// op rope gives them. Behind it rows go to a cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "kernels/common/op_parts.hpp"
#include "registry/op.hpp"

namespace fftune::rope {

constexpr std::int64_t usual_positions = 4096;  // of a table of angles

/// What an op rotates.
struct RotatedPart {
  std::int64_t features = 0;   // of a head, which are rotated
  std::int64_t positions = 0;  // rows of the table
  bool halves = false;         // pairs are features / 2 apart, not neighbours
  bool table = false;          // of angles

  std::int64_t first_of(std::int64_t pair) const { return halves ? pair : 2 * pair; }
};

/// Rows of the table of angles: `usual` of them if left out.
SizeField positions_size(const std::string& usual, WhenAbsent when_absent);
/// Rows of "the cache" or "the caches"; m if left out.
SizeField cache_slots_size(const std::string& caches, WhenAbsent when_absent);

/// Those by which angles are given or computed.
std::vector<OptionField> angle_options();

/// Why the options of llama3 do not go together; empty: they do.
std::string contradiction_of_angles(const Op& op, const Problem& problem);

/// Positions of `tokens` tokens, some a little past the table's end, which then stands for them;
/// and the table where there is one.
std::vector<TensorSpec> angle_tensors(const RotatedPart& part, std::int64_t tokens);

/// Rows of a cache with `rows` of them to which the tokens go, none twice. Some tokens have none:
/// their slots are before and past the cache's.
TensorSpec slots_tensor(DType dtype, std::int64_t tokens, std::int64_t rows);

/// The rule: the frequency of each pair, none where there is a table, and the factor of all sines
/// and cosines.
struct Turns {
  std::vector<float> frequencies;
  float scale = 1;
};
Turns turns_of(const Problem& problem, const RotatedPart& part);

/// By definition: the angle of every pair at a token's position.
std::vector<double> angles_of(const RotatedPart& part, const Turns& turns,
                              const ReferenceTensors& tensors, std::size_t token);

}  // namespace fftune::rope
