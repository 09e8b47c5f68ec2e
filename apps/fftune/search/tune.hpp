// Searches of this machine's devices, whatever command names the problems.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/saved/saved_inputs.hpp"
#include "registry/op.hpp"
#include "registry/variant.hpp"

namespace fftune::tool {

struct Command;

struct SearchOptions {
  std::string device;
  std::string strategy;
  std::string budget;
  std::string min_gain;
  std::string out = "presets";
  std::string seed = "0";
  std::string max_variants = "0";
  std::string progress;
  std::string launcher;
  bool resume = false;
  bool in_process = false;
  bool retry_quarantined = false;
  std::string wait = "10s";
  bool same_bits = false;
  bool strict = false;
  bool keep_undecided = false;
};

/// `options` must live as long as `command` parses. `several_hosts`: with --launcher, whose devices
/// serve the search of one op.
void add_search_options(Command& command, SearchOptions& options, bool several_hosts);

void add_keep_undecided(Command& command, bool& option, const char* group = "");

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
