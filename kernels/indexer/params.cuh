// The form, configurations and parameters of the kernels of indexer. Included by host and device
// code.
#pragma once

#include "gemm/form.cuh"

namespace fftune {

/// The facts that kernels are compiled for: one template argument.
struct indexer_form {
  element type = element::bf16;
  int heads = 64;
  int dim = 128;
  bool lengths = false;
  bool e4m3 = false;  // keys are e4m3, each with a scale
  bool paged = false;
};

/// A configuration of scores by mma.sync: a CTA has some keys, whose features its threads hold in
/// registers, and goes over the queries.
struct indexer_config {
  int warps = 4;
  int m_tiles = 1;  // tiles of 16 keys of a warp

  constexpr int threads() const { return warps * 32; }
  constexpr int keys() const { return warps * m_tiles * 16; }

  /// Heads of a query in shared memory: rows of whole steps of 32 features. Eight lanes read 64
  /// bytes of two neighbouring rows at once, from all banks.
  static constexpr int steps(const indexer_form& form) { return (form.dim + 31) / 32; }
  static constexpr int row_bytes(const indexer_form& form) { return (steps(form) | 1) * 64; }
  static constexpr int blocks(const indexer_form& form) { return (form.heads + 7) / 8; }
  static constexpr int weights_at(const indexer_form& form) {
    return blocks(form) * 8 * row_bytes(form);
  }
  static constexpr int stage_bytes(const indexer_form& form) {
    return weights_at(form) + blocks(form) * 32;
  }
  static constexpr int stages = 2;
  static constexpr int shared_bytes(const indexer_form& form) { return stages * stage_bytes(form); }
  /// 32-bit registers of a thread that hold keys.
  constexpr int key_registers(const indexer_form& form) const { return m_tiles * steps(form) * 8; }
};

struct indexer_params {
  const void* q;         // [batch, queries, heads, dim]
  const float* weights;  // [batch, queries, heads]
  const void* k;         // rows of dim elements, of sequences or of pages
  const float* k_scale;  // a scale for each row
  const int* pages;      // [batch, ceil(kv_len / page)]; outside [0, page_count): a page of zeros
  const int* lengths;    // [batch]
  float* scores;         // [batch, queries, kv_len]; only those of keys that a query sees
  int* ids;              // [batch, queries, top]
  long long k_block, scale_block;  // elements from a page, or a sequence, to the next
  int batch, queries, kv_len, top, page, page_count;
  int queries_of_cta;
  int held;  // keys of scores that a CTA holds in shared memory while it chooses
};

}  // namespace fftune
