// A thread keeps a few channels and walks over tokens. The fallback is the same kernel with
// accesses of one element.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::causal_conv1d {
namespace {

constexpr const char* file = "causal_conv1d/conv.cu";
constexpr std::int64_t other_registers = 40;  // addresses, bounds, the value at hand

std::int64_t element_bytes(const Layer& layer) {
  return static_cast<std::int64_t>(dtype_bytes(layer.dtype));
}

/// The widest access, in bytes, to which all rows and all entries are aligned.
std::int64_t widest(const Layer& layer) {
  std::int64_t elements = std::gcd(layer.channels, layer.x_row);
  // The channels of a thread are neighbours in x.
  if (layer.x_groups > 0)
    for (const std::int64_t size : {layer.x_block(), layer.x_keys, layer.group_values()})
      elements = std::gcd(elements, size);
  if (layer.state != State::none && !layer.channels_first)
    elements = std::gcd(elements, layer.state_row);
  return widest_vector(elements * element_bytes(layer));
}

/// Whether the states of a [channels, entries] order begin at multiples of 16 bytes.
bool states_are_aligned(const Layer& layer) {
  return layer.state != State::none && layer.state_row * element_bytes(layer) % 16 == 0;
}

/// How a configuration divides the work among threads.
struct Division {
  std::int64_t count = 0;          // channels of a thread
  std::int64_t columns = 0;        // threads of a block side by side
  std::int64_t rows = 0;           // of these in a block
  std::int64_t column_blocks = 0;  // blocks side by side
  std::int64_t tiles = 0;          // parts of the tokens, one for each thread

  Division(const Layer& layer, const Config& config) {
    count = std::max<std::int64_t>(1, config.at("vector") / element_bytes(layer));
    const std::int64_t across = quotient_up(layer.channels, count);
    columns = std::min(config.at("threads"), power_of_two(across));
    rows = config.at("threads") / columns;
    column_blocks = quotient_up(across, columns);
    tiles = quotient_up(layer.tokens(), config.at("tokens"));
  }
  std::int64_t blocks() const { return quotient_up(tiles, rows) * column_blocks; }
};

/// Registers of a thread: taps, windows and sums in fp32, loads in flight as they are.
std::int64_t registers_needed(const Layer& layer, const Config& config) {
  const std::int64_t count = Division(layer, config).count;
  const std::int64_t unroll = config.at("unroll"), window = layer.width - 1 + unroll;
  const std::int64_t loads =
      raw_registers(count, element_bytes(layer), count) * unroll * (layer.gates ? 3 : 1);
  std::int64_t floats = layer.width + 1;  // taps and bias
  if (layer.backward)
    floats += 2 * window + (layer.frozen ? 0 : layer.width + 1);
  else
    floats += std::max(window, layer.state == State::none
                                   ? 0
                                   : layer.entries * (layer.channels_first ? 2 : 1) + layer.width);
  return count * floats + loads * (layer.backward ? 2 : 1) + other_registers;
}

constexpr std::int64_t threads_of_multiprocessor = 768;  // about as many as registers allow

/// Parts of the tokens in the backward pass, each of which writes a row of sums.
std::int64_t most_tiles(const DeviceFacts& facts) {
  return 64 * std::int64_t{facts.multiprocessors};
}

/// Tokens of a thread: as few as keep all SMs busy, so that most loads of history hit the L2
/// cache. Backward as many as leave about one thread for each place on an SM, as each writes sums.
std::int64_t usual_tokens(const Layer& layer, const DeviceFacts& facts, std::int64_t across,
                          const std::vector<std::int64_t>& choices) {
  const std::int64_t places = threads_of_multiprocessor * facts.multiprocessors;
  std::int64_t wanted = quotient_up(layer.tokens() * across, layer.backward ? places : 4 * places);
  if (layer.backward) wanted = std::max(wanted, quotient_up(layer.tokens(), most_tiles(facts)));
  std::int64_t tokens = choices.front();
  for (const std::int64_t choice : choices)
    if (choice <= (layer.backward ? 2 * wanted : std::min<std::int64_t>(wanted, 32)))
      tokens = choice;
  return tokens;
}

const std::vector<std::int64_t>& token_choices(bool backward) {
  static const std::vector<std::int64_t> forward{1, 2, 4, 8, 16, 32, 64, 128},
      back{8, 16, 32, 64, 128, 256, 512, 1024, 2048};
  return backward ? back : forward;
}

Config defaults(const Layer& layer, const DeviceFacts& facts, std::int64_t vector) {
  Config config{{"vector", vector}, {"threads", 128}, {"tokens", 1}, {"unroll", 1}};
  while (config.at("vector") > element_bytes(layer) && registers_needed(layer, config) > 168)
    config.set("vector", config.at("vector") / 2);
  const std::int64_t across = quotient_up(layer.channels, Division(layer, config).count);
  const std::int64_t tokens = usual_tokens(layer, facts, across, token_choices(layer.backward));
  config.set("tokens", tokens);
  config.set("unroll", std::min<std::int64_t>(layer.backward ? 2 : 4, tokens));
  if (layer.tokens() * across < 128 * facts.multiprocessors) config.set("threads", 32);
  return config;
}

Space space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  add_vector(space, element_bytes(layer), widest(layer))
      .parameter("threads", "threads of a block", {32, 64, 128, 256})
      .parameter("tokens", "consecutive tokens of a thread", token_choices(layer.backward))
      .parameter("unroll", "tokens that a thread has in flight", {1, 2, 4, 8})
      .constraint("a thread has no more tokens in flight than it has",
                  [](const Config& c) { return c.at("unroll") <= c.at("tokens"); },
                  {"tokens", "unroll"})
      .constraint("more than half of a thread's tokens would be padding",
                  [layer, least = token_choices(layer.backward).front()](const Config& c) {
                    return c.at("tokens") == least || c.at("tokens") < 2 * layer.tokens();
                  },
                  {"tokens"})
      .constraint("more than half of a block's threads would have no token",
                  [layer](const Config& c) {
                    const Division work(layer, c);
                    return c.at("threads") == 32 || work.rows == 1 || work.rows < 2 * work.tiles;
                  },
                  {"vector", "threads", "tokens"})
      .constraint(
          "the sums of more than 64 parts of the tokens for each SM take too long to add up",
          [layer, facts, most = token_choices(true).back()](const Config& c) {
            return !layer.backward || layer.frozen || c.at("tokens") == most ||
                   Division(layer, c).tiles <= most_tiles(facts);
          },
          {"vector", "threads", "tokens"})
      .constraint("taps, windows and loads in flight must fit in a thread's registers",
                  [layer, facts](const Config& c) {
                    return registers_needed(layer, c) <=
                           registers_of_thread(facts, c.at("threads"));
                  },
                  {"vector", "threads", "tokens", "unroll"});
  return space;
}

Config default_config(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  return defaults(layer, facts, widest(layer));
}

std::int32_t small(std::int64_t value) {
  return static_cast<std::int32_t>(value);
}

/// One token of each sequence, as in decoding.
bool is_step(const Layer& layer) {
  return !layer.backward && !layer.packed && layer.s == 1 && layer.state != State::none &&
         !layer.accepted;
}

/// The last template argument of kernels, and their last arguments: conv_groups.
std::string grouped_type(const Layer& layer) {
  return layer.x_groups > 0 ? ", true" : "";
}
std::vector<Argument> with_groups(std::vector<Argument> arguments, const Layer& layer) {
  const bool is_grouped = layer.x_groups > 0;
  append(arguments,
         {is_grouped ? layer.x_block() : std::int64_t{0}, small(layer.x_keys),
          small(is_grouped ? layer.group_values() : 0), small(layer.x_groups * layer.x_keys)});
  return arguments;
}

Program step_program(const Layer& layer, const DeviceFacts& facts, const Config& config,
                     const Division& work, const std::string& types, const std::string& threads) {
  const TensorPlaces places(tensors_of(layer));
  const bool updates = layer.state == State::update;
  Program program;
  auto& launch = append_kernel(
      program, file,
      fmt::format("conv_step<{}, {}, {}{}>", types, layer.gates, threads, grouped_type(layer)),
      {static_cast<std::uint32_t>(work.blocks())},
      static_cast<std::uint32_t>(work.columns * work.rows),
      with_groups(
          {tensor_of(places, "x"), tensor_of(places, "w"), tensor_or_null(places, "bias"),
           tensor_or_null(places, "indices"), tensor_or_null(places, "has_state"),
           tensor_of(places, updates ? "state" : "initial"),
           tensor_of(places, updates ? "state" : "final"), tensor_of(places, "y"), small(layer.b),
           small(layer.channels), layer.x_row, layer.state_row, small(layer.first_slot),
           small(layer.slots), small(config.at("tokens")), small(work.column_blocks)},
          layer));
  launch.programmatic = facts.compute_capability >= 90;
  return program;
}

Program forward_program(const Layer& layer, const DeviceFacts& facts, const Config& config,
                        const Division& work, const std::string& types,
                        const std::string& division) {
  const TensorPlaces places(tensors_of(layer));
  const bool updates = layer.state == State::update;
  return pdl_program(
      facts, file,
      fmt::format("conv_forward<{}, {}, {}{}>", types, layer.gates, division, grouped_type(layer)),
      {static_cast<std::uint32_t>(work.blocks())},
      static_cast<std::uint32_t>(work.columns * work.rows),
      with_groups({tensor_of(places, "x"),
                   tensor_of(places, "w"),
                   tensor_or_null(places, "bias"),
                   tensor_or_null(places, "offsets"),
                   tensor_or_null(places, "indices"),
                   tensor_or_null(places, "has_state"),
                   tensor_or_null(places, "accepted"),
                   tensor_or_null(places, updates ? "state" : "initial"),
                   tensor_or_null(places, updates ? "state" : "final"),
                   tensor_of(places, "y"),
                   layer.tokens(),
                   layer.s,
                   small(layer.b),
                   small(layer.channels),
                   layer.x_row,
                   layer.state_row,
                   small(layer.first_slot),
                   small(layer.slots),
                   small(config.at("tokens")),
                   small(work.column_blocks)},
                  layer));
}

Program backward_program(const Layer& layer, const DeviceFacts& facts, const Config& config,
                         const Division& work, const std::string& types,
                         const std::string& division) {
  const TensorPlaces places(tensors_of(layer));
  const auto floats = [](std::int64_t count) {
    return Scratch{static_cast<std::size_t>(count) * sizeof(float), false};
  };
  const bool sums = !layer.frozen;
  Program program;
  if (sums) program.scratch.push_back(floats(work.tiles * layer.channels * layer.width));
  if (sums && layer.bias) program.scratch.push_back(floats(work.tiles * layer.channels));
  append_pdl_kernel(program, facts, file,
                    fmt::format("conv_backward<{}, {}, {}>", types, layer.frozen, division),
                    {static_cast<std::uint32_t>(work.blocks())},
                    static_cast<std::uint32_t>(work.columns * work.rows),
                    {tensor_of(places, "dy"), tensor_of(places, "x"), tensor_of(places, "w"),
                     tensor_or_null(places, "bias"), tensor_or_null(places, "offsets"),
                     tensor_or_null(places, "initial"), tensor_or_null(places, "d_final"),
                     tensor_of(places, "dx"), tensor_or_null(places, "d_initial"),
                     sums ? Argument{ScratchArgument{0}} : Argument{std::int64_t{0}},
                     sums && layer.bias ? Argument{ScratchArgument{1}} : Argument{std::int64_t{0}},
                     layer.tokens(), layer.s, small(layer.b), small(layer.channels), layer.x_row,
                     layer.state_row, small(config.at("tokens")), small(work.column_blocks)});
  if (!sums) return program;
  append_column_sum(program, facts, file, "conv_backward_sum", layer.weight_dtype, {0},
                    tensor_of(places, "dw"), work.tiles, layer.channels * layer.width);
  if (layer.bias)
    append_column_sum(program, facts, file, "conv_backward_sum", layer.weight_dtype, {1},
                      tensor_of(places, "dbias"), work.tiles, layer.channels);
  return program;
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const Division work(layer, config);
  const std::string types = fmt::format(
      "{}, {}, {}, {}, {}, {}, {}", element_type(layer.dtype), element_type(layer.weight_dtype),
      activation_type(layer.act), layer.width, layer.state == State::none ? 0 : layer.entries,
      layer.channels_first, states_are_aligned(layer));
  const std::string threads =
      fmt::format("{}, {}, {}", config.at("vector"), work.columns, work.rows);
  if (is_step(layer)) return step_program(layer, facts, config, work, types, threads);
  const std::string division = fmt::format("{}, {}", threads, config.at("unroll"));
  return layer.backward ? backward_program(layer, facts, config, work, types, division)
                        : forward_program(layer, facts, config, work, types, division);
}

/// Element by element.
Program fallback_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Layer layer = layer_of(problem);
  return program(problem, facts, defaults(layer, facts, element_bytes(layer)));
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const auto columns =
      of_passes({"forward_columns", "backward_columns"},
                {.summary = "a few channels a thread, a window of tokens in registers",
                 .sources = {file},
                 .search = {space, default_config},
                 .program = program});
  static const auto fallbacks =
      cuda_fallbacks("element by element: the fallback", file, fallback_program);
  return addresses_of(columns, fallbacks);
}

}  // namespace fftune::causal_conv1d
