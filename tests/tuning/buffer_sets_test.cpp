#include "measure/buffer_sets.hpp"

#include <algorithm>
#include <limits>

#include "measure/runner.hpp"
#include "support/catch.hpp"

using namespace fftune;

TEST_CASE("tensors lie apart, each aligned") {
  const auto layout = layout_of({{"x", DType::f32, {3}, Role::input, 1},
                                 {"w", DType::bf16, {129}, Role::input, 1},
                                 {"y", DType::f32, {1}, Role::output, 1}});
  CHECK(layout.offsets == std::vector<std::size_t>{0, 256, 768});
  CHECK(layout.bytes == 1024);
}

TEST_CASE("tensors that no memory holds do not add up to a few bytes") {
  const std::int64_t most = (std::int64_t{1} << 31) - 1;
  // The bytes of the three are 4 less than 2^64, and more than that aligned.
  const auto layout = layout_of({{"x", DType::f32, {most}, Role::input, 1},
                                 {"w", DType::f32, {most}, Role::input, 1},
                                 {"y", DType::f32, {most, most}, Role::output, 1}});
  CHECK(layout.bytes == std::numeric_limits<std::size_t>::max());
}

namespace {

DeviceFacts with_cache(DeviceKind kind, std::int64_t bytes) {
  DeviceFacts facts;
  facts.kind = kind;
  facts.l2_bytes = bytes;
  return facts;
}

DeviceFacts gpu(std::int64_t cache_bytes) {
  return with_cache(DeviceKind::cuda, cache_bytes);
}

}  // namespace

TEST_CASE("the sets overflow the cache by the stage that touches least") {
  const std::vector<StageSpec> stages{{"a", {}, {}, 1, 0, 8e6}, {"b", {}, {}, 1, 0, 4e6}};
  constexpr std::size_t free = std::size_t{100} << 30;
  CHECK(set_count(stages, 12'000'000, gpu(50'000'000), free) == 32);  // 2.5 · 50e6 / 4e6
  CHECK(set_count(stages, 12'000'000, gpu(0), free) == 2);            // an unknown cache
  CHECK(set_count(stages, 1'200'000, gpu(1'000'000'000), free) == 128);
  CHECK(set_count(stages, 12'000'000, gpu(50'000'000), 100'000'000) == 4);  // half of the memory
  CHECK(set_count(stages, 12'000'000, gpu(50'000'000), 13'000'000) == 1);
  CHECK(set_count(stages, 12'000'000, gpu(50'000'000), 11'000'000) == 0);
  CHECK(set_count(stages, std::size_t{3} << 30, gpu(50'000'000), free) == 5);
  CHECK(set_count(stages, std::size_t{9} << 30, gpu(50'000'000), free) == 2);
  // A stage that touches next to nothing needs no gigabytes.
  const std::vector<StageSpec> uneven{{"a", {}, {}, 1, 0, 8e8}, {"b", {}, {}, 1, 0, 4e6}};
  CHECK(set_count(uneven, 804'000'000, gpu(50'000'000), free) == 2);
}

TEST_CASE("sets whose stage reads a small part of them overflow the cache too") {
  // One token of DeepSeek-V3 in fp8, of 256 experts with an eighth of their features: it reads the
  // weights of eight.
  const std::vector<StageSpec> stages{{"gate_up", {}, {}, 1, 0, 29.4e6},
                                      {"down", {}, {}, 1, 0, 14.7e6}};
  constexpr std::size_t free = std::size_t{130} << 30;
  CHECK(set_count(stages, 1'410'000'000, gpu(62'914'560), free) * 14.7e6 > 2.4 * 62'914'560);
  CHECK(set_count(stages, 1'410'000'000, with_cache(DeviceKind::cpu, 32 << 20), free) == 2);
}

TEST_CASE("on a CPU the sets overflow a last-level cache of hundreds of megabytes") {
  constexpr std::size_t free = std::size_t{100} << 30;
  constexpr std::int64_t cache = 260 << 20;
  const auto cpu = with_cache(DeviceKind::cpu, cache);
  // From a layer of 256 features to one of 8192, whose second stage reads a third of each set.
  for (const double set : {1.5e6, 6e6, 24e6, 100e6, 800e6}) {
    CAPTURE(set);
    const std::vector<StageSpec> stages{{"a", {}, {}, 1, 0, set * 2 / 3},
                                        {"b", {}, {}, 1, 0, set / 3}};
    const auto bytes = static_cast<std::size_t>(set);
    CHECK(set_count(stages, bytes, cpu, free) * set / 3 > 1.2 * static_cast<double>(cache));
  }
}

TEST_CASE("a sample lasts long enough, and takes whole rounds of the sets where they are short") {
  CHECK(passes_per_sample(3e-6, 36) == 72);  // 67 passes make 200 µs
  CHECK(passes_per_sample(3e-6, 2) == 68);
  CHECK(passes_per_sample(100e-6, 2) == 2);
  CHECK(passes_per_sample(100e-6, 36) == 2);  // a round would take 3.6 ms
  CHECK(passes_per_sample(0.06, 3) == 1);
  CHECK(passes_per_sample(0, 1) == 4096);
}
