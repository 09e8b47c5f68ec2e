#include "device/backend.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "core/memory.hpp"
#include "core/shared_pages.hpp"
#include "cpu/executable.hpp"
#include "cpu/limits.hpp"
#include "cpu/load.hpp"
#include "cpu/machine.hpp"
#include "cpu/open.hpp"
#include "cpu/pool.hpp"
#include "device/group_layout.hpp"
#include "device/lacking.hpp"

namespace fftune {
namespace {

struct Block {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// Blocks of large pages. The largest one that was freed serves the next that it fits, since a
/// search frees the buffers of a problem before it allocates those of the next. The system takes up
/// to a second to make the pages of a gigabyte. Until then it may take them back when it needs
/// memory.
class LargePages {
 public:
  static constexpr std::size_t page = std::size_t{2} << 20;

  LargePages() = default;
  LargePages(const LargePages&) = delete;
  LargePages& operator=(const LargePages&) = delete;
  ~LargePages() { std::free(kept_.data); }

  /// The kept block, or none. A small buffer does not take it from a large one to come.
  Block reuse(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const bool fits = bytes <= kept_.bytes && bytes >= least_kept;
    return fits ? std::exchange(kept_, {}) : Block{};
  }
  void release(Block block) {
    if (block.bytes >= least_kept && madvise(block.data, block.bytes, MADV_FREE) == 0) {
      const std::lock_guard lock(mutex_);
      if (block.bytes > kept_.bytes) std::swap(block, kept_);
    }
    std::free(block.data);
  }

 private:
  static constexpr std::size_t least_kept = std::size_t{64} << 20;
  std::mutex mutex_;
  Block kept_;
};

class CpuBuffer final : public Buffer {
 public:
  CpuBuffer(Block block, std::size_t bytes, std::shared_ptr<LargePages> pages)
      : block_(block), bytes_(bytes), pages_(std::move(pages)) {}
  ~CpuBuffer() override { pages_->release(block_); }
  CpuBuffer(const CpuBuffer&) = delete;
  CpuBuffer& operator=(const CpuBuffer&) = delete;
  void* data() const override { return block_.data; }
  std::size_t bytes() const override { return bytes_; }

 private:
  Block block_;
  std::size_t bytes_;
  std::shared_ptr<LargePages> pages_;
};

class SharedCpuBuffer final : public SharedBuffer {
 public:
  explicit SharedCpuBuffer(SharedPages pages) : pages_(std::move(pages)) {
    handle_.descriptor = pages_.descriptor();
  }
  void* data() const override { return pages_.data(); }
  std::size_t bytes() const override { return pages_.bytes(); }
  const SharedHandle& handle() const override { return handle_; }
  std::uint32_t* notices() const override { return &notices_->error; }
  std::uint64_t device_notices() const override {
    return reinterpret_cast<std::uint64_t>(notices_.get());
  }
  void wait_until_unused() const override {
    while (std::atomic_ref(notices_->users).load() != 0)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  SharedPages pages_;
  SharedHandle handle_;
  std::unique_ptr<HostNotices> notices_ = std::make_unique<HostNotices>();
};

class CpuReplay final : public Replay {
 public:
  CpuReplay(std::vector<RecordedCall> calls, int passes)
      : calls_(std::move(calls)), passes_(passes) {}

  double sample() override {
    const auto start = std::chrono::steady_clock::now();
    for (const auto& call : calls_) call.program->run(call.tensors.data(), call.workspace);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    return time.count() / passes_;
  }

 private:
  std::vector<RecordedCall> calls_;
  int passes_;
};

std::unique_ptr<Parallel> threads_of(const CpuOptions& options, int cores) {
  const int threads = options.threads > 0 ? std::min(options.threads, cores) : cores;
  if (options.run_tasks) return std::make_unique<CallersPool>(threads, options.run_tasks);
  return std::make_unique<Pool>(threads);
}

/// The last seconds of the machine: what is captured is measured next.
class RecentLoad {
 public:
  /// Before a measurement.
  void note() {
    const std::lock_guard lock(mutex_);
    const auto now = read_cpu("/", cores_);
    if (!readings_.empty() && now.seconds - readings_.back().seconds < between_seconds) return;
    readings_.push_back(now);
    while (readings_.size() > 1 && now.seconds - readings_.front().seconds > remembered_seconds)
      readings_.pop_front();
  }

  /// Since it was asked last, or over the last seconds if that is less.
  std::vector<std::string> disturbances() {
    const std::lock_guard lock(mutex_);
    const auto now = read_cpu("/", cores_);
    std::vector<std::string> found;
    if (!readings_.empty()) {
      found = fftune::disturbances(readings_.front(), now, full_clock_hz_);
      if (is_working(readings_.front(), now))
        full_clock_hz_ = std::max(full_clock_hz_, now.clock_hz);
    }
    readings_ = {now};
    return found;
  }

 private:
  static constexpr double between_seconds = 0.05;
  static constexpr double remembered_seconds = 4;

  std::vector<int> cores_ = own_cores();
  std::mutex mutex_;
  std::deque<CpuReading> readings_;
  double full_clock_hz_ = 0;  // the most that was seen
};

class CpuBackend final : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options)
      : facts_(cpu_facts()),
        engine_(std::make_shared<CpuEngine>(threads_of(options, facts_.multiprocessors))) {}

  const DeviceFacts& facts() const override { return facts_; }

  CompileResult compile(const Program& program) override {
    CompileReport report;
    report.failure = CpuProgram::check(program);
    if (!report.failure.empty()) return {nullptr, report};
    auto ready = std::make_shared<const CpuProgram>(engine_, program);
    return {std::make_shared<const CpuExecutable>(std::move(ready), report), report};
  }

  std::size_t workspace_bytes(const Program& program) const override {
    return CpuProgram(engine_, program).workspace_bytes();
  }

  std::size_t free_bytes() const override { return static_cast<std::size_t>(available_bytes()); }

  std::unique_ptr<Buffer> allocate(std::size_t bytes) override {
    const std::size_t alignment = bytes >= LargePages::page ? LargePages::page : 256;
    const std::size_t rounded = (bytes / alignment + 1) * alignment;
    Block block = pages_->reuse(rounded);
    if (block.data == nullptr) {
      // Linux promises more memory than there is and ends the process that uses it: ask first.
      const std::size_t there = room_for(bytes);
      if (bytes <= there) block = {std::aligned_alloc(alignment, rounded), rounded};
      if (block.data == nullptr) {
        require_fit("a buffer", static_cast<double>(bytes), static_cast<double>(there),
                    facts_.name);
        throw Error(ErrorKind::unavailable,
                    fmt::format("the system refuses a buffer of {}: raise ulimit -v, or use "
                                "smaller sizes",
                                bytes_text(static_cast<double>(bytes))));
      }
      // Only a hint: rows of weights a page apart cost a TLB entry each without it.
      if (alignment == LargePages::page) madvise(block.data, rounded, MADV_HUGEPAGE);
    }
    return std::make_unique<CpuBuffer>(block, bytes, pages_);
  }

  std::unique_ptr<SharedBuffer> allocate_shared(std::size_t bytes) override {
    if (const std::size_t there = room_for(bytes); bytes > there)
      throw Error(ErrorKind::unavailable,
                  fmt::format("a rank's memory has {} bytes and {} are available: give a smaller "
                              "max_bytes",
                              bytes, there));
    return std::make_unique<SharedCpuBuffer>(SharedPages::make(bytes));
  }
  std::unique_ptr<Buffer> open_shared(const SharedHandle& handle, std::size_t bytes) override {
    return std::make_unique<SharedCpuBuffer>(SharedPages::open(handle.descriptor, bytes));
  }

  void write(void* device, const void* host, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void read(void* host, const void* device, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(to, from, bytes);
  }
  void fill(void* device, std::uint8_t byte, std::size_t bytes) override {
    if (bytes > 0) std::memset(device, byte, bytes);
  }

  void* stream() override { return nullptr; }
  void synchronize() override {}  // a program is complete when enqueue returns

  std::unique_ptr<Replay> capture(
      int passes, const std::function<void(int pass, void* stream)>& enqueue) override {
    load_.note();
    auto calls = engine_->record([&] {
      for (int pass = 0; pass < passes; ++pass) enqueue(pass, nullptr);
    });
    return std::make_unique<CpuReplay>(std::move(calls), passes);
  }

  std::vector<std::string> disturbances() override { return load_.disturbances(); }

  std::vector<std::string> warnings() const override {
    const std::string lacking = lacking_for_now(facts_);
    if (lacking.empty()) return {};
    return {lacking + ": families that use it are left out until it has them"};
  }

  Limits limits(DType) override {
    const std::lock_guard lock(limits_mutex_);
    if (!limits_) {
      // Small pages, which streams read as fast: large ones would be lost to the buffers to come,
      // and a virtual machine may have to ask its host for each.
      const std::size_t bytes = cpu_limits_bytes(facts_.l2_bytes, free_bytes());
      const std::unique_ptr<std::byte[]> memory(new std::byte[bytes]);  // uninitialised
      limits_ = measure_cpu_limits(engine_->pool, {memory.get(), bytes});
    }
    return *limits_;
  }

 private:
  /// free_bytes() before this buffer. To find it opens several files: an answer serves for a tenth
  /// of a second, less the buffers of that time, while they are small beside it.
  std::size_t room_for(std::size_t bytes) {
    using namespace std::chrono;
    const std::lock_guard lock(room_mutex_);
    const auto now = steady_clock::now();
    if (now - asked_ > milliseconds(100) || bytes > room_ / 16) {
      room_ = free_bytes();
      asked_ = now;
    }
    const std::size_t there = room_;
    room_ -= std::min(bytes, room_);
    return there;
  }

  DeviceFacts facts_;
  std::shared_ptr<CpuEngine> engine_;
  std::shared_ptr<LargePages> pages_ = std::make_shared<LargePages>();  // buffers share it
  RecentLoad load_;
  std::mutex room_mutex_;  // guards the next two
  std::size_t room_ = 0;
  std::chrono::steady_clock::time_point asked_{};
  std::mutex limits_mutex_;
  std::optional<Limits> limits_;
};

}  // namespace

std::unique_ptr<Backend> open_cpu(const CpuOptions& options) {
  return std::make_unique<CpuBackend>(options);
}

}  // namespace fftune
