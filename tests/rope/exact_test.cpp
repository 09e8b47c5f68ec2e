// f32 is rounded once, and a result may lie where its input was.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu/open.hpp"
#include "rope/problems.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The buffers of a problem on a backend, its inputs drawn.
struct Buffers {
  Buffers(Backend& device, const Problem& problem, Draw& draw)
      : backend(&device), tensors(rope_op().tensors(problem)) {
    std::normal_distribution<double> normal;
    for (const auto& tensor : tensors) {
      buffers.push_back(device.allocate(tensor.bytes()));
      addresses.push_back(buffers.back()->data());
      if (tensor.role != Role::input) continue;
      std::vector<double> drawn(static_cast<std::size_t>(tensor.elements()));
      if (tensor.draw)
        tensor.draw(draw.random()(), drawn);
      else
        for (double& value : drawn)
          value = round_to(tensor.dtype, tensor.scale * normal(draw.random()));
      std::vector<std::byte> bytes(tensor.bytes());
      encode(tensor.dtype, std::span<const double>(drawn), bytes.data());
      device.write(addresses.back(), bytes.data(), bytes.size());
      values[tensor.name] = std::move(drawn);
    }
  }

  std::vector<float> read(std::size_t place) const {
    std::vector<std::byte> bytes(tensors[place].bytes());
    backend->read(bytes.data(), addresses[place], bytes.size());
    std::vector<float> floats(static_cast<std::size_t>(tensors[place].elements()));
    decode(tensors[place].dtype, bytes.data(), std::span<float>(floats));
    return floats;
  }

  Backend* backend;
  std::vector<TensorSpec> tensors;
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<void*> addresses;
  ReferenceTensors values;
};

void run_family(Backend& backend, const Family& family, const Problem& problem,
                const std::vector<void*>& addresses) {
  const auto& facts = backend.facts();
  const auto compiled =
      backend.compile(family.program(problem, facts, family.default_config(problem, facts)));
  REQUIRE(compiled.report.failure == "");
  REQUIRE(compiled.executable->workspace_bytes() == 0);
  compiled.executable->enqueue(addresses.data(), nullptr, backend.stream());
  backend.synchronize();
}

/// How many numbers of f32 lie between the two.
std::int64_t distance(float a, float b) {
  const auto place = [](float value) {
    const auto bits = std::bit_cast<std::int32_t>(value);
    return bits < 0 ? std::int64_t{INT32_MIN} - bits : std::int64_t{bits};
  };
  return std::abs(place(a) - place(b));
}

template <typename Body>
void for_each_family(Backend& backend, const Problem& problem, const Body& body) {
  for (const Family* family : rope_op().families())
    if (family->device_kind() == backend.facts().kind && !family->refusal(problem, backend.facts()))
      body(*family);
}

void check_rounding(Backend& backend) {
  Draw draw(21);
  for (int i = 0; i < 40; ++i) {
    Problem problem = random_rope(backend.facts().kind, draw, 1 << 13);
    problem.dtype = DType::f32;
    CAPTURE(problem.text());
    Buffers buffers(backend, problem, draw);
    HostThreads threads;
    ReferenceTensors expected = buffers.values;
    rope_op().reference(problem, 0, expected, threads);
    for_each_family(backend, problem, [&](const Family& family) {
      CAPTURE(family.name());
      run_family(backend, family, problem, buffers.addresses);
      for (std::size_t place = 0; place < buffers.tensors.size(); ++place) {
        if (buffers.tensors[place].role != Role::output) continue;
        const auto out = buffers.read(place);
        const auto& reference = expected.at(buffers.tensors[place].name);
        std::int64_t worst = 0;
        for (std::size_t e = 0; e < out.size(); ++e)
          worst = std::max(worst, distance(out[e], static_cast<float>(reference[e])));
        CHECK(worst <= 1);
      }
    });
  }
}

void check_in_place(Backend& backend) {
  Draw draw(22);
  for (int i = 0; i < 40; ++i) {
    Problem problem = random_rope(backend.facts().kind, draw, 1 << 13);
    for (const char* stride : {"q-row", "q-outer", "q-head", "k-row", "k-outer", "k-head"})
      problem.sizes.erase(stride);
    CAPTURE(problem.text());
    for_each_family(backend, problem, [&](const Family& family) {
      CAPTURE(family.name());
      Buffers buffers(backend, problem, draw);
      const TensorPlaces at(rope_op().tensors(problem));
      const auto sides = rope::sides_of(rope::layer_of(problem));
      run_family(backend, family, problem, buffers.addresses);
      auto in_place = buffers.addresses;
      for (const auto& side : sides) in_place[at.at(side.out)] = in_place[at.at(side.in)];
      run_family(backend, family, problem, in_place);
      for (const auto& side : sides)
        CHECK(buffers.read(at.at(side.in)) == buffers.read(at.at(side.out)));
    });
  }
}

}  // namespace

TEST_CASE("results in f32 are within one ulp of the reference on the CPU") {
  check_rounding(*open_cpu());
}

TEST_CASE("results in f32 are within one ulp of the reference on the GPU", "[gpu]") {
  on_first_cuda(check_rounding);
}

TEST_CASE("a result may lie where its input was on the CPU") {
  check_in_place(*open_cpu());
}

TEST_CASE("a result may lie where its input was on the GPU", "[gpu]") {
  on_first_cuda([](Backend& backend) { check_in_place(backend); });
}
