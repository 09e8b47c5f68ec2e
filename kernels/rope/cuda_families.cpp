// A few threads share a row of a head. The fallback is the same kernel with accesses of one
// element.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "kernels/common/stage_family.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {
namespace {

constexpr const char* file = "rope/rows.cu";
constexpr std::int64_t most_sine_bytes = 48 * 1024;  // without opting in to more
constexpr std::int64_t most_sines = 1;               // that a thread makes by default
constexpr std::int64_t usual_vector = 8;      // bytes of an access by default: a thread has two
constexpr std::int64_t other_registers = 48;  // addresses, the position, one pair of accesses

std::int64_t element_bytes(const Layer& layer) {
  return static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

/// The widest access that divides a row's halves and its rest, and to which all rows are aligned.
std::int64_t widest(const Layer& layer) {
  std::int64_t elements = std::gcd(layer.rotary / 2, layer.dim);
  for (const Strides& strides : {layer.q, layer.k})
    for (const std::int64_t stride : {strides.row, strides.outer, strides.head})
      elements = std::gcd(elements, stride);
  return widest_vector(elements * element_bytes(layer));
}

std::int64_t angles_of_token(const Layer& layer) {
  return layer.table ? layer.rotary : layer.rotary / 2;
}

/// Sines and cosines of one token.
std::int64_t sine_bytes(const Layer& layer) {
  return angles_of_token(layer) * 2 *
         (layer.dtype == DType::f32 ? std::int64_t{sizeof(double)} : std::int64_t{sizeof(float)});
}

/// Threads that share a row, as rope_row has it. An access of less than an element is no variant,
/// but its constraints are judged.
std::int64_t row_lanes(const Layer& layer, std::int64_t vector) {
  const std::int64_t count = std::max<std::int64_t>(vector / element_bytes(layer), 1);
  return layer.rotary / 2 / count + ((layer.dim - layer.rotary) / count + 1) / 2;
}

std::int64_t block_threads(const Layer& layer, const Config& config) {
  return row_lanes(layer, config.at("vector")) * config.at("heads") * config.at("tokens");
}

std::int64_t all_heads(const Layer& layer) {
  return layer.heads + layer.kv_heads;
}

std::int64_t head_blocks(const Layer& layer, const Config& config) {
  return quotient_up(all_heads(layer),
                     config.at("heads") * config.at("unroll") * config.at("passes"));
}

std::int64_t registers_needed(const Layer& layer, const Config& config) {
  const std::int64_t count = config.at("vector") / element_bytes(layer);
  const std::int64_t words = layer.dtype == DType::f32 ? 2 : 1;  // of a sine
  return config.at("unroll") * 2 * raw_registers(count, element_bytes(layer), count) +
         2 * count * words * (layer.table ? 2 : 1) + 2 * count * words + other_registers;
}

/// Blocks of about 128 threads, so that few threads wait for each other's sines, with four heads of
/// a token a thread; fewer heads if too few threads would share the sines of a token.
Config defaults(const Layer& layer, std::int64_t vector) {
  const std::int64_t lanes = row_lanes(layer, vector);
  const std::int64_t heads_needed = all_heads(layer);
  const auto side_by_side = [&](std::int64_t unroll) {
    std::int64_t heads = 1;
    while (2 * heads * lanes <= 256 && heads * unroll < heads_needed && heads < 32) heads *= 2;
    return heads;
  };
  std::int64_t unroll = 1;
  while (unroll < 4 && 2 * unroll <= heads_needed) unroll *= 2;
  while (unroll > 1 && angles_of_token(layer) > most_sines * lanes * side_by_side(unroll))
    unroll /= 2;
  const std::int64_t heads = side_by_side(unroll);
  std::int64_t tokens = 1;
  while (2 * tokens * heads * lanes <= 128 && tokens < layer.tokens() && tokens < 128 &&
         2 * tokens * sine_bytes(layer) <= most_sine_bytes)
    tokens *= 2;
  while (heads * tokens * lanes < 64 && tokens < 128) tokens *= 2;
  return {{"vector", vector}, {"heads", heads}, {"tokens", tokens},
          {"unroll", unroll}, {"passes", 1},    {"evict_first", 0}};
}

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  add_wide_vector(space, element_bytes(layer), widest(layer), "halves and rows")
      .parameter("heads", "heads of a block side by side", {1, 2, 4, 8, 16, 32})
      .parameter("tokens", "tokens of a block", {1, 2, 4, 8, 16, 32, 64, 128})
      .parameter("unroll", "heads that a thread has in flight", {1, 2, 4, 8})
      .parameter("passes", "times that it goes on to further heads with the same sines",
                 {1, 2, 4, 8})
      .parameter("evict_first", "1: accesses use the L2 policy evict_first; 0: evict_normal",
                 {0, 1})
      .constraint("a block has 64 to 512 threads, or as many as one row needs",
                  [layer](const Config& c) {
                    const std::int64_t threads = block_threads(layer, c);
                    return threads >= 64 &&
                           (threads <= 512 || (c.at("heads") == 1 && c.at("tokens") == 1));
                  },
                  {"vector", "heads", "tokens"})
      .constraint("more than half of the heads of a pass would be padding",
                  [layer](const Config& c) {
                    return c.at("heads") * c.at("unroll") == 1 ||
                           c.at("heads") * c.at("unroll") < 2 * all_heads(layer);
                  },
                  {"heads", "unroll"})
      .constraint("every pass needs heads",
                  [layer](const Config& c) {
                    return c.at("passes") == 1 ||
                           c.at("heads") * c.at("unroll") * (c.at("passes") - 1) < all_heads(layer);
                  },
                  {"heads", "unroll", "passes"})
      .constraint(
          "more than half of a block's tokens would be padding, in a block of more than 64 "
          "threads",
          [layer](const Config& c) {
            return c.at("tokens") == 1 || c.at("tokens") < 2 * layer.tokens() ||
                   block_threads(layer, c) < 128;
          },
          {"vector", "heads", "tokens"})
      .constraint("a block's sines and cosines must fit in 48 KB of shared memory",
                  [layer](const Config& c) {
                    return c.at("tokens") * sine_bytes(layer) <= most_sine_bytes;
                  },
                  {"tokens"})
      .constraint("accesses in flight and sines must fit in a thread's registers",
                  [layer, facts](const Config& c) {
                    return registers_needed(layer, c) <=
                           registers_of_thread(facts, block_threads(layer, c));
                  },
                  {"vector", "heads", "tokens", "unroll"});
  return space;
}

Config default_config(const Problem& problem, const DeviceFacts&) {
  const Layer layer = layer_of(problem);
  return defaults(layer, std::min(widest(layer), usual_vector));
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(rope_op().tensors(problem));
  const bool back = layer.backward;
  const Frequencies frequencies = frequencies_of(problem);
  const std::int64_t across = head_blocks(layer, config);
  const auto small = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  return pdl_program(
      facts, file,
      fmt::format("rope_rows<{}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}>",
                  element_type(layer.dtype), static_cast<int>(layer.layout), !layer.is_plain(),
                  layer.starts, layer.table, layer.backward,
                  layer.rotation == Rotation::interleaved, layer.dim, layer.rotary,
                  config.at("vector"), config.at("heads"), config.at("tokens"), config.at("unroll"),
                  config.at("passes"), config.at("evict_first") != 0),
      {static_cast<std::uint32_t>(quotient_up(layer.tokens(), config.at("tokens")) * across)},
      static_cast<std::uint32_t>(block_threads(layer, config)),
      {tensor_or_null(places, back ? "dq_out" : "q"),
       tensor_or_null(places, back ? "dk_out" : "k"),
       tensor_or_null(places, back ? "dq" : "q_out"),
       tensor_or_null(places, back ? "dk" : "k_out"),
       tensor_or_null(places, "angles"),
       tensor_or_null(places, "offsets"),
       tensor_or_null(places, "starts"),
       ArrayArgument{frequencies.values},
       layer.tokens(),
       small(layer.b),
       small(layer.s),
       small(layer.positions),
       small(layer.heads),
       small(layer.kv_heads),
       layer.q.row,
       layer.k.row,
       layer.q.outer,
       layer.k.outer,
       layer.q.head,
       layer.k.head,
       small(across),
       frequencies.scale});
}

/// Element by element.
Program fallback_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Layer layer = layer_of(problem);
  return program(problem, facts, defaults(layer, element_bytes(layer)));
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const auto rows = of_passes({"forward_rows", "backward_rows"},
                                     {.summary = "a few threads a head, sines shared by heads",
                                      .sources = {file},
                                      .search = {space, default_config},
                                      .program = program});
  static const auto fallbacks =
      cuda_fallbacks("element by element: the fallback", file, fallback_program);
  return addresses_of(rows, fallbacks);
}

}  // namespace fftune::rope
