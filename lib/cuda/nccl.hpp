// NCCL, the vendor's library of collectives: libnccl, opened at run time. It needs no header of its
// own.
#pragma once

#include <array>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"
#include "device/backend.hpp"

namespace fftune::cuda {

/// Each member is the function of that name in nccl.h.
class Nccl {
 public:
  using Communicator = void*;
  using Status = int;
  struct Id {
    std::array<std::byte, 128> bytes;
  };

  /// The library that the process has already, as PyTorch's, or the loader's, or one in `folders`;
  /// with a `path` that one alone. Throws Error(unavailable) saying what to install.
  static std::shared_ptr<const Nccl> open(const std::vector<std::filesystem::path>& folders,
                                          const std::filesystem::path& path);

  Status (*get_unique_id)(Id*) = nullptr;
  Status (*comm_init_rank)(Communicator*, int ranks, Id, int rank) = nullptr;
  Status (*comm_destroy)(Communicator) = nullptr;
  Status (*comm_abort)(Communicator) = nullptr;
  Status (*comm_get_async_error)(Communicator, Status*) = nullptr;
  Status (*all_reduce)(const void* from, void* to, std::size_t elements, int type, int operation,
                       Communicator, void* stream) = nullptr;

  /// Throws an Error of this kind with the library's words unless `status` is success.
  void check(Status status, const char* what, ErrorKind kind) const;

 private:
  const char* (*get_error_string)(Status) = nullptr;
  /// The cause in more words; 2.13 and newer have it.
  const char* (*get_last_error)(Communicator) = nullptr;
};

/// Calls a function where a device is current, on the thread that calls it.
using OnDevice = std::function<void(const std::function<void()>&)>;

/// A rank's communicator. Sums find it by the address of the group's memory.
class NcclCommunicator final : public Communicator {
 public:
  /// Returns when all ranks have come. Throws Error(unavailable) where the library fails, at the
  /// deadline, or when the options give up.
  NcclCommunicator(std::shared_ptr<const Nccl> library, const CommunicatorOptions& options,
                   OnDevice on_device);
  /// Returns within seconds, also where a graph has sums of the communicator, which then ends when
  /// the graph is gone.
  ~NcclCommunicator() override;

  /// As the destructor does.
  void end() override;
  void check() const override;

 private:
  friend void sum_of_group(const void*, const void*, void*, std::size_t, DType, void*);
  struct State;
  std::shared_ptr<State> state_;
  const void* group_;
};

/// Starts y = the sum of x over the ranks whose communicator has this group's memory, which has to
/// be in this process. Throws Error(invalid_input) where the group has none, Error(device_fault)
/// where it has ended or the library fails.
void sum_of_group(const void* group, const void* x, void* y, std::size_t elements, DType dtype,
                  void* stream);

}  // namespace fftune::cuda
