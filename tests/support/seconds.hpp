// Time limits of host code, on machines that do other work too.
#pragma once

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <string>

namespace fftune::test {

/// How many times as long host code may take in this build as in one that is optimised.
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__)
constexpr double slowness = 1;
#else
constexpr double slowness = 40;
#endif

/// Seconds that this process has spent on processors, all threads together. Elapsed time also
/// depends on other processes.
inline double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// Processor seconds of one call.
template <typename Call>
double processor_seconds_of(const Call& call) {
  const double begin = processor_seconds();
  call();
  return processor_seconds() - begin;
}

/// How many times as long host code takes at this moment as on an idle core of the machine whose
/// times the limits were set for, a Xeon of 2.9 GHz; at least 1. A fixed piece of work tells: maps
/// of words, as problems and plans have them.
inline double pace() {
  constexpr double seconds_there = 30e-6;
  constexpr int words = 400;
  const double here = processor_seconds_of([] {
    std::map<std::string, int> numbers;
    for (int i = 0; i < words; ++i)
      numbers["the number of word " + std::to_string(i * 7919 % words)] = i;
    if (numbers.size() != words) std::abort();
  });
  return std::max(1.0, here / (seconds_there * slowness));
}

/// The least result of `measure`, which is asked again, up to `most` times, until one is below
/// `limit`: a machine whose other work takes caches and clocks makes a measurement longer, never
/// shorter.
template <typename Measure>
double least_of(double limit, const Measure& measure, int most = 30) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < most && least >= limit; ++i) least = std::min(least, measure());
  return least;
}

/// The same of a time, at the pace that limits are set for.
template <typename Measure>
double least_time_of(double limit, const Measure& measure, int most = 30) {
  const auto paced = [&] {
    const double before = pace();
    const double measured = measure();
    return measured / std::min(before, pace());
  };
  return least_of(limit, paced, most);
}

}  // namespace fftune::test
