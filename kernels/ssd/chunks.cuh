// The configuration and the shared memory of the kernels of chunks (chunks.cu, chunks_backward.cu).
// Included by host and device code.
#pragma once

#include "ssd/params.cuh"

namespace fftune {

constexpr int ssd_chunk = 64;         // tokens
constexpr int ssd_chunk_warps = 4;    // each with 16 tokens
constexpr int ssd_chunk_factors = 4;  // arrays of ssd_chunk floats (chunks.cu)

// A walk writes out; or it keeps the state before each chunk; or it goes back with the gradient of
// the state, and keeps that behind each chunk.
enum class ssd_walk { out, keep, back };

struct ssd_chunk_config {
  int rows = 64;   // of a state that a CTA has: 16, 32 or 64
  int stages = 2;  // chunks in shared memory
  ssd_walk walk = ssd_walk::out;
};

// Shared memory, in bytes. Rows of tiles are 16 bytes longer than their elements, so that ldmatrix
// reads eight of them from all banks.
struct ssd_chunk_plan {
  int state_row, x_row;       // bytes
  int c_tile, x_tile, stage;  // offsets in a stage, which begins with B; the size of one
  int state_tile, factors, bytes;
};
constexpr ssd_chunk_plan ssd_chunk_plan_of(int state_dim, ssd_chunk_config c) {
  const int state_row = 2 * state_dim + 16, x_row = 2 * c.rows + 16;
  const int tile = ssd_chunk * state_row;
  const bool writes = c.walk == ssd_walk::out;  // it needs C and S too
  const int x_tile = writes ? 2 * tile : tile, stage = x_tile + ssd_chunk * x_row;
  const int state_tile = c.stages * stage;
  const int factors = state_tile + (writes ? c.rows * state_row : 0);
  return {state_row, x_row,      tile,    x_tile,
          stage,     state_tile, factors, factors + ssd_chunk_factors * ssd_chunk * 4};
}

// Shared memory of the gradients of a chunk's tokens, in bytes: tiles B, C [64, state_dim], x,
// d_out [64, dim], S, dS [dim, state_dim]; arrays of 64 floats.
constexpr int ssd_token_arrays = 14;
struct ssd_token_plan {
  int state_row, x_row, C, x, d_out, S, dS, arrays, bytes;
};
constexpr ssd_token_plan ssd_token_plan_of(int dim, int state_dim) {
  const int state_row = 2 * state_dim + 16, x_row = 2 * dim + 16;
  const int C = ssd_chunk * state_row, x = 2 * C, d_out = x + ssd_chunk * x_row;
  const int S = d_out + ssd_chunk * x_row, dS = S + dim * state_row;
  const int arrays = dS + dim * state_row;
  return {state_row, x_row, C, x, d_out, S, dS, arrays, arrays + ssd_token_arrays * ssd_chunk * 4};
}

}  // namespace fftune
