// Which rank a process is by the environment of what launched it.
#include <map>
#include <string>

#include "core/error.hpp"
#include "runtime/launcher.hpp"
#include "support/catch.hpp"

using namespace fftune;

namespace {

LaunchedRank launched_by(const std::map<std::string, std::string>& variables) {
  return launched_rank([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

}  // namespace

TEST_CASE("mpirun, torchrun and srun say which rank of its host a process is") {
  const auto open_mpi = launched_by({{"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                     {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                                     {"PMIX_NAMESPACE", "prterun-7@1"}});
  CHECK(open_mpi.rank == 1);
  CHECK(open_mpi.ranks == 4);
  CHECK(open_mpi.job == "prterun-7@1.");
  const auto torchrun = launched_by({{"LOCAL_RANK", "0"},
                                     {"LOCAL_WORLD_SIZE", "2"},
                                     {"TORCHELASTIC_RUN_ID", "none"},
                                     {"MASTER_PORT", "29500"}});
  CHECK(torchrun.ranks == 2);
  CHECK(torchrun.job == "none.29500.");
  const auto srun = launched_by({{"SLURM_LOCALID", "3"},
                                 {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                                 {"SLURM_JOB_ID", "12"},
                                 {"SLURM_STEP_ID", "0"}});
  CHECK(srun.rank == 3);
  CHECK(srun.ranks == 4);
  CHECK(srun.job == "12.0.");
  // Without a job's name its processes have one parent.
  CHECK(launched_by({{"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "2"}}).job ==
        launched_by({{"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}}).job);
}

TEST_CASE("a process that no launcher started is told so") {
  for (const std::map<std::string, std::string>& variables :
       std::initializer_list<std::map<std::string, std::string>>{
           {},
           {{"LOCAL_RANK", "0"}},
           {{"LOCAL_RANK", "x"}, {"LOCAL_WORLD_SIZE", "2"}},
           {{"SLURM_LOCALID", "0"}, {"SLURM_STEP_TASKS_PER_NODE", "4,2"}}})
    CHECK_THROWS_WITH(launched_by(variables), ContainsSubstring("mpirun, torchrun or srun"));
}
