// Built where MPI is found.
#include <mpi.h>

#include <array>

#include "apps/fftune/search/sweep_device.hpp"
#include "core/error.hpp"

namespace fftune::tool {

MpiRank join_by_mpi(const std::function<std::string()>& invite) {
  if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS)
    throw Error(ErrorKind::unavailable, "MPI does not start: is this run by mpirun?");
  MpiRank self;
  MPI_Comm_rank(MPI_COMM_WORLD, &self.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &self.count);
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &self.on_host);
  MPI_Comm_size(host, &self.host_ranks);
  MPI_Comm_free(&host);
  std::array<char, 4096> text{};
  if (self.rank == 0) invite().copy(text.data(), text.size() - 1);
  MPI_Bcast(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  MPI_Finalize();
  self.invitation = text.data();
  return self;
}

}  // namespace fftune::tool
