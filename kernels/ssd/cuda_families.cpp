// ssd on CUDA, host side.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/common/least_cost.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gated_delta_rule/launch.hpp"
#include "kernels/gemm/element.hpp"
#include "kernels/ssd/chunks.cuh"
#include "kernels/ssd/sm90_config.cuh"
#include "kernels/ssd/ssd.hpp"

namespace fftune::ssd {
namespace {

using gated_delta_rule::append_launch;

constexpr const char* chunk_file = "ssd/chunks.cu";
constexpr const char* sm90_file = "ssd/sm90.cu";
constexpr const char* chunk_backward_file = "ssd/chunks_backward.cu";
constexpr const char* recurrent_file = "ssd/recurrent.cu";
constexpr const char* decode_file = "ssd/decode.cu";
constexpr const char* backward_file = "ssd/recurrent_backward.cu";
constexpr const char* rows_file = "gated_delta_rule/recurrent_backward.cu";

std::string template_argument(const Layer& layer) {
  StructText text("ssd_form", "type", element_text(element_of(layer.dtype)), "state",
                  element_text(element_of(layer.state_dtype)), "dim", layer.v_dim, "state_dim",
                  layer.dim);
  if (!layer.softplus) text.set("softplus", false);
  return text.flags("bias", layer.bias, "skip", layer.skip, "given", layer.given);
}

/// The part of the gated delta rule.
ParameterStruct layer_parameters(const Layer& layer, const TensorPlaces& places) {
  using Params = delta_rule_params;
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_tensors(places, &Params::q, "C", &Params::k, "B", &Params::v, "x", &Params::gate, "dt",
                     &Params::A_log, layer.given ? "A" : "A_log");
  gated_delta_rule::set_layer(layer, places, fields);
  return parameters;
}

/// D and the limits of dt, of a struct `Params` that has them.
template <class Params>
void set_rest(const Layer& layer, const TensorPlaces& places, ParameterStruct& parameters) {
  ParameterFields<Params> fields(parameters);
  fields.set_tensors(places, &Params::D, "D");
  fields.set(&Params::dt_min, layer.dt_min, &Params::dt_max, layer.dt_max);
}

Space recurrent_space(const Problem& problem, const DeviceFacts& facts) {
  return gated_delta_rule::recurrent_space(layer_of(problem), facts);
}
Config recurrent_default(const Problem& problem, const DeviceFacts& facts) {
  return gated_delta_rule::recurrent_default(layer_of(problem), facts);
}

ParameterStruct forward_parameters(const Problem& problem) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(ssd_op().tensors(problem));
  ParameterStruct parameters{.bytes = sizeof(ssd_params), .fields = {}};
  ParameterFields<ssd_params>(parameters)
      .set_struct(&ssd_params::layer, layer_parameters(layer, places));
  set_rest<ssd_params>(layer, places, parameters);
  return parameters;
}

Program recurrent_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  Program program;
  gated_delta_rule::append_forward(program, facts, {recurrent_file, decode_file}, "ssd_",
                                   template_argument(layer), layer, config,
                                   forward_parameters(problem));
  return program;
}

// Chunks of 64 tokens, with mma.sync.

/// Packed sequences count as equally long ones.
std::int64_t tokens_of_sequence(const Layer& layer) {
  return layer.packed ? quotient_up(layer.s, layer.b) : layer.s;
}
/// Whether chunks are about full.
bool has_chunks(const Problem& problem) {
  return tokens_of_sequence(layer_of(problem)) >= 32;
}

std::int64_t chunk_bytes(const Layer& layer, const Config& c, ssd_walk walk = ssd_walk::out) {
  return ssd_chunk_plan_of(static_cast<int>(layer.dim),
                           {.rows = c.get("rows"), .stages = c.get("stages"), .walk = walk})
      .bytes;
}
std::int64_t chunk_ctas(const Layer& layer, std::int64_t rows) {
  return layer.b * layer.v_heads * quotient_up(layer.v_dim, rows);
}

Space chunk_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const auto is_whole = [dim = layer.dim](std::int64_t rows) {
    return dim * rows % (64 * 16) == 0;
  };
  Space space;
  space.parameter("rows", "rows of a state that a CTA has", {16, 32, 64})
      .parameter("stages", "chunks in shared memory", {1, 2, 3})
      .constraint("half the rows would not do",
                  [layer, is_whole](const Config& c) {
                    return c.get("rows") == 16 || c.at("rows") / 2 < layer.v_dim ||
                           !is_whole(c.at("rows") / 2);
                  },
                  {"rows"})
      .constraint("the features of a state are whole MMAs of 4 warps, which 16 rows share",
                  [is_whole](const Config& c) { return is_whole(c.at("rows")); }, {"rows"})
      .constraint("the stages must fit in shared memory",
                  [layer, facts](const Config& c) {
                    return chunk_bytes(layer, c) <= facts.shared_bytes_per_block;
                  },
                  {"rows", "stages"});
  return space;
}

std::optional<std::string> refuse_chunks(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  if (layer.dtype != DType::bf16) return "it computes in bf16: states leave the range of fp16";
  if (tokens_of_sequence(layer) < 2) return "a chunk has several tokens of a sequence";
  if (layer.slots > 0) return "states behind single tokens are not those of chunks";
  if (layer.v_dim % 8 != 0) return fmt::format("dim={} is no multiple of 8", layer.v_dim);
  if (layer.dim % 16 != 0) return fmt::format("state-dim={} is no multiple of 16", layer.dim);
  for (const auto& [name, row] :
       {std::pair{"x", layer.v_row}, std::pair{"b", layer.k_row}, std::pair{"c", layer.q_row}})
    if (row % 8 != 0) return fmt::format("rows of {}-row={} are not 16-byte aligned", name, row);
  if (chunk_space(problem, facts).feasible().empty())
    return fmt::format("a chunk of state-dim={} does not fit in shared memory", layer.dim);
  return std::nullopt;
}

/// As many rows as leave no SM idle: each CTA computes C Bᵀ. The next chunk is copied meanwhile.
Config chunk_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  return least_cost(chunk_space(problem, facts), "chunks", [&](const Config& c) {
    const bool fills = chunk_ctas(layer, c.at("rows")) >= facts.multiprocessors;
    return std::tuple(!fills, fills ? -c.get("rows") : c.get("rows"),
                      std::abs(c.get("stages") - 2));
  });
}

/// Appends a walk over the chunks (chunks.cuh), with the parameters `Params`.
void append_walk(Program& program, const Problem& problem, const DeviceFacts& facts,
                 const Config& config, ssd_walk walk, const char* type,
                 const ParameterStruct& parameters) {
  const Layer layer = layer_of(problem);
  constexpr const char* walks[] = {"out", "keep", "back"};
  const StructText own("ssd_chunk_config", "rows", config.get("rows"), "stages",
                       config.get("stages"), "walk",
                       fmt::format("fftune::ssd_walk::{}", walks[static_cast<int>(walk)]));
  append_launch(
      program, facts, chunk_file,
      fmt::format("ssd_chunk_walk<{}, {}, fftune::{}>", template_argument(layer), own, type),
      chunk_ctas(layer, config.at("rows")), 32 * ssd_chunk_warps, parameters)
      .shared_bytes = static_cast<std::uint32_t>(chunk_bytes(layer, config, walk));
}

Program chunk_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  Program program;
  append_walk(program, problem, facts, config, ssd_walk::out, "ssd_params",
              forward_parameters(problem));
  return program;
}

// Chunks of 64 tokens, with wgmma.

ssd_sm90_config sm90_config_of(const Config& c) {
  return {.rows = c.get("rows"), .stages = c.get("stages"), .cluster = c.get("cluster")};
}
ssd_sm90_plan sm90_plan_of(const Layer& layer, const Config& c) {
  return ssd_sm90_plan_of(static_cast<int>(layer.v_dim), static_cast<int>(layer.dim),
                          sm90_config_of(c));
}

Space sm90_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  space.parameter("rows", "rows of a state that a CTA has at most", {32, 64, 128})
      .parameter("stages", "chunks in shared memory", {2, 3, 4})
      .parameter("cluster", "CTAs that load B and C once for all of them", {1, 2, 4})
      .constraint("half the rows would not do",
                  [layer](const Config& c) {
                    return c.get("rows") == 32 || c.at("rows") / 2 < layer.v_dim;
                  },
                  {"rows"})
      .constraint("a state's rows fit in the registers of a warpgroup",
                  [layer](const Config& c) {
                    return ssd_sm90_accumulators(static_cast<int>(layer.v_dim),
                                                 static_cast<int>(layer.dim),
                                                 {.rows = c.get("rows")}) <= 80;
                  },
                  {"rows"})
      .constraint(
          "a cluster's CTAs have the same B and C, and load equal shares of them",
          [layer](const Config& c) {
            return layer.group() * quotient_up(layer.v_dim, c.at("rows")) % c.at("cluster") == 0 &&
                   layer.dim / 32 % c.at("cluster") == 0;
          },
          {"rows", "cluster"})
      .constraint("the stages must fit in shared memory",
                  [layer, facts](const Config& c) {
                    return sm90_plan_of(layer, c).bytes <= facts.shared_bytes_per_block;
                  },
                  {"rows", "stages", "cluster"});
  return space;
}

std::optional<std::string> refuse_sm90(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  if (facts.arch != "sm_90a") return "wgmma needs sm_90a, not " + facts.arch;
  if (auto refusal = refuse_chunks(problem, facts)) return refusal;
  if (layer.v_dim % 16 != 0) return fmt::format("dim={} is no multiple of 16", layer.v_dim);
  if (layer.dim % 64 != 0)
    return fmt::format("state-dim={} is no multiple of 64, the rows of a wgmma", layer.dim);
  if (layer.tokens() >= std::int64_t{1} << 31)
    return fmt::format("{} tokens in all exceed 2^31 - 1", layer.tokens());
  return std::nullopt;
}

/// About how many cycles the walk takes: a chunk takes as long as its MMAs, the state's, or B, C
/// and x from L2.
double sm90_cycles(const Layer& layer, const DeviceFacts& facts, const Config& c) {
  const ssd_sm90_plan plan = sm90_plan_of(layer, c);
  const double columns = plan.columns, features = static_cast<double>(layer.dim);
  // An MMA of 64 rows and 16 of the other extent takes half a cycle for each column.
  const double state = features / 64 * 4 * columns / 2;
  const double mmas = features / 16 * (32 + columns / 2) + 2 * columns + state;
  const std::int64_t ctas = layer.b * layer.v_heads * quotient_up(layer.v_dim, c.at("rows"));
  // Clusters of more than two CTAs do not fill every GPC: an H200 has 30 of four.
  const std::int64_t whole = std::max(facts.multiprocessors, 1);
  const std::int64_t sms =
      c.get("cluster") > 2 ? std::max<std::int64_t>(whole * 91 / 100, 1) : whole;
  const double busy = static_cast<double>(std::min(ctas, sms)) / static_cast<double>(sms);
  const double loads = 2 * features * ssd_sm90_chunk * 2 / c.get("cluster") + 2.0 * plan.x_bytes;
  const double memory = std::max(loads / 24 * busy, loads / 50);
  const double chain = 400 + state + 2 * features * columns / 128;
  const double chunk = std::max({mmas, memory, chain}) + (c.get("stages") > 2 ? 0 : 300);
  return static_cast<double>(quotient_up(ctas, sms)) *
         (3000 + chunk * static_cast<double>(quotient_up(tokens_of_sequence(layer), 64)));
}

Config sm90_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  return least_cost(sm90_space(problem, facts), "chunks_sm90", [&](const Config& c) {
    return std::tuple(sm90_cycles(layer, facts, c), c.get("cluster"), -c.get("stages"));
  });
}

/// Boxes of 64 tokens and `box` columns of a tensor with rows of `row` elements.
TensorMapArgument tokens_map(const Layer& layer, TensorArgument tensor, std::int64_t row, int box) {
  return {.matrix = tensor,
          .dtype = layer.dtype,
          .rows = layer.tokens(),
          .columns = row,
          .box_rows = ssd_sm90_chunk,
          .box_columns = static_cast<std::uint32_t>(box)};
}

Program sm90_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  using Params = ssd_sm90_params;
  const Layer layer = layer_of(problem);
  const ssd_sm90_plan plan = sm90_plan_of(layer, config);
  const TensorPlaces places(ssd_op().tensors(problem));
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_struct(&Params::ssd, forward_parameters(problem));
  fields.set(&Params::C, tokens_map(layer, tensor_of(places, "C"), layer.q_row, 64), &Params::B,
             tokens_map(layer, tensor_of(places, "B"), layer.k_row, 64), &Params::x,
             tokens_map(layer, tensor_of(places, "x"), layer.v_row, plan.slab_row / 2));
  Program program;
  KernelLaunch& launch =
      append_launch(program, facts, sm90_file,
                    fmt::format("ssd_chunks_sm90<{}, {}>", template_argument(layer),
                                StructText("ssd_sm90_config", "rows", config.get("rows"), "stages",
                                           config.get("stages"), "cluster", config.get("cluster"))),
                    layer.b * layer.v_heads * quotient_up(layer.v_dim, config.at("rows")),
                    ssd_sm90_threads, parameters);
  launch.cluster.x = static_cast<std::uint32_t>(config.get("cluster"));
  launch.shared_bytes = static_cast<std::uint32_t>(plan.bytes);
  return program;
}

/// A pass back, as it is put together: its parameters, and its kernels at the end.
class BackwardProgram {
 public:
  using Params = ssd_backward_params;
  using Back = delta_backward_params;
  static_assert(offsetof(Params, back) == 0);

  /// `blocks`: CTAs of a state, each with partial sums.
  BackwardProgram(const Problem& problem, const DeviceFacts& facts, std::int64_t blocks)
      : layer(layer_of(problem)), facts_(facts), blocks_(blocks) {
    const TensorPlaces places(ssd_op().tensors(problem));
    parameters.bytes = sizeof(Params);
    ParameterFields<Back> back(parameters);
    back.set_struct(&Back::forward, layer_parameters(layer, places));
    back.set_tensors(places, &Back::d_out, "d_out", &Back::d_final_state, "d_final_state",
                     &Back::dq, "dC", &Back::dk, "dB", &Back::dv, "dx", &Back::d_gate, "ddt",
                     &Back::dA_log, layer.given ? "dA" : "dA_log", &Back::ddt_bias, "ddt_bias",
                     &Back::d_initial_state, "d_initial_state");
    back.set(&Back::all_tokens, layer.tokens());
    const std::int64_t head_bytes = 4 * layer.tokens() * layer.v_heads;
    back.set_scratch(program, &Back::row_sums, blocks * head_bytes * 2 * layer.dim);
    back.set_scratch(program, &Back::gate_sums, blocks * head_bytes * 3);
    ParameterFields<Params>(parameters).set_tensors(places, &Params::dD, "dD");
    set_rest<Params>(layer, places, parameters);
  }

  /// The kernels that add up the partial sums.
  Program finish() && {
    const std::int64_t of_heads = layer.tokens() * layer.v_heads;
    const std::string form = template_argument(layer);
    // The kernel that adds up rows takes the part `back` alone.
    ParameterStruct rows = parameters;
    rows.bytes = sizeof(Back);
    std::erase_if(rows.fields,
                  [](const ParameterStruct::Field& field) { return field.offset >= sizeof(Back); });
    append_launch(
        program, facts_, rows_file,
        fmt::format("delta_rule_rows<{}, {}>", gated_delta_rule::template_argument(layer), blocks_),
        quotient_up(layer.tokens() * layer.heads, 8), 256, rows);
    append_launch(program, facts_, backward_file, fmt::format("ssd_steps<{}, {}>", form, blocks_),
                  quotient_up(of_heads, 256), 256, parameters);
    append_launch(program, facts_, backward_file, fmt::format("ssd_parameters<{}>", form),
                  layer.v_heads, 256, parameters);
    return std::move(program);
  }

  const Layer layer;
  Program program;
  ParameterStruct parameters;

 private:
  const DeviceFacts& facts_;
  std::int64_t blocks_;
};

Program backward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  BackwardProgram back(problem, facts, blocks_of_state(layer, config));
  gated_delta_rule::append_walks(back.program, back.parameters, facts, backward_file, "ssd_",
                                 template_argument(layer), layer, config);
  return std::move(back).finish();
}

std::int64_t token_bytes(const Layer& layer) {
  return ssd_token_plan_of(static_cast<int>(layer.v_dim), static_cast<int>(layer.dim)).bytes;
}

std::optional<std::string> refuse_backward_chunks(const Problem& problem,
                                                  const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  if (auto refusal = refuse_chunks(problem, facts)) return refusal;
  if (layer.v_dim % 16 != 0) return fmt::format("dim={} is no multiple of 16", layer.v_dim);
  if (layer.v_dim > 128)
    return fmt::format("gradients of dim={} do not fit in registers", layer.v_dim);
  if (token_bytes(layer) > facts.shared_bytes_per_block)
    return fmt::format("a chunk's states of dim={} and state-dim={} do not fit in shared memory",
                       layer.v_dim, layer.dim);
  return std::nullopt;
}

Program chunk_backward_program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config) {
  using Params = ssd_backward_params;
  BackwardProgram back(problem, facts, 1);
  const Layer& layer = back.layer;
  const std::int64_t chunks = layer.tokens() / ssd_chunk + layer.b;
  ParameterFields<Params> fields(back.parameters);
  fields.set_scratch(back.program, &Params::states, chunks * layer.state_elements() * 2);
  fields.set_scratch(back.program, &Params::d_states, chunks * layer.state_elements() * 2);
  for (const ssd_walk walk : {ssd_walk::keep, ssd_walk::back})
    append_walk(back.program, problem, facts, config, walk, "ssd_backward_params", back.parameters);
  append_launch(back.program, facts, chunk_backward_file,
                fmt::format("ssd_chunk_tokens_backward<{}>", template_argument(layer)),
                chunks * layer.v_heads, 32 * ssd_chunk_warps, back.parameters)
      .shared_bytes = static_cast<std::uint32_t>(token_bytes(layer));
  return std::move(back).finish();
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const std::vector<StageFamily> families{
      StageFamily(
          {.name = "chunks_sm90",
           .summary =
               "chunks of 64 tokens with wgmma, a head's state in the registers of a warpgroup",
           .pass = "fwd",
           .sources = {sm90_file},
           .is_preferred = has_chunks,
           .refusal = refuse_sm90,
           .search = {sm90_space, sm90_default},
           .program = sm90_program}),
      StageFamily(
          {.name = "chunks",
           .summary = "chunks of 64 tokens with mma.sync, a head's state in the registers of a CTA",
           .pass = "fwd",
           .sources = {chunk_file},
           .is_preferred = has_chunks,
           .refusal = refuse_chunks,
           .search = {chunk_space, chunk_default},
           .program = chunk_program}),
      gated_delta_rule::recurrent_family("fwd", {recurrent_file, decode_file},
                                         {recurrent_space, recurrent_default}, recurrent_program),
      StageFamily(
          {.name = "chunks_backward",
           .summary =
               "chunks of 64 tokens with mma.sync: walks of states and of their gradients, then "
               "all chunks' tokens at once",
           .pass = "bwd",
           .sources = {chunk_file, chunk_backward_file, backward_file, rows_file},
           .is_preferred = has_chunks,
           .refusal = refuse_backward_chunks,
           .search = {chunk_space, chunk_default},
           .program = chunk_backward_program}),
      gated_delta_rule::recurrent_family("bwd", {backward_file, rows_file},
                                         {recurrent_space, recurrent_default}, backward_program)};
  return addresses_of(families);
}

}  // namespace fftune::ssd
