// Caches of e4m3: random problems, and every 16-bit value with what it becomes.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "qkv/problems.hpp"
#include "support/error_of.hpp"
#include "support/fuzz_cases.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

Problem random_qkv_of_e4m3(DeviceKind kind, Draw& draw, std::int64_t most_elements) {
  Problem problem = random_qkv(kind, draw, most_elements);
  problem.options["cache"] = "yes";
  problem.options.erase("keys");
  problem.options["cache-format"] = "e4m3";
  problem.options["cache-scales"] = draw.of({"tensor", "head"});
  return qkv_problem(kind, problem.dtype, problem.sizes, problem.options);
}

/// Every number of 16 bits as a feature of k, and backwards of v.
constexpr std::int64_t tokens = 128, dim = 256, kv_heads = 2;

float number(DType dtype, std::size_t bits) {
  const auto own = static_cast<std::uint16_t>(bits);
  return dtype == DType::bf16 ? float_from_bf16(own) : float_from_fp16(own);
}

/// Runs a family of the stage heads on them: the caches, poisoned before.
std::vector<std::vector<std::byte>> caches_of(Backend& backend, const Problem& problem,
                                              const Family& family,
                                              const std::vector<float>& scales) {
  const auto compiled = backend.compile(
      family.program(problem, backend.facts(), family.default_config(problem, backend.facts())));
  REQUIRE(compiled.report.failure == "");
  const auto specs = qkv_op().tensors(problem);
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<void*> addresses;
  for (const TensorSpec& spec : specs) {
    std::vector<std::byte> bytes(spec.bytes(), std::byte{0xff});
    std::vector<float> values(static_cast<std::size_t>(spec.elements()));
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t place = spec.name == "v_raw" ? 0xffff - i : i;
      if (spec.name == "slots") values[i] = static_cast<float>(i);
      if (spec.name == "k_raw" || spec.name == "v_raw") values[i] = number(problem.dtype, place);
      if (spec.name == "k_scale" || spec.name == "v_scale") values[i] = scales[i];
    }
    if (spec.role != Role::updated && spec.role != Role::output)
      encode(spec.dtype, std::span<const float>(values), bytes.data());
    buffers.push_back(backend.allocate(bytes.size()));
    backend.write(buffers.back()->data(), bytes.data(), bytes.size());
    addresses.push_back(buffers.back()->data());
  }
  const auto workspace =
      backend.allocate(std::max<std::size_t>(256, compiled.executable->workspace_bytes()));
  compiled.executable->enqueue(addresses.data(), workspace->data(), backend.stream());
  backend.synchronize();
  std::vector<std::vector<std::byte>> caches;
  for (const char* name : {"k_cache", "v_cache"}) {
    const std::size_t at = tensor_index(specs, name);
    caches.emplace_back(specs[at].bytes());
    backend.read(caches.back().data(), addresses[at], caches.back().size());
  }
  return caches;
}

/// What the definition says, without the library's conversion: the nearest number of e4m3, even
/// ones at a tie, up to 448; NaN of NaN.
double nearest_e4m3(double value) {
  if (std::isnan(value)) return value;
  const double magnitude = std::abs(value);
  // Subnormals have the spacing of the least normal numbers.
  const double power = std::floor(std::log2(std::clamp(magnitude, 0x1p-6, 448.0)));
  const double spacing = std::ldexp(1.0, static_cast<int>(power) - 3);
  const double rounded = magnitude >= 448 ? 448 : std::nearbyint(magnitude / spacing) * spacing;
  return std::copysign(std::min(rounded, 448.0), value);
}

void check_every_number(Backend& backend) {
  for (const DType dtype : qkv_op().dtypes(backend.facts().kind))
    for (const char* choice : {"tensor", "head"}) {
      if (dtype == DType::f32) continue;
      const Problem problem =
          qkv_problem(backend.facts().kind, dtype,
                      {{"m", tokens}, {"d", 8}, {"heads", 2}, {"kv-heads", kv_heads}, {"dim", dim}},
                      {{"cache", "yes"}, {"cache-format", "e4m3"}, {"cache-scales", choice}});
      const bool of_heads = std::string(choice) == "head";
      const std::vector<float> scales{0.3f, 7.0f};
      for (const Family* family : qkv_op().families()) {
        if (family->device_kind() != backend.facts().kind ||
            family->stages() != std::vector<std::string>{qkv::stage_heads} ||
            family->refusal(problem, backend.facts()))
          continue;
        CAPTURE(problem.text(), family->name());
        const auto caches = caches_of(backend, problem, *family, scales);
        std::size_t wrong = 0;
        for (std::size_t part = 0; part < 2; ++part)
          for (std::size_t i = 0; i < caches[part].size(); ++i) {
            const float value = number(dtype, part == 0 ? i : 0xffff - i);
            const float scale = scales[of_heads ? i / dim % kv_heads : 0];
            const double expected = nearest_e4m3(value / scale);
            const double stored = float_from_fp8(static_cast<std::uint8_t>(caches[part][i]));
            const bool same =
                std::isnan(expected)
                    ? std::isnan(stored)
                    : stored == expected && std::signbit(stored) == std::signbit(expected);
            wrong += !same;
          }
        CHECK(wrong == 0);
      }
    }
}

}  // namespace

TEST_CASE("caches of e4m3 have scales behind the slots, and a second stage that writes them") {
  const Problem problem = qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(5, 32, 4, 2, 16),
                                      {{"cache", "yes"}, {"cache-format", "e4m3"}});
  std::vector<std::string> names;
  for (const TensorSpec& tensor : qkv_op().tensors(problem)) {
    names.push_back(tensor.name);
    CHECK((tensor.dtype == DType::fp8) == (tensor.role == Role::updated));
  }
  CHECK(names == std::vector<std::string>{"x", "w_q", "w_k", "w_v", "k_cache", "v_cache", "slots",
                                          "k_scale", "v_scale", "q", "q_raw", "k_raw", "v_raw"});
  CHECK(qkv_op().stages(problem).size() == 2);
}

TEST_CASE("e4m3 without a cache, and scales without e4m3, are refused in one line") {
  const auto complaint = [](const Options& options) -> std::string {
    return error_of(
        [&] { qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(5, 32, 4, 2, 16), options); });
  };
  CHECK(complaint({{"cache-format", "e4m3"}}).find("there is no cache") != std::string::npos);
  CHECK(complaint({{"cache", "yes"}, {"cache-scales", "head"}}).find("only e4m3 has scales") !=
        std::string::npos);
}

TEST_CASE("every 16-bit value becomes the nearest e4m3, saturates, or stays NaN, on the CPU") {
  check_every_number(*open_cpu());
}

TEST_CASE("every 16-bit value becomes the nearest e4m3, saturates, or stays NaN, on the GPU",
          "[gpu][small]") {
  on_first_cuda(check_every_number);
}

const FuzzCases<qkv_op, random_qkv_of_e4m3, FuzzCounts{.small = 600, .larger = 15, .gpu = 0}>
    e4m3_cases("qkv with caches of e4m3");
