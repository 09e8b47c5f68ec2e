// ssd: its fields, tensors and test data.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/saturated.hpp"
#include "kernels/gated_delta_rule/state_tensors.hpp"
#include "kernels/ssd/ssd.hpp"

namespace fftune::ssd {
namespace {

using gated_delta_rule::most_heads;
using gated_delta_rule::most_stride;
using gated_delta_rule::TensorList;

constexpr const char* state_text = "heads * dim * state-dim";

// Sizes that are left out (SizeField::when_absent).
std::optional<std::int64_t> usual_x_row(const Problem& problem) {
  return saturated_product(size_or(problem, "heads", 0), size_or(problem, "dim", 0));
}
std::optional<std::int64_t> usual_row(const Problem& problem) {
  return saturated_product(size_or(problem, "groups", 1), size_or(problem, "state-dim", 0));
}
std::optional<std::int64_t> usual_block(const Problem& problem) {
  return saturated_product(*usual_x_row(problem), size_or(problem, "state-dim", 0));
}

double inverse_softplus(double step) {
  return step + std::log(-std::expm1(-step));
}

/// Steps as models begin with, where limits leave a choice: from 0.001 to 0.13.
struct StepRange {
  double low, high;

  explicit StepRange(const Layer& layer)
      : low(std::max<double>(layer.dt_min, std::min(0.001, layer.dt_max / 8.0))),
        high(std::min<double>(layer.dt_max, std::max(0.13, layer.dt_min * 8.0))) {}

  /// Of the logarithm.
  double width() const { return std::log(high / low); }
  double drawn(std::mt19937_64& random) const { return low * std::exp(width() * uniform(random)); }
};

/// Draws steps, of which one in ten is beyond each limit that is set, so that it is replaced. Some
/// tokens leave the state as it is, some erase it.
auto steps_drawn_for(const Layer& layer) {
  const StepRange limits(layer);
  StepRange range = limits;
  const double beyond = std::exp(limits.width() > 0 ? limits.width() / 8 : 1);
  if (layer.dt_min > 0) range.low /= beyond;
  if (std::isfinite(layer.dt_max)) range.high *= beyond;
  return [range](std::mt19937_64& random) {
    const std::uint64_t kind = random() % 64;
    return kind == 0 ? 0 : kind == 1 ? 20 : range.drawn(random);
  };
}

std::vector<TensorSpec> tensors_of(const Problem& problem) {
  const Layer layer = layer_of(problem);
  TensorList list(layer);
  const std::int64_t groups = layer.heads, heads = layer.v_heads, dim = layer.v_dim;
  list.add_d_out();
  list.rows("x", layer.dtype, Role::input, heads, dim, layer.v_row);
  TensorSpec& dt = list.rows("dt", layer.dtype, Role::input, heads, 1, layer.gate_row);
  const StepRange steps(layer);
  // Where values are given instead of drawn, they are as small.
  if (layer.softplus && layer.bias) {
    // The bias is that of a step between the limits, and dt takes few steps beyond them.
    dt.scale = steps.width() > 0 ? std::min(0.5, steps.width() / 4) : 0.5;
  } else if (layer.softplus) {
    dt.draw = each([drawn = steps_drawn_for(layer)](std::mt19937_64& random) {
      const double step = drawn(random);
      return step == 0 ? -200 : inverse_softplus(step);
    });
    dt.scale = 0.5, dt.mean = -4;
  } else {
    dt.draw = each(steps_drawn_for(layer));
    dt.scale = 0.02, dt.mean = 0.1;
  }
  if (layer.given)
    list.add({"A", DType::f32, {heads}, Role::input, 0.3, -3}).draw =
        each([](std::mt19937_64& random) { return -1 - 15 * uniform(random); });
  else
    list.add({"A_log", DType::f32, {heads}, Role::input, 0.3, 1}).draw =
        each([](std::mt19937_64& random) { return std::log(1 + 15 * uniform(random)); });
  list.rows("B", layer.dtype, Role::input, groups, layer.dim, layer.k_row);
  list.rows("C", layer.dtype, Role::input, groups, layer.dim, layer.q_row);
  if (layer.skip) list.add({"D", DType::f32, {heads}});
  if (layer.bias)
    list.add({"dt_bias", DType::f32, {heads}, Role::input, 0.5, layer.softplus ? -4.0 : 0.1}).draw =
        each([steps, given = !layer.softplus](std::mt19937_64& random) {
          if (!given) return inverse_softplus(steps.drawn(random));
          // The bias of a step leaves most of them between the limits.
          return random() % 2 == 0 ? 0 : (steps.high - steps.low) / 2 * uniform(random);
        });
  list.add_states_and_out();
  if (!layer.backward) return std::move(list).tensors();
  list.rows("dx", layer.dtype, Role::output, heads, dim);
  list.rows("ddt", layer.dtype, Role::output, heads, 1);
  list.add({layer.given ? "dA" : "dA_log", DType::f32, {heads}, Role::output, 1});
  list.rows("dB", layer.dtype, Role::output, groups, layer.dim);
  list.rows("dC", layer.dtype, Role::output, groups, layer.dim);
  if (layer.skip) list.add({"dD", DType::f32, {heads}, Role::output, 1});
  if (layer.bias) list.add({"ddt_bias", DType::f32, {heads}, Role::output, 1});
  list.add_d_initial_state();
  return std::move(list).tensors();
}

std::vector<KnownModel> models() {
  const std::map<std::string, std::string> options{{"skip", "yes"}, {"dt-bias", "yes"}};
  const auto model = [&](const char* name, std::int64_t heads, std::int64_t dim,
                         std::int64_t state_dim, std::int64_t groups) {
    return KnownModel{
        name,
        {{"heads", heads}, {"dim", dim}, {"state-dim", state_dim}, {"groups", groups}},
        options};
  };
  return {model("mamba-codestral-7b", 128, 64, 128, 8),
          model("nemotron-3-nano-30b-a3b", 64, 64, 128, 8),
          model("nemotron-nano-9b-v2", 128, 80, 128, 8),
          model("granite-4.0-h-small", 128, 64, 128, 1), model("falcon-h1-1.5b", 48, 64, 256, 1)};
}

std::vector<SizeField> sizes() {
  std::vector<SizeField> sizes = gated_delta_rule::sequence_sizes();
  append(sizes, {{.name = "heads", .help = "heads of x", .max = most_heads, .example = 128},
                 {.name = "dim", .help = "features of a head of x", .max = most_dim, .example = 64},
                 {.name = "state-dim",
                  .help = "features of a group of B and C",
                  .max = most_dim,
                  .example = 128},
                 rare_size("groups", "groups of heads that share B and C; 1 if left out",
                           most_heads, 8, usually(1))});
  append(sizes, gated_delta_rule::cache_sizes(state_text, usual_block));
  append(sizes, {rare_size("x-row",
                           "stride of x between tokens, in elements, for a part of a packed row; "
                           "heads * dim if left out",
                           most_stride, 10240, usual_x_row),
                 rare_size("b-row", "as x-row, for B; groups * state-dim if left out", most_stride,
                           10240, usual_row),
                 rare_size("c-row", "as b-row, for C", most_stride, 10240, usual_row),
                 rare_size("dt-row", "as x-row, for dt; heads if left out", most_stride, 18560,
                           same_as("heads"))});
  return sizes;
}

std::vector<OptionField> options() {
  std::vector<OptionField> options = {
      gated_delta_rule::layout_option(),
      rare_option("decay", "A_log, for A = -exp(A_log), or A itself", {"log", "given"}),
      rare_option("softplus", "whether dt is the softplus of its input", {"yes", "no"}),
      rare_option("dt-bias", "whether dt_bias is added to dt first", {"no", "yes"}),
      rare_option("skip", "whether D x is added to out", {"no", "yes"})};
  append(options, gated_delta_rule::state_options());
  append(options, {rare_number("dt-min", "the least dt", "0", {0, 1e6}),
                   rare_number("dt-max", "the largest dt; 0: no limit", "0", {0, 1e6}),
                   gated_delta_rule::null_index_option()});
  return options;
}

std::string contradiction(const Problem& problem) {
  const Layer layer = layer_of(problem);
  if (layer.v_heads % layer.heads != 0)
    return fmt::format("groups={} do not divide heads={}", layer.heads, layer.v_heads);
  if (auto wrong =
          gated_delta_rule::row_contradiction({{"x", layer.v_row, layer.v_heads * layer.v_dim},
                                               {"b", layer.k_row, layer.heads * layer.dim},
                                               {"c", layer.q_row, layer.heads * layer.dim},
                                               {"dt", layer.gate_row, layer.v_heads}});
      !wrong.empty())
    return wrong;
  if (layer.dt_max < layer.dt_min)
    return fmt::format("dt-max={} is less than dt-min={}", layer.dt_max, layer.dt_min);
  return state_contradiction(problem, layer, state_text);
}

/// Chunks round the state, dt x with its decay, and a chunk's matrix; backward the gradients of
/// these too, and d_out with its decay. A rounding of the matrix is that of all features of a
/// token, and one of them may be by far the largest: it counts as four.
void complete(const Problem& problem, StageSpec& stage) {
  const Layer layer = layer_of(problem);
  using Work = gated_delta_rule::StateWork;
  complete_state_stage(layer, layer.backward ? Work{12, 13} : Work{4, 6}, stage);
  if (layer.backward) stage.reduction_length += 4 * layer.dim * layer.group();
}

OpFacts facts() {
  return {.name = "ssd",
          .summary =
              "state space duality, the core of Mamba-2: S = exp(dt A) S + dt x B^T, out = S C + D "
              "x",
          .sizes = sizes(),
          .options = options(),
          .token_size = "s",
          .rows_are_alike = false,
          .sharded_sizes = {"heads", "groups"},
          .known_models = models,
          .families = {cuda_families, cpu_families},
          .contradiction = contradiction,
          .stage = {.tensors = tensors_of, .complete = complete, .reference = reference}};
}

}  // namespace

Layer layer_of(const Problem& problem) {
  const Op& op = ssd_op();
  auto layer = sizes_of<Layer>(problem, {{"b", &Layer::b},
                                         {"s", &Layer::s},
                                         {"heads", &Layer::v_heads},
                                         {"state-dim", &Layer::dim},
                                         {"dim", &Layer::v_dim}});
  layer.heads = size_or(problem, "groups", 1);
  layer.v_row = size_or(problem, "x-row", layer.v_heads * layer.v_dim);
  layer.k_row = size_or(problem, "b-row", layer.heads * layer.dim);
  layer.q_row = size_or(problem, "c-row", layer.heads * layer.dim);
  layer.gate_row = size_or(problem, "dt-row", layer.v_heads);
  layer.softplus = !problem.has("softplus", "no");
  layer.bias = problem.has("dt-bias", "yes");
  layer.skip = problem.has("skip", "yes");
  layer.given = problem.has("decay", "given");
  layer.dt_min = static_cast<float>(number_or_default(op, problem, "dt-min"));
  layer.dt_max = static_cast<float>(number_or_default(op, problem, "dt-max"));
  if (layer.dt_max == 0) layer.dt_max = std::numeric_limits<float>::infinity();
  read_states(op, problem, layer);
  return layer;
}

}  // namespace fftune::ssd

const fftune::Op& fftune::ssd_op() {
  static const DescribedOp op(ssd::facts());
  return op;
}
