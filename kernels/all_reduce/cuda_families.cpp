// The host side of words.cu and chunks.cu.
#include <fmt/format.h>

#include <algorithm>

#include "device/group_layout.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "registry/part_family.hpp"

namespace fftune::all_reduce {
namespace {

constexpr const char* words_file = "all_reduce/words.cu";
constexpr const char* chunks_file = "all_reduce/chunks.cu";

/// "fftune::bf16, fftune::llama_norm, true, true, fftune::norm_output::same, 2": the first template
/// arguments of both kernels.
std::string template_arguments(const Form& form) {
  return fmt::format("{}, fftune::{}_norm, {}, {}, fftune::norm_output::{}, {}",
                     element_type(form.dtype), form.convention, form.normalises, form.adds,
                     form.scale_given ? "fp8_static"
                     : form.quantises ? "fp8"
                                      : "same",
                     form.ranks);
}

/// Adds a kernel with the fields of all_reduce_params. A rank that is alone has its memory in
/// scratch, cleared before each run.
KernelLaunch& append(Program& program, const Problem& problem, const DeviceFacts& facts,
                     const Form& form, const char* file, const std::string& expression,
                     std::int64_t grid, std::int64_t threads, std::int64_t chunk_rows) {
  const TensorPlaces places(all_reduce_op().tensors(problem));
  KernelLaunch& launch =
      append_pdl_kernel(program, facts, file, expression, {static_cast<std::uint32_t>(grid)},
                        static_cast<std::uint32_t>(threads), {});
  ParameterStruct parameters{.bytes = sizeof(all_reduce_params), .fields = {}};
  using Params = all_reduce_params;
  ParameterFields<Params> fields(parameters);
  set_group(fields, program, form, places.at("group"));
  fields.set_tensors(places, &Params::x, "x", &Params::residual, "residual", &Params::w, "w",
                     &Params::y, "y", &Params::sum, "sum", &Params::scales,
                     form.scale_given ? "y_scale" : "scale");
  fields.set(&Params::rows, form.m, &Params::chunk_rows, chunk_rows, &Params::d, form.d,
             &Params::eps, form.eps, &Params::tag, tag_of(problem, expression));
  launch.parameters = std::move(parameters);
  return launch;
}

// Words.

std::int64_t word_vectors(const Form& form, const Config& config) {
  return quotient_up(form.row_bytes(), 16 * config.at("threads") * config.at("cluster"));
}

/// A thread keeps its vectors of x, the residual and w in registers.
std::int64_t most_vectors(std::int64_t threads) {
  return std::min<std::int64_t>(8, (threads > 256 ? 1024 : 2048) / threads);
}

std::optional<std::string> refuse_words(const Problem& problem, const DeviceFacts& facts) {
  if (auto refusal = refuse_peers(problem, facts)) return refusal;
  const Form form = form_of(problem);
  if (form.row_bytes() % 16 != 0)
    return fmt::format("rows of d={} are not whole vectors: a row must be a multiple of 16 bytes",
                       form.d);
  if (static_cast<std::uint64_t>(form.bytes()) > most_word_message)
    return fmt::format("a message of {} bytes exceeds the {} that words carry", form.bytes(),
                       most_word_message);
  const std::int64_t widest = 16 * 2048 * (facts.compute_capability >= 90 ? 8 : 1);
  if (form.row_bytes() > widest)
    return fmt::format("rows of {} bytes exceed the {} that registers hold", form.row_bytes(),
                       widest);
  return std::nullopt;
}

/// Between more ranks two shots move fewer bytes over the link, which counts in long messages.
bool prefers_words(const Problem& problem) {
  const Form form = form_of(problem);
  return form.ranks <= 2 || static_cast<std::uint64_t>(form.bytes()) <= most_packet_message;
}

Space word_space(const Problem& problem, const DeviceFacts& facts) {
  const Form form = form_of(problem);
  Space space;
  space.parameter("threads", "threads of a block", {64, 128, 256, 512, 1024})
      .parameter("cluster", "blocks that share a row", {1, 2, 4, 8})
      .constraint("clusters need compute capability 9.0",
                  [clusters = facts.compute_capability >= 90](const Config& c) {
                    return c.at("cluster") == 1 || clusters;
                  },
                  {"cluster"})
      .constraint("every block needs a vector of the row",
                  [form](const Config& c) {
                    return (c.at("threads") == 64 || c.at("threads") * 8 < form.row_bytes()) &&
                           (c.at("cluster") == 1 ||
                            (c.at("cluster") - 1) * c.at("threads") * 16 < form.row_bytes());
                  },
                  {"threads", "cluster"})
      .constraint("a thread's vectors must fit in registers",
                  [form](const Config& c) {
                    return word_vectors(form, c) <= most_vectors(c.at("threads"));
                  },
                  {"threads", "cluster"});
  return space;
}

/// Two vectors a thread or more, which are in flight together, and clusters for wide rows.
Config word_default(const Problem& problem, const DeviceFacts& facts) {
  const Form form = form_of(problem);
  const std::int64_t vectors = quotient_up(form.row_bytes(), 16);
  const std::int64_t threads =
      std::clamp<std::int64_t>(power_of_two(quotient_up(vectors, 2)), 64, 256);
  std::int64_t cluster = 1;
  if (facts.compute_capability >= 90)
    while (cluster < 8 && vectors > 4 * threads * cluster) cluster *= 2;
  return {{"threads", threads}, {"cluster", cluster}};
}

Program words_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  Form form = form_of(problem);
  form.as_words = true;
  Program program;
  KernelLaunch& launch =
      append(program, problem, facts, form, words_file,
             fmt::format("all_reduce_words<{}, {}, {}, {}>", template_arguments(form),
                         config.at("threads"), word_vectors(form, config), config.at("cluster")),
             (form.m + 1) * config.at("cluster"), config.at("threads"), 1);
  launch.cluster.x = static_cast<std::uint32_t>(config.at("cluster"));
  return program;
}

// Chunks.

std::int64_t chunk_vector(const Form& form) {
  return widest_vector(form.row_bytes());
}

/// Vectors of a summing thread in registers, of all ranks and the residual; or 0: too many.
std::int64_t chunk_vectors(const Form& form, const Config& config) {
  const std::int64_t vectors =
      quotient_up(form.row_bytes(), chunk_vector(form) * config.at("summers"));
  return vectors * (form.ranks + 1) <= 12 ? vectors : 0;
}

std::int64_t rows_of_chunk(const Form& form, const Config& config) {
  return quotient_up(form.m * config.at("parts"), most_chunks);
}

std::int64_t chunk_threads(const Config& config) {
  return config.at("summers") + 32 * config.at("senders");
}

Space chunk_space(const Problem& problem, const DeviceFacts&) {
  const Form form = form_of(problem);
  Space space;
  space
      .parameter("shots",
                 "1: every rank adds all rows; 2: a row's owner adds it, and sends the sum", {1, 2})
      .parameter("senders", "warps that send", {1, 2, 4, 8, 16})
      .parameter("summers", "threads that add and normalise", {128, 256, 512})
      .parameter("parts", "parts of a chunk, each sent by a warp", {1, 2, 4, 8, 16})
      .parameter("blocks", "blocks for each SM", {1, 2, 3, 4})
      .constraint("blocks of an SM have 2048 threads at most",
                  [](const Config& c) {
                    return c.at("blocks") == 1 || c.at("blocks") * chunk_threads(c) <= 2048;
                  },
                  {"blocks", "senders", "summers"})
      .constraint("shots=2 needs two ranks or more",
                  [form](const Config& c) { return c.at("shots") == 1 || form.ranks > 1; },
                  {"shots"})
      .constraint("a part of a row has at least 512 bytes",
                  [form](const Config& c) {
                    return c.at("parts") == 1 || c.at("parts") * 512 <= form.row_bytes();
                  },
                  {"parts"})
      .constraint("parts above 1 is for few rows, where every chunk is one row",
                  [form](const Config& c) {
                    return c.at("parts") == 1 || form.m * c.at("parts") <= most_chunks;
                  },
                  {"parts"});
  return space;
}

/// Few rows: all warps of a block send a row together, and a thread adds a vector or two. Many
/// rows: two warps send a row each, as more of them fill the link's queues and no more of the link,
/// and blocks are small enough for two of an SM, unless rows are wide. Between two ranks one shot
/// moves as many bytes over the link as two.
Config chunk_default(const Problem& problem, const DeviceFacts& facts) {
  const Form form = form_of(problem);
  const std::int64_t vectors = form.row_bytes() / chunk_vector(form);
  const bool few = form.m <= 4 * facts.multiprocessors;
  Config config{{"shots", form.ranks > 2 ? 2 : 1},
                {"senders", few ? 4 : 2},
                {"summers", vectors <= 128 ? 128 : 256},
                {"parts", 1}};
  if (chunk_vectors(form, config) == 0) config.set("summers", 512);
  config.set("blocks", config.at("summers") == 512 ? 1 : 2);
  const Space space = chunk_space(problem, facts);
  if (few)
    for (const std::int64_t parts : {2, 4}) {
      Config finer = config;
      finer.set("parts", parts);
      if (space.violations(finer).empty()) config = finer;
    }
  return config;
}

Program chunk_program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const Form form = form_of(problem);
  const std::int64_t chunk_rows = rows_of_chunk(form, config);
  const std::int64_t blocks = std::min<std::int64_t>(quotient_up(form.m, chunk_rows),
                                                     config.at("blocks") * facts.multiprocessors);
  Program program;
  KernelLaunch& launch =
      append(program, problem, facts, form, chunks_file,
             fmt::format("all_reduce_chunks<{}, {}>", template_arguments(form),
                         StructText("chunk_config", "two_shots", config.at("shots") == 2, "vector",
                                    chunk_vector(form), "senders", config.at("senders"), "summers",
                                    config.at("summers"), "vectors", chunk_vectors(form, config),
                                    "parts", config.at("parts"))),
             blocks + 1, chunk_threads(config), chunk_rows);
  if (form.quantises && !form.adds && chunk_vectors(form, config) == 0) {
    ParameterFields<all_reduce_params>(*launch.parameters)
        .set_scratch(program, &all_reduce_params::sum, form.bytes());
  }
  return program;
}

// NCCL.

/// NCCL's sum; behind it, where there is more to do, the kernel of a rank that is alone.
Program nccl_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  const Form form = form_of(problem);
  const TensorPlaces places(all_reduce_op().tensors(problem));
  const auto tensor = [&](const std::string& name) { return TensorArgument{places.at(name)}; };
  Program program;
  LibrarySum sum{form.dtype, form.m * form.d, tensor("x"), tensor("y"), tensor("group")};
  if (!form.adds && !form.normalises) {
    program.steps.emplace_back(sum);
    return program;
  }
  sum.y = ScratchArgument{0};
  program.scratch.push_back({static_cast<std::size_t>(form.bytes()), false});
  program.steps.emplace_back(sum);

  Problem alone = problem;
  alone.sizes["ranks"] = 1;
  alone.options.erase("link");
  std::vector<Pointer> tensors;
  for (const TensorSpec& spec : all_reduce_op().tensors(alone))
    tensors.push_back(spec.name == "x" ? Pointer{ScratchArgument{0}} : Pointer{tensor(spec.name)});
  Program behind = refuse_words(alone, facts)
                       ? chunk_program(alone, facts, chunk_default(alone, facts))
                       : words_program(alone, facts, word_default(alone, facts));
  // NCCL's kernel is captured with work around it, behind which nothing starts early.
  std::get<KernelLaunch>(behind.steps.back()).programmatic = false;
  append_moved(program, std::move(behind), tensors, places.count());
  return program;
}

}  // namespace

void set_loopback(ParameterFields<group_table> fields, Program& program, const Form& form) {
  using Table = group_table;
  const Table table = loopback_table(form);
  program.scratch.push_back({loopback_bytes(form), true});
  for (int rank = 0; rank < form.ranks; ++rank)
    fields.set_at(&Table::base, static_cast<std::size_t>(rank),
                  ScratchArgument{program.scratch.size() - 1});
  fields.set(&Table::ranks, form.ranks, &Table::timeout, table.timeout, &Table::packets,
             table.packets, &Table::packet_bytes, table.packet_bytes, &Table::data, table.data,
             &Table::data_bytes, table.data_bytes);
}

std::vector<const Family*> cuda_families() {
  static const StageFamily words({.name = "all_reduce_words",
                                  .summary = "one shot, words that are empty until data come",
                                  .sources = {words_file},
                                  .is_preferred = prefers_words,
                                  .refusal = refuse_words,
                                  .search = {word_space, word_default},
                                  .program = words_program});
  static const StageFamily chunks({.name = "all_reduce_chunks",
                                   .summary = "one or two shots, plain data and arrival flags",
                                   .sources = {chunks_file},
                                   .is_fallback = true,
                                   .refusal = refuse_peers,
                                   .search = {chunk_space, chunk_default},
                                   .program = chunk_program});
  static const StageFamily nccl({.name = "all_reduce_nccl",
                                 .summary = "NCCL's sum, and a kernel for what stands behind it",
                                 .needs = {"link", "nccl"},
                                 .sources = {words_file, chunks_file},
                                 .program = nccl_program});
  return {&words, &chunks, &nccl};
}

}  // namespace fftune::all_reduce
