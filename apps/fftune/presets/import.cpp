// fftune presets import-vllm: what vLLM's tables of its fused mixture-of-experts kernel were tuned
// for, as searches of moe-ffn.
//
// A table's name has the experts, the intermediate size of a device and the device:
//   E=128,N=768,device_name=NVIDIA_H200[,dtype=fp8_w8a8][,block_shape=[128,128]].json
// and its keys are numbers of tokens, beside "triton_version". The embedding size and the experts
// of a token are not in it: a known model of these sizes has them, or --d and --top-k give them.
// Its values are parameters of that kernel, and mean nothing to others. fp8_w8a8 is fp8 with scales
// of tensors, with a block_shape of 128 x 128 with scales of blocks.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/command_line/command.hpp"
#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/presets/presets.hpp"
#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "core/file_access.hpp"
#include "registry/catalog.hpp"
#include "tuning/log.hpp"

namespace fftune::tool {

namespace {

constexpr const char* op_name = "moe-ffn";

struct ImportOptions {
  std::vector<std::string> paths;
  std::int64_t d = 0, choices = 0;
};

struct Table {
  std::filesystem::path path;
  std::int64_t experts = 0, h = 0;
  std::string device, dtype, block_shape;
  std::vector<std::int64_t> tokens;
};

/// The value of "NAME=value" in a table's name, or of "NAME=[a,b]" with its brackets; empty: there
/// is none.
std::string field_of(const std::string& name, const std::string& field) {
  const auto at = ("," + name).find("," + field + "=");
  if (at == std::string::npos) return "";
  const auto first = at + field.size() + 1;
  const bool is_list = name.compare(first, 1, "[") == 0;
  const auto end = is_list ? name.find(']', first) : name.find(',', first);
  return name.substr(first, end == std::string::npos ? end : end - first + (is_list ? 1 : 0));
}

using Given = std::vector<std::pair<std::string, std::string>>;

/// How a search says the element type of a table; nothing: moe-ffn has no such type.
std::optional<Given> dtype_options(const Table& table) {
  if (table.dtype.empty() && table.block_shape.empty()) return Given{};
  if (table.dtype != "fp8_w8a8") return std::nullopt;
  if (table.block_shape.empty()) return Given{{"dtype", "fp8"}};
  std::string shape = table.block_shape;
  std::erase(shape, ' ');
  if (shape == "[128,128]") return Given{{"dtype", "fp8"}, {"scales", "block"}};
  return std::nullopt;
}

/// All of the text as a whole number from 1 on.
std::optional<std::int64_t> whole_of(const std::string& text) {
  const bool digits =
      !text.empty() && text.size() < 10 &&
      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoll(text) < 1) return std::nullopt;
  return std::stoll(text);
}

/// Throws Error(invalid_input) for a file that is no table.
Table read_table(const std::filesystem::path& path) {
  const auto reject = [&](const std::string& why) {
    throw Error(ErrorKind::invalid_input, fmt::format("{}: {}", path.string(), why));
  };
  Table table;
  table.path = path;
  const std::string name = path.stem().string();
  const auto experts = whole_of(field_of(name, "E")), h = whole_of(field_of(name, "N"));
  if (!experts || !h)
    reject("the name of a vLLM table begins like E=128,N=768,device_name=NVIDIA_H200");
  table.experts = *experts;
  table.h = *h;
  table.device = field_of(name, "device_name");
  table.dtype = field_of(name, "dtype");
  table.block_shape = field_of(name, "block_shape");
  std::string text;
  try {
    text = read_whole_file(path);
  } catch (const Error& error) {
    reject(error.what());
  }
  const Json json = [&] {
    try {
      return parse_json(text);
    } catch (const Error&) {
      return Json();
    }
  }();
  const auto* const members = json.get_if<Json::Object>();
  if (members == nullptr) reject("not a JSON object of numbers of tokens");
  for (const auto& [key, value] : *members)
    if (const auto tokens = whole_of(key)) table.tokens.push_back(*tokens);
  if (table.tokens.empty()) reject("there is no number of tokens among its keys");
  std::sort(table.tokens.begin(), table.tokens.end());
  return table;
}

/// Files themselves, and of folders those whose name is a table's.
std::vector<std::filesystem::path> table_paths(const std::vector<std::string>& paths) {
  std::vector<std::filesystem::path> found;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      if (!std::filesystem::exists(path))
        throw Error(ErrorKind::invalid_input, fmt::format("{}: there is no such file", path));
      found.emplace_back(path);
      continue;
    }
    std::vector<std::filesystem::path> own;
    std::error_code error;
    for (std::filesystem::directory_iterator entry(path, error), end; !error && entry != end;
         entry.increment(error))
      if (entry->path().extension() == ".json" &&
          entry->path().filename().string().starts_with("E="))
        own.push_back(entry->path());
    if (error)
      throw Error(ErrorKind::io, fmt::format("{}: cannot be listed: {}", path, error.message()));
    std::sort(own.begin(), own.end());
    found.insert(found.end(), own.begin(), own.end());
  }
  return found;
}

/// A layer that a table may be of.
struct Layer {
  std::string model;  // empty: given by hand
  std::int64_t d = 0, choices = 0, tp = 1;
  std::map<std::string, std::string> options = {};
};

std::vector<Layer> layers_of(const Op& op, const Table& table, const ImportOptions& options) {
  if (options.d > 0) return {{"", options.d, options.choices}};
  std::vector<Layer> layers;
  for (const KnownModel& model : op.known_models()) {
    if (model.options.contains("weights")) continue;  // the tables are of dense ones
    const std::int64_t whole = model.sizes.at("h");
    if (model.sizes.at("experts") == table.experts && whole % table.h == 0)
      layers.push_back({.model = model.name,
                        .d = model.sizes.at("d"),
                        .choices = model.sizes.at("top-k"),
                        .tp = whole / table.h,
                        .options = model.options});
  }
  return layers;
}

std::int64_t most_experts(const Op& op) {
  const auto fields = op.sizes();
  const auto found = std::find_if(fields.begin(), fields.end(),
                                  [](const SizeField& field) { return field.name == "experts"; });
  return found->max;
}

/// Why the op cannot be searched for the table; empty: it can.
std::string refusal(const Op& op, const Table& table) {
  if (!dtype_options(table))
    return fmt::format(
        "{} computes in bf16, fp16 and fp8 with scales of tensors or of 128 x 128 "
        "blocks, not {}",
        op_name, table.dtype + (table.block_shape.empty() ? "" : " in " + table.block_shape));
  if (const std::int64_t most = most_experts(op); table.experts > most)
    return fmt::format("{} experts: {} takes up to {}", table.experts, op_name, most);
  return {};
}

/// A search of the table's experts in a layer of a model, as a line and as JSON.
struct Search {
  std::string line;
  Json json;
};
Search search_of(const std::string& name, const Table& table, const Layer& layer) {
  const auto dtype = *dtype_options(table);
  ShellCommand command({"fftune", op_name});
  for (const auto& [size, value] : {std::pair("d", layer.d),
                                    {"h", table.h},
                                    {"experts", table.experts},
                                    {"top-k", layer.choices}})
    command.option(size, fmt::format("{}", value));
  command.option("m", fmt::format("{}", fmt::join(table.tokens, ",")));
  Json given = Json::Object();
  for (const auto& [option, value] : dtype) command.option(option, value);
  for (const auto& [option, value] : layer.options) {
    // Interleaved gates have no scales.
    if (option == "gate-up" && !dtype.empty()) continue;
    command.option(option, value);
    given[option] = value;
  }
  const std::string devices = layer.tp > 1 ? fmt::format(", {} devices", layer.tp) : "";
  const std::string why = layer.model.empty() ? "" : fmt::format("  # {}{}", layer.model, devices);
  return {.line = command.text() + why,
          .json = {{"table", name},
                   {"device", table.device},
                   {"model", layer.model},
                   {"tp", layer.tp},
                   {"op", op_name},
                   {"d", layer.d},
                   {"h", table.h},
                   {"experts", table.experts},
                   {"top-k", layer.choices},
                   {"dtype", dtype.empty() ? "" : "fp8"},
                   {"scales", table.block_shape.empty() ? "" : "block"},
                   {"options", given},
                   {"m", table.tokens}}};
}

int run(const ImportOptions& options, const Session& session) {
  if ((options.d == 0) != (options.choices == 0))
    throw Error(ErrorKind::invalid_input, "--d and --top-k come together");
  const Op& op = builtin_catalog().op(op_name);
  Json document = Json::Array();
  int searches = 0;
  std::vector<std::string> broken;
  for (const auto& path : table_paths(options.paths)) {
    const std::string name = path.filename().string();
    const auto skip = [&](const std::string& why) {
      session.output.line(fmt::format("# {}: {}", name, why));
      document.push_back({{"table", name}, {"skipped", why}});
    };
    Table table;
    try {
      table = read_table(path);
    } catch (const Error& error) {
      broken.emplace_back(error.what());
      document.push_back({{"table", name}, {"broken", error.what()}});
      continue;
    }
    if (const std::string why = refusal(op, table); !why.empty()) {
      skip(why);
      continue;
    }
    const auto layers = layers_of(op, table, options);
    if (layers.empty())
      skip(fmt::format("no known model has {} experts of {}: give --d and --top-k", table.experts,
                       table.h));
    for (const Layer& layer : layers) {
      Search search = search_of(name, table, layer);
      session.output.line(search.line);
      document.push_back(std::move(search.json));
      ++searches;
    }
  }
  session.output.document(document);
  if (searches == 0)
    throw Error(ErrorKind::invalid_input,
                !broken.empty()        ? broken.front()
                : document.size() == 0 ? fmt::format("{}: there is no vLLM table, E=...,N=....json",
                                                     fmt::join(options.paths, ", "))
                                       : "there is no table to search for: see the lines above");
  for (const std::string& each : broken) logging::warn("{}; it is left out", each);
  return broken.empty() ? exit_good : exit_check_failed;
}

}  // namespace

void add_presets_import(CommandLine& line, Command& group) {
  auto [command, options] = line.add<ImportOptions>(
      group, "import-vllm",
      "the searches of moe-ffn that cover the problems of vLLM's tuned tables, as commands", run);
  command
      .option("PATHS", options.paths,
              "tables (E=...,N=...,device_name=....json), or folders of them")
      .required = true;
  command.option("--d N", whole(options.d, 1, 1 << 30),
                 "embedding size, which tables do not have (default: that of the known models "
                 "with as many experts of this size)");
  command.option("--top-k N", whole(options.choices, 1, 1024), "experts of a token, likewise");
}

}  // namespace fftune::tool
