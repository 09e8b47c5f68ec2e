// Memory of a GPU that processes share through CUDA's handles for inter-process communication, and
// threads of one process, each with a GPU of its own, by its address.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "core/error.hpp"
#include "core/fork.hpp"
#include "cuda/backend.hpp"
#include "cuda/facts.hpp"

namespace fftune::cuda {
namespace {

static_assert(sizeof(CUipcMemHandle) == sizeof(SharedHandle::bytes));

std::uint64_t random_number() {
  std::random_device random;
  return std::uint64_t{random()} << 32 | random();
}

/// A number that no other process has, in other containers neither. A child of fork() is another.
std::uint64_t this_process() {
  static const std::uint64_t own = random_number();
  return own ^ static_cast<std::uint64_t>(::getpid());
}

/// Memory that this process shares, by the keys of its handles: its peers that are threads of the
/// process share it too, so that it outlives a rank that leaves first.
class OwnMemory {
 public:
  struct Entry {
    std::weak_ptr<Buffer> memory;
    SharedContext context;
  };
  static std::uint64_t add(Entry entry) {
    const std::lock_guard lock(own().mutex_.own());
    const std::uint64_t key = random_number();
    own().entries_[key] = std::move(entry);
    return key;
  }
  static void remove(std::uint64_t key) {
    const std::lock_guard lock(own().mutex_.own());
    own().entries_.erase(key);
  }
  /// One without memory: its rank is gone.
  static Entry find(std::uint64_t key) {
    const std::lock_guard lock(own().mutex_.own());
    const auto found = own().entries_.find(key);
    return found == own().entries_.end() ? Entry{} : found->second;
  }

 private:
  static OwnMemory& own() {
    static OwnMemory memory;
    return memory;
  }
  ForkMutex mutex_;
  std::map<std::uint64_t, Entry> entries_;
};

/// That of a peer in this process.
class SharedWithThread final : public Buffer {
 public:
  explicit SharedWithThread(std::shared_ptr<Buffer> memory) : memory_(std::move(memory)) {}
  void* data() const override { return memory_->data(); }
  std::size_t bytes() const override { return memory_->bytes(); }

 private:
  std::shared_ptr<Buffer> memory_;
};

class SharedDeviceBuffer final : public SharedBuffer {
 public:
  SharedDeviceBuffer(SharedContext context, std::unique_ptr<Buffer> memory)
      : context_(std::move(context)), memory_(std::move(memory)) {
    const Driver& driver = context_->driver();
    CUipcMemHandle handle;
    driver.accept(driver.ipc_get_mem_handle(&handle, device_address(memory_->data())),
                  "cuIpcGetMemHandle: the memory of this GPU cannot be shared");
    std::memcpy(handle_.bytes.data(), &handle, sizeof handle);
    const std::string bus = pci_bus(driver, context_->device());
    std::copy_n(bus.begin(), std::min(bus.size(), handle_.device.size() - 1),
                handle_.device.begin());
    void* host = nullptr;
    driver.accept(driver.mem_host_alloc(&host, 2 * sizeof(std::uint32_t),
                                        CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
                  "cuMemHostAlloc");
    notices_ = Owned<void*>(context_, host, driver.mem_free_host);
    std::memset(host, 0, 2 * sizeof(std::uint32_t));
    CUdeviceptr device = 0;
    driver.check(driver.mem_host_get_device_pointer(&device, host, 0), "cuMemHostGetDevicePointer");
    device_notices_ = device;
    handle_.process = this_process();
    handle_.key = OwnMemory::add({memory_, context_});
  }
  ~SharedDeviceBuffer() override { OwnMemory::remove(handle_.key); }
  void* data() const override { return memory_->data(); }
  std::size_t bytes() const override { return memory_->bytes(); }
  const SharedHandle& handle() const override { return handle_; }
  std::uint32_t* notices() const override { return static_cast<std::uint32_t*>(notices_.get()); }
  std::uint64_t device_notices() const override { return device_notices_; }

 private:
  SharedContext context_;
  std::shared_ptr<Buffer> memory_;
  SharedHandle handle_;
  Owned<void*> notices_;
  std::uint64_t device_notices_ = 0;
};

void require_sharing(const Driver& driver) {
  if (!driver.ipc_get_mem_handle || !driver.ipc_open_mem_handle || !driver.mem_host_alloc)
    throw Error(ErrorKind::unavailable,
                "CUDA: this driver does not share memory between processes (cuIpcGetMemHandle)");
}

}  // namespace

std::unique_ptr<SharedBuffer> CudaBackend::allocate_shared(std::size_t bytes) {
  require_sharing(context_->driver());
  const Current current(*context_);
  auto memory = cuda::allocate(context_, bytes);
  fill(memory->data(), 0, bytes);
  synchronize();
  return std::make_unique<SharedDeviceBuffer>(context_, std::move(memory));
}

std::unique_ptr<Buffer> CudaBackend::open_shared(const SharedHandle& handle, std::size_t bytes) {
  const Driver& driver = context_->driver();
  require_sharing(driver);
  const Current current(*context_);
  const std::string there = handle.device.data(), here = pci_bus(driver, context_->device());
  // They share the context, and loading a kernel may wait for all that runs in it ("Potential
  // Hazards" of lazy loading, CUDA Programming Guide); cuModuleUnload and cuMemFree wait too. One
  // rank would wait for the other's kernel, which waits for a launch behind that call.
  const bool is_thread = handle.process == this_process();
  if (is_thread && there == here)
    throw Error(ErrorKind::invalid_input,
                fmt::format("CUDA: two ranks of this process are on GPU {}, where a call of one "
                            "can wait for the other's kernel forever: give each a GPU of its "
                            "own, or a process",
                            here));
  CUdevice device = 0;
  int reaches = 1;
  // A GPU that this process does not see may be reached all the same.
  if (there != here && driver.device_get_by_pci_bus_id && driver.device_can_access_peer &&
      driver.device_get_by_pci_bus_id(&device, there.c_str()) == CUDA_SUCCESS)
    driver.device_can_access_peer(&reaches, context_->device(), device);
  if (reaches == 0)
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: GPU {} cannot reach the memory of GPU {}: choose GPUs that "
                            "`nvidia-smi topo -p2p r` shows as OK, or use NCCL",
                            here, there));
  if (is_thread) {
    const OwnMemory::Entry theirs = OwnMemory::find(handle.key);
    auto memory = theirs.memory.lock();
    if (!memory)
      throw Error(ErrorKind::unavailable,
                  fmt::format("CUDA: the rank on GPU {} gave up while the group was made", there));
    const CUresult enabled = driver.ctx_enable_peer_access(theirs.context->handle(), 0);
    if (enabled != CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
      driver.accept(enabled, "cuCtxEnablePeerAccess");
    return std::make_unique<SharedWithThread>(std::move(memory));
  }
  CUipcMemHandle given;
  std::memcpy(&given, handle.bytes.data(), sizeof given);
  CUdeviceptr address = 0;
  const CUresult result =
      driver.ipc_open_mem_handle(&address, given, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  if (result != CUDA_SUCCESS)
    throw Error(ErrorKind::unavailable,
                fmt::format("CUDA: GPU {} cannot open the memory that a process shares on GPU {}: "
                            "{}: let each process see both GPUs (CUDA_VISIBLE_DEVICES)",
                            here, there, driver.words(result)));
  return buffer_of(Owned<CUdeviceptr>(context_, address, driver.ipc_close_mem_handle), bytes);
}

}  // namespace fftune::cuda
