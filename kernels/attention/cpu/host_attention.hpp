// An attention problem on the host: its sequences, rows of its tensors as f32, and blocks of
// scores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/space.hpp"
#include "cpu/blas.hpp"
#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/cpu_vector.hpp"
#include "kernels/gemm/cpu/host_gemm.hpp"
#include "kernels/gemm/cpu/work.hpp"

namespace fftune::attention {

using gemm_cpu::Range;

/// A sequence's tokens in q, and in k and v unless these are paged.
struct Sequence {
  std::int64_t index = 0;
  std::int64_t first_query = 0, queries = 0;
  std::int64_t first_key = 0, keys = 0;
};

/// Some queries, or keys, of one head of a sequence; `head` of k and v for keys.
struct Block {
  Sequence sequence;
  std::int64_t head = 0;
  Range range;
};

class HostAttention {
 public:
  HostAttention(const Problem& problem, const DeviceFacts& facts);

  Layer layer;
  Places at;
  gemm_cpu::Converter converter;
  const VectorKernels* vector = nullptr;

  Sequence sequence(const HostCall& call, std::int64_t index) const;
  /// All queries of all heads in blocks of at most `size`, the last of a sequence first, because
  /// causal ones see the most keys: how many there are, and each.
  std::int64_t query_blocks(const HostCall& call, std::int64_t size) const;
  Block query_block(const HostCall& call, std::int64_t size, std::int64_t index) const;
  /// The same of keys, in their order, those beyond a sequence's length too.
  std::int64_t key_blocks(const HostCall& call, std::int64_t size) const;
  Block key_block(const HostCall& call, std::int64_t size, std::int64_t index) const;

  /// The keys that a query may see as its position has it, and the hull of those of several.
  Range keys_of(const Sequence& sequence, std::int64_t query) const;
  Range keys_of(const Sequence& sequence, Range queries) const;
  /// Whether a mask in memory, if there is one, allows any pair of the block.
  bool sees_any(const HostCall& call, const Sequence& sequence, std::int64_t head, Range queries,
                Range keys) const;

  /// Features of a head of a tensor.
  std::int64_t features_of(std::size_t tensor) const {
    const bool of_values =
        tensor == at.v || tensor == at.out || tensor == at.d_out || tensor == at.dv;
    return of_values ? layer.v_dim : layer.dim;
  }
  /// Rows of q, d_out or out: [queries, features], in place if they are f32, else copied to `room`.
  MatrixView query_rows(const HostCall& call, std::size_t tensor, const Block& block,
                        float* room) const;
  /// Rows of k or v of a head of theirs.
  MatrixView key_rows(const HostCall& call, std::size_t tensor, const Sequence& sequence,
                      std::int64_t head, Range keys, float* room) const;
  /// Whether rows are copied.
  bool copies() const { return layer.kv_dtype() != DType::f32 || layer.page > 0; }

  /// scores [queries, keys.size()] of a block and some keys, -inf where a key is not allowed. The
  /// slope of the soft cap goes to `slope` where it is not null.
  void scores(const HostCall& call, const Block& block, Range keys, MatrixView q, MatrixView k,
              float* scores, float* slope) const;

  /// The same of the products q kᵀ of one query.
  void finish_row(const HostCall& call, const Sequence& sequence, std::int64_t head,
                  std::int64_t query, Range keys, float* scores, float* slope) const;

  /// Stores rows [count, features] of one head of an output that has `heads`.
  void store_rows(const HostCall& call, std::size_t tensor, std::int64_t heads,
                  std::int64_t first_token, std::int64_t head, std::int64_t count,
                  const float* rows) const;

  /// The head's logit without a value; -inf where there are none.
  float sink(const HostCall& call, std::int64_t head) const;
  /// The place of lse of a query.
  std::int64_t lse_at(const Sequence& sequence, std::int64_t head, std::int64_t query) const {
    return layer.lse_at(sequence.index, head) +
           (layer.layout == Layout::thd ? sequence.first_query : 0) + query;
  }

 private:
  /// Keys of a sequence whose gradients there are.
  std::int64_t stored_keys(const Sequence& sequence) const {
    return layer.lengths ? layer.kv : sequence.keys;
  }
  std::int64_t row_of(std::size_t tensor) const;
  /// A key's row of k and v; -1 where its page is not in the cache, so that it is all zeros.
  std::int64_t key_token(const HostCall& call, const Sequence& sequence, std::int64_t key) const;
};

/// The blocks of the engines over OpenBLAS: parameters block_q, block_k and threads.
Space block_space(const Layer& layer, const DeviceFacts& facts);
/// More than one where each has enough to do.
std::int64_t default_threads(const Layer& layer, const DeviceFacts& facts);
Config default_blocks(const Layer& layer, const DeviceFacts& facts);

/// The embedded sources that the CPU engines share, and an engine's own.
std::vector<std::string> host_sources(const char* own);

}  // namespace fftune::attention
