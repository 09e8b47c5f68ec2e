// Test data by which a router chooses what it should.
//
// An expert has a direction of ±1, which is its row of w_router but for the scale. A token's x is
// noise and the directions of the experts that it is to choose: these have logits far above the
// others', through the norms, and through attention and the layers before, which add to x.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "core/distribution.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/layer/layer.hpp"

namespace fftune::layer {
namespace {

/// The distance of a chosen expert's logit from the others', in deviations of the noise.
constexpr double margin = 14;
/// Noise of the router's weights besides the direction.
constexpr double noise_of_weights = 0.25;

/// The sizes that the data depend on.
struct Shape {
  std::int64_t tokens, d, experts, choices;
  std::int64_t groups, top_groups;  // of experts; 1 without
  Routing routing;
};

/// ±1, the same for every tensor and seed. Rows of a Hadamard matrix, from the second on, are
/// orthogonal and have no mean: an expert's direction adds nothing to another's logit. With more
/// experts than features, random signs (the output function of SplitMix64).
double direction(const Shape& shape, std::int64_t expert, std::int64_t feature) {
  if (std::bit_ceil(static_cast<std::uint64_t>(shape.experts) + 1) <=
      static_cast<std::uint64_t>(shape.d))
    return std::popcount(static_cast<std::uint64_t>((expert + 1) & feature)) % 2 ? -1 : 1;
  std::uint64_t z =
      (static_cast<std::uint64_t>(expert) << 32) + static_cast<std::uint64_t>(feature);
  z += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) & 1 ? 1 : -1;
}

/// The experts of each token. With groups all are in `top_groups` neighbouring ones, which then
/// are those that the router keeps.
std::vector<std::int32_t> draw_ids(const Shape& shape, std::uint64_t seed) {
  auto ids = draw_routing(shape.routing, shape.tokens, shape.experts, shape.choices, seed);
  if (shape.top_groups == shape.groups) return ids;
  const std::int64_t size = shape.experts / shape.groups;
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> kept(static_cast<std::size_t>(size * shape.top_groups));
  for (auto own = ids.begin(); own != ids.end(); own += shape.choices) {
    const std::int64_t first = *own / size * size;
    for (std::size_t i = 0; i < kept.size(); ++i)
      kept[i] = static_cast<std::int32_t>((first + static_cast<std::int64_t>(i)) % shape.experts);
    std::shuffle(kept.begin(), kept.end(), random);
    std::copy_n(kept.begin(), shape.choices, own);
  }
  return ids;
}

void draw_x(const Shape& shape, std::uint64_t seed, std::span<double> values) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  for (double& value : values) value = normal(random);
  const double share = margin / std::sqrt(static_cast<double>(shape.d));
  const auto ids = draw_ids(shape, seed);
  for (std::int64_t choice = 0; choice < shape.tokens * shape.choices; ++choice) {
    const std::int32_t expert = ids[static_cast<std::size_t>(choice)];
    if (expert < 0 || expert >= shape.experts) continue;
    const auto row = values.subspan(static_cast<std::size_t>(choice / shape.choices * shape.d),
                                    static_cast<std::size_t>(shape.d));
    for (std::int64_t i = 0; i < shape.d; ++i)
      row[static_cast<std::size_t>(i)] += share * direction(shape, expert, i);
  }
}

void draw_router(const Shape& shape, std::uint64_t seed, std::span<double> values) {
  // Another sequence than x's, for the same seed.
  std::mt19937_64 random(seed + 1);
  std::normal_distribution<double> normal(0, noise_of_weights);
  const double scale = 1 / std::sqrt(static_cast<double>(shape.d));
  for (std::int64_t expert = 0; expert < shape.experts; ++expert)
    for (std::int64_t i = 0; i < shape.d; ++i)
      values[static_cast<std::size_t>(expert * shape.d + i)] =
          scale * (direction(shape, expert, i) + normal(random));
}

}  // namespace

void set_routed_draw(const Problem& problem, TensorSpec& tensor) {
  // A norm whose weights have mean zero would turn an expert's direction into noise.
  const bool is_norm = tensor.name == "attn_norm" || tensor.name == "ffn_norm" ||
                       tensor.name == "router_norm" || tensor.name == "experts_norm";
  if (is_norm && !problem.has("convention", "gemma")) {
    tensor.mean = 1;
    tensor.scale = 0.25;
  }
  if (tensor.name != "x" && tensor.name != "w_router") return;
  const std::int64_t s = size_or(problem, "s", 1), groups = size_or(problem, "groups", 1);
  const auto routing = problem.options.find("routing");
  const Shape shape{.tokens = problem.size("batch") * s,
                    .d = problem.size("d"),
                    .experts = problem.size("experts"),
                    .choices = problem.size("top-k"),
                    .groups = groups,
                    .top_groups = size_or(problem, "top-groups", groups),
                    .routing = routing == problem.options.end()
                                   ? Routing{}
                                   : parse_routing(routing->second).value_or(Routing{})};
  const auto draw = tensor.name == "x" ? draw_x : draw_router;
  tensor.draw = [shape, draw](std::uint64_t seed, std::span<double> values) {
    draw(shape, seed, values);
  };
}

}  // namespace fftune::layer
