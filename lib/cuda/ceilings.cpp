#include "cuda/ceilings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "core/error.hpp"
#include "cuda/facts.hpp"
#include "cuda/gemm.hpp"

namespace fftune::cuda {
namespace {

/// An idle device runs at a fraction of its clock and takes some tenths of a second of work to
/// reach the full one: so the best of a time, not of a number of passes.
constexpr double sampling_seconds = 0.3;

double fastest(const std::function<double()>& sample) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(sampling_seconds);
  double seconds = std::numeric_limits<double>::infinity();
  do seconds = std::min(seconds, sample());
  while (Clock::now() < end);
  return seconds;
}

/// Seconds of one copy, between events on the stream. Not from a graph: its copy nodes go to the
/// copy engines, which on an H200 move 2.8 TB/s, and not to the SMs, which move 4.2.
double copy_seconds(const Session& session, Buffer& to, const Buffer& from) {
  constexpr int copies = 4;
  const Current current(*session.context());
  const Driver& driver = session.driver();
  const auto start = make_event(session.context());
  const auto end = make_event(session.context());
  driver.check(driver.event_record(start.get(), session.stream()), "cuEventRecord");
  for (int i = 0; i < copies; ++i)
    driver.check(driver.memcpy_dtod_async(device_address(to.data()), device_address(from.data()),
                                          from.bytes(), session.stream()),
                 "cuMemcpyDtoD");
  driver.check(driver.event_record(end.get(), session.stream()), "cuEventRecord");
  session.synchronize();
  float milliseconds = 0;
  driver.check(driver.event_elapsed_time(&milliseconds, start.get(), end.get()),
               "cuEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3 / copies;
}

std::size_t free_bytes(const Driver& driver) {
  std::size_t free = 0;
  std::size_t total = 0;
  driver.check(driver.mem_get_info(&free, &total), "cuMemGetInfo");
  return free;
}

void measure_copy(const std::shared_ptr<const Session>& session, Limits& limits) {
  constexpr std::size_t wanted = std::size_t{1} << 30;
  const auto bytes = std::min(wanted, free_bytes(session->driver()) / 8) & ~std::size_t{255};
  const auto from = allocate(session->context(), bytes);
  const auto to = allocate(session->context(), bytes);
  fill_random(*session, *from, DType::f32);
  const double seconds = fastest([&] { return copy_seconds(*session, *to, *from); });
  limits.bytes_per_second = 2.0 * static_cast<double>(bytes) / seconds;
  limits.method = fmt::format("copy of {} MiB on the device, the fastest", bytes >> 20);
}

void measure_gemm(const std::shared_ptr<const Session>& session, const DeviceFacts& facts,
                  DType dtype, const std::shared_ptr<const CublasLt>& library, Limits& limits) {
  const auto element = dtype_bytes(dtype);
  std::int64_t size = dtype == DType::f32 ? 4096 : 8192;
  LibraryGemm gemm;
  gemm.dtype = dtype;
  const auto c_element = dtype_bytes(gemm.c_dtype());
  // Three operands here and three in the search for the algorithm.
  while (size > 512 &&
         7 * static_cast<std::size_t>(size * size) * c_element + gemm_workspace_bytes * 2 >
             free_bytes(session->driver()))
    size /= 2;
  gemm.m = gemm.n = gemm.k = size;
  const GemmPlan plan(session, library, gemm, facts.l2_bytes);
  const auto bytes = static_cast<std::size_t>(size * size) * element;
  const auto a = allocate(session->context(), bytes);
  const auto b = allocate(session->context(), bytes);
  const auto c = allocate(session->context(), bytes / element * c_element);
  const auto workspace = allocate(session->context(), gemm_workspace_bytes);
  fill_random(*session, *a, dtype);
  fill_random(*session, *b, dtype);
  constexpr int passes = 4;
  const auto replay = capture(session, passes, [&](int, void* stream) {
    plan.enqueue({device_address(a->data()), device_address(b->data()), device_address(c->data())},
                 device_address(workspace->data()), as_stream(stream));
  });
  const auto flops =
      2.0 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
  limits.flops_per_second = flops / fastest([&] { return replay->sample(); });
  limits.method += fmt::format("; {}^3 {} product by {}, random data, the fastest", size,
                               dtype_name(dtype), plan.description());
}

}  // namespace

Limits measure_limits(const std::shared_ptr<const Session>& session, const DeviceFacts& facts,
                      DType dtype,
                      const std::function<std::shared_ptr<const CublasLt>()>& library) {
  Limits limits;
  measure_copy(session, limits);
  try {
    measure_gemm(session, facts, dtype, library(), limits);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    limits.flops_per_second = datasheet_flops(facts, dtype);
    limits.method += fmt::format("; {}, not measured: {}",
                                 limits.flops_per_second > 0 ? "the datasheet's peak for products"
                                                             : "no ceiling for products",
                                 error.what());
  }
  return limits;
}

}  // namespace fftune::cuda
