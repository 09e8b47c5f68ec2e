#include "kernels/gated_delta_rule/state_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "kernels/attention/test_data.hpp"

namespace fftune::gated_delta_rule {
namespace {

std::optional<std::int64_t> usual_states(const Problem& problem) {
  if (!problem.has("indices", "yes")) return std::nullopt;
  return size_or(problem, "b", 0) * size_or(problem, "slots", 1) + 1;
}

/// Entries are distinct; one sequence in eight is padding, and so are those that no entry is left
/// for.
void draw_indices(const Layer& layer, std::uint64_t seed, std::span<double> values) {
  std::mt19937_64 random(seed);
  const std::int64_t null = layer.null_index;
  const std::vector<double> order = shuffled(null + 1, layer.states, random);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = i < order.size() && (i == 0 || random() % 8 != 0)
                    ? order[i]
                    : static_cast<double>(null - static_cast<std::int64_t>(random() % 2));
}

}  // namespace

TensorSpec& TensorList::rows(std::string name, DType dtype, Role role, std::int64_t heads,
                             std::int64_t features, std::int64_t row) {
  std::vector<std::int64_t> shape{layer_.b, layer_.s};
  if (layer_.packed) shape = {layer_.s};
  const std::int64_t width = heads * features;
  if (row == 0 || row == width) {
    shape.push_back(heads);
    if (features > 1) shape.push_back(features);
  } else {
    shape.push_back(row);
  }
  TensorSpec& spec = add({std::move(name), dtype, std::move(shape), role, 1});
  if (row > width) spec.behind = row - width;
  return spec;
}

TensorSpec& TensorList::states(std::string name, Role role) {
  std::vector<std::int64_t> shape{layer_.b, layer_.v_heads, layer_.v_dim, layer_.dim};
  if (layer_.key_major) std::swap(shape[2], shape[3]);
  return add({std::move(name), layer_.state_dtype, std::move(shape), role, 0.3});
}

TensorSpec& TensorList::add(TensorSpec spec) {
  tensors_.push_back(std::move(spec));
  return tensors_.back();
}

void TensorList::add_cache() {
  if (layer_.initial) states("initial_state", Role::input);
  if (!layer_.indices) return;
  const bool whole = layer_.state_block == layer_.state_elements();
  std::vector<std::int64_t> shape{layer_.states, layer_.v_heads, layer_.v_dim, layer_.dim};
  if (layer_.key_major) std::swap(shape[2], shape[3]);
  if (!whole) shape = {layer_.states, layer_.state_block};
  TensorSpec& cache = add({"states", layer_.state_dtype, shape, Role::updated, 0.3});
  if (!whole) cache.behind = layer_.state_block - layer_.state_elements();
  cache.read_share = std::min(1.0, static_cast<double>(layer_.b * layer_.state_elements()) /
                                       static_cast<double>(layer_.states * layer_.state_block));
  std::vector<std::int64_t> of_sequences{layer_.b};
  if (layer_.slots > 0) of_sequences.push_back(layer_.slots);
  add({"state_indices", DType::i32, of_sequences}).draw =
      [layer = layer_](std::uint64_t seed, std::span<double> values) {
        draw_indices(layer, seed, values);
      };
  if (layer_.slots > 0)
    add({"accepted", DType::i32, {layer_.b}}).draw =
        each([slots = layer_.slots](std::mt19937_64& random) {
          return static_cast<double>(1 + random() % static_cast<std::uint64_t>(slots));
        });
}

void TensorList::add_sequences() {
  if (layer_.has_state)
    add({"has_state", DType::u8, {layer_.b}}).draw =
        each([](std::mt19937_64& random) { return random() % 4 == 0 ? 0.0 : 1.0; });
  if (layer_.packed)
    add({"offsets", DType::i32, {layer_.b + 1}}).draw =
        [tokens = layer_.s](std::uint64_t, std::span<double> values) {
          attention::draw_offsets(tokens, values);
        };
}

void TensorList::add_d_out() {
  if (!layer_.backward) return;
  rows("d_out", layer_.dtype, Role::input, layer_.v_heads, layer_.v_dim);
  if (layer_.final) states("d_final_state", Role::input).dtype = DType::f32;
}

void TensorList::add_states_and_out() {
  add_cache();
  add_sequences();
  if (layer_.backward) return;
  rows("out", layer_.dtype, Role::output, layer_.v_heads, layer_.v_dim);
  if (layer_.final) states("final_state", Role::output);
}

void TensorList::add_d_initial_state() {
  if (layer_.initial) states("d_initial_state", Role::output).dtype = DType::f32;
}

std::vector<SizeField> sequence_sizes() {
  return {token_count("s", "tokens of a sequence; in layout thd of all sequences together",
                      {1, 2048, 8192}, {1, 128}, most_tokens, 2048),
          {.name = "b", .help = "sequences", .max = 65536, .example = 4}};
}

std::vector<SizeField> cache_sizes(const std::string& state, const WhenAbsent& usual_block) {
  return {neutral(rare_size("states", "entries of the cache of states; b + 1 if left out",
                            most_tokens, 65, usual_states)),
          {.name = "state-block",
           .help = "elements from an entry of the cache to the next; " + state + " if left out",
           .max = most_stride,
           .example = 1 << 20,
           .rare = true,
           .when_absent = [usual_block](const Problem& problem) -> std::optional<std::int64_t> {
             if (!problem.has("indices", "yes")) return std::nullopt;
             return usual_block(problem);
           }},
          {.name = "slots",
           .help = "entries of a sequence, one behind each token, for the verification of drafts: "
                   "state_indices is [b, slots], and accepted, i32 [b] behind it, tells the tokens "
                   "that were kept; without it one entry",
           .max = 64,
           .example = 4,
           .rare = true}};
}

std::vector<OptionField> state_options() {
  return {rare_option("initial-state", "whether sequences begin with a state", {"no", "yes"}),
          rare_option("final-state",
                      "whether the state behind the last token is written, or in pass bwd has a "
                      "gradient",
                      {"no", "yes"}),
          rare_option("indices",
                      "whether states are entries of a cache, updated in place, by an index of "
                      "each sequence",
                      {"no", "yes"}),
          rare_option("has-state",
                      "whether a byte of each sequence tells that it begins with its state, "
                      "otherwise with zeros",
                      {"no", "yes"}),
          rare_option("state-dtype", "dtype of states", {"f32", "bf16"})};
}

OptionField layout_option() {
  return rare_option("layout", "order of the tokens: [b, s, ..], or packed sequences",
                     {"bshd", "thd"});
}

OptionField null_index_option() {
  return rare_number("null-index", "an index of at most this is padding: 0, or -1", "0", {-1, 0});
}

void read_states(const Op& op, const Problem& problem, Layer& layer) {
  layer.packed = problem.has("layout", "thd");
  layer.initial = problem.has("initial-state", "yes");
  layer.final = problem.has("final-state", "yes");
  layer.indices = problem.has("indices", "yes");
  layer.has_state = problem.has("has-state", "yes");
  layer.backward = problem.pass == "bwd";
  layer.dtype = problem.dtype;
  layer.state_dtype = problem.has("state-dtype", "bf16") ? DType::bf16 : DType::f32;
  layer.slots = size_or(problem, "slots", 0);
  layer.states = layer.indices ? size_or(problem, "states",
                                         layer.b * std::max<std::int64_t>(layer.slots, 1) + 1)
                               : 0;
  layer.state_block = layer.indices ? size_or(problem, "state-block", layer.state_elements()) : 0;
  layer.null_index = static_cast<std::int64_t>(number_or_default(op, problem, "null-index"));
}

std::string state_contradiction(const Problem& problem, const Layer& layer,
                                const std::string& state) {
  if (!layer.indices && (problem.sizes.contains("states") || problem.sizes.contains("state-block")))
    return "states or state-block without indices=yes: there is no cache";
  if (!layer.indices && layer.slots > 0) return "slots without indices=yes: there is no cache";
  if (layer.indices && layer.state_block < layer.state_elements())
    return fmt::format("state-block={} is less than {} = {}", layer.state_block, state,
                       layer.state_elements());
  if (layer.indices && (layer.initial || layer.final))
    return "indices=yes with initial-state or final-state: states are updated in the cache";
  if (layer.has_state && !layer.indices && !layer.initial)
    return "has-state=yes without states: give initial-state=yes or indices=yes";
  if (layer.backward && (layer.indices || layer.has_state))
    return "indices or has-state in pass bwd: give initial-state=yes";
  if (layer.null_index != 0 && layer.null_index != -1) return "null-index is 0 or -1";
  return "";
}

std::string row_contradiction(std::initializer_list<StridedRow> rows) {
  for (const auto& [name, row, features] : rows)
    if (row < features)
      return fmt::format("{}-row={} is less than its heads * features = {}", name, row, features);
  return "";
}

void complete_state_stage(const Layer& layer, const StateWork& work, StageSpec& stage) {
  const std::int64_t sequence = layer.sequence_tokens();
  stage.reduction_length = 4 * (layer.dim + layer.v_dim) + 16 * sequence;
  if (layer.backward) stage.reduction_length += 16 * layer.tokens();
  // Products of chunks round: their errors stay in states of f32 (docs/precision.md).
  if (layer.dtype == DType::bf16 && sequence > 1) {
    stage.inner_roundings = work.inner_roundings;
    stage.inner_values = std::numeric_limits<double>::infinity();
  }
  stage.flops = work.flops * static_cast<double>(layer.tokens()) *
                static_cast<double>(layer.state_elements());
  const auto bytes = [](std::int64_t elements, DType dtype) {
    return static_cast<double>(elements) * static_cast<double>(dtype_bytes(dtype));
  };
  for (const auto& [row, used] : {std::pair{layer.q_row, layer.heads * layer.dim},
                                  std::pair{layer.k_row, layer.heads * layer.dim},
                                  std::pair{layer.v_row, layer.v_heads * layer.v_dim}})
    stage.bytes -= bytes(layer.tokens() * (row - used), layer.dtype);
  if (layer.indices)
    stage.bytes -= 2 * bytes(std::max<std::int64_t>(0, layer.states * layer.state_block -
                                                           layer.b * layer.state_elements()),
                             layer.state_dtype);
}

}  // namespace fftune::gated_delta_rule
