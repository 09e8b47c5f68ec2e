#include "cuda/nccl.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/fork.hpp"
#include "core/lookup.hpp"
#include "cuda/shared_library.hpp"

namespace fftune::cuda {
namespace {

// As in nccl.h, whose values never change.
constexpr Nccl::Status nccl_success = 0;
constexpr int operation_sum = 0;

int nccl_type(DType dtype) {
  return value_of<DType, int>(dtype, {{DType::fp16, 6}, {DType::f32, 7}, {DType::bf16, 9}});
}

/// The results of a call that may never return, for whoever still waits for it.
struct Joining {
  std::mutex mutex;
  std::condition_variable came;
  bool done = false, abandoned = false;
  Nccl::Status status = nccl_success;
  Nccl::Communicator communicator = nullptr;
};

}  // namespace

std::shared_ptr<const Nccl> Nccl::open(const std::vector<std::filesystem::path>& folders,
                                       const std::filesystem::path& path) {
  const auto candidates = path.empty() ? library_candidates({"libnccl.so.2"}, folders)
                                       : std::vector<std::string>{path.string()};
  std::optional<SharedLibrary> library;
  for (const auto& candidate : candidates)
    if ((library = SharedLibrary::open(candidate))) break;
  if (!library)
    throw Error(ErrorKind::unavailable,
                path.empty()
                    ? "NCCL is not there: install it (PyTorch's wheels bring it as nvidia-nccl), "
                      "or set FFTUNE_NCCL to the path of libnccl.so.2"
                    : fmt::format("NCCL is not at FFTUNE_NCCL, {}: give the path of libnccl.so.2",
                                  path.string()));
  auto nccl = std::make_shared<Nccl>();
  library->load(nccl->get_unique_id, "ncclGetUniqueId");
  library->load(nccl->comm_init_rank, "ncclCommInitRank");
  library->load(nccl->comm_destroy, "ncclCommDestroy");
  library->load(nccl->comm_abort, "ncclCommAbort");
  library->load(nccl->comm_get_async_error, "ncclCommGetAsyncError");
  library->load(nccl->all_reduce, "ncclAllReduce");
  library->load(nccl->get_error_string, "ncclGetErrorString");
  nccl->get_last_error =
      reinterpret_cast<decltype(nccl->get_last_error)>(library->find("ncclGetLastError"));
  return nccl;
}

void Nccl::check(Status status, const char* what, ErrorKind kind) const {
  if (status == nccl_success) return;
  std::string words = get_error_string(status);
  if (const char* const more = get_last_error ? get_last_error(nullptr) : nullptr; more && *more)
    words += fmt::format(": {}", more);
  std::replace(words.begin(), words.end(), '\n', ' ');
  throw Error(kind, fmt::format("NCCL: {}: {}", what, words));
}

struct NcclCommunicator::State {
  std::shared_ptr<const Nccl> library;
  OnDevice on_device;
  Nccl::Communicator communicator = nullptr;
  std::mutex mutex;  // held while the communicator is ended, or asked
  std::atomic<bool> ended = false;
  int forks = fork_count();  // a child has neither the device nor NCCL's threads

  /// By a thread, because NCCL's call returns only when the graphs that hold its sums are gone.
  /// Waits for it as long as it usually takes.
  static void end(const std::shared_ptr<State>& state,
                  Nccl::Status (*Nccl::*how)(Nccl::Communicator)) {
    if (state->ended.exchange(true) || fork_count() != state->forks) return;
    std::packaged_task<void()> ending([state, how] {
      const std::lock_guard lock(state->mutex);
      state->on_device([&] { (state->library.get()->*how)(state->communicator); });
    });
    const auto ended = ending.get_future();
    try {
      std::thread(std::move(ending)).detach();
    } catch (const std::system_error&) {
      return;  // no thread is to be had: the communicator ends with the process
    }
    ended.wait_for(std::chrono::seconds(2));
  }

  /// The communicators of this process, by the memory of their groups.
  struct All {
    ForkMutex mutex;
    std::map<const void*, std::shared_ptr<State>> by_group;
  };
  static All& all() {
    static All all;
    return all;
  }
};

NcclCommunicator::NcclCommunicator(std::shared_ptr<const Nccl> library,
                                   const CommunicatorOptions& options, OnDevice on_device)
    : state_(std::make_shared<State>()), group_(options.group) {
  state_->library = std::move(library);
  state_->on_device = std::move(on_device);
  // The call waits for the ranks without a limit. A thread that nobody waits for any longer goes on
  // until NCCL finds that they are gone.
  const auto joining = std::make_shared<Joining>();
  std::thread([joining, state = state_, id = Nccl::Id{options.id}, ranks = options.ranks,
               rank = options.rank] {
    Nccl::Communicator made = nullptr;
    Nccl::Status status = nccl_success;
    state->on_device([&] { status = state->library->comm_init_rank(&made, ranks, id, rank); });
    const std::lock_guard lock(joining->mutex);
    if (joining->abandoned && status == nccl_success)
      state->on_device([&] { state->library->comm_abort(made); });
    joining->status = status;
    joining->communicator = made;
    joining->done = true;
    joining->came.notify_all();
  }).detach();
  std::unique_lock lock(joining->mutex);
  while (!joining->done) {
    const bool late = std::chrono::steady_clock::now() > options.deadline;
    if (late || (options.gives_up && options.gives_up())) {
      joining->abandoned = true;
      throw Error(ErrorKind::unavailable,
                  late ? "NCCL: the ranks did not connect in time: NCCL_DEBUG=INFO says why"
                       : "NCCL: a rank is gone");
    }
    joining->came.wait_for(lock, std::chrono::milliseconds(10));
  }
  state_->library->check(joining->status, "ncclCommInitRank", ErrorKind::unavailable);
  state_->communicator = joining->communicator;
  const std::lock_guard all_lock(State::all().mutex.own());
  State::all().by_group[group_] = state_;
}

NcclCommunicator::~NcclCommunicator() {
  {
    const std::lock_guard lock(State::all().mutex.own());
    State::all().by_group.erase(group_);
  }
  State::end(state_, &Nccl::comm_destroy);
}

void NcclCommunicator::end() {
  State::end(state_, &Nccl::comm_abort);
}

void NcclCommunicator::check() const {
  const std::unique_lock lock(state_->mutex, std::try_to_lock);
  if (!lock || state_->ended) return;
  Nccl::Status found = nccl_success;
  const Nccl& library = *state_->library;
  library.check(library.comm_get_async_error(state_->communicator, &found), "ncclCommGetAsyncError",
                ErrorKind::device_fault);
  library.check(found, "a sum of the group", ErrorKind::device_fault);
}

void sum_of_group(const void* group, const void* x, void* y, std::size_t elements, DType dtype,
                  void* stream) {
  std::shared_ptr<NcclCommunicator::State> state;
  {
    auto& all = NcclCommunicator::State::all();
    const std::lock_guard lock(all.mutex.own());
    const auto found = all.by_group.find(group);
    if (found != all.by_group.end()) state = found->second;
  }
  if (!state)
    throw Error(ErrorKind::invalid_input,
                "link=nccl: the tensor `group` is no memory of a group with NCCL in this process: "
                "make the group with nccl");
  if (state->ended)
    throw Error(ErrorKind::device_fault,
                "link=nccl: a rank of the group is gone: make a new group");
  state->library->check(state->library->all_reduce(x, y, elements, nccl_type(dtype), operation_sum,
                                                   state->communicator, stream),
                        "ncclAllReduce", ErrorKind::device_fault);
}

}  // namespace fftune::cuda
