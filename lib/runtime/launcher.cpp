#include "runtime/launcher.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "runtime/environment.hpp"

namespace fftune {
namespace {

/// The variables of one kind of launcher.
struct Launcher {
  const char *rank, *ranks;
  std::vector<const char*> job;  // those that are set together name the job
};

const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> all{
      // Open MPI
      {"OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE",
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
      // MPICH and Intel MPI
      {"MPI_LOCALRANKID", "MPI_LOCALNRANKS", {}},
      // torchrun
      {"LOCAL_RANK", "LOCAL_WORLD_SIZE", {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"}},
      // srun; with as many tasks on each node its number is "4" or "4(x2)"
      {"SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", {"SLURM_JOB_ID", "SLURM_STEP_ID"}}};
  return all;
}

/// The number that the text begins with; what follows may be a bracket.
std::optional<int> number_of(const char* text) {
  if (text == nullptr) return std::nullopt;
  const std::string_view all(text);
  int number = 0;
  const auto [end, error] = std::from_chars(all.data(), all.data() + all.size(), number);
  const bool whole = end == all.data() + all.size() || *end == '(';
  if (error != std::errc() || !whole || number < 0) return std::nullopt;
  return number;
}

}  // namespace

LaunchedRank launched_rank(const std::function<const char*(const char*)>& variable) {
  for (const Launcher& launcher : launchers()) {
    const auto rank = number_of(variable(launcher.rank)),
               ranks = number_of(variable(launcher.ranks));
    if (!rank || !ranks) continue;
    std::string job;
    for (const char* const name : launcher.job)
      if (const char* const value = variable(name)) job += fmt::format("{}.", value);
    // The processes of a host have one parent where the launcher names no job.
    if (job.empty()) job = fmt::format("{}.", ::getppid());
    // A slash would make a path of it.
    std::replace(job.begin(), job.end(), '/', '-');
    return {job, *rank, *ranks};
  }
  throw Error(
      ErrorKind::invalid_input,
      "no launcher's variables say which rank this process is: start it by mpirun, torchrun "
      "or srun, or give rank and ranks");
}

LaunchedRank launched_rank() {
  return launched_rank(variable_of_launcher);
}

}  // namespace fftune
