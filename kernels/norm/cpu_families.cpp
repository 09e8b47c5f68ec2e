// Rows on the CPU: rmsnorm's in vectors, layernorm's in float with sums in double. Forward, a row
// is summed, and read again from the cache. Backward, each thread goes through its own rows and
// adds up their dw and db, then the threads' sums are added up, column by column. Which rows make a
// part is fixed, and so are the bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"
#include "kernels/norm/norm.hpp"

namespace fftune::norm {
namespace {

std::vector<std::string> cpu_sources() {
  return {"norm/cpu_families.cpp", row_kernel_sources[0], row_kernel_sources[1]};
}

/// A matrix's row.
std::byte* row_of(const Layer& layer, void* matrix, std::int64_t row) {
  if (!matrix) return nullptr;
  const auto at = static_cast<std::size_t>(row) * static_cast<std::size_t>(layer.d);
  return static_cast<std::byte*>(matrix) + at * dtype_bytes(layer.dtype);
}

/// The bytes of scratch memory that factors_of needs.
std::size_t factor_bytes(const Layer& layer) {
  const bool ready = layer.weight_dtype == DType::f32 && layer.convention != Convention::gemma;
  return ready ? 0 : static_cast<std::size_t>(layer.d) * sizeof(float);
}

/// The factor of the formula that w stands for, in float: `factors` [d] of scratch memory is
/// filled, or w itself serves.
const float* factors_of(const Layer& layer, const void* w, float* factors) {
  if (factor_bytes(layer) == 0) return static_cast<const float*>(w);
  const std::span<float> values(factors, static_cast<std::size_t>(layer.d));
  decode(layer.weight_dtype, w, values);
  if (layer.convention == Convention::gemma)
    for (float& value : values) value += 1;
  return factors;
}

/// 1 / sqrt(the mean of d squares + eps)
float reciprocal_deviation(const Layer& layer, float squares) {
  return 1 / std::sqrt(squares / static_cast<float>(layer.d) + layer.eps);
}

/// Computes q and the scale of a row with known r: one pass finds the largest magnitude, and one
/// writes the quotients.
float quantise_row(const Layer& layer, const std::byte* x, const float* factors, float r,
                   std::byte* q) {
  constexpr std::int64_t part = 1024;
  const auto for_each_part = [&](const auto& body) {
    float values[part];
    for (std::int64_t first = 0; first < layer.d; first += part) {
      const std::span<float> piece(values,
                                   static_cast<std::size_t>(std::min(part, layer.d - first)));
      decode(layer.dtype, x + static_cast<std::size_t>(first) * dtype_bytes(layer.dtype), piece);
      for (std::size_t i = 0; i < piece.size(); ++i)
        piece[i] *= r * factors[static_cast<std::size_t>(first) + i];
      body(first, piece);
    }
  };
  float largest = 0;
  for_each_part([&](std::int64_t, std::span<float> piece) {
    const float both[] = {largest, largest_magnitude(std::span<const float>(piece))};
    largest = largest_magnitude(std::span<const float>(both));
  });
  const float limit = layer.out_dtype == DType::fp8 ? 448 : 127;
  const float scale = largest <= std::ldexp(1.0f, -100) ? 1 : largest / limit;
  for_each_part([&](std::int64_t first, std::span<float> piece) {
    for (float& value : piece) value /= scale;
    encode(layer.out_dtype, std::span<const float>(piece), q + first);
  });
  return scale;
}

/// A row of the backward pass; dsum is null where no residual was added.
struct Gradient {
  const std::byte* x;
  const std::byte* dy;
  const std::byte* dsum;
  std::byte* dx;
};

/// dx of a row of one element, g·r·(1 − x̂²) = g·r·eps·r²: the difference would keep no digit of it.
void differentiate_one(const Layer& layer, const Gradient& of, float factor, float r) {
  float gradient = 0, other = 0;
  decode(layer.dtype, of.dy, {&gradient, 1});
  if (of.dsum) decode(layer.dtype, of.dsum, {&other, 1});
  const float slope = factor * gradient * r * (layer.eps * r * r) + other;
  encode(layer.dtype, std::span<const float>(&slope, 1), of.dx);
}

/// y of a row whose sum with the residual is rounded once.
void add_to_row(const Layer& layer, const std::byte* x, const std::byte* residual,
                const float* factors, float r, std::byte* y) {
  constexpr std::int64_t part = 1024;
  float values[part], others[part];
  for (std::int64_t first = 0; first < layer.d; first += part) {
    const auto count = static_cast<std::size_t>(std::min(part, layer.d - first));
    const std::size_t at = static_cast<std::size_t>(first) * dtype_bytes(layer.dtype);
    const std::span<float> piece(values, count);
    decode(layer.dtype, x + at, piece);
    for (float& value : piece) value *= r;
    if (layer.convention == Convention::llama) {
      encode(layer.dtype, std::span<const float>(piece), y + at);
      decode(layer.dtype, y + at, piece);
    }
    decode(layer.dtype, residual + at, std::span<float>(others, count));
    for (std::size_t i = 0; i < count; ++i)
      piece[i] = piece[i] * factors[static_cast<std::size_t>(first) + i] + others[i];
    encode(layer.dtype, std::span<const float>(piece), y + at);
  }
}

std::vector<float> floats_of(const Layer& layer, const std::byte* row) {
  std::vector<float> values(static_cast<std::size_t>(layer.d));
  decode(layer.dtype, row, std::span<float>(values));
  return values;
}

/// Of layernorm. Sums of floats in double cost nothing beside reading them, and cancel less.
struct Moments {
  float mean, rstd;

  Moments(const Layer& layer, std::span<const float> row) {
    double sum = 0, squares = 0;
    for (const float value : row) sum += value;
    const double exact = sum / static_cast<double>(layer.d);
    for (const float value : row) squares += (value - exact) * (value - exact);
    mean = static_cast<float>(exact);
    rstd = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(layer.d) + layer.eps));
  }
};

/// y of a row of layernorm.
void normalise_centred(const Layer& layer, const std::byte* x, const float* factors,
                       const float* biases, std::byte* y) {
  auto row = floats_of(layer, x);
  const Moments of(layer, row);
  for (std::size_t i = 0; i < row.size(); ++i)
    row[i] = (row[i] - of.mean) * of.rstd * factors[i] + biases[i];
  encode(layer.dtype, std::span<const float>(row), y);
}

/// dx of a row of layernorm, and its summands of dw [d] and db [d] behind it.
void differentiate_centred(const Layer& layer, const Gradient& gradient, const float* factors,
                           float* dw_and_db) {
  const auto d = static_cast<std::size_t>(layer.d);
  const auto row = floats_of(layer, gradient.x);
  auto slope = floats_of(layer, gradient.dy);
  const Moments of(layer, row);
  double sum = 0, product = 0;
  for (std::size_t i = 0; i < d; ++i) {
    const float normalised = (row[i] - of.mean) * of.rstd;
    dw_and_db[i] += slope[i] * normalised;
    dw_and_db[d + i] += slope[i];
    slope[i] *= factors[i];
    sum += slope[i];
    product += double{slope[i]} * normalised;
  }
  const auto mean = static_cast<float>(sum / static_cast<double>(d));
  const auto mean_product = static_cast<float>(product / static_cast<double>(d));
  for (std::size_t i = 0; i < d; ++i) {
    const float centred = slope[i] - mean;
    slope[i] = d == 2 ? of.rstd * centred * (layer.eps * of.rstd * of.rstd)
                      : of.rstd * (centred - (row[i] - of.mean) * of.rstd * mean_product);
  }
  if (gradient.dsum) {
    const auto more = floats_of(layer, gradient.dsum);
    for (std::size_t i = 0; i < d; ++i) slope[i] += more[i];
  }
  encode(layer.dtype, std::span<const float>(slope), gradient.dx);
}

/// dx of a row of rmsnorm, and its summand of dw [d].
void differentiate(const Layer& layer, const RowKernels& kernels, const Gradient& of,
                   const float* factors, const float* rstd, float* dw, bool nontemporal) {
  const auto d = static_cast<std::size_t>(layer.d);
  float sums[2];
  kernels.products(of.x, of.dy, factors, d, sums);
  const float r = rstd ? *rstd : reciprocal_deviation(layer, sums[1]);
  kernels.norm_gradient(of.x, of.dy, of.dsum, factors, r, sums[0] * r / static_cast<float>(layer.d),
                        of.dx, dw, d, nontemporal);
  if (layer.d == 1 && !rstd) differentiate_one(layer, of, factors[0], r);
}

RowWork work(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return {.rows = layer.m,
          .row_bytes = layer.d * static_cast<std::int64_t>(dtype_bytes(layer.dtype)),
          .sums = layer.backward,
          .nontemporal = !layer.centres};
}

Program forward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const RowTasks tasks(work(problem), config);
  const RowKernels& kernels = row_kernels(facts.arch, layer.dtype);
  const TensorPlaces at = places_of(layer);
  return host_program(
      at.count(), {{factor_bytes(layer), false}, {layer.centres ? factor_bytes(layer) : 0, false}},
      [=, &kernels, x = at.at("x"), residual = at.at("residual"), w = at.at("w"), b = at.at("b"),
       y = at.at("y"), sum = at.at("sum"), rstd = at.at("rstd"),
       scale = at.at("scale")](const HostCall& call) {
        const auto d = static_cast<std::size_t>(layer.d);
        const auto row_in = [&](std::size_t place, std::int64_t row) {
          return row_of(layer, call.tensors[place], row);
        };
        const auto floats_in = [&](std::size_t place, std::size_t scratch) {
          return factors_of(layer, call.tensors[place],
                            reinterpret_cast<float*>(call.scratch[scratch]));
        };
        auto* const rstds = static_cast<float*>(address_of(call, rstd));
        const float* const factors = floats_in(w, 0);
        const float* const biases = layer.centres ? floats_in(b, 1) : nullptr;
        tasks.run(call.parallel, kernels.fence, [&](std::int64_t row) {
          const std::byte* values = row_in(x, row);
          float squares = 0;
          if (layer.adds) {
            std::byte* const total = row_in(sum, row);
            squares = kernels.add(values, row_in(residual, row), total, d);
            values = total;
          } else if (!layer.centres) {
            squares = kernels.squares(values, d);
          }
          if (layer.centres)
            return normalise_centred(layer, values, factors, biases, row_in(y, row));
          const float r = reciprocal_deviation(layer, squares);
          if (rstds) rstds[row] = r;
          if (layer.quantises())
            static_cast<float*>(call.tensors[scale])[row] =
                quantise_row(layer, values, factors, r,
                             static_cast<std::byte*>(call.tensors[y]) + row * layer.d);
          else if (layer.adds_after)
            add_to_row(layer, values, row_in(residual, row), factors, r, row_in(y, row));
          else
            kernels.normalise(values, factors, r, layer.convention == Convention::llama,
                              row_in(y, row), d, tasks.nontemporal);
        });
      });
}

Program backward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const RowParts parts(work(problem), config);
  const RowKernels& kernels = row_kernels(facts.arch, layer.dtype);
  const TensorPlaces at = places_of(layer);
  const auto d = static_cast<std::size_t>(layer.d);
  const std::int64_t columns = layer.centres ? 2 * layer.d : layer.d;
  return host_program(
      at.count(),
      {{factor_bytes(layer), false},
       parts.scratch(columns),
       {layer.centres || layer.frozen ? 2 * d * sizeof(float) : 0, false}},
      [=, &kernels, x = at.at("x"), w = at.at("w"), dy = at.at("dy"), dsum = at.at("dsum"),
       rstd = at.at("rstd"), dx = at.at("dx"), dw = at.at("dw"),
       db = at.at("db")](const HostCall& call) {
        const auto* const rstds = static_cast<const float*>(address_of(call, rstd));
        const float* const factors =
            factors_of(layer, call.tensors[w], reinterpret_cast<float*>(call.scratch[0]));
        const auto of_row = [&](std::int64_t row, float* sums) {
          const Gradient of{.x = row_of(layer, call.tensors[x], row),
                            .dy = row_of(layer, call.tensors[dy], row),
                            .dsum = row_of(layer, address_of(call, dsum), row),
                            .dx = row_of(layer, call.tensors[dx], row)};
          if (layer.centres)
            differentiate_centred(layer, of, factors, sums);
          else
            differentiate(layer, kernels, of, factors, rstds ? rstds + row : nullptr, sums,
                          parts.nontemporal);
        };
        // dw and db lie beside each other only in scratch memory, and that is all that frozen ones
        // do.
        auto* const both = reinterpret_cast<float*>(call.scratch[2]);
        const bool apart = layer.centres || layer.frozen;
        parts.run(call, kernels.fence, call.scratch[1], columns,
                  apart ? DType::f32 : layer.weight_dtype, apart ? both : call.tensors[dw], of_row);
        if (!layer.centres || layer.frozen) return;
        encode(layer.dtype, std::span<const float>(both, d), call.tensors[dw]);
        encode(layer.dtype, std::span<const float>(both + d, d), call.tensors[db]);
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRowFamily forward({.name = "cpu_forward",
                                     .summary = "blocks of rows, on all threads",
                                     .pass = "fwd",
                                     .sources = cpu_sources(),
                                     .program = forward_program},
                                    work);
  static const CpuRowFamily backward(
      {.name = "cpu_backward",
       .summary = "a part of the rows for each thread, then the sums of theirs",
       .pass = "bwd",
       .sources = cpu_sources(),
       .program = backward_program},
      work);
  return {&forward, &backward};
}

}  // namespace fftune::norm
