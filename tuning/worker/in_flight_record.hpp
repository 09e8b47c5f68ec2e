// The in-flight record: which candidate a worker runs at this moment, in memory that it shares with
// its supervisor. A message would wake the supervisor in the middle of a measurement; this is a few
// stores. The other way it tells a worker in the middle of a reference that the search is over.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace fftune {

struct Launch {
  std::uint64_t number = 0;     // counts launches
  std::size_t candidate = 0;    // its place in the request
  double expected_seconds = 0;  // 0: unknown
};

/// Both processes map the memory of one descriptor.
class InFlightRecord {
 public:
  /// Makes one; throws Error(unavailable).
  InFlightRecord();
  /// Maps the one that the supervisor made; throws Error(internal) if it is none.
  explicit InFlightRecord(int descriptor);
  ~InFlightRecord();
  InFlightRecord(const InFlightRecord&) = delete;
  InFlightRecord& operator=(const InFlightRecord&) = delete;

  int descriptor() const { return descriptor_; }

  void launch(std::size_t candidate, double expected_seconds);
  void land();

  /// The supervisor's wish that no reference be computed any more, which is not taken back.
  void cancel() { page_->cancelled = true; }
  const std::atomic<bool>& cancelled() const { return page_->cancelled; }

  /// The latest launch, if it has not landed. The record may hold any bytes if the worker has
  /// written over it: check the place against the request.
  std::optional<Launch> current() const;

 private:
  /// Written between two steps of `version`, which is odd meanwhile.
  struct Page {
    std::atomic<std::uint64_t> version;
    std::atomic<std::uint64_t> number;
    std::atomic<std::uint64_t> candidate;
    std::atomic<double> expected_seconds;
    std::atomic<bool> flying;
    std::atomic<bool> cancelled;
  };
  static_assert(std::atomic<double>::is_always_lock_free, "shared by two processes");

  void map();
  void write(bool flying, std::size_t candidate, double expected_seconds);

  int descriptor_;
  Page* page_ = nullptr;
};

}  // namespace fftune
