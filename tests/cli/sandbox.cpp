#include "sandbox.hpp"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace fftune::testing {

namespace {

bool has_search_options(const std::string& words) {
  const auto has = [&](const char* word) { return words.find(word) != std::string::npos; };
  const bool searches =
      words.starts_with("refresh") ||
      (has(" --budget ") && !words.starts_with("bench") && !words.starts_with("check"));
  return searches;
}

std::vector<std::string> command(std::vector<std::string> result, const std::string& tool,
                                 const std::string& words) {
  result.push_back(tool);
  std::istringstream stream(words);
  for (std::string word; stream >> word;) result.push_back(word == "''" ? "" : word);
  // Other tests run beside this one: a search would wait for a quiet moment in vain, 10 s for each
  // problem, and keep out what it cannot decide.
  const auto lacks = [&](const char* option) { return words.find(option) == std::string::npos; };
  if (!has_search_options(words)) return result;
  if (lacks(" --wait")) result.insert(result.end(), {"--wait", "0s"});
  if (lacks(" --keep-undecided") && lacks(" --strict")) result.emplace_back("--keep-undecided");
  return result;
}

}  // namespace

std::unique_ptr<Process> Sandbox::start(const std::string& words) const {
  return start_by({}, words, {});
}

std::vector<std::string> Sandbox::environment() const {
  std::vector<std::string> variables{
      "HOME=" + folder().string(), "FFTUNE_CACHE=" + (folder() / "cache").string(),
      "PATH=/usr/bin:/bin",
      // The BLAS keeps its threads' memory to the end; a fault of the tool itself must still show.
      "ASAN_OPTIONS=detect_leaks=0"};
  // The kernels that an OpenBLAS takes which does not know the processor (docs/environment.md).
  if (const char* const core = std::getenv("OPENBLAS_CORETYPE"))
    variables.push_back("OPENBLAS_CORETYPE=" + std::string(core));
  return variables;
}

std::unique_ptr<Process> Sandbox::start_by(std::vector<std::string> program,
                                           const std::string& words,
                                           const std::vector<std::string>& more) const {
  auto variables = environment();
  variables.insert(variables.end(), more.begin(), more.end());
  return std::make_unique<Process>(command(std::move(program), tool_, words), variables, folder());
}

Finished Sandbox::on_terminal(int columns, const std::string& words) const {
  auto variables = environment();
  variables.push_back("TERM=xterm");
  return run_on_terminal(command({}, tool_, words), variables, folder(), columns);
}

Finished Sandbox::fftune(const std::string& words) const {
  return start(words)->wait();
}

bool Sandbox::open_to_others() {
  std::filesystem::permissions(folder(), std::filesystem::perms::all);
  std::filesystem::copy_file(tool_, folder() / "fftune");
  tool_ = folder() / "fftune";
  return folder_.others_can_reach();
}

std::filesystem::path Sandbox::preset_file(const std::string& presets) const {
  std::error_code error;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder() / presets, error))
    if (entry.path().filename() == "ffn.json") return entry.path();
  return {};
}

std::filesystem::path Sandbox::tuned(const std::string& tokens) const {
  const Finished done =
      fftune("ffn --d 32 --h 64 --device cpu --budget 4s --max-variants 6 --m " + tokens);
  if (done.code != 0) throw std::runtime_error("tuning failed: " + done.err + done.out);
  return preset_file();
}

std::size_t lines_in(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace fftune::testing
