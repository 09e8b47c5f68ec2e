#include "layers/layer_rules.hpp"

#include <algorithm>

#include "device/sources.hpp"

namespace fftune::testing {
namespace {

using Words = std::vector<std::string_view>;

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

bool starts_with_any(std::string_view text, const Words& starts) {
  return std::any_of(starts.begin(), starts.end(),
                     [&](std::string_view start) { return starts_with(text, start); });
}

/// A folder and the layers whose headers it may include, itself aside. Headers are spelled from
/// lib/ ("core/config.hpp") or from the root ("tuning/tuner.hpp").
struct Layer {
  std::string_view folder;
  std::string_view spelling;
  Words below;
};

const Words mechanism{"core/",    "device/", "registry/", "store/",
                      "runtime/", "verify/", "measure/",  "tuning/log.hpp"};

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The tool compiles for architectures that are not here, which is no device's business.
const Words all_of_lib{"fftune/",  "core/",   "device/",  "cuda/open.hpp", "registry/", "store/",
                       "runtime/", "verify/", "measure/", "saved/",        "tuning/"};
constexpr std::string_view terminal = "apps/fftune/terminal/";
const Words words_and_options{terminal, "apps/fftune/command_line/", "apps/fftune/commands.hpp"};
const Words words_and_presets = with(words_and_options, {"apps/fftune/presets/"});
const Words words_and_inputs = with(words_and_presets, {"apps/fftune/saved/"});

/// The first that a path begins with counts.
const std::vector<Layer>& layers() {
  static const std::vector<Layer> layers{
      {"lib/core/", "core/", {}},
      {"lib/device/", "device/", {"core/"}},
      {"lib/cuda/", "cuda/", {"core/", "device/"}},
      {"lib/cpu/", "cpu/", {"core/", "device/"}},
      {"lib/registry/", "registry/", {"core/", "device/"}},
      // A record names variants, so the store sits above the registry.
      {"lib/store/", "store/", {"core/", "device/", "registry/"}},
      // The tensors of saved models, and which inputs of ops they are.
      {"lib/saved/", "saved/", {"core/", "device/", "registry/", "store/", "verify/"}},
      {"lib/runtime/", "runtime/", {"core/", "device/", "cuda/", "cpu/", "registry/", "store/"}},
      {"lib/verify/", "verify/", {"core/", "device/", "registry/"}},
      {"lib/measure/", "measure/", {"core/", "device/", "registry/", "verify/"}},
      {"lib/ranks/",
       "ranks/",
       {"core/", "device/", "registry/", "store/", "runtime/", "verify/", "measure/"}},
      {"lib/include/", "fftune/", {}},
      {"lib/api/",
       "api/",
       {"fftune/", "core/", "device/", "registry/", "store/", "runtime/", "verify/", "saved/",
        "ranks/"}},
      {"kernels/common/", "kernels/common/", {"core/", "device/", "cpu/", "registry/"}},
      {"kernels/", "kernels/", {"core/", "device/", "cpu/", "registry/"}},
      // Within tuning, from what runs variants to what decides.
      {"tuning/journal/", "tuning/journal/", mechanism},
      {"tuning/evaluate/", "tuning/evaluate/", mechanism},
      {"tuning/protocol/", "tuning/protocol/", with(mechanism, {"tuning/evaluate/"})},
      {"tuning/worker/", "tuning/worker/",
       with(mechanism, {"tuning/evaluate/", "tuning/protocol/"})},
      {"tuning/remote/", "tuning/remote/",
       with(mechanism, {"tuning/evaluate/", "tuning/protocol/"})},
      {"tuning/strategies/", "tuning/strategies/", with(mechanism, {"tuning/journal/"})},
      {"tuning/search/", "tuning/search/",
       with(mechanism, {"tuning/journal/", "tuning/evaluate/", "tuning/strategies/"})},
      {"tuning/decide/", "tuning/decide/",
       with(mechanism, {"tuning/journal/", "tuning/evaluate/", "tuning/search/"})},
      {"tuning/", "tuning/", mechanism},
      // Within the tool, from words and tables to the commands.
      {"apps/fftune/terminal/", "apps/fftune/terminal/", all_of_lib},
      {"apps/fftune/command_line/", "apps/fftune/command_line/", with(all_of_lib, {terminal})},
      {"apps/fftune/saved/", "apps/fftune/saved/", with(all_of_lib, words_and_options)},
      {"apps/fftune/presets/", "apps/fftune/presets/", with(all_of_lib, words_and_options)},
      {"apps/fftune/compile/", "apps/fftune/compile/", with(all_of_lib, words_and_presets)},
      {"apps/fftune/report/", "apps/fftune/report/", with(all_of_lib, words_and_presets)},
      {"apps/fftune/bench/", "apps/fftune/bench/", with(all_of_lib, words_and_inputs)},
      {"apps/fftune/check/", "apps/fftune/check/", with(all_of_lib, words_and_inputs)},
      {"apps/fftune/search/", "apps/fftune/search/", with(all_of_lib, words_and_inputs)},
      {"apps/fftune/inspect/", "apps/fftune/inspect/",
       with(all_of_lib, with(words_and_inputs, {"apps/fftune/check/"}))},
      {"apps/", "apps/", all_of_lib},
  };
  return layers;
}

/// Headers of other projects, and the only places that may include them.
struct External {
  std::string_view what;
  Words headers;
  Words users;
};

const std::vector<External>& externals() {
  static const std::vector<External> externals{
      {"CLI11", {"CLI/"}, {"apps/fftune/command_line/parse.cpp", "apps/fftune/main.cpp"}},
      {"spdlog",
       {"spdlog/"},
       {"tuning/log.cpp", "apps/fftune/main.cpp", "apps/fftune/terminal/output.cpp"}},
      {"nlohmann/json", {"nlohmann/"}, {"lib/store/json_value.cpp"}},
      {"MPI", {"mpi.h"}, {"apps/fftune/search/team_mpi.cpp"}},
      {"the CUDA toolkit", {"cuda", "nvrtc", "cublas", "nvml"}, {"lib/cuda/"}},
      {"BLAS", {"cblas", "openblas"}, {"lib/cpu/"}},
  };
  return externals;
}

struct Call {
  std::string_view function;
  Words users;
  std::string_view instead;
};

const std::vector<Call>& calls_in_one_place() {
  static const std::vector<Call> calls{
      {"getenv", {"lib/runtime/environment.cpp"}, "take an Environment"},
      {"secure_getenv", {"lib/runtime/environment.cpp"}, "take an Environment"},
      {"exit", {"apps/fftune/main.cpp"}, "throw an Error"},
      // A second Ctrl-C: nothing else may be called from a signal handler, nor from a process that
      // was to become a worker and could not.
      {"_exit",
       {"apps/fftune/terminal/interrupt.cpp", "tuning/worker/process.cpp"},
       "throw an Error"},
      {"quick_exit", {"apps/fftune/main.cpp"}, "throw an Error"},
      {"abort", {"apps/fftune/main.cpp"}, "throw an Error"},
  };
  return calls;
}

/// Code that opens a file, or maps one, has one of these; one file has them all. In a process that
/// is between fork() and exec(), nothing but system calls may run.
const Words& words_of_file_access() {
  static const Words words{"O_RDONLY", "O_RDWR",   "O_WRONLY", "fopen",         "freopen",
                           "ifstream", "ofstream", "fstream",  "basic_filebuf", "filebuf",
                           "creat",    "mkstemp",  "mkostemp", "mmap",          "copy_file"};
  return words;
}

bool may_access_files(std::string_view path) {
  return starts_with(path, "lib/core/file_access.") || path == "lib/core/shared_pages.cpp" ||
         path == "tuning/worker/process.cpp" || path == "tuning/worker/in_flight_record.cpp";
}

bool is_device_source(std::string_view path) {
  return starts_with(path, "kernels/") && (path.ends_with(".cu") || path.ends_with(".cuh"));
}

bool calls(const Tokens& tokens, std::string_view function) {
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i)
    if (tokens[i].text == function && tokens[i + 1].text == "(") return true;
  return false;
}

bool has_text(const Tokens& tokens, std::string_view text) {
  return std::any_of(tokens.begin(), tokens.end(), [&](const Token& token) {
    return token.text.find(text) != std::string_view::npos;
  });
}

/// Device sources see each other alone: NVRTC is given no include path.
std::string device_include_rule(const Include& include) {
  if (!include.quoted) return "a device source includes no system header";
  if (starts_with_any(include.name,
                      {"common/", "gemm/", "attention/", "layer/", "moe/", "all_reduce/",
                       "gated_delta_rule/", "indexer/", "mla/", "ssd/"}) &&
      include.name.ends_with(".cuh"))
    return "";
  // The kernel whose epilogue others replace.
  if (include.name == "gemm/sm90/gemm.cu") return "";
  return "a device source includes only .cuh of kernels/common, gemm, attention, layer, moe, "
         "all_reduce, gated_delta_rule, indexer, mla and ssd, and gemm/sm90/gemm.cu";
}

std::string host_include_rule(std::string_view path, const Include& include) {
  for (const auto& external : externals())
    if (starts_with_any(include.name, external.headers) && !starts_with(include.name, "cuda/"))
      return starts_with_any(path, external.users)
                 ? ""
                 : "only " + std::string(external.users.front()) + " and its like use " +
                       std::string(external.what);
  if (!include.quoted) return "";
  for (const auto& layer : layers()) {
    if (!starts_with(path, layer.folder)) continue;
    if (starts_with(include.name, layer.spelling) || starts_with_any(include.name, layer.below))
      return "";
    return "it is not of a layer below " + std::string(layer.folder);
  }
  return "the file is in no known layer";
}

}  // namespace

std::vector<std::string> broken_rules(const std::string& path, std::string_view source) {
  std::vector<std::string> broken;
  const Tokens tokens = tokens_of(source);
  for (const auto& include : includes_of(tokens)) {
    const std::string why =
        is_device_source(path) ? device_include_rule(include) : host_include_rule(path, include);
    if (!why.empty()) broken.push_back(path + ": includes " + include.name + ": " + why);
  }
  if (is_device_source(path)) return broken;

  for (const auto& [function, users, instead] : calls_in_one_place())
    if (std::find(users.begin(), users.end(), path) == users.end() && calls(tokens, function))
      broken.push_back(path + ": calls " + std::string(function) + ", as " +
                       std::string(users.front()) + " alone may: " + std::string(instead));
  if (!may_access_files(path))
    for (const auto word : words_of_file_access())
      if (std::any_of(tokens.begin(), tokens.end(),
                      [&](const Token& token) { return token.text == word; }))
        broken.push_back(path + ": has " + std::string(word) +
                         ", as lib/core/file_access.cpp alone may: read, replace and keep files by "
                         "core/file_access.hpp");
  // Models name the weights of ops.
  if (starts_with(path, "lib/") && path != "lib/saved/names.cpp" && has_text(tokens, "\"ffn\""))
    broken.push_back(path + ": names the op \"ffn\", but lib is mechanism alone");
  return broken;
}

}  // namespace fftune::testing
