// From a GemmProblem to a kernel's launch: its compile-time form (form.cuh) as a template argument,
// its parameters (form.cuh) filled in by name, and how the blocks of split-K (split_k.cuh) meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "device/facts.hpp"
#include "device/program.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/gemm/form.cuh"
#include "kernels/gemm/packed/layout.cuh"
#include "kernels/gemm/packed/params.cuh"
#include "kernels/gemm/problem.hpp"

namespace fftune {

gemm_form form_of(const GemmProblem& gemm);

/// As a template argument: "fftune::gemm_form{.ab = fftune::element::fp16, ...}". Fields that have
/// their default are left out.
std::string template_argument(const gemm_form& form);

/// Sets the sizes, and the address of every tensor of the problem. group_m and what belongs to
/// split-K are left to the engine.
void set_gemm(ParameterFields<gemm_params> fields, const GemmProblem& gemm,
              const TensorPlaces& places);

/// The format of a problem's packed weights.
packed_form packed_form_of(const GemmProblem& gemm);
/// As a template argument: "fftune::packed_form{128, false, fftune::packed_code::int4}".
std::string template_argument(const packed_form& form);
void set_packed(ParameterFields<packed_params> fields, const GemmProblem& gemm,
                const TensorPlaces& places);

/// Appends the launch that writes the sines and cosines of every row of a rotating epilogue qkv, if
/// it is one, and returns where they are: qkv_params::sines.
std::optional<Pointer> append_sines(Program& program, const GemmProblem& gemm,
                                    const TensorPlaces& places);

/// Appends the launch that copies `rows` rows, or tokens, into the order of their groups
/// (sort_tokens.cu). The caller adds the arguments behind the groups: two matrices, and `rows`.
KernelLaunch& append_permute_rows(Program& program, const GemmProblem& gemm,
                                  const TensorPlaces& places, const DeviceFacts& facts,
                                  std::int64_t rows);

/// Sets what an epilogue qkv needs.
void set_heads(ParameterFields<qkv_params> fields, const GemmProblem& gemm,
               const TensorPlaces& places, const std::optional<Pointer>& sines);

/// Those of a plain_params but for group_m and split-K, in a struct of `bytes`: of a kernel without
/// heads a gemm_params is enough. `sines`: as append_sines() returns them.
ParameterStruct plain_parameters(const GemmProblem& gemm, const TensorPlaces& places,
                                 const std::optional<Pointer>& sines, std::size_t bytes);

/// All fields of a plain_params of heads; of rotated ones those of a rotating_params, whose kernel
/// needs no sines.
ParameterStruct heads_parameters(const GemmProblem& gemm, const TensorPlaces& places);

/// Appends a launch of the kernel `fftune::<expression>` of `file` with one struct of parameters.
/// The reference that it returns is valid until the next step is appended.
KernelLaunch& append_gemm(Program& program, const std::string& file, const std::string& expression,
                          std::int64_t grid, int threads, ParameterStruct parameters);

/// Launches `kernel` while the launches before it run (KernelLaunch::programmatic) if it waits for
/// them by itself. These write no weights: packed ones are loaded before the wait.
void launch_behind(KernelLaunch& launch, const KernelSource& kernel);
/// The same for all kernels of a part, which follow others.
void launch_programmatically(Program& program, const DeviceFacts& facts);

/// From sm_90 on the splits of a tile are a cluster, and need neither workspace nor counters.
bool splits_in_clusters(const DeviceFacts& facts);

/// The most splits a tile can have: 8 blocks are the largest cluster that every device runs.
constexpr int max_split_k = 8;

/// Makes `launch`, whose grid.x counts tiles, run `split_k` blocks a tile: sets grid.y, cluster,
/// and split_k, split_counters and split_partials of the gemm_params that its parameter struct
/// begins with, with their scratch. `share_bytes` are one block's accumulators; where they travel
/// through shared memory, after the first `kept_bytes` of it, there will be room for them.
void split_launch(Program& program, KernelLaunch& launch, const DeviceFacts& facts, int split_k,
                  std::int64_t share_bytes, std::int64_t kept_bytes = 0);

/// Blocks of engines whose blocks compute one work tile of bm x bn each (tile_scheduler.cuh): of
/// grouped rows the most that any groups take.
std::int64_t work_tiles(const GemmProblem& gemm, int bm, int bn);

}  // namespace fftune
