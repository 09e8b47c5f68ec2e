// ssd on the CPU. For few tokens the recurrence, token by token: tasks have rows of the states,
// which do not depend on each other. For more, chunks (cpu_chunks.cpp).
#include "kernels/common/cpu_vector.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/ssd/cpu_host.hpp"

namespace fftune::ssd {
namespace {

constexpr std::int64_t lanes = 16;  // partial sums of a dot product: what vector registers add up
constexpr std::int64_t fewest_tokens = 8;  // of a sequence in chunks

/// Decays a row, writes to it and reads it. Zeros are behind the last feature up to whole lanes.
float step_row(float* row, const float* B, const float* C, float decay, float x,
               std::size_t width) {
  float sums[lanes] = {};
  for (std::size_t n = 0; n < width; n += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      row[n + lane] = decay * row[n + lane] + x * B[n + lane];
      sums[lane] += row[n + lane] * C[n + lane];
    }
  float sum = 0;
  for (const float one : sums) sum += one;
  return sum;
}

/// The tokens of a head of a sequence, for rows [first, end) of its state.
void walk(const Host& host, std::int64_t sequence, std::int64_t j, std::int64_t first,
          std::int64_t end) {
  const Layer& layer = host.layer;
  const Tokens tokens = host.tokens(sequence);
  const auto rows = static_cast<std::size_t>(end - first),
             features = static_cast<std::size_t>(layer.dim),
             width = (features + lanes - 1) / lanes * lanes;
  const auto x_place = [&](std::int64_t t, std::int64_t row) {
    return t * row + j * layer.v_dim + first;
  };
  const std::int64_t out_row = layer.v_heads * layer.v_dim;
  std::vector<float> out(rows);
  std::int64_t place = host.state_place(sequence);
  if (place < 0) {
    for (std::int64_t t = tokens.first; t < tokens.end; ++t)
      host.write("out", layer.dtype, x_place(t, out_row), out);
    return;
  }
  const std::int64_t head_place = (j * layer.v_dim + first) * layer.dim;
  place += head_place;
  std::vector<float> state(rows * width), B(width), C(width), x(rows);
  if (const char* name = host.first_state(sequence))
    for (std::size_t row = 0; row < rows; ++row)
      host.read(name, layer.state_dtype, place + static_cast<std::int64_t>(row * features),
                {&state[row * width], features});
  const Host::Head head = host.head(j);
  const std::int64_t group = j / layer.group();
  const auto store = [&](const char* name, std::int64_t to) {
    for (float& value : state) value = number(value);
    for (std::size_t row = 0; row < rows; ++row)
      host.write(name, layer.state_dtype, to + static_cast<std::int64_t>(row * features),
                 {&state[row * width], features});
  };
  for (std::int64_t t = tokens.first; t < tokens.end; ++t) {
    const float dt = host.step(t, j, head).dt, decay = std::exp(dt * head.A);
    host.read("B", layer.dtype, t * layer.k_row + group * layer.dim, {B.data(), features});
    host.read("C", layer.dtype, t * layer.q_row + group * layer.dim, {C.data(), features});
    host.read("x", layer.dtype, x_place(t, layer.v_row), x);
    for (std::size_t row = 0; row < rows; ++row)
      out[row] =
          number(step_row(&state[row * width], B.data(), C.data(), decay, dt * x[row], width)) +
          head.D * x[row];
    host.write("out", layer.dtype, x_place(t, out_row), out);
    if (const std::int64_t own = host.slot_place(sequence, t - tokens.first); own >= 0)
      store("states", own + head_place);
  }
  if (const char* name = host.last_state()) store(name, place);
}

Program recurrent_program(const Problem& problem, const DeviceFacts&, const Config& config) {
  return host_program(ssd_op().tensors(problem).size(),
                      [problem, rows = config.at("rows")](const HostCall& call) {
                        const Host host(problem, call);
                        gated_delta_rule::for_each_state_rows(
                            host.layer, rows, call.parallel,
                            [&](std::int64_t sequence, std::int64_t head, std::int64_t first,
                                std::int64_t end) { walk(host, sequence, head, first, end); });
                      });
}

Space recurrent_space(const Problem& problem, const DeviceFacts&) {
  return gated_delta_rule::state_rows_space(layer_of(problem));
}
Config recurrent_default(const Problem& problem, const DeviceFacts&) {
  return gated_delta_rule::state_rows_default(layer_of(problem));
}

std::optional<std::string> refuse_slots(const Problem& problem, const DeviceFacts&) {
  if (layer_of(problem).slots > 0) return "states behind single tokens are not those of chunks";
  return std::nullopt;
}
bool has_chunks(const Problem& problem) {
  const Layer layer = layer_of(problem);
  return layer.s >= fewest_tokens * (layer.packed ? layer.b : 1);
}

/// The heads of a group are shared out where there are few sequences and groups.
Space chunk_space(const Problem& problem, const DeviceFacts&) {
  Space space;
  space.parameter("heads", "heads of a group that a task has", {1, 2, 4, 8, 16})
      .constraint("a task has heads of one group",
                  [group = layer_of(problem).group()](const Config& c) {
                    return group % c.at("heads") == 0;
                  },
                  {"heads"});
  return space;
}
Config chunk_default(const Problem& problem, const DeviceFacts& facts) {
  const Layer layer = layer_of(problem);
  std::int64_t heads = 1;
  while (heads < 8 && layer.group() % (2 * heads) == 0 &&
         layer.b * layer.v_heads >= 8 * heads * facts.multiprocessors)
    heads *= 2;
  return {{"heads", heads}};
}

}  // namespace

std::vector<const Family*> cpu_families() {
  const std::vector<std::string> chunk_sources = {"ssd/cpu_chunks.cpp", "ssd/cpu_host.hpp",
                                                  "gated_delta_rule/cpu_states.hpp",
                                                  vector_kernel_source};
  static const std::vector<StageFamily> families{
      StageFamily(
          {.name = "cpu_chunks",
           .summary =
               "chunks of 64 tokens of some heads on several threads, by products of matrices",
           .device_kind = DeviceKind::cpu,
           .pass = "fwd",
           .sources = chunk_sources,
           .is_preferred = has_chunks,
           .refusal = refuse_slots,
           .search = {chunk_space, chunk_default},
           .program = chunk_program}),
      cpu_fallback({.name = "cpu_recurrent",
                    .summary = "rows of states on several threads, token by token",
                    .pass = "fwd",
                    .sources = {"ssd/cpu_families.cpp", "ssd/cpu_host.hpp",
                                "gated_delta_rule/cpu_states.hpp"},
                    .search = {recurrent_space, recurrent_default},
                    .program = recurrent_program}),
      cpu_fallback(
          {.name = "cpu_chunks_backward",
           .summary = "chunks of 64 tokens of some heads on several threads, from the last one on",
           .pass = "bwd",
           .sources = chunk_sources,
           .search = {chunk_space, chunk_default},
           .program = chunk_backward_program})};
  return addresses_of(families);
}

}  // namespace fftune::ssd
