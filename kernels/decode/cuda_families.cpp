#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/decode/decode.hpp"

namespace fftune::decoding {
namespace {

constexpr const char* kernel_file = "decode/step.cu";

/// A size as a kernel takes it.
std::int32_t number(std::int64_t size) {
  return static_cast<std::int32_t>(size);
}

Program embed_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  constexpr std::int64_t threads = 128;
  const Sequences of = sequences_of(problem);
  const TensorPlaces places = places_of(problem);
  const auto given = [&](const char* name) { return tensor_or_null(places, name); };
  const auto bytes = static_cast<std::int64_t>(dtype_bytes(of.dtype));
  const std::int64_t vector = widest_vector(of.d * bytes) / bytes;
  return pdl_program(
      facts, kernel_file,
      fmt::format("embed_tokens<{}, {}>", element_type(of.dtype),
                  StructText("step_config", "vector", vector, "page", of.page, "rotates",
                             places.at("positions") != absent)),
      {static_cast<std::uint32_t>(of.batch * quotient_up(of.d, threads * vector))}, threads,
      {given("ids"), given("lengths"), given("ended"), given("pages"), given("embedding"),
       given("x"), given("positions"), given("slots"), given("key_lengths"), of.scale, number(of.d),
       number(of.vocab), number(of.cache), number(of.table), number(of.rows)});
}

Program advance_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  constexpr std::int64_t threads = 128;
  const Sequences of = sequences_of(problem);
  const TensorPlaces places = places_of(problem);
  const auto given = [&](const char* name) { return tensor_or_null(places, name); };
  return pdl_program(
      facts, kernel_file, "advance_tokens",
      {static_cast<std::uint32_t>(quotient_up(of.batch, threads))}, threads,
      {given("chosen"), given("limits"), given("stop"), given("ids"), given("lengths"),
       given("steps"), given("ended"), given("out"), number(of.batch), number(of.cache),
       number(of.stops), number(of.room), of.pad});
}

StageFamily family_of(const char* name, const char* summary, const char* stage,
                      decltype(&embed_program) program) {
  return StageFamily({.name = name,
                      .summary = summary,
                      .stage = stage,
                      .pass = "fwd",
                      .sources = {kernel_file},
                      .is_fallback = true,
                      .program = program});
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const StageFamily embed =
      family_of("embed", "a block for a part of a row", stage_embed, embed_program);
  static const StageFamily advance =
      family_of("advance", "a thread for a sequence", stage_advance, advance_program);
  return {&embed, &advance};
}

}  // namespace fftune::decoding
