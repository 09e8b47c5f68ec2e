#include <algorithm>
#include <cmath>
#include <random>

#include "core/dtype.hpp"
#include "cuda/device.hpp"
#include "support/catch.hpp"

namespace fftune::cuda {
namespace {

using testing::TestDevice;

std::vector<float> random_values(DType dtype, std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values)
    value = static_cast<float>(round_to(dtype, static_cast<double>(uniform(random))));
  return values;
}

std::unique_ptr<Buffer> upload(TestDevice& device, DType dtype, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  encode(dtype, values, bytes.data());
  auto buffer = device.backend->allocate(bytes.size());
  device.backend->write(buffer->data(), bytes.data(), bytes.size());
  return buffer;
}

}  // namespace

TEST_CASE("the vendor's product agrees with the host's", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  auto& backend = *device.backend;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::f32})
    for (const std::int64_t m : {1, 40}) {
      LibraryGemm gemm;
      gemm.dtype = dtype;
      gemm.m = m;
      gemm.n = 96;
      gemm.k = 72;
      gemm.a = TensorArgument{0};
      gemm.b = ScratchArgument{0};
      gemm.c = TensorArgument{1};
      const auto a_values = random_values(dtype, gemm.m * gemm.k, 1);
      const auto b_values = random_values(dtype, gemm.n * gemm.k, 2);
      Program program;
      program.scratch = {{b_values.size() * dtype_bytes(dtype), false}};
      program.steps.emplace_back(gemm);
      const auto result = backend.compile(program);
      if (result.report.failure.find("cuBLASLt is not there") != std::string::npos)
        FFTUNE_SKIP(result.report.failure);
      REQUIRE(result.report.failure == "");

      const auto a = upload(device, dtype, a_values);
      const auto b = upload(device, dtype, b_values);
      const auto c_count = static_cast<std::size_t>(gemm.m * gemm.n);
      const auto c = backend.allocate(c_count * dtype_bytes(dtype));
      backend.fill(c->data(), 0xff, c->bytes());
      const auto workspace = backend.allocate(result.executable->workspace_bytes());
      backend.copy(workspace->data(), b->data(), b->bytes());
      void* const tensors[] = {a->data(), c->data()};
      result.executable->enqueue(tensors, workspace->data(), backend.stream());
      std::vector<std::byte> bytes(c->bytes());
      backend.read(bytes.data(), c->data(), bytes.size());
      std::vector<float> c_values(c_count);
      decode(dtype, bytes.data(), c_values);

      double difference = 0;
      double norm = 0;
      for (std::int64_t row = 0; row < gemm.m; ++row)
        for (std::int64_t column = 0; column < gemm.n; ++column) {
          double sum = 0;
          for (std::int64_t i = 0; i < gemm.k; ++i)
            sum += static_cast<double>(a_values[static_cast<std::size_t>(row * gemm.k + i)]) *
                   static_cast<double>(b_values[static_cast<std::size_t>(column * gemm.k + i)]);
          const double error =
              static_cast<double>(c_values[static_cast<std::size_t>(row * gemm.n + column)]) - sum;
          difference += error * error;
          norm += sum * sum;
        }
      INFO(dtype_name(dtype) << " m=" << m);
      // One rounding of the result; f32 also rounds in its sum of 72. TF32 would show as 2^-11.
      const double allowed =
          dtype == DType::f32 ? 32 * dtype_unit_roundoff(dtype) : dtype_unit_roundoff(dtype);
      CHECK(std::sqrt(difference / norm) <= allowed);
    }
}

TEST_CASE("a product of matrices on the host, in float64", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (const bool a_transposed : {false, true})
    for (const bool b_transposed : {false, true}) {
      const std::int64_t m = 70, n = 99, k = 130;
      std::vector<double> a(m * k), b(n * k), c(m * n, 7);
      for (auto* values : {&a, &b})
        for (double& value : *values) value = normal(random);
      if (!device.backend->multiply(
              {m, n, k, a.data(), b.data(), a_transposed, b_transposed, c.data()}))
        FFTUNE_SKIP("cuBLASLt is not there");
      const auto at = [](const std::vector<double>& from, std::int64_t place) {
        return from[static_cast<std::size_t>(place)];
      };
      double worst = 0;
      for (std::int64_t row = 0; row < m; ++row)
        for (std::int64_t column = 0; column < n; ++column) {
          double sum = 0;
          for (std::int64_t i = 0; i < k; ++i)
            sum += at(a, a_transposed ? i * m + row : row * k + i) *
                   at(b, b_transposed ? i * n + column : column * k + i);
          worst = std::max(worst, std::abs(at(c, row * n + column) - sum));
        }
      CAPTURE(a_transposed, b_transposed);
      CHECK(worst < 1e-12);
    }
}

TEST_CASE("a product of nothing is a failure, not a crash", "[gpu]") {
  FFTUNE_DEVICE(TestDevice, device);
  Program program;
  program.steps.emplace_back(LibraryGemm{});
  const auto result = device.backend->compile(program);
  CHECK(!result.executable);
  CHECK(result.report.failure != "");
}

}  // namespace fftune::cuda
