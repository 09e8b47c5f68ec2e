// Copies of q, k and v whose heads TMA can address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/program.hpp"
#include "kernels/attention/launch.hpp"

namespace fftune::attention {

/// The device source of the launch that copies.
constexpr const char* copy_heads_source = "attention/copy_heads.cu";

/// Whether kernels of TMA read copies of a layer's heads: these are not aligned to 16 bytes.
bool copies_heads(const Layer& layer);

/// Cycles of the launch that copies q, k and v, and d_out in the backward pass; 0: there is none.
double copy_cycles(const Layer& layer, const DeviceFacts& facts);

/// The tensors of a layer as maps of TMA are made from: the problem's own, or copies.
struct HeadTensors {
  Layer layer;  // as the tensors lie: features of a head, rows, and heads of k and v
  Pointer q, k, v, d_out;
};

/// Adds the launch that copies, if there is one.
HeadTensors head_tensors(Program& program, Launch& launch, const DeviceFacts& facts);

/// Boxes of `tokens` tokens and `heads` heads, of `columns` columns of each: a tensor map of three
/// dimensions, features of a head, heads of a row, and the tokens of all sequences and pages.
TensorMapArgument heads_map(const Layer& layer, const Pointer& tensor, std::int64_t row,
                            bool of_keys, int tokens, int columns, int heads = 1);

}  // namespace fftune::attention
