// An op's description as command-line options, and the given options as problems.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "registry/op.hpp"
#include "saved/inputs.hpp"

namespace fftune::tool {

struct Command;

struct ProblemOptions : GivenProblem {
  std::string model = {};  // of an op that knows models: instead of sizes
  std::string tp = {};     // tensor parallelism
};

/// Whether sizes without a default must be given, or have the op's examples instead.
enum class Sizes { required, optional };

/// Adds --<size>, --<option>, --dtype and --pass, and --model and --tp where the op knows models;
/// `values` must live as long as `command` parses.
void add_problem_options(Command& command, const Op& op, Sizes sizes, ProblemOptions& values);

/// One canonical problem for each dtype and number of tokens, in the order given. Throws
/// Error(invalid_input) that names the option.
std::vector<Problem> problems_of(const Op& op, const ProblemOptions& values, Sizes sizes,
                                 DeviceKind kind);

/// Why no plan is made for a record's problem, one line: a file may be of another version of the
/// op, or written by hand. Empty: it is as plans have it.
std::string fault_of_recorded(const Op& op, const Problem& problem, DeviceKind kind);

/// Whether plans of the problem take the memory of a group (link=peers, or nccl), which the tool
/// has not.
bool needs_group(const Problem& problem);
/// Where such a problem is searched, behind "link=" or "--link ".
std::string needs_group_words(const Problem& problem);
/// The problem of one rank that plays all, where it is one of a group; canonical.
Problem on_one_rank(const Op& op, Problem problem, DeviceKind kind);

/// The op at its example sizes, with every size that was left out filled in: for listings.
Problem example_problem(const Op& op, const std::string& pass, DType dtype, DeviceKind kind);

/// Which problems a command is about; an empty filter takes all. For check.
struct ProblemFilter {
  std::vector<std::string> ops;
  std::vector<std::string> dtypes;
  std::map<std::string, std::vector<std::int64_t>> sizes;
};

/// Adds --op, --dtype, and --<size> for every size of any op.
void add_problem_filter(Command& command, const std::vector<const Op*>& ops, ProblemFilter& values);

bool admits(const ProblemFilter& filter, const Problem& problem);

}  // namespace fftune::tool
