// How rmsnorm's CUDA kernels spread a row over threads: parameters that both passes have.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/space.hpp"
#include "device/facts.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "registry/family.hpp"

namespace fftune::rmsnorm {

/// Why rows in registers cannot serve a pass, one line: no CUDA kernel can, or the default of
/// `family` is not in its space.
std::optional<std::string> refuse_rows(const Family& family, const Problem& problem,
                                       std::string_view pass, const DeviceFacts& facts);

/// Adds vector, group, groups, cluster and streams, with what constrains them alone.
void add_row_parameters(Space& space, const Layer& layer, const DeviceFacts& facts);

/// Values for those parameters: the widest vectors, about `vectors` of them a thread, and 256
/// threads a block or what a row takes; a row that is wider than 512 threads' accesses of 16 bytes,
/// `most_vectors` (at least 2) for each, is spread over a cluster where there are clusters.
Config default_rows(const Layer& layer, const DeviceFacts& facts, std::int64_t vectors,
                    std::int64_t most_vectors);

/// Elements of x that one access moves.
std::int64_t elements_of_vector(const Layer& layer, const Config& config);
/// Vectors of a row that each of its threads has.
std::int64_t vectors_of_thread(const Layer& layer, const Config& config);
std::int64_t block_threads(const Config& config);

}  // namespace fftune::rmsnorm
