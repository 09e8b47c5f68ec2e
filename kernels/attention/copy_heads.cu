// Copies heads of 16-bit elements to rows that begin at multiples of 32 bytes, with zeros behind
// their features: TMA addresses multiples of 16 bytes, and the MMAs take 16 features at a time.
//
// A block has some tokens of one tensor, a thread 16 bytes of the copy at a time. Heads are aligned
// to four bytes at least.
//
// Grid: token blocks of the longest tensor, tensors. Block: 256.
#include "attention/copy_heads.cuh"
#include "attention/row_layout.cuh"
#include "common/async.cuh"
#include "common/vectors.cuh"

namespace fftune {

template <int dim, int tokens_of_block>
__global__ void __launch_bounds__(256)
    attention_copy_heads(const __grid_constant__ attention_copy_params params) {
  constexpr int chunks = attention_padded_dim(dim) / 8;  // of a head
  wait_and_launch_dependents();
  const int tensor = static_cast<int>(blockIdx.y), heads = params.heads[tensor];
  const i64 first = static_cast<i64>(blockIdx.x) * tokens_of_block;
  const i64 left = params.tokens[tensor] - first;
  if (left <= 0) return;
  const int tokens = left < tokens_of_block ? static_cast<int>(left) : tokens_of_block;
  const u16* const from = static_cast<const u16*>(params.from[tensor]);
  uint4* const to = static_cast<uint4*>(params.to[tensor]) + first * heads * chunks;
  for (int i = threadIdx.x; i < tokens * heads * chunks; i += 256) {
    const int column = i % chunks * 8, head = i / chunks % heads, token = i / chunks / heads;
    const u16* const own =
        from + (first + token) * params.row[tensor] + static_cast<i64>(head) * params.head[tensor];
    u32 word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      word[j] = column + j * 2 < dim ? load_dependent_word(own + column + j * 2) : 0;
    }
    to[i] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

}  // namespace fftune
