// gated-delta-rule on CUDA, host side.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/common/least_cost.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gated_delta_rule/chunk_params.cuh"
#include "kernels/gated_delta_rule/launch.hpp"
#include "kernels/gemm/element.hpp"

namespace fftune::gated_delta_rule {
namespace {

constexpr const char* recurrent_file = "gated_delta_rule/recurrent.cu";
constexpr const char* decode_file = "gated_delta_rule/decode.cu";
constexpr const char* backward_file = "gated_delta_rule/recurrent_backward.cu";
constexpr const char* prepare_file = "gated_delta_rule/chunk_prepare.cu";
constexpr const char* chunk_backward_file = "gated_delta_rule/chunk_backward.cu";
constexpr const char* scan_file = "gated_delta_rule/chunk_scan.cu";

/// Registers of a thread beside its part of the state, q and k.
constexpr std::int64_t other_registers = 64;

std::int64_t state_bytes(const Layer& layer) {
  return layer.state_dtype == DType::f32 ? 4 : 2;
}

/// Whether neighbouring features, or rows of a state, can be accessed in one vector.
bool fits_k_vector(const Layer& layer, std::int64_t vector) {
  if (layer.dim % vector != 0 || layer.q_row % vector != 0 || layer.k_row % vector != 0)
    return false;
  return layer.key_major || !layer.indices || layer.state_block % vector == 0;
}
bool fits_v_vector(const Layer& layer, std::int64_t vector) {
  if (!layer.key_major) return vector == 1;
  return layer.v_dim % vector == 0 && layer.v_row % vector == 0 &&
         (!layer.indices || layer.state_block % vector == 0);
}

/// The most neighbouring elements of a state, up to 16 bytes, that `fits` allows.
std::int64_t widest_vector(const Layer& layer, bool (*fits)(const Layer&, std::int64_t)) {
  std::int64_t vector = 16 / state_bytes(layer);
  while (!fits(layer, vector)) vector /= 2;
  return vector;
}

std::int64_t features_of_lane(const Layer& layer, const Config& c) {
  const std::int64_t step = c.at("lanes_k") * c.at("k_vector");
  return quotient_up(layer.dim, step) * c.at("k_vector");
}

std::int64_t state_registers(const Layer& layer, const Config& c) {
  return features_of_lane(layer, c) * c.at("rows");
}

/// Registers that a thread needs: a state, and where it is not kept as it is in memory its gradient
/// or the q and k of another token.
std::int64_t registers_needed(const Layer& layer, const Config& c) {
  const std::int64_t state = state_registers(layer, c), features = features_of_lane(layer, c);
  if (layer.is_decode())
    return state * state_bytes(layer) / 4 + 2 * features + 3 * c.at("rows") + other_registers;
  return (layer.backward ? 2 : 1) * state + 3 * features + other_registers;
}

/// Whether the rows of a state are pieces of whole 16 bytes, which a prefetch takes.
bool has_prefetch(const Layer& layer) {
  const auto is_whole = [&](std::int64_t elements) {
    return elements * state_bytes(layer) % 16 == 0;
  };
  return layer.is_decode() && !layer.key_major && is_whole(layer.dim) &&
         (!layer.indices || is_whole(layer.state_block));
}

/// Tokens of a chunk of the backward pass: the states before all chunks and those before a chunk's
/// tokens are as many.
std::int64_t chunk_of(const Layer& layer) {
  const auto root = static_cast<std::int64_t>(std::sqrt(static_cast<double>(layer.s)));
  return std::clamp<std::int64_t>(root, 8, 128);
}

}  // namespace

Space recurrent_space(const Layer& layer, const DeviceFacts& facts) {
  Space space;
  space
      // The backward pass has sums of 4 warps in shared memory.
      .parameter("warps", "warps of a CTA, each with rows of its own",
                 layer.backward ? std::vector<std::int64_t>{1, 2, 4}
                                : std::vector<std::int64_t>{1, 2, 4, 8})
      .parameter("lanes_k", "lanes that share a row of a state", {4, 8, 16, 32})
      .parameter("rows", "rows of a state that a lane has", {1, 2, 4, 8})
      .parameter("k_vector", "neighbouring features of k that a lane has", {1, 2, 4, 8})
      .parameter("v_vector", "neighbouring rows of a state [dim, v-dim] that a lane has",
                 {1, 2, 4, 8})
      .parameter("prefetch", "whether states are prefetched to L2 before the kernel before ends",
                 {0, 1})
      .when_absent(0)
      .constraint(
          "a prefetch takes rows of one token's state, of whole 16 bytes",
          [has = has_prefetch(layer)](const Config& c) { return c.get("prefetch") == 0 || has; },
          {"prefetch"})
      .constraint("a vector must not leave its row, nor be unaligned",
                  [layer](const Config& c) {
                    return fits_k_vector(layer, c.at("k_vector")) &&
                           fits_v_vector(layer, c.at("v_vector"));
                  },
                  {"k_vector", "v_vector"})
      .constraint("one token's states move in the widest vectors",
                  [layer](const Config& c) {
                    return !layer.is_decode() || layer.key_major ||
                           c.at("k_vector") == widest_vector(layer, fits_k_vector);
                  },
                  {"k_vector"})
      .constraint("a lane has whole vectors of rows",
                  [](const Config& c) { return c.at("rows") % c.at("v_vector") == 0; },
                  {"rows", "v_vector"})
      .constraint("no lane is without features",
                  [layer](const Config& c) {
                    return c.get("lanes_k") == 4 ||
                           c.at("lanes_k") / 2 * c.at("k_vector") < layer.dim;
                  },
                  {"lanes_k", "k_vector"})
      .constraint("no warp is without rows",
                  [layer](const Config& c) {
                    const std::int64_t rows = c.at("rows") * (32 / c.at("lanes_k"));
                    return (c.get("warps") == 1 || (c.at("warps") - 1) * rows < layer.v_dim) &&
                           (c.at("rows") == c.at("v_vector") || rows / 2 < layer.v_dim);
                  },
                  {"warps", "lanes_k", "rows", "v_vector"})
      .constraint("a lane's part of the state fits in registers, with q and k of two tokens",
                  [layer, facts](const Config& c) {
                    return registers_needed(layer, c) <=
                           registers_of_thread(facts, 32 * c.at("warps"));
                  },
                  {"warps", "lanes_k", "rows", "k_vector"});
  return space;
}

/// Vectors of 16 bytes of a state, and 256 bytes of it in each lane. For one token of each sequence
/// 128 bytes: the registers of an SM then hold more of the states in all; and fewer where the warps
/// would be fewer than 4 for each SM.
Config recurrent_default(const Layer& layer, const DeviceFacts& facts) {
  const bool is_decode = layer.is_decode();
  const std::int64_t k_vector = widest_vector(layer, fits_k_vector);
  const std::int64_t v_vector = widest_vector(layer, fits_v_vector);
  // Elements of a lane. Fewer lanes of a row [dim, v-dim] have more neighbouring rows.
  const std::int64_t most = is_decode && !layer.key_major ? 128 / state_bytes(layer) : 64;
  const std::int64_t least_rows = std::max<std::int64_t>(4, v_vector);
  // A row among 4 to 32 lanes.
  const auto features = [&](std::int64_t lanes) {
    return quotient_up(layer.dim, lanes * k_vector) * k_vector;
  };
  const auto has_features = [&](std::int64_t lanes) { return lanes / 2 * k_vector < layer.dim; };
  std::int64_t lanes = 8;
  while (lanes < 32 && has_features(2 * lanes) && features(lanes) * least_rows > most) lanes *= 2;
  while (lanes > 4 && !has_features(lanes)) lanes /= 2;
  const auto has_rows = [&](std::int64_t rows) {
    const std::int64_t of_warp = rows * (32 / lanes);
    const std::int64_t warps = layer.b * layer.v_heads * quotient_up(layer.v_dim, of_warp);
    return of_warp / 2 < layer.v_dim && features(lanes) * rows <= most &&
           (!is_decode || warps >= 4 * facts.multiprocessors);
  };
  std::int64_t rows = least_rows;
  while (rows > v_vector && !has_rows(rows)) rows /= 2;
  // One row of a lane leaves few loads in flight: one sequence of 32 heads of 128 in bf16 took 2.93
  // us with 8 lanes of a row, and 2.72 with 16.
  if (is_decode && rows == 1 && lanes < 32 && has_features(2 * lanes)) lanes *= 2;
  // CTAs for all SMs come before CTAs of many warps.
  const std::int64_t warp_rows = rows * (32 / lanes);
  const auto fits = [&](std::int64_t warps) {
    const std::int64_t ctas = layer.b * layer.v_heads * quotient_up(layer.v_dim, warps * warp_rows);
    return (warps - 1) * warp_rows < layer.v_dim && ctas >= 2 * facts.multiprocessors;
  };
  std::int64_t warps = 4;
  while (warps > 1 && !fits(warps)) warps /= 2;
  return {{"warps", warps},       {"lanes_k", lanes},     {"rows", rows},
          {"k_vector", k_vector}, {"v_vector", v_vector}, {"prefetch", 0}};
}

std::string recurrent_argument(const Config& config) {
  StructText text("delta_recurrent_config");
  for (const char* field : {"warps", "lanes_k", "rows", "k_vector", "v_vector"})
    text.set(field, config.get(field));
  return text.flags("prefetch", config.get("prefetch") != 0);
}

std::int64_t blocks_of_state(const Layer& layer, const Config& config) {
  return quotient_up(layer.v_dim,
                     config.at("warps") * config.at("rows") * (32 / config.at("lanes_k")));
}

KernelLaunch& append_launch(Program& program, const DeviceFacts& facts, const char* file,
                            const std::string& expression, std::int64_t ctas, std::int64_t threads,
                            ParameterStruct parameters) {
  KernelLaunch& launch =
      append_pdl_kernel(program, facts, file, expression, {static_cast<std::uint32_t>(ctas)},
                        static_cast<std::uint32_t>(threads), {});
  launch.parameters = std::move(parameters);
  return launch;
}

void append_forward(Program& program, const DeviceFacts& facts, const ForwardFiles& files,
                    const std::string& prefix, const std::string& form, const Layer& layer,
                    const Config& config, ParameterStruct parameters) {
  const bool is_decode = layer.is_decode();
  const std::int64_t ctas = layer.b * blocks_of_state(layer, config);
  KernelLaunch& launch = append_launch(
      program, facts, is_decode ? files.decode : files.recurrent,
      fmt::format("{}{}<{}, {}>", prefix, is_decode ? "decode" : "recurrent", form,
                  recurrent_argument(config)),
      is_decode ? ctas : ctas * layer.v_heads, 32 * config.at("warps"), std::move(parameters));
  if (is_decode) launch.grid.y = static_cast<std::uint32_t>(layer.v_heads);
}

void append_walks(Program& program, ParameterStruct& parameters, const DeviceFacts& facts,
                  const char* file, const std::string& prefix, const std::string& form,
                  const Layer& layer, const Config& config) {
  using Params = delta_backward_params;
  const std::int64_t chunk = chunk_of(layer), threads = 32 * config.at("warps");
  const std::int64_t ctas = layer.b * layer.v_heads * blocks_of_state(layer, config);
  const std::int64_t most_chunks = layer.packed ? layer.tokens() / chunk + layer.b
                                                : layer.b * quotient_up(layer.s, chunk) + layer.b;
  ParameterFields<Params> fields(parameters);
  fields.set_scratch(program, &Params::checkpoints, 4 * most_chunks * layer.state_elements());
  fields.set_scratch(program, &Params::history,
                     4 * ctas * chunk * state_registers(layer, config) * threads);
  fields.set(&Params::chunk, chunk);
  for (const char* walk : {"checkpoints", "reverse"})
    append_launch(program, facts, file,
                  fmt::format("{}{}<{}, {}>", prefix, walk, form, recurrent_argument(config)), ctas,
                  threads, parameters);
}

StageFamily recurrent_family(std::string_view pass, std::vector<std::string> sources,
                             SearchSide<Problem> search,
                             decltype(StageFamilyFacts::program) program) {
  const bool is_backward = pass == "bwd";
  return StageFamily(
      {.name = is_backward ? "recurrent_backward" : "recurrent",
       .summary = is_backward
                      ? "token by token from the last on, with the states before each chunk in "
                        "memory"
                      : "token by token, rows of a state in the registers of a warp",
       .pass = pass,
       .sources = std::move(sources),
       .is_fallback = true,
       .search = search,
       .program = program});
}

namespace {

Program recurrent_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  Program program;
  append_forward(program, facts, {recurrent_file, decode_file}, "delta_rule_",
                 template_argument(layer), layer, config, parameters_of(problem));
  return program;
}

/// The parameters of a pass back beside its `forward`: the gradients' tensors, and memory for the
/// partial sums of `blocks` CTAs of each state.
ParameterStruct gradient_parameters(Program& program, const Problem& problem,
                                    const TensorPlaces& places, std::int64_t blocks) {
  using Params = delta_backward_params;
  const Layer layer = layer_of(problem);
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_tensors(
      places, &Params::d_out, "d_out", &Params::d_final_state, "d_final_state", &Params::dq, "dq",
      &Params::dk, "dk", &Params::dv, "dv", &Params::d_gate, layer.gate == Gate::log ? "dg" : "da",
      &Params::dA_log, "dA_log", &Params::ddt_bias, "ddt_bias", &Params::d_beta,
      layer.sigmoid ? "dbeta_logits" : "dbeta", &Params::d_initial_state, "d_initial_state");
  fields.set(&Params::all_tokens, layer.tokens());
  const std::int64_t head_bytes = 4 * layer.tokens() * layer.v_heads;
  fields.set_scratch(program, &Params::row_sums, blocks * head_bytes * 2 * layer.dim);
  fields.set_scratch(program, &Params::gate_sums, blocks * head_bytes * (1 + layer.decays()));
  if (layer.gate != Gate::log)
    fields.set_scratch(program, &Params::log_sums, head_bytes * layer.decays());
  return parameters;
}

/// The kernels that add up the partial sums of `blocks` CTAs of each state.
void append_sums(Program& program, const DeviceFacts& facts, const Layer& layer,
                 std::int64_t blocks, const ParameterStruct& parameters) {
  const std::string form = template_argument(layer);
  const auto add = [&](const std::string& expression, std::int64_t ctas) {
    append_launch(program, facts, backward_file, "delta_rule_" + expression, ctas, 256, parameters);
  };
  const std::int64_t tokens = layer.tokens();
  add(fmt::format("rows<{}, {}>", form, blocks), quotient_up(tokens * layer.heads, 8));
  add(fmt::format("gates_backward<{}, {}>", form, blocks),
      quotient_up(tokens * layer.v_heads * layer.decays(), 256));
  if (layer.gate != Gate::log) add(fmt::format("parameters<{}>", form), layer.v_heads);
}

Program backward_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  const TensorPlaces places(gated_delta_rule_op().tensors(problem));
  const std::int64_t blocks = blocks_of_state(layer, config);
  Program program;
  ParameterStruct parameters = gradient_parameters(program, problem, places, blocks);
  ParameterFields<delta_backward_params>(parameters)
      .set_struct(&delta_backward_params::forward, parameters_of(problem));
  append_walks(program, parameters, facts, backward_file, "delta_rule_", template_argument(layer),
               layer, config);
  append_sums(program, facts, layer, blocks, parameters);
  return program;
}

Space space_of_problem(const Problem& problem, const DeviceFacts& facts) {
  return recurrent_space(layer_of(problem), facts);
}
Config default_of_problem(const Problem& problem, const DeviceFacts& facts) {
  return recurrent_default(layer_of(problem), facts);
}

// Chunks of 64 tokens, with wgmma.

constexpr std::int64_t slab_bytes = delta_chunk * 128;  // of a tile: 64 tokens, 64 features

/// Shared memory of delta_scan (chunk_walk.cuh).
std::int64_t scan_bytes(const Layer& layer, const Config& c) {
  const std::int64_t slabs = layer.dim / 64, warpgroups = c.at("warpgroups");
  const std::int64_t stage = (2 * slabs + warpgroups + 2) * slab_bytes + 4 * delta_chunk_factors;
  return c.at("stages") * (stage + 16) + warpgroups * slab_bytes;
}
/// Shared memory of delta_prepare (chunk_prepare.cu), a multiple of 1024.
std::int64_t prepare_bytes(const Layer& layer) {
  const std::int64_t slabs = layer.dim / 64, rows = delta_chunk;
  const std::int64_t own = (std::max<std::int64_t>(slabs, 2) + slabs) * slab_bytes +
                           2 * rows * (rows + 4) * 4 + 4 * rows * 4;
  return quotient_up(own, 1024) * 1024;
}
std::int64_t chunk_slots(const Layer& layer) {
  return layer.tokens() / delta_chunk + layer.b;
}

std::optional<std::string> refuse_chunks(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  if (facts.arch != "sm_90a") return "wgmma needs sm_90a, not " + facts.arch;
  if (auto reason = refuse_chunks(layer)) return reason;
  for (const auto& [name, row] :
       {std::pair{"q", layer.q_row}, std::pair{"k", layer.k_row}, std::pair{"v", layer.v_row}})
    if (row % 8 != 0) return fmt::format("rows of {}-row={} are not 16-byte aligned", name, row);
  if (layer.tokens() >= std::int64_t{1} << 31)
    return fmt::format("{} tokens in all exceed 2^31 - 1", layer.tokens());
  return std::nullopt;
}

/// Chunks of a sequence; packed sequences count as equally long ones.
std::int64_t chunks_of_sequence(const Layer& layer) {
  return quotient_up(layer.packed ? quotient_up(layer.s, layer.b) : layer.s, delta_chunk);
}

/// CTAs of the walk, or of the walk that finds what the segments but the last do to a state.
std::int64_t scan_ctas(const Layer& layer, std::int64_t warpgroups, std::int64_t segments) {
  return layer.b * layer.v_heads * segments * (layer.v_dim / (64 * warpgroups));
}
/// Two where they have whole CTAs: they share what they load, and take no longer than one.
std::int64_t transfer_warpgroups(const Layer& layer) {
  return layer.dim % 128 == 0 && layer.v_dim % 128 == 0 ? 2 : 1;
}
std::int64_t transfer_ctas(const Layer& layer, std::int64_t warpgroups, std::int64_t segments) {
  return layer.b * layer.v_heads * (segments - 1) * ((layer.v_dim + layer.dim) / (64 * warpgroups));
}

/// About how many microseconds the walks take on an H200, where a chunk takes 1.05 with one MMA
/// warpgroup and 1.25 with two, and without out a quarter less.
double walk_cost(const Layer& layer, const DeviceFacts& facts, const Config& c) {
  const std::int64_t warpgroups = c.at("warpgroups"), segments = c.at("segments");
  const auto walk = [&](std::int64_t own, std::int64_t ctas) {
    const std::int64_t waves = quotient_up(ctas, std::max(facts.multiprocessors, 1));
    const std::int64_t chunks = quotient_up(chunks_of_sequence(layer), segments);
    return static_cast<double>(waves * chunks) * (own > 1 ? 1.25 : 1.05);
  };
  double cost = walk(warpgroups, scan_ctas(layer, warpgroups, segments));
  if (segments > 1) {
    const std::int64_t own = transfer_warpgroups(layer);
    cost += 0.75 * walk(own, transfer_ctas(layer, own, segments));
    cost += 6 + 1.5 * static_cast<double>(segments);  // launches, and one sum after the other
  }
  return cost;
}

Space chunk_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  space.parameter("warpgroups", "MMA warpgroups of a CTA, each with 64 rows of a state", {1, 2})
      .parameter("stages", "chunks in shared memory", {2, 3, 4})
      .parameter("segments", "segments of a sequence whose walks run side by side",
                 {1, 2, 3, 4, 6, 8, 12, 16, 24, 32})
      .constraint("the rows of a state are whole CTAs'",
                  [layer](const Config& c) { return layer.v_dim % (64 * c.at("warpgroups")) == 0; },
                  {"warpgroups"})
      .constraint("a segment has at least 4 chunks",
                  [layer](const Config& c) {
                    return c.get("segments") == 1 ||
                           4 * c.at("segments") <= chunks_of_sequence(layer);
                  },
                  {"segments"})
      .constraint("segments are for sequences and heads that leave SMs idle",
                  [layer, facts](const Config& c) {
                    return c.get("segments") == 1 ||
                           scan_ctas(layer, c.at("warpgroups"), c.at("segments") / 2) <
                               2 * facts.multiprocessors;
                  },
                  {"warpgroups", "segments"})
      .constraint("the stages must fit in shared memory",
                  [layer, facts](const Config& c) {
                    return scan_bytes(layer, c) <= facts.shared_bytes_per_block;
                  },
                  {"warpgroups", "stages"});
  return space;
}

/// Three stages: one that is computed, and two on their way.
Config chunk_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  return least_cost(chunk_space(problem, facts), "chunks_sm90", [&](const Config& config) {
    return std::pair(walk_cost(layer, facts, config), std::abs(config.get("stages") - 3));
  });
}

/// Whether sequences have chunks that are about full.
bool has_chunks(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return layer.s >= 32 * (layer.packed ? layer.b : 1);
}

/// Boxes of 64 tokens and 64 features of a tensor with rows of `row` elements.
TensorMapArgument tokens_map(const Layer& layer, TensorArgument tensor, std::int64_t row) {
  return {.matrix = tensor,
          .dtype = layer.dtype,
          .rows = layer.tokens(),
          .columns = row,
          .box_rows = delta_chunk,
          .box_columns = 64};
}

/// A delta_chunk_params, with the scratch memory of its chunks.
ParameterStruct chunk_parameters(const Problem& problem, Program& program) {
  using Params = delta_chunk_params;
  const Layer layer = layer_of(problem);
  const TensorPlaces places(gated_delta_rule_op().tensors(problem));
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_struct(&Params::layer, parameters_of(problem));
  const std::int64_t chunks = chunk_slots(layer) * layer.v_heads;
  fields.set_scratch(program, &Params::images, chunks * delta_image_bytes);
  fields.set_scratch(program, &Params::factors, chunks * delta_chunk_factors * 4);
  for (const auto& [map, name, row] : {std::tuple{&Params::q, "q", layer.q_row},
                                       {&Params::k, "k", layer.k_row},
                                       {&Params::v, "v", layer.v_row}})
    fields.set(map, tokens_map(layer, tensor_of(places, name), row));
  return parameters;
}

void append_prepare(Program& program, const DeviceFacts& facts, const Layer& layer,
                    const ParameterStruct& parameters) {
  append_launch(program, facts, prepare_file,
                fmt::format("delta_rule_prepare<{}>", template_argument(layer)),
                chunk_slots(layer) * layer.heads, 128, parameters)
      .shared_bytes = static_cast<std::uint32_t>(prepare_bytes(layer));
}

Program chunk_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Layer layer = layer_of(problem);
  Program program;
  ParameterStruct parameters = chunk_parameters(problem, program);
  if (const std::int64_t others = config.at("segments") - 1; others > 0) {
    ParameterFields<delta_chunk_params>(parameters)
        .set_scratch(program, &delta_chunk_params::transfers,
                     layer.b * layer.v_heads * others * (layer.v_dim + layer.dim) * layer.dim * 4);
  }
  append_prepare(program, facts, layer, parameters);
  const std::string form = template_argument(layer);
  const std::int64_t warpgroups = config.at("warpgroups"), segments = config.at("segments");
  const auto walk = [&](std::int64_t own, bool is_transfer, std::int64_t ctas) {
    // The other walk's CTAs may be larger.
    Config sized = {{"warpgroups", own}, {"stages", config.at("stages")}};
    while (scan_bytes(layer, sized) > facts.shared_bytes_per_block)
      sized = {{"warpgroups", own}, {"stages", sized.at("stages") - 1}};
    append_launch(program, facts, scan_file,
                  fmt::format("delta_rule_scan<{}, {}>", form,
                              StructText("delta_scan_config", "warpgroups", own, "stages",
                                         sized.get("stages"), "segments", segments)
                                  .flags("transfer", is_transfer)),
                  ctas, 128 * (own + 1), parameters)
        .shared_bytes = static_cast<std::uint32_t>(scan_bytes(layer, sized));
  };
  if (segments > 1) {
    const std::int64_t own = transfer_warpgroups(layer);
    walk(own, true, transfer_ctas(layer, own, segments));
    append_launch(program, facts, scan_file, fmt::format("delta_rule_join<{}, {}>", form, segments),
                  layer.b * layer.v_heads * (layer.v_dim / 8), layer.dim, parameters);
  }
  walk(warpgroups, false, scan_ctas(layer, warpgroups, segments));
  return program;
}

/// Shared memory of delta_tokens (chunk_backward.cu), a multiple of 1024.
std::int64_t tokens_bytes(const Layer& layer) {
  const std::int64_t k_slabs = layer.dim / 64, v_slabs = layer.v_dim / 64;
  const std::int64_t tiles = 2 * v_slabs * k_slabs + 3 * v_slabs + 2 * k_slabs + 4;
  const std::int64_t sums = (2 + 4 + 2 + 6 + 1) * delta_chunk + 8;
  return tiles * slab_bytes + quotient_up(4 * (delta_chunk_factors + sums), 1024) * 1024;
}
/// Shared memory of delta_scan with `keeps`, or with `back`.
std::int64_t keeping_bytes(const Layer& layer, const Config& c, bool is_back) {
  return scan_bytes(layer, c) +
         c.at("warpgroups") * (layer.dim / 64 + (is_back ? 1 : 0)) * slab_bytes;
}

std::optional<std::string> refuse_backward_chunks(const Problem& problem,
                                                  const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  if (auto refusal = refuse_chunks(problem, facts)) return refusal;
  if (tokens_bytes(layer) > facts.shared_bytes_per_block)
    return fmt::format("a chunk's states of v-dim={} and dim={} do not fit in shared memory",
                       layer.v_dim, layer.dim);
  return std::nullopt;
}

Space backward_chunk_space(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  Space space;
  space.parameter("warpgroups", "MMA warpgroups of a CTA, each with 64 rows of a state", {1, 2})
      .parameter("stages", "chunks in shared memory", {2, 3})
      .constraint("the rows of a state are whole CTAs'",
                  [layer](const Config& c) { return layer.v_dim % (64 * c.at("warpgroups")) == 0; },
                  {"warpgroups"})
      .constraint("the stages must fit in shared memory",
                  [layer, facts](const Config& c) {
                    return keeping_bytes(layer, c, true) <= facts.shared_bytes_per_block;
                  },
                  {"warpgroups", "stages"});
  return space;
}

Config backward_chunk_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  const bool fills = layer.v_dim % 128 == 0 &&
                     2 * scan_ctas(layer, 2, 1) >= 3 * std::max(facts.multiprocessors, 1) / 2;
  return {{"warpgroups", fills ? 2 : 1}, {"stages", 2}};
}

Program backward_chunk_program(const Problem& problem, const DeviceFacts& facts,
                               const Config& config) {
  using Params = delta_chunk_backward_params;
  const Layer layer = layer_of(problem);
  const TensorPlaces places(gated_delta_rule_op().tensors(problem));
  const std::int64_t chunks = chunk_slots(layer) * layer.v_heads;
  Program program;
  // The kernels of chunks take one struct, or its part `chunk`; those that end a backward pass take
  // a struct as its part `back`, with `forward`.
  ParameterStruct of_chunks = chunk_parameters(problem, program);
  ParameterStruct sums = gradient_parameters(program, problem, places, 1);
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_struct(&Params::back, sums);
  ParameterFields<delta_backward_params>(sums).set_struct(&delta_backward_params::forward,
                                                          parameters_of(problem));
  const std::int64_t state_bytes = layer.v_dim * layer.dim * 2;
  const std::int64_t delta_bytes = layer.v_dim * delta_chunk * 2;
  ParameterFields<delta_chunk_params> chunk_fields(of_chunks);
  chunk_fields.set_scratch(program, &delta_chunk_params::states, chunks * state_bytes);
  chunk_fields.set_scratch(program, &delta_chunk_params::deltas, chunks * delta_bytes);
  chunk_fields.set(&delta_chunk_params::d_out,
                   tokens_map(layer, tensor_of(places, "d_out"), layer.v_heads * layer.v_dim));
  fields.set_struct(&Params::chunk, of_chunks);
  fields.set_scratch(program, &Params::d_states, chunks * state_bytes);
  fields.set_scratch(program, &Params::errors, chunks * delta_bytes);
  const std::string form = template_argument(layer);
  const std::int64_t warpgroups = config.at("warpgroups");
  append_prepare(program, facts, layer, of_chunks);
  const auto walk = [&](const char* file, const char* kernel, bool is_back,
                        const ParameterStruct& own) {
    append_launch(program, facts, file,
                  fmt::format("{}<{}, {}>", kernel, form,
                              StructText("delta_scan_config", "warpgroups", warpgroups, "stages",
                                         config.get("stages"), is_back ? "back" : "keeps", true)),
                  scan_ctas(layer, warpgroups, 1), 128 * (warpgroups + 1), own)
        .shared_bytes = static_cast<std::uint32_t>(keeping_bytes(layer, config, is_back));
  };
  walk(scan_file, "delta_rule_scan", false, of_chunks);
  walk(chunk_backward_file, "delta_rule_walk_back", true, parameters);
  append_launch(program, facts, chunk_backward_file, fmt::format("delta_rule_tokens<{}>", form),
                chunks, 256, parameters)
      .shared_bytes = static_cast<std::uint32_t>(tokens_bytes(layer));
  append_sums(program, facts, layer, 1, sums);
  return program;
}

}  // namespace

std::string template_argument(const Layer& layer) {
  constexpr std::string_view gates[] = {"log", "softplus", "bounded"};
  return StructText("delta_rule_form", "type", element_text(element_of(layer.dtype)), "state",
                    element_text(element_of(layer.state_dtype)), "dim", layer.dim, "v_dim",
                    layer.v_dim)
      .name("gate", "delta_gate", layer.gate, Gate::log, gates)
      .flags("channels", layer.channels, "sigmoid", layer.sigmoid, "normed", layer.normed,
             "key_major", layer.key_major);
}

void set_layer(const Layer& layer, const TensorPlaces& places,
               ParameterFields<delta_rule_params>& fields) {
  using Params = delta_rule_params;
  fields.set_tensors(places, &Params::dt_bias, "dt_bias", &Params::state_in,
                     layer.indices ? "states" : "initial_state", &Params::state_out,
                     layer.indices ? "states" : "final_state", &Params::state_indices,
                     "state_indices", &Params::accepted, "accepted", &Params::has_state,
                     "has_state", &Params::offsets, "offsets", &Params::out, "out");
  fields.set(&Params::q_row, layer.q_row, &Params::k_row, layer.k_row, &Params::v_row, layer.v_row,
             &Params::g_row, layer.g_row(), &Params::beta_row, layer.gate_row, &Params::state_block,
             layer.indices ? layer.state_block : layer.state_elements(), &Params::batch, layer.b,
             &Params::tokens, layer.s, &Params::heads, layer.heads, &Params::v_heads, layer.v_heads,
             &Params::states, layer.states, &Params::slots, layer.slots, &Params::null_index,
             layer.null_index, &Params::scale, layer.scale, &Params::beta_scale, layer.beta_scale,
             &Params::gate_bound, layer.gate_bound);
}

ParameterStruct parameters_of(const Problem& problem) {
  using Params = delta_rule_params;
  const Layer layer = layer_of(problem);
  const TensorPlaces places(gated_delta_rule_op().tensors(problem));
  ParameterStruct parameters{.bytes = sizeof(Params), .fields = {}};
  ParameterFields<Params> fields(parameters);
  fields.set_tensors(places, &Params::q, "q", &Params::k, "k", &Params::v, "v", &Params::gate,
                     layer.gate == Gate::log ? "g" : "a", &Params::A_log, "A_log", &Params::beta,
                     layer.sigmoid ? "beta_logits" : "beta");
  set_layer(layer, places, fields);
  fields.set(&Params::gate_gap, layer.gate_block - layer.group());
  return parameters;
}

std::vector<const Family*> cuda_families() {
  static const std::vector<StageFamily> families{
      StageFamily(
          {.name = "chunks_sm90",
           .summary = "chunks of 64 tokens: their matrices at once, then the state's walk by wgmma",
           .pass = "fwd",
           .sources = {prepare_file, scan_file},
           .is_preferred = has_chunks,
           .refusal = refuse_chunks,
           .search = {chunk_space, chunk_default},
           .program = chunk_program}),
      recurrent_family("fwd", {recurrent_file, decode_file}, {space_of_problem, default_of_problem},
                       recurrent_program),
      StageFamily(
          {.name = "chunks_backward_sm90",
           .summary =
               "chunks of 64 tokens: walks of states and of their gradients by wgmma, then all "
               "chunks' tokens at once",
           .pass = "bwd",
           .sources = {prepare_file, scan_file, chunk_backward_file, backward_file},
           .is_preferred = has_chunks,
           .refusal = refuse_backward_chunks,
           .search = {backward_chunk_space, backward_chunk_default},
           .program = backward_chunk_program}),
      recurrent_family("bwd", {backward_file}, {space_of_problem, default_of_problem},
                       backward_program)};
  return addresses_of(families);
}

}  // namespace fftune::gated_delta_rule
