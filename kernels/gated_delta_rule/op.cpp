// gated-delta-rule: its fields, tensors and test data.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <span>
#include <string>
#include <utility>

#include "core/saturated.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"
#include "kernels/gated_delta_rule/state_tensors.hpp"

namespace fftune::gated_delta_rule {
namespace {

// Sizes that are left out (SizeField::when_absent).
std::int64_t v_heads_of(const Problem& problem) {
  return size_or(problem, "v-heads", size_or(problem, "heads", 0));
}
std::int64_t v_dim_of(const Problem& problem) {
  return size_or(problem, "v-dim", 0);
}
std::optional<std::int64_t> usual_row(const Problem& problem) {
  return saturated_product(size_or(problem, "heads", 0), size_or(problem, "dim", 0));
}
std::optional<std::int64_t> usual_v_row(const Problem& problem) {
  return saturated_product(v_heads_of(problem), v_dim_of(problem));
}
std::int64_t group_of(const Problem& problem) {
  return v_heads_of(problem) / std::max<std::int64_t>(1, size_or(problem, "heads", 1));
}
std::optional<std::int64_t> usual_gate_block(const Problem& problem) {
  return group_of(problem);
}
std::optional<std::int64_t> usual_gate_row(const Problem& problem) {
  return saturated_product(size_or(problem, "heads", 0),
                           size_or(problem, "gate-block", group_of(problem)));
}
std::optional<std::int64_t> usual_block(const Problem& problem) {
  return saturated_product(saturated_product(v_heads_of(problem), v_dim_of(problem)),
                           size_or(problem, "dim", 0));
}

/// Keys without a norm are shorter than 1: with longer ones an erase would overshoot, and states
/// grow without bound.
DrawValues short_keys(std::int64_t dim) {
  return each([most = 1 / std::sqrt(static_cast<double>(dim))](std::mt19937_64& random) {
    return (2 * uniform(random) - 1) * most;
  });
}
/// Log-decays: most forget slowly, some not at all, some at once, a few beyond the exponents of
/// float.
double drawn_decay(std::mt19937_64& random) {
  const std::uint64_t kind = random() % 64;
  if (kind < 4) return 0;
  if (kind == 4) return random() % 4 == 0 ? -1e4 : -30;
  return -0.2 * uniform(random);
}
double drawn_beta(std::mt19937_64& random) {
  const std::uint64_t kind = random() % 32;
  return kind == 0 ? 0 : kind == 1 ? 1 : kind == 2 ? 2 : uniform(random);
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  TensorList list(layer);
  const std::int64_t heads = layer.heads, v_heads = layer.v_heads, dim = layer.dim;
  list.add_d_out();
  list.rows("q", layer.dtype, Role::input, heads, dim, layer.q_row);
  TensorSpec& k = list.rows("k", layer.dtype, Role::input, heads, dim, layer.k_row);
  // Where values are given instead of drawn, they are as small.
  if (!layer.normed) k.draw = short_keys(dim), k.scale = 0.5 / std::sqrt(static_cast<double>(dim));
  list.rows("v", layer.dtype, Role::input, v_heads, layer.v_dim, layer.v_row);
  const auto of_heads = [&](const char* name, DType dtype) -> TensorSpec& {
    TensorSpec& spec = list.rows(name, dtype, Role::input, v_heads, 1, layer.gate_row);
    if (layer.gate_block > layer.group()) spec.behind = layer.gate_row - layer.gate_elements();
    return spec;
  };
  const auto decays = [&](const char* name, DType dtype) -> TensorSpec& {
    return layer.channels ? list.rows(name, dtype, Role::input, v_heads, dim)
                          : of_heads(name, dtype);
  };
  if (layer.gate == Gate::log) {
    TensorSpec& g = decays("g", DType::f32);
    g.draw = each(drawn_decay), g.scale = 0.02, g.mean = -0.1;
  } else {
    decays("a", layer.dtype);
    // A bounded gate multiplies both before its sigmoid, which float cannot hold below exp(-87).
    const bool is_bounded = layer.gate == Gate::bounded;
    list.add({"A_log", DType::f32, {v_heads}, Role::input, 0.3, is_bounded ? 0.5 : 1}).draw =
        each([most = is_bounded ? 3 : 15](std::mt19937_64& random) {
          return std::log(1 + most * uniform(random));
        });
    list.add({"dt_bias",
              DType::f32,
              {v_heads * layer.decays()},
              Role::input,
              0.5,
              is_bounded ? -1.0 : -4.0})
        .draw = each([first = is_bounded ? -1.5 : -7, width = is_bounded ? 1 : 5](
                         std::mt19937_64& random) { return first + width * uniform(random); });
  }
  if (layer.sigmoid) {
    of_heads("beta_logits", layer.dtype);
  } else {
    TensorSpec& beta = of_heads("beta", DType::f32);
    beta.draw = each(drawn_beta), beta.scale = 0.1, beta.mean = 0.5;
  }
  list.add_states_and_out();
  if (!layer.backward) return std::move(list).tensors();
  list.rows("dq", layer.dtype, Role::output, heads, dim);
  list.rows("dk", layer.dtype, Role::output, heads, dim);
  list.rows("dv", layer.dtype, Role::output, v_heads, layer.v_dim);
  if (layer.gate == Gate::log) {
    list.rows("dg", DType::f32, Role::output, v_heads, layer.decays());
  } else {
    list.rows("da", layer.dtype, Role::output, v_heads, layer.decays());
    list.add({"dA_log", DType::f32, {v_heads}, Role::output, 1});
    list.add({"ddt_bias", DType::f32, {v_heads * layer.decays()}, Role::output, 1});
  }
  if (layer.sigmoid)
    list.rows("dbeta_logits", layer.dtype, Role::output, v_heads, 1);
  else
    list.rows("dbeta", DType::f32, Role::output, v_heads, 1);
  list.add_d_initial_state();
  return std::move(list).tensors();
}

std::vector<KnownModel> models() {
  const std::map<std::string, std::string> options{
      {"gate", "softplus"}, {"beta", "sigmoid"}, {"qk-norm", "l2"}};
  const auto kimi = [&](std::string gate) {
    auto by_channel = options;
    by_channel["decay"] = "channel", by_channel["gate"] = std::move(gate);
    return by_channel;
  };
  return {{"qwen3-next-80b-a3b",
           {{"heads", 16}, {"v-heads", 32}, {"dim", 128}, {"v-dim", 128}},
           options},
          {"qwen3.5-27b", {{"heads", 16}, {"v-heads", 48}, {"dim", 128}, {"v-dim", 128}}, options},
          {"qwen3.5-0.8b", {{"heads", 16}, {"dim", 128}, {"v-dim", 128}}, options},
          {"kimi-linear-48b-a3b", {{"heads", 32}, {"dim", 128}, {"v-dim", 128}}, kimi("softplus")}};
}

std::vector<SizeField> sizes() {
  std::vector<SizeField> sizes = sequence_sizes();
  append(sizes,
         {{.name = "heads", .help = "heads of q and k", .max = most_heads, .example = 16},
          {.name = "dim", .help = "features of a head of q and k", .max = most_dim, .example = 128},
          {.name = "v-dim", .help = "features of a head of v", .max = most_dim, .example = 128},
          rare_size("v-heads", "heads of v, a multiple of those of q and k; as many if left out",
                    most_heads, 32, same_as("heads"))});
  append(sizes, cache_sizes("v-heads * v-dim * dim", usual_block));
  append(sizes, {rare_size("q-row",
                           "stride of q between tokens, in elements, for a part of a packed row; "
                           "heads * dim if left out",
                           most_stride, 8192, usual_row),
                 rare_size("k-row", "as q-row, for k", most_stride, 8192, usual_row),
                 rare_size("v-row", "as q-row, for v; v-heads * v-dim if left out", most_stride,
                           8192, usual_v_row),
                 rare_size("gate-row",
                           "as q-row, for beta or beta_logits, and for g or a of decay=head; "
                           "heads * gate-block if left out",
                           most_stride, 64, usual_gate_row),
                 rare_size("gate-block",
                           "in these, elements from the first value head of a head of k to that of "
                           "the next; v-heads / heads if left out",
                           most_heads, 4, usual_gate_block)});
  return sizes;
}

std::vector<OptionField> options() {
  std::vector<OptionField> options = {
      layout_option(),
      rare_option("gate",
                  "the log of the decay g, or its input a for -exp(A_log) softplus(a + "
                  "dt_bias), or for gate-bound * sigmoid(exp(A_log) (a + dt_bias))",
                  {"log", "softplus", "bounded"}),
      rare_option("decay", "decays of a value head: one, or one for each feature of k",
                  {"head", "channel"}),
      rare_option("beta", "beta itself, or beta-scale * sigmoid(beta_logits)",
                  {"given", "sigmoid"}),
      rare_option("qk-norm", "whether q and k are divided by their l2 norm", {"none", "l2"})};
  append(options, state_options());
  append(options, {rare_option("state-layout", "states [v-dim, dim] or [dim, v-dim]", {"vk", "kv"}),
                   rare_number("scale", "factor of out; 0: 1 / sqrt(dim)", "0", {0, 1e6}),
                   rare_number("beta-scale", "factor of beta=sigmoid, 2 for negative eigenvalues",
                               "1", {0, 2}),
                   rare_number("gate-bound", "the least g of gate=bounded", "-5", {-100, 0}),
                   null_index_option()});
  return options;
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.v_heads % layer.heads != 0)
    return fmt::format("heads={} do not divide v-heads={}", layer.heads, layer.v_heads);
  if (layer.normed && layer.dim == 1) return "qk-norm=l2 with dim=1: give a dim of at least 2";
  if (layer.gate_block < layer.group())
    return fmt::format("gate-block={} is less than v-heads / heads = {}", layer.gate_block,
                       layer.group());
  if (auto wrong = row_contradiction({{"q", layer.q_row, layer.heads * layer.dim},
                                      {"k", layer.k_row, layer.heads * layer.dim},
                                      {"v", layer.v_row, layer.v_heads * layer.v_dim},
                                      {"gate", layer.gate_row, layer.gate_elements()}});
      !wrong.empty())
    return wrong;
  if (layer.gate != Gate::bounded && layer.gate_bound != -5)
    return "gate-bound without gate=bounded";
  if (!layer.sigmoid && layer.beta_scale != 1) return "beta-scale without beta=sigmoid";
  return state_contradiction(problem, layer, "v-heads * v-dim * dim");
}

/// Chunks round the state, the error and delta, and a chunk's matrices; backward the gradients of
/// these too.
void complete(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  complete_state_stage(layer, layer.backward ? StateWork{16, 12} : StateWork{6, 3}, stage);
}

OpFacts facts() {
  return {.name = "gated-delta-rule",
          .summary =
              "linear attention with a state that decays, erases and writes: S = S exp(g), S += "
              "beta (v - S k) k^T, out = scale * S q",
          .sizes = sizes(),
          .options = options(),
          .token_size = "s",
          .rows_are_alike = false,
          .sharded_sizes = {"heads", "v-heads"},
          .known_models = models,
          .families = {cuda_families, cpu_families},
          .contradiction = contradiction,
          .stage = {.tensors = tensors_of, .complete = complete, .reference = reference}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  const Op& op = gated_delta_rule_op();
  const auto number = [&](const char* name) {
    return static_cast<float>(number_or_default(op, problem, name));
  };
  auto layer = sizes_of<Layer>(
      problem,
      {{"b", &Layer::b}, {"s", &Layer::s}, {"heads", &Layer::heads}, {"dim", &Layer::dim}});
  layer.v_heads = v_heads_of(problem);
  layer.v_dim = v_dim_of(problem);
  layer.gate = problem.has("gate", "softplus")  ? Gate::softplus
               : problem.has("gate", "bounded") ? Gate::bounded
                                                : Gate::log;
  layer.channels = problem.has("decay", "channel");
  layer.sigmoid = problem.has("beta", "sigmoid");
  layer.normed = problem.has("qk-norm", "l2");
  layer.key_major = problem.has("state-layout", "kv");
  layer.q_row = size_or(problem, "q-row", layer.heads * layer.dim);
  layer.k_row = size_or(problem, "k-row", layer.heads * layer.dim);
  layer.v_row = size_or(problem, "v-row", layer.v_heads * layer.v_dim);
  layer.gate_block = size_or(problem, "gate-block", group_of(problem));
  layer.gate_row = size_or(problem, "gate-row", layer.heads * layer.gate_block);
  layer.scale = number("scale");
  if (layer.scale == 0)
    layer.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(layer.dim)));
  layer.beta_scale = number("beta-scale");
  layer.gate_bound = number("gate-bound");
  read_states(op, problem, layer);
  return layer;
}

std::optional<std::string> refuse_chunks(const Layer& layer) {
  if (layer.dtype != DType::bf16) return "it computes in bf16: states leave the range of fp16";
  // One token's state is verified as one that no product of bf16 rounds.
  if (layer.sequence_tokens() == 1) return "sequences of one token have no chunks";
  if (layer.slots > 0) return "states behind single tokens are not those of chunks";
  if (layer.channels) return "decay=channel does not factor out of a chunk's products";
  if (layer.dim != 64 && layer.dim != 128) return fmt::format("dim={} is not 64 or 128", layer.dim);
  if (layer.v_dim % 64 != 0) return fmt::format("v-dim={} is no multiple of 64", layer.v_dim);
  return std::nullopt;
}

}  // namespace fftune::gated_delta_rule

const fftune::Op& fftune::gated_delta_rule_op() {
  static const DescribedOp op(gated_delta_rule::facts());
  return op;
}
