#include "kernels/common/cpu_vector.hpp"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "cpu/machine.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

/// The sets of loops that this processor can run.
std::vector<const VectorKernels*> runnable() {
  std::vector<const VectorKernels*> kernels{&vector_kernels("")};
  for (const std::string isa : {"avx2", "avx512"})
    if (vector_isa() == isa || (vector_isa() == "avx512" && isa == "avx2"))
      kernels.push_back(&vector_kernels(isa));
  return kernels;
}

std::vector<float> random_values(std::mt19937& random, std::size_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (auto& value : values) value = normal(random);
  return values;
}

}  // namespace

TEST_CASE("vectorised activations agree with their definitions") {
  for (const auto* kernels : runnable())
    for (const auto& name : activation_names()) {
      const auto activation = parse_activation(name);
      std::vector<float> x;
      for (float value = -100; value < 100; value += 0.0371f) x.push_back(value);
      for (const float value : {0.0f, -0.0f, 1e-30f, -1e-30f, 1e30f, -1e4f, 5.0f, -5.0f})
        x.push_back(value);
      const std::vector<float> ones(x.size(), 1.0f);
      std::vector<float> out(x.size());
      kernels->gated(activation, x.data(), ones.data(), out.data(), x.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double expected = activate(activation, x[i]);
        // Relative to the value, or to x where the activation cancels it almost to nothing.
        const double bound = 3e-7 * std::abs(expected) + 2e-7 * std::abs(x[i]);
        if (!(std::abs(out[i] - expected) <= bound)) FAIL(name << " of " << x[i] << ": " << out[i]);
      }
    }
}

TEST_CASE("a NaN stays one") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto* kernels : runnable())
    for (const auto& name : activation_names()) {
      if (name == "relu") continue;  // as in C, a comparison with NaN is false
      const std::vector<float> gate(17, nan), up(17, 1.0f);
      std::vector<float> out(17);
      kernels->gated(parse_activation(name), gate.data(), up.data(), out.data(), out.size());
      for (const float value : out) REQUIRE(std::isnan(value));
    }
}

TEST_CASE("gated takes any count and writes no more") {
  std::mt19937 random(3);
  for (const auto* kernels : runnable())
    for (std::size_t count = 0; count < 40; ++count) {
      const auto gate = random_values(random, count), up = random_values(random, count);
      std::vector<float> out(count + 1, 77);
      kernels->gated(Activation::none, gate.data(), up.data(), out.data(), count);
      for (std::size_t i = 0; i < count; ++i) REQUIRE(out[i] == gate[i] * up[i]);
      REQUIRE(out[count] == 77);
    }
}

TEST_CASE("widen and narrow are the conversions of core/dtype") {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  std::mt19937 random(5);
  std::vector<float> values(10007);
  for (auto& value : values) value = float_from_fp16(static_cast<std::uint16_t>(random()));
  values[0] = std::numeric_limits<float>::max();
  for (const auto* kernels : runnable()) {
    std::vector<float> wide(all.size()), expected(all.size());
    kernels->widen(all.data(), wide.data(), all.size());
    decode(DType::bf16, all.data(), expected);
    for (std::size_t i = 0; i < all.size(); ++i)
      if (!std::isnan(expected[i])) REQUIRE(wide[i] == expected[i]);
    std::vector<std::uint16_t> halves(values.size()), expected_halves(values.size());
    kernels->narrow(values.data(), halves.data(), values.size());
    encode(DType::bf16, values, expected_halves.data());
    REQUIRE(halves == expected_halves);
  }
}

TEST_CASE("transpose takes any extents") {
  std::mt19937 random(7);
  for (const auto* kernels : runnable())
    for (const std::size_t rows : {1, 3, 4, 9, 16})
      for (const std::size_t columns : {1, 2, 4, 7, 16, 21}) {
        const auto in = random_values(random, rows * 24);
        std::vector<float> out(columns * 18, 77);
        kernels->transpose(in.data(), 24, out.data(), 18, rows, columns);
        for (std::size_t c = 0; c < columns; ++c)
          for (std::size_t r = 0; r < 18; ++r)
            REQUIRE(out[c * 18 + r] == (r < rows ? in[r * 24 + c] : 77));
      }
}

TEST_CASE("a tile is a product of two groups of weight rows with a panel") {
  std::mt19937 random(11);
  for (const auto* kernels : runnable())
    for (const std::size_t depth : {1, 2, 5, 64}) {
      const std::size_t stride = depth + 3, half = kernels->tile_rows / 2;
      const std::size_t columns = kernels->tile_columns;
      const auto first = random_values(random, half * stride);
      const auto second = random_values(random, half * stride);
      const auto panel = random_values(random, depth * columns);
      std::vector<float> out(kernels->tile_rows * columns, 77);
      for (const bool accumulate : {false, true}) {
        kernels->tile(first.data(), second.data(), stride, panel.data(), depth, accumulate,
                      out.data());
        for (std::size_t r = 0; r < kernels->tile_rows; ++r)
          for (std::size_t c = 0; c < columns; ++c) {
            const auto& w = r < half ? first : second;
            double sum = 0;
            for (std::size_t k = 0; k < depth; ++k)
              sum += double{w[r % half * stride + k]} * double{panel[k * columns + c]};
            REQUIRE(out[r * columns + c] == Approx(accumulate ? 2 * sum : sum).margin(1e-4));
          }
      }
    }
}

TEST_CASE("dot products of few rows and tokens, of any depth") {
  std::mt19937 random(13);
  for (const auto* kernels : runnable())
    for (const std::size_t depth : {1, 7, 16, 33, 100})
      for (std::size_t rows = 1; rows <= 4; ++rows)
        for (std::size_t tokens = 1; tokens <= 4; ++tokens) {
          const std::size_t stride = depth + 5;
          const auto w = random_values(random, rows * stride);
          const auto x = random_values(random, tokens * stride);
          std::vector<std::uint16_t> half(w.size());
          kernels->narrow(w.data(), half.data(), w.size());
          std::vector<float> rounded(w.size()), out(rows * tokens + 1, 77), out_half = out;
          kernels->widen(half.data(), rounded.data(), half.size());
          kernels->dot(w.data(), stride, x.data(), stride, depth, rows, tokens, out.data());
          kernels->dot_bf16(half.data(), stride, x.data(), stride, depth, rows, tokens,
                            out_half.data());
          for (std::size_t r = 0; r < rows; ++r)
            for (std::size_t t = 0; t < tokens; ++t) {
              double sum = 0, sum_half = 0;
              for (std::size_t k = 0; k < depth; ++k) {
                sum += double{w[r * stride + k]} * double{x[t * stride + k]};
                sum_half += double{rounded[r * stride + k]} * double{x[t * stride + k]};
              }
              REQUIRE(out[r * tokens + t] == Approx(sum).margin(1e-4));
              REQUIRE(out_half[r * tokens + t] == Approx(sum_half).margin(1e-4));
            }
          REQUIRE(out.back() == 77);
          REQUIRE(out_half.back() == 77);
        }
}
