#include "cuda/ceilings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "core/error.hpp"
#include "cuda/facts.hpp"
#include "cuda/gemm.hpp"
#include "cuda/random_data.hpp"

namespace fftune::cuda {
namespace {

constexpr int samples = 10;

double fastest_pass(Replay& replay) {
  double seconds = std::numeric_limits<double>::infinity();
  for (int i = 0; i < samples; ++i) seconds = std::min(seconds, replay.sample());
  return seconds;
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
  const auto replay = capture(session, 1, [&](int, void* stream) {
    const Driver& driver = session->driver();
    driver.check(driver.memcpy_dtod_async(device_address(to->data()), device_address(from->data()),
                                          bytes, as_stream(stream)),
                 "cuMemcpyDtoD");
  });
  limits.bytes_per_second = 2.0 * static_cast<double>(bytes) / fastest_pass(*replay);
  limits.method = fmt::format("copy of {} MiB on the device, best of {}", bytes >> 20, samples);
}

void measure_gemm(const std::shared_ptr<const Session>& session, const DeviceFacts& facts,
                  DType dtype, const std::shared_ptr<const CublasLt>& library, Limits& limits) {
  const auto element = dtype_bytes(dtype);
  std::int64_t size = dtype == DType::f32 ? 4096 : 8192;
  // Three operands here and three in the search for the algorithm.
  while (size > 512 &&
         7 * static_cast<std::size_t>(size * size) * element + gemm_workspace_bytes * 2 >
             free_bytes(session->driver()))
    size /= 2;
  LibraryGemm gemm;
  gemm.dtype = dtype;
  gemm.m = gemm.n = gemm.k = size;
  const GemmPlan plan(session, library, gemm, facts.l2_bytes);
  const auto bytes = static_cast<std::size_t>(size * size) * element;
  const auto a = allocate(session->context(), bytes);
  const auto b = allocate(session->context(), bytes);
  const auto c = allocate(session->context(), bytes);
  const auto workspace = allocate(session->context(), gemm_workspace_bytes);
  fill_random(*session, *a, dtype);
  fill_random(*session, *b, dtype);
  constexpr int passes = 4;
  const auto replay = capture(session, passes, [&](int, void* stream) {
    plan.enqueue(device_address(a->data()), device_address(b->data()), device_address(c->data()),
                 device_address(workspace->data()), as_stream(stream));
  });
  const auto flops =
      2.0 * static_cast<double>(size) * static_cast<double>(size) * static_cast<double>(size);
  limits.flops_per_second = flops / fastest_pass(*replay);
  limits.method += fmt::format("; {}^3 {} product by {}, random data, best of {}", size,
                               dtype_name(dtype), plan.description(), samples);
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
