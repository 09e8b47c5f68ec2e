#include "cpu/blas.hpp"

#include <cblas.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/fork.hpp"
#include "cpu/machine.hpp"

namespace fftune {
namespace {

constexpr const char* soname = "libopenblas.so.0";

/// The file in the folders that the loader searches: the program's own, LD_LIBRARY_PATH's, and the
/// system's. Empty if there is none.
std::filesystem::path search_file() {
  void* const self = ::dlopen(nullptr, RTLD_LAZY);
  Dl_serinfo size{};
  if (!self || ::dlinfo(self, RTLD_DI_SERINFOSIZE, &size) != 0) return {};
  std::vector<std::byte> room(size.dls_size);
  auto* const folders = reinterpret_cast<Dl_serinfo*>(room.data());
  if (::dlinfo(self, RTLD_DI_SERINFOSIZE, folders) != 0 ||
      ::dlinfo(self, RTLD_DI_SERINFO, folders) != 0)
    return {};
  for (unsigned i = 0; i < folders->dls_cnt; ++i) {
    std::error_code error;
    const auto file = std::filesystem::path(folders->dls_serpath[i].dls_name) / soname;
    if (std::filesystem::is_regular_file(file, error)) return file;
  }
  return {};
}

const std::filesystem::path& found_file() {
  static const std::filesystem::path file = search_file();
  return file;
}

/// OpenBLAS maps a buffer for each of its threads and for each caller at a time, and the threads
/// have stacks.
constexpr std::size_t buffer_bytes = std::size_t{128} << 20;
/// The least of it that products touch.
constexpr std::int64_t touched_bytes = std::int64_t{16} << 20;

std::size_t buffers_of(std::uint64_t threads) {
  return 2 * static_cast<std::size_t>(threads) + 1;
}

/// The limit of the memory that this process may map, in words; empty if there is none.
std::string mapping_limit() {
  rlimit limit{};
  const auto is_limited = [&](auto resource) {
    return ::getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  };
  if (is_limited(RLIMIT_AS)) return fmt::format("ulimit -v is {} MiB", limit.rlim_cur >> 20);
  if (is_limited(RLIMIT_DATA)) return fmt::format("ulimit -d is {} MiB", limit.rlim_cur >> 20);
  if (text_of_file("/proc/sys/vm/overcommit_memory").starts_with('2'))
    return "the system grants no more memory than it has (vm.overcommit_memory)";
  return "";
}

/// Whether that many buffers can be mapped at once, tried by mapping them: all limits count,
/// whatever sets them. Pages that are not written to take no memory.
bool can_map(std::size_t buffers) {
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::vector<std::unique_ptr<void, Free>> mapped;
  while (mapped.size() < buffers) {
    mapped.emplace_back(std::malloc(buffer_bytes));
    if (!mapped.back()) return false;
    *static_cast<volatile char*>(mapped.back().get()) = 0;  // so that it is not optimised away
  }
  return true;
}

/// Why there is no memory for that many threads of OpenBLAS; empty if there is.
std::string memory_refusal(std::uint64_t threads) {
  const auto needed = static_cast<std::int64_t>(threads) * touched_bytes;
  if (const auto room = read_memory_room("/"); room && *room < needed)
    return fmt::format("its threads need {} MiB, and this control group has {} MiB left",
                       needed >> 20, *room >> 20);
  const std::string limit = mapping_limit();
  if (limit.empty() || can_map(buffers_of(threads))) return "";
  return fmt::format("its threads need an address space of {} MiB, and {}",
                     buffers_of(threads) * buffer_bytes >> 20, limit);
}

/// Whether that many threads can be started, tried by starting them: limits of a user, a control
/// group and the kernel all count.
bool can_start(std::uint64_t count) {
  std::atomic<bool> tried{false};
  std::vector<std::jthread> threads;
  bool all = true;
  try {
    for (std::uint64_t i = 0; i < count; ++i) threads.emplace_back([&tried] { tried.wait(false); });
  } catch (const std::exception&) {
    all = false;
  }
  tried = true;
  tried.notify_all();
  return all;
}

/// Whether OpenBLAS has been opened, and so has its memory.
std::atomic<bool> is_open{false};

/// Why the file should not be opened; empty if it may. OpenBLAS tries again for ever where memory
/// for its threads is refused, and waits for ever for a thread that it could not start.
std::string refusal_of(const std::filesystem::path& file) {
  if (is_open) return "";
  if (file.empty()) return fmt::format("{} is not in the loader's folders", soname);
  const auto threads = static_cast<std::uint64_t>(std::max(1, usable_cores()));
  if (auto refusal = memory_refusal(threads); !refusal.empty()) return refusal;
  return can_start(threads - 1) ? "" : "its threads cannot be started: raise ulimit -u";
}

struct Library {
  decltype(&cblas_sgemm) sgemm = nullptr;
  decltype(&cblas_dgemm) dgemm = nullptr;
  decltype(&openblas_get_num_threads) get_num_threads = nullptr;
  decltype(&openblas_set_num_threads) set_num_threads = nullptr;
};

/// Has OpenBLAS map all buffers that it may ever need: later, when the limits leave no room for
/// one, it would try again for ever. Versions that do not export this are left alone.
void map_buffers(void* handle) {
  const auto alloc = reinterpret_cast<void* (*)(int)>(::dlsym(handle, "blas_memory_alloc"));
  const auto free = reinterpret_cast<void (*)(void*)>(::dlsym(handle, "blas_memory_free"));
  if (!alloc || !free) return;
  std::vector<void*> buffers(buffers_of(static_cast<std::uint64_t>(std::max(1, usable_cores()))) -
                             static_cast<std::size_t>(std::max(1, usable_cores())));
  for (void*& buffer : buffers) buffer = alloc(0);
  for (void* const buffer : buffers) free(buffer);
}

std::optional<Library> open_library() {
  if (!refusal_of(found_file()).empty()) return std::nullopt;
  // Never closed: its threads run to the end.
  void* const handle = ::dlopen(found_file().c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!handle) return std::nullopt;
  Library library;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(::dlsym(handle, name));
    return function != nullptr;
  };
  const bool whole = find(library.sgemm, "cblas_sgemm") && find(library.dgemm, "cblas_dgemm") &&
                     find(library.get_num_threads, "openblas_get_num_threads") &&
                     find(library.set_num_threads, "openblas_set_num_threads");
  if (!whole) return std::nullopt;
  if (!mapping_limit().empty()) map_buffers(handle);
  is_open = true;
  return library;
}

/// Opened once, at the first call; null where that fails.
const Library* library() {
  static const std::optional<Library> opened = open_library();
  return opened ? &*opened : nullptr;
}

void plain_product(std::int64_t m, std::int64_t n, std::int64_t k, DoubleMatrixView a,
                   DoubleMatrixView b, double beta, double* c, std::int64_t c_stride) {
  const auto at = [](const DoubleMatrixView& matrix, std::int64_t row, std::int64_t column) {
    return matrix.transposed ? matrix.data[column * matrix.stride + row]
                             : matrix.data[row * matrix.stride + column];
  };
  for (std::int64_t row = 0; row < m; ++row)
    for (std::int64_t column = 0; column < n; ++column) {
      double sum = 0;
      for (std::int64_t i = 0; i < k; ++i) sum += at(a, row, i) * at(b, column, i);
      double& out = c[row * c_stride + column];
      out = sum + (beta == 0 ? 0 : beta * out);
    }
}

/// OpenBLAS's thread count belongs to the process, and so must what guards it.
struct ThreadCount {
  std::mutex mutex;
  std::condition_variable changed;
  int holders = 0;
  int held = 0;      // while holders > 0
  int original = 0;  // likewise
};

ThreadCount& thread_count() {
  static ThreadCount count;
  static const int forks = fork_count();
  if (forks == fork_count()) return count;
  // The count of a forked child: in the parent's, leases may stand that nobody here will end. (A
  // child of a child shares it, which only matters if that one forked in the middle of a product.)
  static ThreadCount own;
  return own;
}

}  // namespace

std::string blas_file() {
  return found_file().string();
}

std::string blas_version() {
  const auto refusal = refusal_of(found_file());
  if (!refusal.empty()) return fmt::format("{}: {}", no_blas, refusal);
  // "libopenblasp-r0.3.21.so"
  std::error_code error;
  const auto name = std::filesystem::canonical(found_file(), error).filename().string();
  const auto version = name.find("-r");
  if (error || version == name.npos) return "OpenBLAS";
  return "OpenBLAS " + name.substr(version + 2, name.rfind(".so") - version - 2);
}

BlasThreads::BlasThreads(int threads) {
  if (!library()) return;
  auto& count = thread_count();
  std::unique_lock lock(count.mutex);
  count.changed.wait(lock, [&] { return count.holders == 0 || count.held == threads; });
  if (count.holders++ > 0) return;
  count.original = library()->get_num_threads();
  count.held = threads;
  // Where the process gave OpenBLAS fewer threads, it has its reasons.
  const int own = std::min(threads, count.original);
  if (count.original != own) library()->set_num_threads(own);
}

BlasThreads::~BlasThreads() {
  if (!library()) return;
  auto& count = thread_count();
  {
    const std::lock_guard lock(count.mutex);
    if (--count.holders > 0) return;
    if (count.original > count.held) library()->set_num_threads(count.original);
  }
  count.changed.notify_all();
}

namespace {

blasint size(std::int64_t value) {
  return static_cast<blasint>(value);
}

// b comes as [n,k], which is the transpose of what BLAS multiplies by.
template <typename View>
CBLAS_TRANSPOSE first(const View& a) {
  return a.transposed ? CblasTrans : CblasNoTrans;
}
template <typename View>
CBLAS_TRANSPOSE second(const View& b) {
  return b.transposed ? CblasNoTrans : CblasTrans;
}

}  // namespace

void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, MatrixView a, MatrixView b, float beta,
           float* c, std::int64_t c_stride) {
  if (!library()) throw Error(ErrorKind::unavailable, blas_version());
  library()->sgemm(CblasRowMajor, first(a), second(b), size(m), size(n), size(k), 1.0f, a.data,
                   size(a.stride), b.data, size(b.stride), beta, c, size(c_stride));
}

void dgemm(std::int64_t m, std::int64_t n, std::int64_t k, DoubleMatrixView a, DoubleMatrixView b,
           double beta, double* c, std::int64_t c_stride) {
  if (!library()) return plain_product(m, n, k, a, b, beta, c, c_stride);
  library()->dgemm(CblasRowMajor, first(a), second(b), size(m), size(n), size(k), 1.0, a.data,
                   size(a.stride), b.data, size(b.stride), beta, c, size(c_stride));
}

}  // namespace fftune
