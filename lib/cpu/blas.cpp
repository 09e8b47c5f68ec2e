#include "cpu/blas.hpp"

#include <cblas.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <type_traits>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/fork_count.hpp"
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
    if (std::filesystem::exists(file, error)) return file;
  }
  return {};
}

const std::filesystem::path& found_file() {
  static const std::filesystem::path file = search_file();
  return file;
}

/// Address space that OpenBLAS takes for a thread: a buffer, a stack, and an arena.
constexpr std::uint64_t bytes_of_thread = std::uint64_t{128} << 20;

/// Why the address space has no room for that many threads of OpenBLAS; empty if it has.
std::string memory_refusal(std::uint64_t threads) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "";
  std::uint64_t pages = 0;
  std::istringstream(text_of_file("/proc/self/statm")) >> pages;
  const std::uint64_t used = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t needed = used + (threads + 1) * bytes_of_thread;
  if (needed <= limit.rlim_cur) return "";
  return fmt::format("its threads need an address space of {} MiB, and ulimit -v is {} MiB",
                     needed >> 20, limit.rlim_cur >> 20);
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

/// Why the file should not be opened; empty if it may. OpenBLAS tries again for ever where memory
/// for its threads is refused, and waits for ever for a thread that it could not start.
std::string refusal_of(const std::filesystem::path& file) {
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
