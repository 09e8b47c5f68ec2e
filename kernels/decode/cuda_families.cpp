#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/decode/decode.hpp"

namespace fftune::decoding {
namespace {

constexpr const char *kernel_file = "decode/step.cu", *states_file = "decode/states.cu";

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

std::optional<std::string> refuse_states_alone(const Problem& problem, const DeviceFacts&) {
  if (places_of(problem).at("slots") != absent) return std::nullopt;
  return "there is no kernel for layers that have states alone";
}

std::optional<std::string> refuse_without_states(const Problem& problem, const DeviceFacts& facts) {
  if (places_of(problem).at("state_indices") == absent) return "no layer has states";
  return refuse_states_alone(problem, facts);
}

Program states_program(const Problem& problem, const DeviceFacts& facts, const Config&) {
  constexpr std::int64_t threads = 128;
  const Sequences of = sequences_of(problem);
  const TensorPlaces places = places_of(problem);
  const auto given = [&](const char* name) { return tensor_or_null(places, name); };
  return pdl_program(facts, states_file, "find_states",
                     {static_cast<std::uint32_t>(quotient_up(of.batch, threads))}, threads,
                     {given("lengths"), given("ended"), given("state_indices"), number(of.batch),
                      number(of.cache)});
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

StageFamily family_of(const char* name, const char* summary, const char* stage, const char* file,
                      decltype(&embed_program) program,
                      decltype(&refuse_states_alone) refusal = refuse_states_alone) {
  return StageFamily({.name = name,
                      .summary = summary,
                      .stage = stage,
                      .sources = {file},
                      .is_fallback = true,
                      .refusal = refusal,
                      .program = program});
}

}  // namespace

std::vector<const Family*> cuda_families() {
  static const StageFamily embed =
      family_of("embed", "a block for a part of a row", stage_embed, kernel_file, embed_program);
  static const StageFamily states = family_of("states", "a thread for a sequence", stage_states,
                                              states_file, states_program, refuse_without_states);
  static const StageFamily advance =
      family_of("advance", "a thread for a sequence", stage_advance, kernel_file, advance_program);
  return {&embed, &states, &advance};
}

}  // namespace fftune::decoding
