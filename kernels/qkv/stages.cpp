#include "kernels/qkv/qkv.hpp"

namespace fftune::qkv {
namespace {

constexpr GemmStage product{stage_product, qkv_op, product_gemm};
constexpr GemmStage expand{stage_expand, qkv_op, packed_gemm};
constexpr QuantiseStage quantisation{stage_quantise, qkv_op,
                                     [](const Problem& problem) { return quantised_x(problem); }};
constexpr ExpandStage expansion{stage_expand, qkv_op, packed_weights};

}  // namespace

std::int64_t Layer::raw_place(std::size_t part, std::int64_t token, std::int64_t head) const {
  if (gates && part == 0) return (token * heads + head) * 2 * dim;
  if (!joined()) return (token * (part == 0 ? heads : kv_heads) + head) * dim;
  if (!grouped) {
    const std::int64_t before[] = {0, heads, heads + kv_heads};
    return token * columns() + (before[part] + head) * dim;
  }
  const std::int64_t of_group = heads / kv_heads;
  const std::int64_t group = part == 0 ? head / of_group : head;
  const std::int64_t within =
      part == 0 ? head % of_group : of_group + static_cast<std::int64_t>(part) - 1;
  return token * columns() + (group * (of_group + 2) + within) * dim;
}

Turns turns_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return layer.rotates() ? rope::turns_of(problem, layer.rotated()) : Turns{};
}

GemmProblem product_gemm(const Problem& problem) {
  Layer layer = layer_of(problem);
  const bool raw = layer.in_two_stages();
  if (raw) {
    layer.norm = HeadNorm::none;
    layer.rotation = head_rotation::none;
    layer.cache = layer.wide_slots = false;
  }
  if (layer.gates) {  // heads of their own, for the product
    layer.heads *= 2;
    layer.gates = false;
  }
  GemmProblem gemm{.m = layer.m,
                   .n = layer.columns(),
                   .k = layer.d,
                   .dtype = layer.dtype,
                   .c_dtype = layer.dtype,
                   .wide_dtype = layer.dtype};
  gemm.a = {{"x"}};
  gemm.b = {{"w_q"}, {"w_k"}, {"w_v"}};
  if (layer.packed) gemm.b = {{"w"}};
  if (layer.joined()) {
    gemm.c = {{"qkv_raw"}};
    if (layer.format.packed) {
      gemm.b = {{"w_dense"}};
      gemm.follows = gemm.b_depends = true;
    }
    if (layer.bias) gemm.epilogue.row(row_broadcast::bias) = "bias";
    if (quantises(problem)) return with_quantised_a(gemm, quantised_x(problem), {"w_scale"});
    return gemm;
  }
  if (!layer.keys) {
    gemm.b = {{"w_q"}};
    gemm.c = {{"q_raw"}};
    if (layer.bias) gemm.epilogue.row(row_broadcast::bias) = "b_q";
    return gemm;
  }
  gemm.c = {{"q"}, {"k"}, {"v"}};
  if (raw) gemm.c = {{"q_raw"}, {"k_raw"}, {"v_raw"}};
  gemm.epilogue.kind = EpilogueKind::qkv;
  QkvHeads& qkv = gemm.epilogue.qkv;
  qkv.form = {.dim = static_cast<int>(layer.dim),
              .rotary = layer.rotates() ? static_cast<int>(layer.rotary) : 0,
              .rotation = layer.rotation,
              .separate = !layer.packed,
              .bias = layer.bias,
              .normalises = layer.normalises(),
              .caches = layer.cache,
              .wide_slots = layer.wide_slots};
  qkv.heads = layer.heads;
  qkv.kv_heads = layer.kv_heads;
  if (layer.bias) qkv.bias = {"b_q", "b_k", "b_v"};
  if (layer.bias && layer.packed) qkv.bias = {"bias"};
  if (layer.normalises()) {
    qkv.norms = {"q_norm", "k_norm"};
    qkv.epsilon = layer.epsilon;
    qkv.norm_offset = layer.norm_offset;
  }
  if (layer.cache) {
    gemm.c = {{"q"}, {"k_cache"}, {"v_cache"}};
    qkv.slots = "slots";
    qkv.cache_rows = layer.cache_rows;
    qkv.cache_head = layer.cache_head;
  }
  if (layer.rotates()) {
    qkv.positions = "positions";
    if (layer.table) {
      qkv.angles = "angles";
      qkv.table_rows = layer.positions;
    }
    Turns turns = turns_of(problem);
    qkv.frequencies = std::move(turns.frequencies);
    qkv.scale = turns.scale;
  }
  return gemm;
}

GemmProblem packed_gemm(const Problem& problem) {
  return reads_packed(product_gemm(problem), packed_weights(problem));
}

std::vector<PackedWeight> packed_weights(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (!layer.format.packed) return {};
  return {packed_weight(problem, {"w", "w_scale", "w_zero", "w_dense", layer.columns(), layer.d})};
}

QuantisedRows quantised_x(const Layer& layer) {
  return {.from = "x",
          .elements = "x_quantised",
          .scales = "x_scale",
          .rows = layer.m,
          .k = layer.d,
          .dtype = layer.dtype,
          .scaling = layer.scaling};
}

QuantisedRows quantised_x(const Problem& problem) {
  return quantised_x(layer_of(problem));
}

std::vector<const Family*> families() {
  static const std::vector<GemmFamily> gemms{
      {packed_sm90_engine, {expand, product}, "packed_sm90", packed_sm90_summary},
      {packed_decode_engine, {expand, product}, "packed_decode", packed_decode_summary},
      {decode_engine,
       {product},
       "product_decode",
       "up to 16 tokens, at the speed of reading the weights once; a head, or part of one, a "
       "block"},
      {sm90_engine, {product}, "product_sm90", "TMA, wgmma and clusters; tiles of whole heads"},
      {sm80_engine, {product}, "product_sm80", "cp.async and mma.sync; tiles of whole heads"},
      {cpu_blas_engine, {product}, "cpu_blas", "blocks of heads over OpenBLAS"},
      {simt_engine,
       {product},
       "product_fallback",
       "any sizes, alignment and type, a head at a time: the fallback"},
      {cpu_plain_engine, {product}, "cpu_plain", plain_summary}};
  static const auto expansions = on_both(expand_family, cpu_expand_family, {expansion});
  static const auto quantisations = on_both(quantise_family, cpu_quantise_family, {quantisation});
  auto families = addresses_of(gemms, expansions, quantisations);
  append(families, {&heads_family(), &cpu_heads_family()});
  return families;
}

}  // namespace fftune::qkv
