// Searches of this machine's devices, whatever command names the problems.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"
#include "tuning/search/options.hpp"

namespace fftune::tool {

struct Command;

struct SearchOptions {
  std::string device;
  TuneOptions tuning = {};
  std::string strategy;            // empty: the usual one of the device
  std::optional<double> min_gain;  // of the strategy guided
  std::string out = "presets";
  std::string progress;
  std::string launcher;
  bool resume = false;
  bool in_process = false;
  bool same_bits = false;
  bool strict = false;
  bool keep_undecided = false;
};

/// `options` must live as long as `command` parses. `several_hosts`: with --launcher, whose devices
/// serve the search of one op.
void add_search_options(Command& command, SearchOptions& options, bool several_hosts);

/// Adds --wait and --strict, and --keep-undecided, which `shown` has in --help.
void add_disturbance_options(Command& command, SearchOptions& options, const char* group,
                             bool shown);

struct SearchedOp {
  const Op* op = nullptr;
  std::vector<Problem> problems;                      // canonical
  std::map<Problem, std::vector<Recipe>> named = {};  // to try before all else, by problem
};

/// Prints the problems, one a line. Returns the exit code.
int list_problems(const std::vector<SearchedOp>& ops, const Session& session);

/// Searches the ops' problems, prints the results and writes the records. `searched` gives them for
/// a device by name, once for devices of one model. --budget is divided by the number of problems.
/// Returns the exit code; throws Error.
int search(const std::function<std::vector<SearchedOp>(const std::string&)>& searched,
           const SearchOptions& options, const SavedInputs* saved, const Session& session);

}  // namespace fftune::tool
