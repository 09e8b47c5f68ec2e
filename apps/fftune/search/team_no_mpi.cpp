// Built where MPI is not found.
#include "apps/fftune/search/sweep_device.hpp"
#include "core/error.hpp"

namespace fftune::tool {

MpiRank join_by_mpi(const std::function<std::string()>&) {
  throw Error(ErrorKind::unavailable,
              "this fftune was built without MPI: install libopenmpi-dev and build it again");
}

}  // namespace fftune::tool
