// fftune tune-vllm: searches what vLLM's plugin will run for a model, by the model's configuration.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/device_option.hpp"
#include "apps/fftune/commands.hpp"
#include "apps/fftune/search/tune.hpp"
#include "apps/fftune/search/vllm_problems.hpp"
#include "apps/fftune/terminal/json.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {
namespace {

/// The parts of FFTUNE_VLLM.
constexpr std::pair<const char*, bool VllmServing::*> parts[] = {
    {"experts", &VllmServing::experts},
    {"layers", &VllmServing::layers},
    {"linears", &VllmServing::linears},
    {"packed-experts", &VllmServing::packed_experts},
    {"linear-attention", &VllmServing::linear_attention},
    {"int4-linears", &VllmServing::int4_linears},
    {"fp8-linears", &VllmServing::fp8_linears},
    {"prompts", &VllmServing::prompts},
    {"ranks", &VllmServing::ranks},
    {"states", &VllmServing::states}};

struct TuneVllmOptions {
  std::vector<std::string> paths;
  VllmServing serving;
  std::vector<std::string> parts;
  bool list = false;
  SearchOptions search;
};

VllmServing serving_of(const TuneVllmOptions& options) {
  VllmServing serving = options.serving;
  if ((serving.block_size & (serving.block_size - 1)) != 0)
    throw Error(ErrorKind::invalid_input,
                fmt::format("--block-size {}: give 16, 32, 64, 128 or 256: attention has no other "
                            "pages",
                            serving.block_size));
  if (!options.parts.empty())
    for (const auto& [name, wanted] : parts)
      serving.*wanted = std::count(options.parts.begin(), options.parts.end(), name) > 0;
  for (const auto& [wanted, part] : {std::pair(serving.prompts, "prompts"),
                                     {serving.ranks, "ranks"},
                                     {serving.states, "states"}})
    if (wanted && !serving.layers)
      throw Error(
          ErrorKind::invalid_input,
          fmt::format("--parts {} without layers: {} are of layers, so name both", part, part));
  return serving;
}

/// The path, or config.json in the folder that it names.
VllmProblems read_problems(const Catalog& catalog, std::filesystem::path path,
                           const VllmServing& serving, DeviceKind kind) {
  std::error_code unknown;
  if (!std::filesystem::exists(path, unknown))
    throw Error(ErrorKind::io,
                fmt::format("{}: this path does not exist: tune-vllm takes the config.json of a "
                            "model, or the folder that has it; it downloads nothing",
                            path.string()));
  if (std::filesystem::is_directory(path, unknown)) path /= "config.json";
  if (!std::filesystem::exists(path, unknown))
    throw Error(ErrorKind::io, fmt::format("{}: the folder has no config.json: give the folder of "
                                           "a model as transformers saves it",
                                           path.parent_path().string()));
  try {
    return vllm_problems(catalog, parse_json(read_whole_file(path)), serving, kind);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("{}: {}", path.string(), error.what()));
  }
}

int run(const TuneVllmOptions& options, const Session& session) {
  if (options.paths.size() != 1)
    throw Error(ErrorKind::invalid_input, "tune-vllm takes one model: give its config.json");
  const VllmServing serving = serving_of(options);
  bool told = false;
  const auto problems = [&](DeviceKind kind) {
    VllmProblems found = read_problems(session.catalog, options.paths.front(), serving, kind);
    if (!told)
      for (const std::string& part : found.left_alone) logging::warn("{}", part);
    told = true;
    return found;
  };
  if (options.list) return list_problems(problems(DeviceKind::cuda).ops, session);
  return search([&](const std::string& device) { return problems(kind_of_device(device)).ops; },
                options.search, nullptr, session);
}

}  // namespace

void add_tune_vllm(CommandLine& line) {
  auto [command, options] = line.add<TuneVllmOptions>(
      line.root(), "tune-vllm",
      "search this device for what vLLM's plugin runs with a model, and write presets", run);
  command.option("CONFIG", options.paths, "config.json of a model, or the folder that has it")
      .required = true;
  const char* group = "How vLLM serves it";
  constexpr std::int64_t most = 1 << 24;
  VllmServing& serving = options.serving;
  command.option("--tp N", whole(serving.tensor_parallel, 1, 1024), "its --tensor-parallel-size",
                 group);
  command.option("--max-model-len N", whole(serving.max_model_len, 1, most),
                 "likewise (default: max_position_embeddings)", group);
  command.option("--block-size N", whole(serving.block_size, 16, 256), "likewise", group);
  command.option("--max-num-seqs N", whole(serving.max_num_seqs, 1, most), "likewise", group);
  command.option("--m LIST", whole_list(serving.tokens, 1, most),
                 "tokens of a batch (default: the powers of two among the sizes of vLLM's CUDA "
                 "graphs, and 1024 and 4096 of prompts where these run by fftune)",
                 group);
  command
      .flag("--every-graph", serving.every_graph, "all sizes of vLLM's CUDA graphs, up to 51",
            group)
      .excludes = "--m";
  std::vector<std::string> known;
  for (const auto& part : parts) known.emplace_back(part.first);
  command.option("--parts LIST", words(options.parts, known),
                 "parts that FFTUNE_VLLM turns on (default: those that the plugin has by default, "
                 "experts,layers,linears,packed-experts,linear-attention)",
                 group);
  command.flag("--batch-invariant", serving.batch_invariant,
               "what it runs with VLLM_BATCH_INVARIANT=1", group);
  command.flag("--list", options.list, "print the problems, and search nothing", group);
  add_search_options(command, options.search, false);
}

}  // namespace fftune::tool
