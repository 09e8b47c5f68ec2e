// What the CUDA families share: how a stage's kernels are named, and what they refuse.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/masked/masked.hpp"

namespace fftune::masked {

/// The template arguments of every kernel: element type, epilogue, whether A and C are in the order
/// of the mask.
std::string template_arguments(Stage stage, const Problem& problem);

/// The addresses that the kernels of gathered rows begin with: a, mask, an expert's two weights,
/// the other's, c. With one product the second weight is null.
std::vector<Argument> pointer_arguments(const StageProduct& work);

/// Why no kernel of 16-bit tensor core products and 16-byte rows can serve it.
std::optional<std::string> refuse_halves(const Problem& problem, const DeviceFacts& facts);

/// The same of the wgmma engine, whose table of tiles is in shared memory: 64 KiB with tiles of 64
/// rows.
std::optional<std::string> refuse_wgmma(const Problem& problem, const DeviceFacts& facts);

}  // namespace fftune::masked
