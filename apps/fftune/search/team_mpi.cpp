// Built where MPI is found.
#include <mpi.h>

#include <array>

#include "apps/fftune/search/sweep_device.hpp"
#include "core/error.hpp"

namespace fftune::tool {

Place join_by_mpi(const std::function<std::string()>& invite) {
  if (MPI_Init(nullptr, nullptr) != MPI_SUCCESS)
    throw Error(ErrorKind::unavailable, "MPI does not start: is this run by mpirun?");
  Place place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.count);
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &place.on_host);
  MPI_Comm_size(host, &place.host_ranks);
  MPI_Comm_free(&host);
  std::array<char, 4096> text{};
  if (place.rank == 0) invite().copy(text.data(), text.size() - 1);
  MPI_Bcast(text.data(), static_cast<int>(text.size()), MPI_CHAR, 0, MPI_COMM_WORLD);
  MPI_Finalize();
  place.invitation = text.data();
  return place;
}

}  // namespace fftune::tool
