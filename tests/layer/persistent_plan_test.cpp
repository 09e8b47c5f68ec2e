// Plans of the persistent family without a GPU: a stand-in for the kernel computes what the
// parameters of its launches say, and nothing else.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.hpp"
#include "device/facts.hpp"
#include "kernels/layer/persistent.cuh"
#include "layer/problems.hpp"
#include "runtime/plan.hpp"
#include "support/catch.hpp"
#include "support/host_backend.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "verify/verifier.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Values = std::vector<double>;

struct Shape {
  int tokens, d, h, heads, kv_heads, dim;
  int q_rows() const { return heads * dim; }
  int kv_rows() const { return kv_heads * dim; }
};

Values values_at(const void* from, std::int64_t first, std::int64_t count) {
  Values values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = float_from_bf16(
        static_cast<const std::uint16_t*>(from)[first + static_cast<std::int64_t>(i)]);
  return values;
}

void put_values(void* to, std::int64_t first, const Values& values) {
  for (std::size_t i = 0; i < values.size(); ++i)
    static_cast<std::uint16_t*>(to)[first + static_cast<std::int64_t>(i)] =
        bf16_from_float(static_cast<float>(values[i]));
}

Values multiply(const void* matrix, const Values& vector, int rows) {
  const auto k = static_cast<std::int64_t>(vector.size());
  const Values weights = values_at(matrix, 0, rows * k);
  Values result(static_cast<std::size_t>(rows));
  for (std::size_t row = 0; row < result.size(); ++row)
    for (std::size_t i = 0; i < vector.size(); ++i)
      result[row] += weights[row * vector.size() + i] * vector[i];
  return result;
}

void add(Values& to, const Values& values) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += values[i];
}

/// Each group of `length` by itself, times offset + weights.
Values normalised(const Values& values, const void* weights, std::size_t length, double epsilon,
                  double offset) {
  const Values factors = values_at(weights, 0, static_cast<std::int64_t>(length));
  Values result(values.size());
  for (std::size_t first = 0; first < values.size(); first += length) {
    double squares = 0;
    for (std::size_t i = 0; i < length; ++i) squares += values[first + i] * values[first + i];
    const double r = 1 / std::sqrt(squares / static_cast<double>(length) + epsilon);
    for (std::size_t i = 0; i < length; ++i)
      result[first + i] = values[first + i] * r * (offset + factors[i]);
  }
  return result;
}

void rotate(Values& heads, const persistent_params& p, const Shape& shape, int position) {
  const auto half = static_cast<std::size_t>(shape.dim / 2);
  for (std::size_t head = 0; head < heads.size(); head += 2 * half)
    for (std::size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position) * p.frequencies[i];
      const double low = heads[head + i], high = heads[head + half + i];
      heads[head + i] = p.angle_scale * (low * std::cos(angle) - high * std::sin(angle));
      heads[head + half + i] = p.angle_scale * (high * std::cos(angle) + low * std::sin(angle));
    }
}

Values attention(const persistent_params& p, const Shape& shape, const Values& q,
                 const persistent_layer_pointers& of, int token) {
  const std::int64_t first = static_cast<std::int64_t>(token) * p.cache * shape.kv_rows();
  const auto length = static_cast<std::size_t>(p.lengths[token]);
  const std::int64_t count = p.lengths[token] * shape.kv_rows();
  const Values keys = values_at(of.keys, first, count), values = values_at(of.values, first, count);
  const auto dim = static_cast<std::size_t>(shape.dim);
  const auto pitch = static_cast<std::size_t>(shape.kv_rows());
  Values result(q.size());
  for (std::size_t head = 0; head < static_cast<std::size_t>(shape.heads); ++head) {
    const std::size_t at = head / static_cast<std::size_t>(shape.heads / shape.kv_heads) * dim;
    Values weights(length);
    double total = 0;
    for (std::size_t key = 0; key < length; ++key) {
      double score = 0;
      for (std::size_t i = 0; i < dim; ++i) score += q[head * dim + i] * keys[key * pitch + at + i];
      weights[key] = std::exp2(score * p.scale);
      total += weights[key];
    }
    for (std::size_t key = 0; key < length; ++key)
      for (std::size_t i = 0; i < dim; ++i)
        result[head * dim + i] += weights[key] / total * values[key * pitch + at + i];
  }
  return result;
}

/// A layer of Llama with bias and norms of heads.
void run_layer(const persistent_params& p, const Shape& shape, int token,
               const persistent_layer_pointers& of, Values& x) {
  const auto d = static_cast<std::size_t>(shape.d), dim = static_cast<std::size_t>(shape.dim);
  const Values n = normalised(x, of.attn_norm, d, p.epsilon, 0);
  const int rows[] = {shape.q_rows(), shape.kv_rows(), shape.kv_rows()};
  Values qkv[3];
  for (int part = 0; part < 3; ++part) {
    qkv[part] = multiply(of.qkv[part], n, rows[part]);
    add(qkv[part], values_at(of.bias[part], 0, rows[part]));
    if (part == 2) continue;
    qkv[part] = normalised(qkv[part], of.head_norms[part], dim, p.epsilon, p.norm_offset);
    rotate(qkv[part], p, shape, p.positions[token]);
  }
  const std::int64_t slot = static_cast<const std::int32_t*>(p.slots)[token];
  put_values(of.keys, slot * shape.kv_rows(), qkv[1]);
  put_values(of.values, slot * shape.kv_rows(), qkv[2]);
  add(x, multiply(of.out, attention(p, shape, qkv[0], of, token), shape.d));
  const Values m = normalised(x, of.ffn_norm, d, p.epsilon, 0);
  Values hidden = multiply(of.gate, m, shape.h);
  const Values up = multiply(of.up, m, shape.h);
  for (std::size_t i = 0; i < hidden.size(); ++i) hidden[i] *= up[i] / (1 + std::exp(-hidden[i]));
  add(x, multiply(of.down, hidden, shape.d));
}

/// The kernel's own parameters, from those of a launch and a run's addresses.
persistent_params parameters_of(const KernelLaunch& launch, void* const* tensors,
                                std::byte* const* scratch) {
  persistent_params p{};
  REQUIRE(launch.parameters);
  REQUIRE(launch.parameters->bytes == sizeof p);
  std::set<std::size_t> taken;
  for (const auto& [offset, value] : launch.parameters->fields) {
    REQUIRE(offset + argument_bytes(value) <= sizeof p);
    for (std::size_t i = 0; i < argument_bytes(value); ++i)
      REQUIRE(taken.insert(offset + i).second);
    const auto put = [&, at = offset](const auto& of) {
      std::memcpy(reinterpret_cast<std::byte*>(&p) + at, &of, sizeof of);
    };
    if (const auto* tensor = std::get_if<TensorArgument>(&value)) put(tensors[tensor->tensor]);
    if (const auto* area = std::get_if<ScratchArgument>(&value)) put(scratch[area->scratch]);
    if (const auto* number = std::get_if<std::int32_t>(&value)) put(*number);
    if (const auto* number = std::get_if<float>(&value)) put(*number);
    if (const auto* array = std::get_if<ArrayArgument>(&value))
      std::memcpy(reinterpret_cast<std::byte*>(&p) + offset, array->values.data(),
                  argument_bytes(value));
  }
  return p;
}

/// A GPU on which a launch computes what its parameters say, in double. Like the kernel's, its
/// workspace has to be zero, and does not stay so.
class StandIn final : public HostBackend {
 public:
  explicit StandIn(Shape shape) : shape_(shape), facts_(facts_of_architecture("sm_90a")) {}
  const DeviceFacts& facts() const override { return facts_; }

  CompileResult compile(const Program& program) override {
    std::size_t bytes = 0;
    for (const Scratch& scratch : program.scratch) bytes += (scratch.bytes + 255) / 256 * 256;
    return {std::make_shared<HostExecutable>(
                [this, program](void* const* tensors, void* workspace) {
                  run(program, tensors, static_cast<std::byte*>(workspace));
                },
                bytes),
            {}};
  }

  int launches = 0, most_layers = 0;

 private:
  void run(const Program& program, void* const* tensors, std::byte* workspace) {
    std::vector<std::byte*> scratch;
    for (const Scratch& area : program.scratch) {
      if (area.zeroed) std::memset(workspace, 0, area.bytes);
      scratch.push_back(workspace);
      workspace += (area.bytes + 255) / 256 * 256;
    }
    std::set<const void*> used;
    for (const Step& step : program.steps) {
      const auto& launch = std::get<KernelLaunch>(step);
      CHECK(launch.cooperative);
      CHECK(launch.grid.x == static_cast<unsigned>(facts_.multiprocessors));
      const persistent_params p = parameters_of(launch, tensors, scratch.data());
      REQUIRE(p.layers >= 1);
      REQUIRE(p.layers <= persistent_params::most_layers);
      CHECK(used.insert(p.workspace).second);
      const auto* words = static_cast<const std::byte*>(p.workspace);
      const std::size_t area = static_cast<std::size_t>(
          std::find(scratch.begin(), scratch.end(), p.workspace) - scratch.begin());
      REQUIRE(area < scratch.size());
      CHECK(std::all_of(words, words + program.scratch[area].bytes,
                        [](std::byte byte) { return byte == std::byte{0}; }));
      for (int token = 0; token < shape_.tokens; ++token) {
        const std::int64_t first = static_cast<std::int64_t>(token) * shape_.d;
        Values x = values_at(p.x, first, shape_.d);
        for (int layer = 0; layer < p.layers; ++layer) {
          run_layer(p, shape_, token, p.of[layer], x);
          for (double& value : x)  // as one launch of it leaves it for the next
            value = float_from_bf16(bf16_from_float(static_cast<float>(value)));
        }
        put_values(p.y, first, x);
      }
      std::memset(p.workspace, 1, program.scratch[area].bytes);
      ++launches;
      most_layers = std::max(most_layers, p.layers);
    }
  }

  Shape shape_;
  DeviceFacts facts_;
};

constexpr Shape shape{.tokens = 2, .d = 160, .h = 160, .heads = 16, .kv_heads = 8, .dim = 64};
constexpr std::int64_t cache = 24;

Problem small_problem(std::int64_t layers) {
  Sizes sizes{{"batch", shape.tokens},     {"d", shape.d},     {"h", shape.h},
              {"heads", shape.heads},      {"dim", shape.dim}, {"cache", cache},
              {"kv-heads", shape.kv_heads}};
  if (layers > 1) sizes["layers"] = layers;
  return layer_problem(DeviceKind::cuda, DType::bf16, std::move(sizes),
                       {{"qkv-bias", "yes"}, {"qk-norm", "yes"}, {"lengths", "ragged"}});
}

Plan plan_of(StandIn& device, std::int64_t layers) {
  const Problem problem = small_problem(layers);
  const Family& family = family_of(layer_op(), "persistent");
  return {device,
          layer_op(),
          problem,
          {{"persistent", family.default_config(problem, device.facts())}}};
}

/// A plan's buffers by name.
using HostBuffers = std::map<std::string, std::vector<std::byte>>;

HostBuffers random_buffers(const Plan& plan) {
  std::mt19937_64 random(3);
  HostBuffers buffers;
  for (std::size_t i = 0; i < plan.buffer_count(); ++i) {
    const TensorSpec& tensor = plan.tensors()[i];
    std::vector<std::byte>& bytes = buffers[tensor.name];
    bytes.resize(static_cast<std::size_t>(tensor.elements()) * dtype_bytes(tensor.dtype));
    if (tensor.dtype == DType::bf16) {
      std::normal_distribution<double> normal(0, 0.1);
      Values values(static_cast<std::size_t>(tensor.elements()));
      for (double& value : values) value = normal(random);
      put_values(bytes.data(), 0, values);
    }
  }
  for (std::int32_t token = 0; token < shape.tokens; ++token) {
    const std::int32_t length = token == 0 ? static_cast<std::int32_t>(cache) : 7;
    const auto put = [&](const char* name, std::int32_t value) {
      std::memcpy(buffers.at(name).data() + 4 * token, &value, sizeof value);
    };
    put("lengths", length);
    put("positions", length - 1);
    put("slots", token * static_cast<std::int32_t>(cache) + length - 1);
  }
  return buffers;
}

/// `name_of` says what a tensor of the plan is called among the buffers.
template <typename NameOf>
void run_plan(StandIn& device, const Plan& plan, HostBuffers& buffers, const NameOf& name_of) {
  std::vector<void*> addresses;
  for (std::size_t i = 0; i < plan.buffer_count(); ++i)
    addresses.push_back(buffers.at(name_of(plan.tensors()[i].name)).data());
  const auto workspace = device.allocate(plan.workspace_bytes());
  device.fill(workspace->data(), 0x5a, workspace->bytes());
  plan.run(addresses.data(), workspace->data(), device.stream());
}

}  // namespace

TEST_CASE("launches of persistent layers have every layer's tensors") {
  StandIn device(shape);
  for (const std::int64_t layers : {1, 2, 48, 49, 50}) {
    const Plan plan = plan_of(device, layers);
    CAPTURE(layers);
    REQUIRE(plan.executables().size() == 1);
    device.launches = 0;
    Verifier verifier(device, layer_op(), plan.problem(), 7);
    const auto result =
        verifier.verify(0, layer_op().stages(plan.problem()).size(), plan.executables());
    CAPTURE(result.failure, result.error, result.tolerance);
    CHECK(result.passed);
    constexpr std::int64_t most = persistent_params::most_layers;
    CHECK(device.launches == 2 * ((layers + most - 1) / most));
  }
}

TEST_CASE("a plan of persistent layers computes what plans of one layer do one after the other") {
  StandIn device(shape);
  constexpr std::int64_t layers = 50;
  const Plan all = plan_of(device, layers), one = plan_of(device, 1);
  HostBuffers together = random_buffers(all), apart = together;
  run_plan(device, all, together, [](const std::string& name) { return name; });
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    run_plan(device, one, apart, [&](const std::string& name) {
      const std::string own = fmt::format("layers.{}.{}", layer, name);
      return apart.count(own) > 0 ? own : name;
    });
    apart.at("x") = apart.at("y");
  }
  together.at("x") = apart.at("x");
  for (const auto& [name, bytes] : together) {
    CAPTURE(name);
    const bool same = bytes == apart.at(name);
    CHECK(same);
  }
}

TEST_CASE("persistent layers are verified as one and timed as all") {
  StandIn device(shape);
  LocalEvaluator evaluator(device, builtin_catalog(), 1);
  const Plan plan = plan_of(device, 3);
  const Setup setup = evaluator.begin(plan.problem());
  CAPTURE(setup.refusal);
  REQUIRE(setup.refusal.empty());
  Candidate candidate;
  candidate.recipe = plan.recipe();
  device.most_layers = 0;
  const Verified verified = evaluator.verify(candidate);
  CAPTURE(verified.failure);
  CHECK(verified.passed);
  CHECK(device.most_layers == 1);
  const auto timings = evaluator.time({candidate}, {.samples = 1});
  REQUIRE(timings.size() == 1);
  CHECK(timings[0].failure.empty());
  CHECK(device.most_layers == 3);
}
