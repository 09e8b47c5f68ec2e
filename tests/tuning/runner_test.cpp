#include "measure/runner.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "measure/buffer_sets.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("samples rotate through the sets, whole rounds of short passes, parts of long ones") {
  HostBackend backend;
  std::vector<int> visits;
  int place[3];
  Pass pass;
  for (auto& set : place) pass.tensors.push_back({&set});
  pass.executables.push_back(std::make_shared<HostExecutable>([&](void* const* tensors, void*) {
    visits.push_back(static_cast<int>(static_cast<int*>(tensors[0]) - place));
  }));

  SetRotation rotation;
  Runner runner(backend, pass, rotation);
  runner.probe();
  CHECK(visits == std::vector<int>{0});

  visits.clear();
  runner.plan(60e-6);  // four passes make 200 µs; two rounds of three sets
  CHECK(runner.passes() == 6);
  runner.sample();
  CHECK(visits == std::vector<int>{1, 2, 0, 1, 2, 0});

  visits.clear();
  runner.plan(0.1);
  CHECK(runner.passes() == 1);
  for (int i = 0; i < 4; ++i) runner.sample();
  CHECK(visits == std::vector<int>{1, 2, 0, 1});

  // The next candidate goes on where this one ended: its data is not in the cache.
  visits.clear();
  Runner other(backend, pass, rotation);
  other.probe();
  runner.sample();
  other.plan(0.1);
  other.sample();
  CHECK(visits == std::vector<int>{2, 0, 1});
}

TEST_CASE("every set holds the same random data, of the tensors' scale") {
  HostBackend backend;
  const std::vector<TensorSpec> tensors{{"x", DType::f32, {100, 1000}, Role::input, 2},
                                        {"w", DType::bf16, {3000, 1000}, Role::input, 0.1},
                                        {"y", DType::f32, {10}, Role::output, 1}};
  BufferSets sets(backend, tensors, 3, 5);
  sets.replicate();
  REQUIRE(sets.count() == 3);
  for (int set = 1; set < 3; ++set) {
    CHECK(sets.tensors(set)[0] != sets.tensors(0)[0]);
    for (std::size_t i = 0; i < 2; ++i)
      CHECK(std::memcmp(sets.tensors(set)[i], sets.tensors(0)[i], tensors[i].bytes()) == 0);
  }
  for (std::size_t i = 0; i < 2; ++i) {
    std::vector<float> values(static_cast<std::size_t>(tensors[i].elements()));
    decode(tensors[i].dtype, sets.tensors(2)[i], values);
    double sum = 0, squares = 0;
    for (const double value : values) {
      sum += value;
      squares += value * value;
    }
    const auto count = static_cast<double>(values.size());
    CHECK(std::abs(sum / count) < 0.02 * tensors[i].scale);
    CHECK(std::abs(std::sqrt(squares / count) / tensors[i].scale - 1) < 0.02);
  }
}
