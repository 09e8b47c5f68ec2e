#include "kernels/attention/pack_mask.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>

#include "kernels/attention/test_data.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::attention {
namespace {

std::vector<TensorSpec> tensors_of(const MaskShape& shape, std::int64_t b, MaskData data) {
  const std::int64_t heads = shape.matrices / b;
  const auto tiles = [](std::int64_t extent) { return (extent + mask_tile - 1) / mask_tile; };
  TensorSpec mask{"mask", DType::u8, {b, heads, shape.s, shape.kv}};
  mask.draw = [=](std::uint64_t, std::span<double> values) {
    draw_mask(data, heads, shape.s, shape.kv, values);
  };
  return {mask,
          {"mask_bits", DType::i32, {b, heads, shape.s, shape.words()}, Role::output},
          {"mask_flags", DType::u8, {b, heads, tiles(shape.s), tiles(shape.kv)}, Role::output}};
}

MaskData data_of(const Problem& problem) {
  return mask_data_named(problem.options.contains("mask-data") ? problem.option("mask-data") : "");
}

OpFacts facts() {
  return {.name = "pack-mask",
          .summary = "a mask of bytes as bits, with flags of its tiles, for attention",
          .passes = {"fwd"},
          .sizes = {token_count("s", "queries of a sequence", {512, 2048, 8192}, {512},
                                std::int64_t{1} << 24, 2048),
                    {.name = "b", .help = "sequences", .max = 65536, .example = 4},
                    rare_size("kv", "keys of a sequence; s if left out", std::int64_t{1} << 24,
                              8192, same_as("s")),
                    rare_size("heads", "masks of a sequence; 1 if left out", most_heads, 32,
                              usually(1))},
          .options = {mask_data_option()},
          .token_size = "s",
          .rows_are_alike = false,
          .families = {pack_mask_cuda_families, pack_mask_cpu_families}};
}

class PackMask final : public DescribedOp {
 public:
  PackMask() : DescribedOp(facts()) {}

  /// The element type of attention does not matter here, but a problem must have one.
  std::vector<DType> dtypes(DeviceKind kind) const override { return {float_dtypes(kind).front()}; }
  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return tensors_of(mask_shape_of(problem), problem.size("b"), data_of(problem));
  }
  std::vector<StageSpec> stages(const Problem& problem) const override {
    StageSpec stage = whole_stage(stage_pack, tensors(problem));
    const MaskShape shape = mask_shape_of(problem);
    stage.flops = static_cast<double>(shape.matrices) * static_cast<double>(shape.s) *
                  static_cast<double>(shape.kv);
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override;
};

void PackMask::reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                         Parallel& parallel) const {
  const MaskShape shape = mask_shape_of(problem);
  const auto& mask = tensors.at("mask");
  const auto allows = [&](std::int64_t matrix, std::int64_t i, std::int64_t j) {
    return mask[static_cast<std::size_t>((matrix * shape.s + i) * shape.kv + j)] != 0;
  };
  std::vector<double> bits(static_cast<std::size_t>(shape.bits_bytes() / 4));
  std::vector<double> flags(static_cast<std::size_t>(shape.flags_bytes()));
  const auto threads = parallel.max_threads();
  parallel.run(static_cast<int>(shape.matrices * shape.s), threads, [&](int row) {
    for (std::int64_t word = 0; word < shape.words(); ++word) {
      std::uint32_t value = 0;
      for (std::int64_t j = 32 * word; j < std::min(shape.kv, 32 * word + 32); ++j)
        if (allows(row / shape.s, row % shape.s, j)) value |= std::uint32_t{1} << (j % 32);
      bits[static_cast<std::size_t>(row * shape.words() + word)] = static_cast<std::int32_t>(value);
    }
  });
  const std::int64_t down = (shape.s + mask_tile - 1) / mask_tile;
  const std::int64_t across = (shape.kv + mask_tile - 1) / mask_tile;
  parallel.run(static_cast<int>(shape.matrices * down), threads, [&](int row) {
    const std::int64_t first = row % down * mask_tile;
    for (std::int64_t column = 0; column < across; ++column) {
      std::int64_t allowed = 0, pairs = 0;
      for (std::int64_t i = first; i < std::min(shape.s, first + mask_tile); ++i)
        for (std::int64_t j = column * mask_tile; j < std::min(shape.kv, (column + 1) * mask_tile);
             ++j, ++pairs)
          allowed += allows(row / down, i, j);
      flags[static_cast<std::size_t>(row * across + column)] = allowed == 0       ? 0
                                                               : allowed == pairs ? 1
                                                                                  : 2;
    }
  });
  tensors["mask_bits"] = std::move(bits);
  tensors["mask_flags"] = std::move(flags);
}

class CudaPack final : public StageFamily {
 public:
  explicit CudaPack(bool fallback)
      : StageFamily({.name = fallback ? "pack_bytes" : "pack_vectors",
                     .summary = fallback ? "the same by single bytes: the fallback"
                                         : "a block has 64 queries and 512 keys",
                     .stage = stage_pack,
                     .sources = {pack_mask_source},
                     .is_fallback = fallback}) {}

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = refuse_cuda(problem, "fwd", facts)) return reason;
    const std::int64_t kv = mask_shape_of(problem).kv;
    if (is_fallback() || widest_vector(kv) >= 4) return std::nullopt;
    return fmt::format("rows of kv={} bytes are not aligned to 4", kv);
  }
  Program program(const Problem& problem, const DeviceFacts& facts, const Config&) const override {
    Program program;
    append_pack_mask(program, facts, mask_shape_of(problem), TensorArgument{PackPlaces::mask},
                     TensorArgument{PackPlaces::bits}, TensorArgument{PackPlaces::flags},
                     is_fallback() ? 1 : 0);
    return program;
  }
};

}  // namespace

MaskShape mask_shape_of(const Problem& problem) {
  const auto size_or = [&](const char* name, std::int64_t otherwise) {
    return problem.sizes.contains(name) ? problem.size(name) : otherwise;
  };
  const std::int64_t s = problem.size("s");
  return {problem.size("b") * size_or("heads", 1), s, size_or("kv", s)};
}

void append_pack_mask(Program& program, const DeviceFacts& facts, const MaskShape& shape,
                      const Pointer& mask, const Pointer& bits, const Pointer& flags,
                      std::int64_t vector) {
  constexpr std::int64_t keys_of_block = 512;
  if (vector == 0) vector = widest_vector(shape.kv) >= 4 ? widest_vector(shape.kv) : 1;
  const std::int64_t blocks = quotient_up(shape.words() * 32, keys_of_block) *
                              quotient_up(shape.s, mask_tile) * shape.matrices;
  append_pdl_kernel(
      program, facts, pack_mask_source, fmt::format("pack_mask<{}>", vector),
      {static_cast<std::uint32_t>(blocks), 1, 1}, 256,
      {argument_of(mask), argument_of(bits), argument_of(flags), static_cast<std::int32_t>(shape.s),
       static_cast<std::int32_t>(shape.kv), static_cast<std::int32_t>(shape.words())});
}

std::vector<const Family*> pack_mask_cuda_families() {
  static const CudaPack vectors(false), bytes(true);
  return {&vectors, &bytes};
}

}  // namespace fftune::attention

const fftune::Op& fftune::pack_mask_op() {
  static const attention::PackMask op;
  return op;
}
