// The parameters of the kernel that copies heads to where TMA can address them: one struct, passed
// by value. Included by host and device code.
#pragma once

namespace fftune {

/// Tensors of a launch at most: q, k, v and d_out.
constexpr int attention_most_copies = 4;

struct attention_copy_params {
  const void* from[attention_most_copies];
  void* to[attention_most_copies];  // [tokens, heads, attention_padded_dim(dim)]
  long long tokens[attention_most_copies];
  int heads[attention_most_copies];
  int row[attention_most_copies];   // elements between tokens of `from`
  int head[attention_most_copies];  // elements between its heads
};

}  // namespace fftune
