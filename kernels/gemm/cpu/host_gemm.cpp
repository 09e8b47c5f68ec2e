#include "kernels/gemm/cpu/host_gemm.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>

#include "core/error.hpp"

namespace fftune::gemm_cpu {
namespace {

constexpr std::int64_t chunk = 256;  // elements that are finished at a time, on the stack

std::size_t elements(std::int64_t count) {
  return static_cast<std::size_t>(count);
}

std::size_t place_of(const TensorPlaces& places, std::string_view name) {
  const std::size_t place = places.at(name);
  if (place == absent) throw Error(ErrorKind::internal, "no tensor is named " + std::string(name));
  return place;
}

Matrix matrix_of(const TensorPlaces& places, std::string_view name, DType dtype) {
  Matrix matrix{.dtype = dtype};
  if (!name.empty()) matrix.places.push_back(place_of(places, name));
  return matrix;
}

/// `per_group`: the elements of one group's matrix where each group has one, else 0.
std::vector<Matrix> matrices_of(const TensorPlaces& places, const std::vector<TensorNames>& names,
                                DType dtype, std::int64_t per_group) {
  std::vector<Matrix> matrices;
  for (const TensorNames& of_groups : names) {
    Matrix matrix{.dtype = dtype, .stacked = of_groups.size() == 1 ? per_group : 0};
    for (const std::string_view name : of_groups) matrix.places.push_back(place_of(places, name));
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

}  // namespace

void Converter::load(DType dtype, const void* from, float* to, std::int64_t count) const {
  if (dtype == DType::f32)
    std::copy_n(static_cast<const float*>(from), count, to);
  else if (dtype == DType::bf16)
    vector->widen(static_cast<const std::uint16_t*>(from), to, elements(count));
  else
    decode(dtype, from, std::span(to, elements(count)));
}

void Converter::store(DType dtype, const float* from, void* to, std::int64_t count) const {
  if (dtype == DType::f32)
    std::copy_n(from, count, static_cast<float*>(to));
  else if (dtype == DType::bf16)
    vector->narrow(from, static_cast<std::uint16_t*>(to), elements(count));
  else
    encode(dtype, std::span(from, elements(count)), to);
}

HostGemm::HostGemm(const GemmProblem& problem, const TensorPlaces& places, const DeviceFacts& facts)
    : gemm(problem),
      converter{&vector_kernels(facts.arch)},
      vector(&vector_kernels(facts.arch)),
      rows(&row_kernels(facts.arch, DType::f32)) {
  const bool rows_grouped = gemm.groups.by == Grouping::rows;
  const std::int64_t of_b = rows_grouped ? gemm.n * gemm.k : 0;
  const std::int64_t of_c = gemm.groups.by == Grouping::reduction ? gemm.m * gemm.n : 0;
  const Epilogue& epilogue = gemm.epilogue;
  a = matrices_of(places, gemm.a, gemm.dtype, 0);
  b = matrices_of(places, gemm.b, gemm.dtype, of_b);
  c = matrices_of(places, gemm.c, gemm.c_dtype, of_c);
  source = matrices_of(places, epilogue.source, gemm.wide_dtype, of_c);
  for (std::size_t i = 0; i < row_broadcasts; ++i)
    broadcasts[i] =
        matrix_of(places, epilogue.rows[i], gemm.dtype_of(static_cast<row_broadcast>(i)));
  gate = matrix_of(places, epilogue.gate, gemm.wide_dtype);
  up = matrix_of(places, epilogue.up, gemm.wide_dtype);
  d_up = matrix_of(places, epilogue.d_up, gemm.c_dtype);
  hidden = matrix_of(places, epilogue.hidden, gemm.c_dtype);
  const bool packed = gemm.b_packing != Packing::separate;
  const bool interleaved = gemm.b_packing == Packing::interleaved;
  const std::int64_t width = gemm.b_major == Major::k ? gemm.k : gemm.n;
  for (std::size_t i = 0; packed && i < b.size(); ++i) {
    b[i].stacked = 2 * of_b;
    b[i].offset = static_cast<std::int64_t>(i) * (interleaved ? width : of_b);
  }
  row_weights = matrix_of(places, epilogue.row_weights, DType::f32);
  for (const std::string_view name : epilogue.group_bias) {
    Matrix bias = matrix_of(places, name, gemm.wide_dtype);
    const auto i = static_cast<std::int64_t>(group_bias.size());
    bias.stacked = gemm.n * (packed ? 2 : 1);
    bias.offset = packed ? i * (interleaved ? 1 : gemm.n) : 0;
    group_bias.push_back(std::move(bias));
  }
  a_scale = matrix_of(places, gemm.quantisation.a_scale, DType::f32);
  c_scale = matrix_of(places, gemm.quantisation.c_scale, DType::f32);
  const bool in_blocks = gemm.quantisation.scaling == Scaling::block;
  for (const std::string_view name : gemm.quantisation.b_scale) {
    b_scale.push_back(matrix_of(places, name, DType::f32));
    if (!rows_grouped) continue;
    const bool by_channel = gemm.quantisation.scaling == Scaling::channel;
    const std::int64_t scales =
        by_channel
            ? gemm.n
            : (in_blocks ? ceil_div(gemm.n, scale_block) * ceil_div(gemm.k, scale_block) : 1);
    b_scale.back().stacked = scales * (packed ? 2 : 1);
    if (packed) b_scale.back().offset = scales * (std::ssize(b_scale) - 1);
  }
  for (const std::string_view name : epilogue.qkv.bias)
    bias_of_parts.push_back(matrix_of(places, name, gemm.wide_dtype));
  for (const std::string_view name : epilogue.qkv.norms)
    norms.push_back(matrix_of(places, name, gemm.wide_dtype));
  positions_ = places.at(epilogue.qkv.positions);
  angles_ = places.at(epilogue.qkv.angles);
  slots_ = places.at(epilogue.qkv.slots);
  if (!gemm.groups.any()) return;
  if (gemm.groups.mask.empty()) {
    offsets_ = place_of(places, gemm.groups.offsets);
    permutation_ = place_of(places, gemm.groups.permutation);
  } else {
    mask_ = place_of(places, gemm.groups.mask);
  }
}

std::int64_t HostGemm::tokens() const {
  return gemm.groups.by == Grouping::reduction ? gemm.k : gemm.m;
}

std::size_t HostGemm::order_bytes() const {
  return mask_ == absent ? 0 : elements(tokens() + 3) * sizeof(std::int32_t);
}

SortedGroups HostGemm::sort(const HostCall& call, std::byte* scratch) const {
  if (!gemm.groups.any()) return {.rows = gemm.m};
  const std::int64_t count = tokens();
  if (mask_ == absent)
    return {.count = gemm.groups.count,
            .order = static_cast<const std::int32_t*>(call.tensors[permutation_]),
            .offsets = static_cast<const std::int32_t*>(call.tensors[offsets_]),
            .rows = count};
  const auto* mask = static_cast<const std::uint8_t*>(call.tensors[mask_]);
  auto* const offsets = reinterpret_cast<std::int32_t*>(scratch);
  std::int32_t* const order = offsets + 3;
  std::int32_t marked = 0;
  for (std::int64_t token = 0; token < count; ++token) marked += mask[token] != 0;
  offsets[0] = 0;
  offsets[1] = marked;
  offsets[2] = static_cast<std::int32_t>(count);
  std::int32_t next[2] = {marked, 0};
  for (std::int32_t token = 0; token < count; ++token) order[next[mask[token] != 0]++] = token;
  return {.count = 2, .order = order, .offsets = offsets, .rows = count};
}

bool HostGemm::copies() const {
  if (gemm.dtype != DType::f32) return true;
  if (gemm.groups.by == Grouping::rows) return !gemm.a_sorted;
  return gemm.groups.by == Grouping::reduction && !(gemm.a_sorted && gemm.b_sorted);
}

MatrixView HostGemm::view(const HostCall& call, const Matrix& matrix, std::int64_t group,
                          std::int64_t stride, bool transposed, Selection outer, Selection inner,
                          float* room) const {
  if (matrix.dtype == DType::f32 && outer.order == nullptr && inner.order == nullptr)
    return {
        reinterpret_cast<const float*>(matrix.at(call, group, outer.first * stride + inner.first)),
        stride, transposed};
  float* out = room;
  for (std::int64_t i = 0; i < outer.count; ++i, out += inner.count) {
    const std::int64_t at = outer[i] * stride;
    if (inner.order == nullptr)
      converter.load(matrix.dtype, matrix.at(call, group, at + inner.first), out, inner.count);
    else
      for (std::int64_t j = 0; j < inner.count; ++j)
        converter.load(matrix.dtype, matrix.at(call, group, at + inner[j]), out + j, 1);
  }
  return {room, inner.count, transposed};
}

MatrixView HostGemm::a_view(const HostCall& call, int index, Selection of_rows, Selection of_k,
                            float* room) const {
  const Matrix& matrix = a[static_cast<std::size_t>(index)];
  if (gemm.a_major == Major::k) return view(call, matrix, 0, gemm.k, false, of_rows, of_k, room);
  return view(call, matrix, 0, gemm.m, true, of_k, of_rows, room);
}

void HostGemm::load_a(const HostCall& call, int index, std::int64_t row, Selection of_k,
                      float* out) const {
  const Matrix& matrix = a[static_cast<std::size_t>(index)];
  if (gemm.a_major == Major::k && of_k.order == nullptr)
    return converter.load(matrix.dtype, matrix.at(call, 0, row * gemm.k + of_k.first), out,
                          of_k.count);
  for (std::int64_t i = 0; i < of_k.count; ++i) {
    const std::int64_t at =
        gemm.a_major == Major::k ? row * gemm.k + of_k[i] : of_k[i] * gemm.m + row;
    converter.load(matrix.dtype, matrix.at(call, 0, at), out + i, 1);
  }
}

MatrixView HostGemm::b_view(const HostCall& call, int index, std::int64_t group,
                            Selection of_columns, Selection of_k, float* room) const {
  const Matrix& matrix = b[static_cast<std::size_t>(index)];
  const std::int64_t own = gemm.groups.by == Grouping::rows ? group : 0;
  if (b.size() == 3) {
    const std::size_t part = gemm.epilogue.qkv.part_of(of_columns.first);
    of_columns.first -= gemm.epilogue.qkv.first_column(part);
    return view(call, b[part], 0, gemm.k, false, of_columns, of_k, room);
  }
  const std::int64_t beside = gemm.b_packing == Packing::interleaved ? 2 : 1;
  if (gemm.b_major == Major::k)
    return view(call, matrix, own, gemm.k * beside, false, of_columns, of_k, room);
  return view(call, matrix, own, gemm.n * beside, true, of_k, of_columns, room);
}

void HostGemm::add(const HostCall& call, std::int64_t group, int output, std::int64_t row,
                   std::int64_t column, float* sums, std::int64_t count) const {
  float more[chunk];
  const auto apply_row = [&](const Matrix& matrix, std::int64_t at, const auto& apply_one) {
    for (std::int64_t i = 0; i < count; i += chunk) {
      const std::int64_t part = std::min(chunk, count - i);
      converter.load(matrix.dtype, matrix.at(call, group, at + i), more, part);
      for (std::int64_t j = 0; j < part; ++j) sums[i + j] = apply_one(sums[i + j], more[j]);
    }
  };
  for (std::size_t i = 0; i < row_broadcasts; ++i)
    if (broadcasts[i].exists())
      apply_row(broadcasts[i], column, [i](float value, float element) {
        return apply(static_cast<row_broadcast>(i), value, element);
      });
  if (gemm.epilogue.activation != Activation::none) {
    std::fill_n(more, std::min(chunk, count), 1.0f);
    for (std::int64_t i = 0; i < count; i += chunk)
      vector->gated(gemm.epilogue.activation, sums + i, more, sums + i,
                    elements(std::min(chunk, count - i)));
  }
  if (!source.empty())
    apply_row(source[static_cast<std::size_t>(output)], row * gemm.n + column, std::plus<>());
}

void HostGemm::store_preactivations(const HostCall& call, std::int64_t row, std::int64_t column,
                                    const float* gates, const float* ups,
                                    std::int64_t count) const {
  if (!gemm.epilogue.stores_preactivations()) return;
  const std::int64_t at = row * gemm.n + column;
  converter.store(gate.dtype, gates, gate.at(call, 0, at), count);
  converter.store(up.dtype, ups, up.at(call, 0, at), count);
}

void HostGemm::finish(const HostCall& call, std::int64_t group, int output, std::int64_t row,
                      std::int64_t column, float* first, float* second, std::int64_t count) const {
  const std::int64_t own = gemm.groups.by == Grouping::reduction ? group : 0;
  if (row_weights.exists() || !group_bias.empty()) {
    apply_terms(call, group, 0, row, column, first, count);
    if (gemm.b_operands() == 2) apply_terms(call, group, 1, row, column, second, count);
  }
  switch (gemm.epilogue.kind) {
    case EpilogueKind::qkv:
      return finish_heads(call, row, column, first, count);
    case EpilogueKind::activation_gradient:
      return finish_gradient(call, row * gemm.n + column, first, count);
    case EpilogueKind::gated:
      store_preactivations(call, row, column, first, second, count);
      vector->gated(gemm.epilogue.activation, first, second, first, elements(count));
      break;
    case EpilogueKind::linear:
      add(call, own, output, row, column, first, count);
      break;
  }
  store_c(call, own, output, row, column, first, count);
}

/// The row's factor and the group's bias, into accumulators of one B operand.
void HostGemm::apply_terms(const HostCall& call, std::int64_t group, int operand, std::int64_t row,
                           std::int64_t column, float* sums, std::int64_t count) const {
  if (row_weights.exists()) {
    const float factor = *reinterpret_cast<const float*>(row_weights.at(call, 0, row));
    for (std::int64_t i = 0; i < count; ++i) sums[i] *= factor;
  }
  if (group_bias.empty()) return;
  const Matrix& bias = group_bias[static_cast<std::size_t>(operand)];
  const std::int64_t step =
      gemm.b_operands() == 2 && gemm.b_packing == Packing::interleaved ? 2 : 1;
  for (std::int64_t i = 0; i < count; ++i) {
    float value;
    converter.load(bias.dtype, bias.at(call, group, (column + i) * step), &value, 1);
    sums[i] += value;
  }
}

void HostGemm::finish_heads(const HostCall& call, std::int64_t row, std::int64_t column,
                            float* sums, std::int64_t count) const {
  const QkvHeads& qkv = gemm.epilogue.qkv;
  const std::int64_t dim = qkv.form.dim, pairs = qkv.form.rotary / 2;
  std::vector<float> cosines, sines, vector_of_head(elements(dim));
  float* const more = vector_of_head.data();
  if (qkv.form.rotates()) {
    const std::int64_t position = static_cast<const std::int32_t*>(call.tensors[positions_])[row];
    const bool interleaved = qkv.form.rotation == head_rotation::interleaved;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      float angle;
      if (angles_ != absent) {
        const std::int64_t line = std::clamp<std::int64_t>(position, 0, qkv.table_rows - 1);
        angle = static_cast<const float*>(
            call.tensors[angles_])[line * 2 * pairs + (interleaved ? 2 * pair : pair)];
      } else {
        angle = static_cast<float>(position) * qkv.frequencies[elements(pair)];
      }
      cosines.push_back(static_cast<float>(std::cos(double{angle}) * double{qkv.scale}));
      sines.push_back(static_cast<float>(std::sin(double{angle}) * double{qkv.scale}));
    }
  }
  for (std::int64_t at = 0; at < count; at += dim) {
    float* const head = sums + at;
    const std::size_t part = qkv.part_of(column + at);
    const std::int64_t of_part = column + at - qkv.first_column(part);
    if (!bias_of_parts.empty()) {
      const bool packed = bias_of_parts.size() == 1;
      const Matrix& bias = bias_of_parts[packed ? 0 : part];
      converter.load(bias.dtype, bias.at(call, 0, packed ? column + at : of_part), more, dim);
      for (std::int64_t i = 0; i < dim; ++i) head[i] += more[i];
    }
    if (part < 2 && !norms.empty()) {
      float squares = 0;
      for (std::int64_t i = 0; i < dim; ++i) squares += head[i] * head[i];
      const float factor =
          1 / std::sqrt(squares / static_cast<float>(dim) + static_cast<float>(qkv.epsilon));
      converter.load(norms[part].dtype, norms[part].at(call, 0, 0), more, dim);
      const auto offset = static_cast<float>(qkv.norm_offset);
      for (std::int64_t i = 0; i < dim; ++i) head[i] *= factor * (offset + more[i]);
    }
    if (part < 2 && qkv.form.rotates()) {
      const bool halves = qkv.form.rotation == head_rotation::halves;
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        float& first = head[halves ? pair : 2 * pair];
        float& second = head[halves ? pair + pairs : 2 * pair + 1];
        const float before = first, cosine = cosines[elements(pair)], sine = sines[elements(pair)];
        first = before * cosine - second * sine;
        second = second * cosine + before * sine;
      }
    }
    std::int64_t to_row = row;
    const bool is_cached = part > 0 && slots_ != absent;
    if (is_cached)
      to_row = qkv.form.wide_slots ? static_cast<const std::int64_t*>(call.tensors[slots_])[row]
                                   : static_cast<const std::int32_t*>(call.tensors[slots_])[row];
    if (to_row < 0 || (is_cached && to_row >= qkv.cache_rows)) continue;
    const Matrix& out = c[part];
    const std::int64_t heads = qkv.columns(part) / dim;
    converter.store(out.dtype, head,
                    out.at(call, 0, (to_row * heads + of_part / dim) * qkv.head_stride(part)), dim);
  }
}

void HostGemm::finish_gradient(const HostCall& call, std::int64_t at, float* sums,
                               std::int64_t count) const {
  const Activation activation = gemm.epilogue.activation;
  float gates[chunk], ups[chunk], d_gates[chunk], d_ups[chunk];
  for (std::int64_t i = 0; i < count; i += chunk) {
    const std::int64_t part = std::min(chunk, count - i);
    converter.load(gate.dtype, gate.at(call, 0, at + i), gates, part);
    converter.load(up.dtype, up.at(call, 0, at + i), ups, part);
    rows->act_mul_gradient(activation, gates, ups, sums + i, d_gates, d_ups, elements(part), false);
    converter.store(c[0].dtype, d_gates, c[0].at(call, 0, at + i), part);
    converter.store(d_up.dtype, d_ups, d_up.at(call, 0, at + i), part);
    if (!hidden.exists()) continue;
    rows->act_mul(activation, gates, ups, gates, elements(part), false);
    converter.store(hidden.dtype, gates, hidden.at(call, 0, at + i), part);
  }
}

void HostGemm::store_c(const HostCall& call, std::int64_t group, int output, std::int64_t row,
                       std::int64_t column, float* values, std::int64_t count) const {
  if (c_scale.exists() && gemm.quantisation.scaling == Scaling::tensor) {
    const float scale = *reinterpret_cast<const float*>(c_scale.at(call, 0, 0));
    for (std::int64_t i = 0; i < count; ++i) values[i] /= scale;
  } else if (c_scale.exists()) {
    constexpr float largest_number = 448, least = 0x1p-100f;  // below it quotients overflow
    const std::int64_t blocks = ceil_div(gemm.n, scale_block);
    for (std::int64_t i = 0; i < count; i += scale_block) {
      const std::int64_t part = std::min(scale_block, count - i);
      const float largest = largest_magnitude(std::span<const float>(values + i, elements(part)));
      const float scale = largest <= least ? 1 : largest / largest_number;
      for (std::int64_t j = 0; j < part; ++j) values[i + j] /= scale;
      const std::int64_t place = row * blocks + (column + i) / scale_block;
      *reinterpret_cast<float*>(c_scale.at(call, 0, place)) = scale;
    }
  }
  const Matrix& matrix = c[static_cast<std::size_t>(output)];
  converter.store(matrix.dtype, values, matrix.at(call, group, row * gemm.n + column), count);
}

std::optional<std::string> refuse_gated_chain(const GemmChain& chain) {
  if (chain.size() != 2) return "it computes a gated layer's two GEMMs together";
  const GemmProblem& gate_up = chain[0];
  const GemmProblem& down = chain[1];
  for (const GemmProblem& gemm : chain) {
    if (gemm.quantisation.any()) return "its products are in f32, and fp8 has scales to apply";
    if (gemm.groups.any()) return "it has one set of weights for all rows: no groups";
    if (gemm.a_major != Major::k || gemm.b_major != Major::k) return "it reads K-major operands";
  }
  if (gate_up.epilogue.kind != EpilogueKind::gated || down.form != GemmForm::single ||
      down.epilogue.kind != EpilogueKind::linear)
    return "it computes a gated layer's two GEMMs together";
  if (gate_up.epilogue.stores_preactivations() || down.epilogue.adds())
    return "it keeps gate and up in the cache, and adds nothing to y: the plain form alone";
  return std::nullopt;
}

GatedChain gated_chain(const GemmChain& chain, const TensorPlaces& places) {
  const GemmProblem& gate_up = chain[0];
  const GemmProblem& down = chain[1];
  return {.m = gate_up.m,
          .d = gate_up.k,
          .h = gate_up.n,
          .dtype = gate_up.dtype,
          .activation = gate_up.epilogue.activation,
          .x = place_of(places, gate_up.a[0][0]),
          .w_gate = place_of(places, gate_up.b[0][0]),
          .w_up = place_of(places, gate_up.b[1][0]),
          .w_down = place_of(places, down.b[0][0]),
          .y = place_of(places, down.c[0][0])};
}

std::vector<std::string> sources_with(std::vector<std::string> own) {
  for (const char* source :
       {"gemm/cpu/host_gemm.cpp", "gemm/cpu/host_gemm.hpp", "gemm/cpu/work.hpp", "gemm/form.cuh",
        "common/activation.hpp", activation_source, vector_kernel_source, row_kernel_sources[0]})
    own.emplace_back(source);
  return own;
}

}  // namespace fftune::gemm_cpu
