#include "support/ptx.hpp"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "cuda/open.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace fftune::test {

namespace {

bool has(const std::string& line, const char* words) {
  return line.find(words) != line.npos;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

/// "$L__BB0_7" of its line, or "".
std::string label_of(const std::string& line) {
  return line.starts_with("$L") && line.ends_with(":") ? line.substr(0, line.size() - 1) : "";
}

/// The label that the line jumps to, or "".
std::string target_of(const std::string& line) {
  const auto at = has(line, "bra") ? line.find("$L") : line.npos;
  return at == line.npos ? "" : line.substr(at, line.find(';') - at);
}

bool is_entry(const std::string& line) {
  return has(line, ".entry");
}

}  // namespace

std::string ptx_of(const Program& program, const SourceSet& sources) {
  const testing::TemporaryFolder folder;
  const CompileReport report =
      make_cuda_compiler("sm_90a", sources, {folder.path(), {}})->compile(program);
  REQUIRE(report.failure == "");
  std::string text;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    if (entry.path().extension() == ".cubin") {
      std::ifstream file(entry.path(), std::ios::binary);
      text.append(std::istreambuf_iterator<char>(file), {});
    }
  std::replace(text.begin(), text.end(), '\0', '\n');  // between the lines of PTX
  return text;
}

std::vector<std::string> unfenced_reads(const std::string& ptx, const FenceRules& rules) {
  struct State {
    bool reached = true, fenced = true;
    bool written = false, rows = false;  // behind the last wait
    bool unfenced_rows = false;          // also before it
    void add(const State& other) {
      if (!other.reached) return;
      fenced = (!reached || fenced) && other.fenced;
      written = (reached && written) || other.written;
      rows = (reached && rows) || other.rows;
      unfenced_rows = (reached && unfenced_rows) || other.unfenced_rows;
      reached = true;
    }
  };
  constexpr State unreached{.reached = false};
  const bool gathers = has(ptx, "cp.async.cg.shared");
  std::vector<std::string> found;
  std::map<std::string, State> at_labels;
  State state;
  for (const std::string& line : lines_of(ptx)) {
    if (is_entry(line)) state = {};
    const std::string label = label_of(line), target = target_of(line);
    if (rules.follows_branches && !label.empty()) {
      const auto from = at_labels.find(label);
      if (from != at_labels.end()) state.add(from->second);
    } else if (rules.follows_branches && !target.empty()) {
      at_labels.try_emplace(target, unreached).first->second.add(state);
      if (!has(line, "@")) state = unreached;
    }
    if (has(line, "mbarrier.try_wait")) state.fenced = state.written = state.rows = false;
    // Rows of operands and results are written 16 bytes at a time. A store that never happens keeps
    // ptxas from moving what it depends on.
    const bool rows = has(line, "st.shared.v4") || has(line, "stmatrix");
    if (rows || (has(line, "st.shared") && !has(line, "@never"))) state.written = true;
    if (rows) state.rows = state.unfenced_rows = true;
    if (has(line, "fence.proxy.async.shared")) {
      state.fenced = true;
      state.written = state.rows = state.unfenced_rows = false;
    }
    const bool multiplies = has(line, "wgmma.mma_async");
    const bool reads = multiplies || (has(line, ".async.bulk") && has(line, ".global.shared"));
    if ((reads &&
         (state.written || state.unfenced_rows || (multiplies && gathers && !state.fenced))) ||
        (rules.hands_over && has(line, "mbarrier.arrive") && state.rows))
      found.push_back(line);
  }
  return found;
}

std::vector<std::string> unfenced_global_accesses(const std::string& ptx) {
  std::vector<std::string> found;
  bool acquired = false, stored = false;
  for (const std::string& line : lines_of(ptx)) {
    if (is_entry(line) || has(line, "fence.proxy.async.global")) acquired = stored = false;
    if (has(line, "griddepcontrol.wait") || has(line, "ld.acquire")) acquired = true;
    if (has(line, "cp.async.bulk.wait_group") && !has(line, ".read")) stored = true;
    const bool accesses =
        has(line, ".async.bulk") && has(line, ".global") && !has(line, ".prefetch");
    if ((acquired && accesses) || (stored && has(line, "red.release"))) found.push_back(line);
  }
  return found;
}

bool waits_behind_loads(const std::string& ptx) {
  const std::vector<std::string> lines = lines_of(ptx);
  std::map<std::string, std::size_t> labels;
  for (std::size_t i = 0; i < lines.size(); ++i)
    if (const std::string label = label_of(lines[i]); !label.empty()) labels[label] = i;
  // The lines behind `from`, up to waits or all.
  const auto behind = [&](std::size_t from, bool up_to_waits) {
    std::set<std::size_t> seen;
    std::vector<std::size_t> starts{from + 1};
    while (!starts.empty()) {
      std::size_t at = starts.back();
      starts.pop_back();
      for (; at < lines.size() && seen.insert(at).second; ++at) {
        if (up_to_waits && has(lines[at], "mbarrier.try_wait")) break;
        if (lines[at].starts_with("ret;")) break;
        if (const std::string target = target_of(lines[at]); !target.empty()) {
          starts.push_back(labels.at(target));
          if (!has(lines[at], "@")) break;
        }
      }
    }
    return seen;
  };
  std::map<std::size_t, std::set<std::size_t>> loads;  // and what is behind each
  std::set<std::size_t> last;                          // the thread may end without a wait
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!has(lines[i], "cp.async.bulk.tensor") || !has(lines[i], ".shared::cluster.global"))
      continue;
    loads[i] = behind(i, false);
    for (const std::size_t at : behind(i, true))
      if (lines[at].starts_with("ret;")) last.insert(i);
  }
  // A thread's loads are those of one loop over tiles: each is behind each.
  return std::any_of(loads.begin(), loads.end(), [&](const auto& load) {
    return std::none_of(last.begin(), last.end(), [&](std::size_t other) {
      return other == load.first ||
             (load.second.contains(other) && loads.at(other).contains(load.first));
    });
  });
}

}  // namespace fftune::test
