// The devices of a sweep: opened by a worker process each, or by this one, on this host or on those
// of other MPI ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/fftune/command_line/session.hpp"
#include "apps/fftune/saved/weight_options.hpp"
#include "device/backend.hpp"
#include "tuning/evaluate/evaluator.hpp"
#include "tuning/evaluate/multi_device_evaluator.hpp"
#include "tuning/remote/remote_channel.hpp"

namespace fftune::tool {

/// The contents of the sweep's tensors, and what ends the computation of their references.
struct SweepData {
  std::uint64_t seed = 0;
  const SavedInputs* saved = nullptr;         // null: random values alone
  const std::atomic<bool>* cancel = nullptr;  // the user's wish to end the search
};

/// Throws the errors of opening the device in the worker.
std::unique_ptr<Evaluator> start_worker(const std::string& name, const SweepData& data);

class SweepDevice {
 public:
  /// Several names are devices of one kind, over which variants are spread, as over `others` of
  /// other hosts. Throws like open_device(), and where FFTUNE_THREADS would have it measure
  /// less than the device; in this process there is one device alone.
  SweepDevice(const std::vector<std::string>& names, const SweepData& data, bool in_process,
              const Session& session, std::vector<MultiDeviceEvaluator::Device> others = {});

  Evaluator& evaluator() { return *evaluator_; }

 private:
  std::unique_ptr<Backend> backend_;  // only in this process
  std::unique_ptr<Evaluator> evaluator_;
};

struct MpiRank {
  int rank = 0;
  int count = 1;
  int on_host = 0;         // the rank among those of this host
  int host_ranks = 1;      // of this host
  std::string invitation;  // of rank 0, as all ranks know it
};

/// Finds the place of this process among those that mpirun started, and hands what `invite` gives
/// on rank 0 to all. MPI is ended by then: what follows goes over connections of its own, so that
/// the end of one rank is not that of all. Throws Error(unavailable) in a build without MPI.
MpiRank join_by_mpi(const std::function<std::string()>& invite);

/// The part of this host's devices that this rank gives: where several ranks share a host, as most
/// people start them, no two open the same device while there are enough for each. Fewer devices
/// than ranks are given by each of them.
std::vector<std::string> part_of_host(const MpiRank& self, const std::vector<std::string>& names);

/// On rank 0: the devices of the other ranks, as they call; one that does not is a warning.
std::vector<MultiDeviceEvaluator::Device> gather_devices(Listener& listener, int ranks);

/// On every other rank: answers for these devices until rank 0 ends. Throws Error(unavailable) if
/// rank 0 is not reached.
void serve_devices(const MpiRank& self, const std::vector<std::string>& names,
                   const SweepData& data);

}  // namespace fftune::tool
