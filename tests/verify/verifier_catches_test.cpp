// The verifier catches what is wrong, names it, and is sound again for the next candidate.
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "support/catch.hpp"
#include "verify/toy_run.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

const Problem problem = ToyOp::problem(DType::f32, 150, 24, 16);

/// Verifies the second stage spoilt, then right; returns what was said of the spoilt one.
std::string complaint(const Spoil& spoil, std::size_t workspace_bytes = 0) {
  HostBackend backend;
  const ToyOp op;
  Verifier verifier(backend, op, problem, 11);
  const auto spoilt = verifier.verify(1, 1, {toy_stage(problem, 1, spoil, workspace_bytes)});
  CHECK(spoilt.passed == spoilt.failure.empty());
  const auto right = verifier.verify(1, 1, {toy_stage(problem, 1)});
  INFO(right.failure);
  CHECK(right.passed);
  return spoilt.failure;
}

bool says(const std::string& text, const std::string& words) {
  UNSCOPED_INFO("said: " << text);
  return text.find(words) != std::string::npos;
}

float* floats(void* data) {
  return static_cast<float*>(data);
}

}  // namespace

TEST_CASE("elements left unwritten are counted and located") {
  const auto said = complaint([](void* const* t, void*) {
    std::memset(floats(t[toy_y]) + 149 * 24 + 5, 0xff, 3 * sizeof(float));
  });
  CHECK(says(said, "y: 3 of 3600 elements were not written, the first at [149, 5]"));
}

TEST_CASE("a single wrong element in thousands is found, though the norm hardly moves") {
  const auto said = complaint([](void* const* t, void*) { floats(t[toy_y])[100] += 0.01F; });
  CHECK(says(said, "y: 1 of 3600 elements are wrong, the first [4, 4] is"));
}

TEST_CASE("no number that is not one passes") {
  for (const float value : {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), std::nanf("1")}) {
    const auto said = complaint([=](void* const* t, void*) { floats(t[toy_y])[3599] = value; });
    CHECK(says(said, "the first [149, 23] is"));
  }
}

TEST_CASE("a small bias everywhere exceeds the norm's tolerance") {
  const auto said = complaint([](void* const* t, void*) {
    for (int i = 0; i < 3600; ++i) floats(t[toy_y])[i] *= 1 + 4e-6F;
  });
  CHECK(says(said, "y: relative error"));
  CHECK(says(said, "exceeds the tolerance"));
}

TEST_CASE("swapped rows are wrong rows, whatever the tile") {
  for (const int tile : {1, 2, 8, 16, 64}) {
    const auto said = complaint([=](void* const* t, void*) {
      float* const y = floats(t[toy_y]);
      for (int i = 0; i < tile * 24; ++i) std::swap(y[i], y[i + tile * 24]);
    });
    CHECK(says(said, "elements are wrong"));
  }
}

TEST_CASE("writes beyond an output, before it, and beyond the workspace are named") {
  CHECK(says(complaint([](void* const* t, void*) { floats(t[toy_y])[3601] = 0; }),
             "y: 4 bytes of the guard after it were written, the nearest 5 bytes away"));
  CHECK(says(complaint([](void* const* t, void*) { floats(t[toy_y])[-1] = 0; }),
             "y: 4 bytes of the guard before it were written, the nearest 1 bytes away"));
  CHECK(says(complaint([](void* const*, void* w) { static_cast<char*>(w)[100] = 1; }, 100),
             "workspace: 1 bytes of the guard after it"));
  CHECK(says(complaint([](void* const* t, void*) { floats(t[toy_b])[24 * 16] = 0; }),
             "b: 4 bytes of the guard after it"));
}

TEST_CASE("an input that was overwritten is named, and restored") {
  CHECK(says(complaint([](void* const* t, void*) { floats(t[toy_b])[17] = 9; }),
             "b[1, 1]: an input was overwritten"));
  // The reference of the first stage is an input of the second.
  CHECK(says(complaint([](void* const* t, void*) { floats(t[toy_hidden])[149 * 16] = 9; }),
             "hidden[149, 0]: an input was overwritten"));
}

TEST_CASE("a result that moves from run to run is a race") {
  int run = 0;
  const auto said = complaint([&](void* const* t, void*) {
    float& value = floats(t[toy_y])[77];
    if (run++ % 2 == 1) value = std::nextafter(value, 10.0F);
  });
  CHECK(says(said, "y[3, 5] differs between two runs"));
}

TEST_CASE("workspace read before it is written shows") {
  const auto said = complaint(
      [](void* const* t, void* workspace) {
        // Neither NaN nor large: only the second run's garbage tells.
        floats(t[toy_y])[0] += static_cast<unsigned char*>(workspace)[3] == 0xff ? 0 : 1e-9F;
        if (static_cast<unsigned char*>(workspace)[3] != 0xff) floats(t[toy_y])[1] *= 1.0000002F;
      },
      64);
  CHECK(says(said, "differs between two runs"));
}

TEST_CASE("a chunk of the reduction left out of one element is found in bf16") {
  HostBackend backend;
  const ToyOp op;
  const auto half = ToyOp::problem(DType::bf16, 61, 64, 128);
  Verifier verifier(backend, op, half, 2);
  const auto forget = [](void* const* t, void*) {
    std::vector<float> hidden(128);
    std::vector<float> weights(128);
    decode(DType::bf16, t[toy_hidden], hidden);
    decode(DType::bf16, t[toy_b], weights);
    float sum = 0;
    for (std::size_t l = 0; l < 112; ++l) sum += hidden[l] * weights[l];
    encode(DType::bf16, {&sum, 1}, t[toy_y]);
  };
  const auto result = verifier.verify(1, 1, {toy_stage(half, 1, forget)});
  CHECK(says(result.failure, "y: 1 of 3904 elements are wrong, the first [0, 0]"));
}
