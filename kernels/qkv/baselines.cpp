// Calls that a user would make without fftune: a product of the vendor for each of q, k and v, and
// then a kernel that rotates q and k in place.
#include <utility>
#include <variant>

#include "kernels/gemm/library_gemm.hpp"
#include "kernels/qkv/qkv.hpp"
#include "kernels/rope/rope.hpp"
#include "registry/family.hpp"

namespace fftune::qkv {
namespace {

/// rope's fast kernel, at a position of each token, on the tensors of this op.
void append_rotation(Program& program, const Problem& problem, const Layer& layer,
                     const TensorPlaces& places, const DeviceFacts& facts) {
  Problem rotation{"rope",
                   "fwd",
                   layer.dtype,
                   {{"s", 1},
                    {"b", layer.m},
                    {"heads", layer.heads},
                    {"kv-heads", layer.kv_heads},
                    {"dim", layer.dim},
                    {"rotary", layer.rotary}},
                   {{"layout", "bshd"},
                    {"rotation", problem.option("rotation")},
                    {"angles", problem.option("angles")},
                    {"starts", "yes"}}};
  for (const OptionField& field : rope_op().options())
    if (field.number && problem.options.contains(field.name))
      rotation.options[field.name] = problem.option(field.name);
  const Family& family = *rope::cuda_families().front();
  const auto own = rope_op().tensors(rotation);
  Program rotated = family.program(rotation, facts, family.default_config(rotation, facts));
  auto launch = std::get<KernelLaunch>(rotated.steps.front());
  for (Argument& argument : launch.arguments)
    if (auto* tensor = std::get_if<TensorArgument>(&argument)) {
      std::string name = own[tensor->tensor].name;
      if (name == "q_out" || name == "k_out") name.resize(1);
      if (name == "starts") name = "positions";
      *tensor = tensor_of(places, name);
    }
  launch.programmatic = false;
  launch.kernel += program.kernels.size();
  for (auto& kernel : rotated.kernels) program.kernels.push_back(std::move(kernel));
  program.steps.emplace_back(std::move(launch));
}

}  // namespace

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  constexpr std::int64_t most_sequences = 65536;  // of rope
  const bool cuda = facts.kind == DeviceKind::cuda;
  if (!layer.keys || layer.packed || layer.bias || layer.normalises() || layer.cache) return {};
  if (layer.rotates() && (!cuda || layer.table || layer.m > most_sequences)) return {};
  const TensorPlaces places(qkv_op().tensors(problem));
  Baseline baseline;
  baseline.name = "unfused";
  baseline.summary = !cuda             ? "products of OpenBLAS, all on all threads"
                     : layer.rotates() ? "products of cuBLASLt, then rope in place"
                                       : "products of cuBLASLt";
  baseline.program.host_tensors = places.count();
  const GemmProblem all = product_gemm(problem);
  for (std::size_t part = 0; part < 3; ++part) {
    GemmProblem gemm = all;
    gemm.n = all.epilogue.qkv.columns(part);
    gemm.b = {all.b[part]};
    gemm.c = {all.c[part]};
    gemm.epilogue = {};
    append_library_gemms(baseline.program, gemm, places);
  }
  if (layer.rotates()) append_rotation(baseline.program, problem, layer, places, facts);
  return {baseline};
}

}  // namespace fftune::qkv
