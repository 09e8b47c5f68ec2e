#include "worker/misbehaving.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <thread>

#include "core/error.hpp"
#include "cpu/open.hpp"

namespace fftune::test {
namespace {

/// Set by a fault after which the device does no more work, as a CUDA context does not.
std::atomic<bool>& broken() {
  static std::atomic<bool> value{false};
  return value;
}

void require_whole() {
  if (broken()) throw Error(ErrorKind::device_fault, "an illegal memory access was encountered");
}

/// A fault that no sanitizer's handler turns into something else.
void segfault() {
  std::signal(SIGSEGV, SIG_DFL);
  std::raise(SIGSEGV);
}

/// Time of the passes since the last reading, by their own account.
std::atomic<int>& told_microseconds() {
  static std::atomic<int> value{0};
  return value;
}

/// Counts the runs of one variant in this process.
int count_run(int p) {
  static std::atomic<int> runs[crowd_variants];
  return runs[p]++;
}

/// Time of a variant, and with it the true order: the best stands apart.
int microseconds(int p) {
  return p == misbehaving_best ? 290 : 600 + p;
}

void misbehave(const std::string& way, int runs, float* y, std::size_t count) {
  if (way == "segfault") segfault();
  if (way == "abort") std::abort();
  if (way == "exit") _exit(3);
  if (way == "killed") ::raise(SIGKILL);
  if (way == "sticky") {
    broken() = true;
    require_whole();
  }
  if (way == "hang")
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  if (way == "trample") std::memset(y, 0x5a, 16 << 20);
  if (way == "beyond") y[count + 3] = 1;
  if (way == "wrong") y[1] += 1;
  if (way == "nan") y[1] = std::numeric_limits<float>::quiet_NaN();
  if (way == "unwritten") std::memset(&y[1], 0xff, sizeof *y);
  if (way == "moody") y[1] *= 1 + 1e-6F * static_cast<float>(runs % 2);
}

class ToldReplay final : public Replay {
 public:
  ToldReplay(std::unique_ptr<Replay> real, int passes, std::function<double()> pace)
      : real_(std::move(real)), passes_(passes), pace_(std::move(pace)) {}
  double sample() override {
    told_microseconds() = 0;
    real_->sample();
    return told_microseconds() * 1e-6 / passes_ * pace_();
  }

 private:
  std::unique_ptr<Replay> real_;
  int passes_;
  std::function<double()> pace_;
};

class QuickBackend final : public Backend {
 public:
  QuickBackend(std::unique_ptr<Backend> real, std::function<double(int)> pace,
               std::function<void()> at_limits)
      : real_(std::move(real)), pace_(std::move(pace)), at_limits_(std::move(at_limits)) {}
  const DeviceFacts& facts() const override { return real_->facts(); }
  CompileResult compile(const Program& program) override { return real_->compile(program); }
  std::size_t free_bytes() const override { return real_->free_bytes(); }
  std::unique_ptr<Buffer> allocate(std::size_t bytes) override {
    require_whole();
    return real_->allocate(bytes);
  }
  void write(void* to, const void* from, std::size_t bytes) override {
    real_->write(to, from, bytes);
  }
  void read(void* to, const void* from, std::size_t bytes) override {
    real_->read(to, from, bytes);
  }
  void copy(void* to, const void* from, std::size_t bytes) override {
    real_->copy(to, from, bytes);
  }
  void fill(void* to, std::uint8_t byte, std::size_t bytes) override {
    real_->fill(to, byte, bytes);
  }
  void* stream() override { return real_->stream(); }
  void synchronize() override {
    require_whole();
    real_->synchronize();
  }
  std::unique_ptr<Replay> capture(int passes,
                                  const std::function<void(int, void*)>& enqueue) override {
    return std::make_unique<ToldReplay>(real_->capture(passes, enqueue), passes,
                                        [this] { return pace_(samples_++); });
  }
  Limits limits(DType) override {
    at_limits_();
    return {1e10, 1e11, "made up"};
  }

 private:
  std::unique_ptr<Backend> real_;
  std::function<double(int)> pace_;
  std::function<void()> at_limits_;
  int samples_ = 0;
};

}  // namespace

const std::vector<std::string>& ways() {
  static const std::vector<std::string> all{
      "segfault", "abort", "exit",      "killed", "hang", "trample", "beyond",
      "wrong",    "nan",   "unwritten", "moody",  "liar", "sticky",  "crash_compile"};
  return all;
}

void MisbehavingOp::reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                              Parallel& parallel) const {
  if (slow_reference_)
    parallel.run(10000, parallel.max_threads(),
                 [](int) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
  ToyOp::reference(problem, stage, tensors, parallel);
}

Space MisbehavingFamily::space(const Problem&, const DeviceFacts&) const {
  std::vector<std::int64_t> values;
  const int count = way_ == "crowd" ? crowd_variants : misbehaving_variants;
  for (int p = 0; p < count; ++p) values.push_back(p);
  return Space().parameter("p", "its place", values);
}

std::string MisbehavingFamily::way_of(int p) const {
  if (!misbehaves(p) || way_ == "none" || way_ == "crowd") return "";
  return way_ == "mixed" ? ways()[static_cast<std::size_t>(p / 5) % ways().size()] : way_;
}

Program MisbehavingFamily::program(const Problem& problem, const DeviceFacts&,
                                   const Config& config) const {
  const int p = config.get("p");
  const auto way = way_of(p);
  if (way == "crash_compile") segfault();
  Program program;
  program.host_tensors = 5;
  const bool brief = way_ == "crowd";
  program.steps.emplace_back(HostFunction([problem, way, p, brief](const HostCall& call) {
    const auto m = problem.size("m"), d = problem.size("d"), h = problem.size("h");
    const int runs = count_run(p);
    toy_product(problem.dtype, m, h, d, call.tensors[0], call.tensors[1], call.tensors[4]);
    toy_product(problem.dtype, m, d, h, call.tensors[4], call.tensors[2], call.tensors[3]);
    misbehave(way, runs, static_cast<float*>(call.tensors[3]), static_cast<std::size_t>(m * d));
    const bool lies = way == "liar";
    // Long enough that a kill finds it at work.
    if (!brief) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    told_microseconds() += lies ? (runs < 12 ? 300 : 1800) : microseconds(p);
  }));
  return program;
}

std::unique_ptr<Backend> open_quick_cpu() {
  return open_paced_cpu([](int) { return 1; });
}

std::unique_ptr<Backend> open_paced_cpu(std::function<double(int samples)> pace,
                                        std::function<void()> at_limits) {
  return std::make_unique<QuickBackend>(open_cpu(), std::move(pace), std::move(at_limits));
}

}  // namespace fftune::test
