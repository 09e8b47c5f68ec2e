// The CPU's loops over rows: activations of every bf16, what is no number, and sines.
#include "kernels/common/cpu_rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "cpu/machine.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

constexpr std::size_t halves = 65536;

/// The sets of loops that this processor can run.
std::vector<const RowKernels*> runnable(DType dtype = DType::bf16) {
  std::vector<const RowKernels*> kernels{&row_kernels("", dtype)};
  for (const std::string isa : {"avx2", "avx512"})
    if (vector_isa() == isa || (vector_isa() == "avx512" && isa == "avx2"))
      kernels.push_back(&row_kernels(isa, dtype));
  return kernels;
}

std::vector<std::uint16_t> every_half() {
  std::vector<std::uint16_t> values(halves);
  for (std::size_t i = 0; i < halves; ++i) values[i] = static_cast<std::uint16_t>(i);
  return values;
}

float as_float(std::uint16_t half) {
  float value[1];
  decode(DType::bf16, &half, std::span<float>(value));
  return value[0];
}

/// Roundings to bf16 of all that the loops of an instruction set make of every bf16.
struct Results {
  explicit Results(const RowKernels& kernels, Activation activation) {
    const auto x = every_half();
    const std::vector<std::uint16_t> ones(halves, 0x3f80);
    const std::vector<float> zeros(halves, 0.0f);
    std::vector<float> sums(halves);
    // In parts of 1 to 37 elements, so that ends of rows are among them.
    for (std::size_t first = 0, count = 1; first < halves; first += count, count = count % 37 + 1) {
      count = std::min(count, halves - first);
      kernels.bias_act(activation, &x[first], &zeros[first], &biased[first], count, false);
      kernels.act_mul(activation, &x[first], &ones[first], &gated[first], count, false);
      kernels.bias_act_gradient(activation, &x[first], &zeros[first], &ones[first], &slope[first],
                                &sums[first], false, count, false);
    }
  }
  std::vector<std::uint16_t> biased = std::vector<std::uint16_t>(halves);
  std::vector<std::uint16_t> gated = biased, slope = biased;
};

/// Beside a rounding to bf16, 2^-8 at most, what the approximations may be off.
bool close(std::uint16_t half, double exact, double beside) {
  const double error = std::abs(static_cast<double>(as_float(half)) - exact);
  return error <= std::abs(exact) * 0x1.1p-8 + beside;
}

void check_every_half(const RowKernels& kernels, const std::string& name) {
  const Activation activation = parse_activation(name);
  const Results results(kernels, activation);
  for (std::size_t i = 0; i < halves; ++i) {
    const float x = as_float(static_cast<std::uint16_t>(i));
    CAPTURE(name, x);
    if (!std::isfinite(x)) {
      const auto same = [](std::uint16_t half, double exact) {
        const float value = as_float(half);
        return value == static_cast<float>(exact) || (std::isnan(value) && std::isnan(exact));
      };
      REQUIRE(same(results.biased[i], activate(activation, static_cast<double>(x))));
      REQUIRE(same(results.gated[i], activate(activation, static_cast<double>(x))));
      REQUIRE(same(results.slope[i], activation_gradient(activation, static_cast<double>(x), 1)));
    } else {
      // Gelu's lower tail ends where 1e-7 is left of it, and the definition's digits end too.
      const double beside = name == "gelu" ? 2e-7 : 1e-14;
      REQUIRE(close(results.biased[i], activate(activation, static_cast<double>(x)), beside));
      REQUIRE(as_float(results.gated[i]) == as_float(results.biased[i]));
      REQUIRE(close(results.slope[i], activation_gradient(activation, static_cast<double>(x), 1),
                    2e-3));
    }
  }
}

/// Multiples of a quarter and of an eighth of a turn and their neighbours, and angles of all sizes,
/// beyond 10^6 too.
std::vector<float> angles_of_all_sizes() {
  std::vector<float> angles{0.0f, -0.0f, 999999.9f, -1e6f, 1000001.0f, 3e7f, -1e9f};
  for (const double turns : {1, 2, 3, 5, 7, 1001, 30000, 83443, 636618})
    for (const double unit : {0.78539816339744831, 1.5707963267948966})
      for (const float side : {0.0f, 1e9f, -1e9f})
        angles.push_back(std::nextafter(static_cast<float>(turns * unit), side));
  for (float angle = 1e-6f; angle < 4e6f; angle *= 1.0173f) {
    angles.push_back(angle);
    angles.push_back(-angle);
  }
  return angles;
}

/// Real is what the sines of the type are, and `beside` how far off they may be.
template <typename Real>
void check_sines(DType dtype, double beside) {
  const auto angles = angles_of_all_sizes();
  for (const RowKernels* kernels : runnable(dtype))
    for (std::size_t first = 0, count = 1; first < angles.size();
         first += count, count = count % 37 + 1) {
      count = std::min(count, angles.size() - first);
      std::vector<Real> sine(count + 1, 7), cosine = sine;
      kernels->sines(&angles[first], count, 0.5, sine.data(), cosine.data());
      for (std::size_t i = 0; i < count; ++i) {
        const auto angle = static_cast<double>(angles[first + i]);
        CAPTURE(dtype_name(dtype), angle, count, i);
        REQUIRE(std::abs(static_cast<double>(sine[i]) - 0.5 * std::sin(angle)) <= beside);
        REQUIRE(std::abs(static_cast<double>(cosine[i]) - 0.5 * std::cos(angle)) <= beside);
      }
      REQUIRE((sine[count] == 7 && cosine[count] == 7));
    }
}

}  // namespace

TEST_CASE("activations of every bf16 are right to a rounding") {
  for (const RowKernels* kernels : runnable())
    for (const std::string& name : activation_names()) check_every_half(*kernels, name);
}

TEST_CASE("activations of NaN and infinities in f32 are those of the definition") {
  const float infinity = std::numeric_limits<float>::infinity();
  const std::vector<float> gate{std::nanf(""), infinity, -infinity, 1e30f, -1e30f,
                                0.0f,          1.0f,     -1.0f,     -90.0f};
  const auto same = [](float value, double exact) {
    return std::isnan(exact) ? std::isnan(value)
                             : value == Approx(exact).epsilon(1e-5).margin(1e-30);
  };
  for (const RowKernels* kernels : runnable(DType::f32))
    for (const std::string& name : gated_activation_names())
      for (const float of : gate) {
        const Activation activation = parse_activation(name);
        const std::vector<float> x(21, of), ones(21, 1.0f), bad(21, std::nanf(""));
        std::vector<float> out(21), slope(21), hidden(21), cut(21);
        kernels->act_mul(activation, x.data(), ones.data(), out.data(), 21, false);
        kernels->act_mul_gradient(activation, x.data(), ones.data(), ones.data(), slope.data(),
                                  hidden.data(), 21, false);
        kernels->act_mul_gradient(activation, x.data(), ones.data(), bad.data(), cut.data(),
                                  hidden.data(), 21, false);
        CAPTURE(name, of);
        for (const std::size_t i : {0, 20}) {
          CHECK(same(out[i], activate(activation, of)));
          CHECK(same(slope[i], activation_gradient(activation, of, 1)));
          CHECK(same(cut[i], activation_gradient(activation, of, std::nan(""))));
        }
      }
}

TEST_CASE("a NaN whose lower half is full stays one when it is rounded") {
  const std::vector<std::uint16_t> x(40, 0x3f80);
  std::vector<float> bias(40, 1.0f);
  const std::uint32_t bits = 0x7fffffff;
  std::memcpy(&bias[17], &bits, sizeof bits);
  for (const RowKernels* kernels : runnable())
    for (const bool streams : {false, true}) {
      std::vector<std::uint16_t> y(40);
      kernels->bias_act(Activation::none, x.data(), bias.data(), y.data(), y.size(), streams);
      for (std::size_t i = 0; i < y.size(); ++i) {
        CHECK(std::isnan(as_float(y[i])) == (i == 17));
        if (i != 17) CHECK(as_float(y[i]) == 2.0f);
      }
    }
}

TEST_CASE("sines are as exact as their element type takes") {
  check_sines<double>(DType::f32, 4e-16);
  check_sines<float>(DType::bf16, 6e-8);
}
