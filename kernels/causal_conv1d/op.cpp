// causal-conv1d: its fields and tensors.
#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>

#include "core/saturated.hpp"
#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/test_data.hpp"

namespace fftune::causal_conv1d {
namespace {

constexpr std::int64_t most_stride = std::int64_t{1} << 34;
constexpr std::int64_t most_sequences = 65536;

/// Sequences of unlike lengths, some of them empty. Now and then rows are left behind the last, or
/// the last ends behind the rows.
void draw_offsets(std::uint64_t seed, std::int64_t tokens, std::span<double> offsets) {
  std::mt19937_64 random(seed);
  for (double& offset : offsets)
    offset = static_cast<double>(random() % (static_cast<std::uint64_t>(tokens) + 1));
  std::sort(offsets.begin(), offsets.end());
  offsets.front() = 0;
  if (random() % 4 != 0) offsets.back() = static_cast<double>(tokens + (random() % 4 == 0 ? 5 : 0));
}

/// Slots of their own, about one in eight of them padding: negative, or no slot at all.
void draw_indices(std::uint64_t seed, std::int64_t slots, std::span<double> indices) {
  std::mt19937_64 random(seed);
  const std::vector<double> order = shuffled(0, slots, random);
  for (std::size_t i = 0; i < indices.size(); ++i)
    indices[i] = random() % 8 != 0   ? order[i]
                 : random() % 4 != 0 ? -1
                                     : static_cast<double>(slots + 2);
}

class TensorList {
 public:
  explicit TensorList(const Layer& layer) : layer_(layer) {}

  TensorSpec& add(TensorSpec spec) {
    tensors_.push_back(std::move(spec));
    return tensors_.back();
  }
  /// [b, s, row] or [s, row], of which the first columns count.
  TensorSpec& add_rows(const char* name, Role role, std::int64_t row, std::int64_t columns) {
    std::vector<std::int64_t> shape{layer_.b, layer_.s, row};
    if (layer_.packed) shape.erase(shape.begin());
    TensorSpec& spec = add({name, layer_.dtype, std::move(shape), role, 1});
    spec.behind = row - columns;
    return spec;
  }
  void add_x() {
    TensorSpec& x = add_rows("x", Role::input, layer_.x_row, layer_.x_columns());
    if (layer_.x_groups > 0) x.behind = layer_.x_block() - layer_.group_channels();
  }
  TensorSpec& add_states(const char* name, Role role, std::int64_t slots) {
    const std::int64_t elements = layer_.entries * layer_.channels;
    std::vector<std::int64_t> shape{slots, layer_.entries, layer_.channels};
    if (layer_.channels_first) std::swap(shape[1], shape[2]);
    if (layer_.state_row != elements) shape = {slots, layer_.state_row};
    TensorSpec& spec = add({name, layer_.dtype, std::move(shape), role, 1});
    spec.behind = layer_.state_row - elements;
    return spec;
  }
  void add_counts(const char* name, DType dtype, std::int64_t count, DrawValues draw) {
    add({name, dtype, {count}}).draw = std::move(draw);
  }

  std::vector<TensorSpec> tensors() && { return std::move(tensors_); }

 private:
  const Layer& layer_;
  std::vector<TensorSpec> tensors_;
};

std::string contradiction_of_groups(const Problem& problem, const Layer& layer) {
  if (problem.sizes.contains("x-groups") != problem.sizes.contains("x-keys"))
    return "x-groups and x-keys: give both, or none";
  if (layer.x_groups == 0) return "";
  if (layer.backward || layer.gates)
    return fmt::format("x-groups={} with {}: there is no kernel for it", layer.x_groups,
                       layer.backward ? "pass bwd" : "gates=yes");
  for (const auto& [name, value] : {std::pair{"channels", layer.channels}, {"x-row", layer.x_row}})
    if (value % layer.x_groups != 0)
      return fmt::format("x-groups={} do not divide {}={}", layer.x_groups, name, value);
  if (layer.group_values() < 1)
    return fmt::format("x-keys={} leaves no channels of v among the {} of a group", layer.x_keys,
                       layer.group_channels());
  return "";
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.width < least_width) return "width=1: a convolution has at least 2 taps";
  if (layer.x_row < layer.x_columns())
    return fmt::format("x-row={} is less than {}channels={}", layer.x_row,
                       layer.gates ? "3 * " : "", layer.channels);
  if (auto reason = contradiction_of_groups(problem, layer); !reason.empty()) return reason;
  if (layer.state == State::none) {
    for (const char* size : {"entries", "slots", "state-row"})
      if (problem.sizes.contains(size)) return fmt::format("{} without a state", size);
    for (const char* option : {"has-state", "accepted"})
      if (problem.has(option, "yes")) return fmt::format("{}=yes without a state", option);
    if (layer.channels_first) return "state-order=channels without a state";
    return "";
  }
  if (layer.backward && layer.state == State::update)
    return "state=update in pass bwd: the gradients of states are those of state=pass";
  if (layer.entries < layer.width - 1)
    return fmt::format("entries={} is less than width - 1 = {}: a state holds the history",
                       layer.entries, layer.width - 1);
  if (layer.state == State::pass)
    for (const bool stated : {problem.sizes.contains("slots"), layer.flagged, layer.accepted,
                              problem.sizes.contains("state-row")})
      if (stated) return "state=pass has neither slots, has-state, accepted nor state-row";
  if (layer.indexed && layer.slots < layer.b)
    return fmt::format("slots={} is less than b={}: sequences do not share a slot", layer.slots,
                       layer.b);
  if (layer.state_row < layer.entries * layer.channels)
    return fmt::format("state-row={} is less than entries * channels = {}", layer.state_row,
                       layer.entries * layer.channels);
  return "";
}

void complete_stage(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  const auto tokens = static_cast<double>(layer.tokens());
  const auto bytes = static_cast<double>(dtype_bytes(layer.dtype));
  stage.bytes -= tokens * static_cast<double>(layer.x_row - layer.x_columns()) * bytes;
  // Of a pool, only the states of the sequences are read and written.
  if (layer.state == State::update)
    stage.bytes -= 2 * bytes *
                   static_cast<double>(layer.slots * layer.state_row -
                                       layer.b * layer.entries * layer.channels);
  stage.reduction_length = layer.width + (layer.backward && !layer.frozen ? layer.tokens() : 0);
  stage.flops = tokens * static_cast<double>(layer.channels * layer.width) *
                (layer.backward ? layer.frozen ? 4 : 6 : 2);
  if (layer.gates) stage.flops += 2 * tokens * static_cast<double>(layer.channels);
}

std::optional<std::int64_t> usual_entries(const Problem& problem) {
  if (problem.has("state", "none") || !problem.options.contains("state")) return std::nullopt;
  return size_or(problem, "width", 0);
}
std::optional<std::int64_t> usual_x_row(const Problem& problem) {
  return saturated_product(problem.has("gates", "yes") ? 3 : 1, size_or(problem, "channels", 0));
}
std::optional<std::int64_t> usual_state_row(const Problem& problem) {
  if (!problem.has("state", "update")) return std::nullopt;
  return saturated_product(size_or(problem, "entries", size_or(problem, "width", 0)),
                           size_or(problem, "channels", 0));
}

OpFacts facts() {
  return {
      .name = "causal-conv1d",
      .summary = "depthwise causal convolution of sequences, with bias, SiLU and states",
      .sizes =
          {token_count("s", "tokens of a sequence; in layout sc of all sequences together",
                       {1, 512, 2048, 8192}, {1, 512}, std::int64_t{1} << 24, 2048),
           {.name = "b", .help = "sequences", .max = most_sequences, .example = 2},
           {.name = "channels", .help = "channels", .max = std::int64_t{1} << 20, .example = 8192},
           {.name = "width", .help = "taps, 2 to 8", .max = most_width, .example = 4},
           rare_size("x-row",
                     "stride of x between tokens, in elements, for columns of a wider tensor; "
                     "channels if left out, or three times as many with gates",
                     most_stride, 12288, usual_x_row),
           {.name = "x-groups",
            .help =
                "heads of k, of which x has the channels of q, k and v next to each other, as "
                "Qwen3-Next's projection gives them; without it x has the order of the channels",
            .example = 16,
            .rare = true},
           {.name = "x-keys",
            .help = "with x-groups: channels of q, and of k, of a group; the others are of v",
            .example = 128,
            .rare = true},
           rare_size("entries", "inputs that a state holds, width - 1 or more; width if left out",
                     most_entries, 3, usual_entries),
           {.name = "slots",
            .help = "states in memory, found by indices; without it a state for each sequence",
            .example = 64,
            .rare = true},
           rare_size("state-row",
                     "stride between states, in elements, for a part of a page; contiguous if left "
                     "out",
                     most_stride, 65536, usual_state_row)},
      .options =
          {{"layout", "[b, s, channels], or packed sequences [s, channels]", {"bsc", "sc"}},
           {"act", "activation of the sum", {"none", "silu"}},
           {"bias", "whether there is a bias", {"no", "yes"}},
           rare_option("gates",
                       "whether a token of x is B, C and values: B multiplies these in front of "
                       "the convolution, and C its result",
                       {"no", "yes"}, "fwd"),
           rare_option(
               "state",
               "the inputs before the first token: zeros, a state that is updated in place, or an "
               "initial and a final one",
               {"none", "update", "pass"}),
           rare_option("state-order",
                       "order of a state: [entries, channels] or [channels, entries]",
                       {"entries", "channels"}),
           rare_option("has-state", "whether a byte for each sequence says if its state counts",
                       {"no", "yes"}, "fwd"),
           rare_option("accepted",
                       "whether each sequence says how many tokens of the last run were accepted",
                       {"no", "yes"}, "fwd"),
           rare_number("first-slot",
                       "the least index of a slot: sequences with lower ones are padding", "0",
                       {0, 1}, "fwd"),
           rare_option("weights", "element type of w and bias: the op's, or f32", {"same", "f32"}),
           frozen_option("w and bias")},
      .token_size = "s",
      .rows_are_alike = false,
      .families = {cuda_families, cpu_families},
      .contradiction = contradiction,
      .stage = {.tensors = [](const Problem& problem) { return tensors_of(layer_of(problem)); },
                .complete = complete_stage,
                .reference = reference}};
}

}  // namespace

std::vector<TensorSpec> tensors_of(const Layer& layer) {
  TensorList list(layer);
  if (layer.backward) list.add_rows("dy", Role::input, layer.channels, layer.channels);
  list.add_x();
  // The sum of the taps has deviation 1.
  list.add({"w",
            layer.weight_dtype,
            {layer.channels, layer.width},
            Role::input,
            1 / std::sqrt(static_cast<double>(layer.width))});
  if (layer.bias) list.add({"bias", layer.weight_dtype, {layer.channels}, Role::input, 0.5});
  if (layer.packed)
    list.add_counts("offsets", DType::i32, layer.b + 1,
                    [s = layer.s](auto seed, auto values) { draw_offsets(seed, s, values); });
  if (layer.indexed)
    list.add_counts("indices", DType::i32, layer.b, [slots = layer.slots](auto seed, auto values) {
      draw_indices(seed, slots, values);
    });
  if (layer.flagged) list.add_counts("has_state", DType::u8, layer.b, whole_numbers(0, 1));
  if (layer.accepted)
    // Limited to 1 and one less than the largest.
    list.add_counts("accepted", DType::i32, layer.b,
                    whole_numbers(0, layer.entries - layer.width + 3));
  const bool passes = layer.state == State::pass;
  if (layer.state == State::update) list.add_states("state", Role::updated, layer.slots);
  if (passes) list.add_states("initial", Role::input, layer.b);
  if (!layer.backward) {
    list.add_rows("y", Role::output, layer.channels, layer.channels);
    if (passes) list.add_states("final", Role::output, layer.b);
    return std::move(list).tensors();
  }
  if (passes) list.add_states("d_final", Role::input, layer.b);
  list.add_rows("dx", Role::output, layer.channels, layer.channels);
  if (!layer.frozen) {
    list.add({"dw", layer.weight_dtype, {layer.channels, layer.width}, Role::output});
    if (layer.bias) list.add({"dbias", layer.weight_dtype, {layer.channels}, Role::output});
  }
  if (passes) list.add_states("d_initial", Role::output, layer.b);
  return std::move(list).tensors();
}

Layer layer_of(const Problem& problem) {
  auto layer = sizes_of<Layer>(problem, {{"s", &Layer::s},
                                         {"b", &Layer::b},
                                         {"channels", &Layer::channels},
                                         {"width", &Layer::width}});
  layer.packed = problem.has("layout", "sc");
  layer.bias = problem.has("bias", "yes");
  layer.gates = problem.has("gates", "yes");
  layer.x_row = size_or(problem, "x-row", layer.x_columns());
  layer.x_groups = size_or(problem, "x-groups", 0);
  layer.x_keys = size_or(problem, "x-keys", 0);
  layer.backward = problem.pass == "bwd";
  layer.frozen = is_frozen(problem);
  layer.state = problem.has("state", "update") ? State::update
                : problem.has("state", "pass") ? State::pass
                                               : State::none;
  layer.entries = size_or(problem, "entries", layer.width);
  layer.indexed = problem.sizes.contains("slots");
  layer.slots = size_or(problem, "slots", layer.b);
  layer.state_row = size_or(problem, "state-row", layer.entries * layer.channels);
  layer.channels_first = problem.has("state-order", "channels");
  layer.flagged = problem.has("has-state", "yes");
  layer.accepted = problem.has("accepted", "yes");
  if (problem.options.contains("first-slot"))
    layer.first_slot = static_cast<std::int64_t>(problem.number("first-slot"));
  layer.act = parse_activation(problem.option("act"));
  layer.dtype = problem.dtype;
  layer.weight_dtype = problem.has("weights", "f32") ? DType::f32 : problem.dtype;
  return layer;
}

}  // namespace fftune::causal_conv1d

const fftune::Op& fftune::causal_conv1d_op() {
  static const DescribedOp op(causal_conv1d::facts());
  return op;
}
