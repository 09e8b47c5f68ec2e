// embed and advance on the CPU.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "device/parallel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/decode/decode.hpp"

namespace fftune::decoding {
namespace {

bool goes_on(std::int32_t ended, std::int32_t length, const Sequences& of) {
  return ended == 0 && length < of.cache;
}

/// Finds the int32 tensors of a call by their names.
class Tensors {
 public:
  explicit Tensors(const Problem& problem) : places_(places_of(problem)) {}
  std::size_t count() const { return places_.count(); }
  std::size_t at(const char* name) const { return places_.at(name); }
  std::int32_t* of(const HostCall& call, const char* name) const {
    return static_cast<std::int32_t*>(address_of(call, places_.at(name)));
  }

 private:
  TensorPlaces places_;
};

void embed(const Sequences& of, const Tensors& tensors, const HostCall& call) {
  const std::int32_t* const ids = tensors.of(call, "ids");
  const auto* const embedding =
      static_cast<const std::byte*>(call.tensors[tensors.at("embedding")]);
  auto* const x = static_cast<std::byte*>(call.tensors[tensors.at("x")]);
  const std::size_t row_bytes = static_cast<std::size_t>(of.d) * dtype_bytes(of.dtype);
  std::vector<float> row(static_cast<std::size_t>(of.d));
  for (std::int64_t i = 0; i < of.batch; ++i) {
    std::fill(row.begin(), row.end(), 0.0f);
    if (ids[i] >= 0 && ids[i] < of.vocab) {
      decode(of.dtype, embedding + static_cast<std::size_t>(ids[i]) * row_bytes,
             std::span<float>(row));
      for (float& value : row) value *= of.scale;
    }
    encode(of.dtype, std::span<const float>(row), x + static_cast<std::size_t>(i) * row_bytes);
  }
}

void place(const Sequences& of, const Tensors& tensors, const HostCall& call) {
  const std::int32_t *const lengths = tensors.of(call, "lengths"),
                            *const ended = tensors.of(call, "ended"),
                            *const pages = tensors.of(call, "pages");
  std::int32_t *const positions = tensors.of(call, "positions"),
                      *const slots = tensors.of(call, "slots"),
                      *const keys = tensors.of(call, "key_lengths");
  for (std::int64_t i = 0; i < of.batch; ++i) {
    const bool alive = goes_on(ended[i], lengths[i], of);
    const std::int64_t length = lengths[i],
                       count = alive ? std::max<std::int64_t>(length, 0) + 1
                                     : std::max<std::int64_t>(std::min(length, of.cache), 1),
                       position = count - 1;
    if (keys == nullptr) continue;  // layers have states alone
    keys[i] = static_cast<std::int32_t>(count);
    if (positions != nullptr) positions[i] = static_cast<std::int32_t>(position);
    std::int64_t slot = of.rows;
    if (alive && of.page == 0) slot = i * of.cache + position;
    if (alive && of.page > 0) {
      const std::int64_t page = pages[i * of.table + position / of.page];
      if (page >= 0 && page < of.rows / of.page) slot = page * of.page + position % of.page;
    }
    slots[i] = static_cast<std::int32_t>(slot);
  }
}

void find_states(const Sequences& of, const Tensors& tensors, const HostCall& call) {
  const std::int32_t *const lengths = tensors.of(call, "lengths"), *const ended =
                                                                       tensors.of(call, "ended");
  std::int32_t* const indices = tensors.of(call, "state_indices");
  for (std::int64_t i = 0; i < of.batch; ++i)
    indices[i] = goes_on(ended[i], lengths[i], of) ? static_cast<std::int32_t>(i) : -1;
}

void advance(const Sequences& of, const Tensors& tensors, const HostCall& call) {
  const std::int32_t *const chosen = tensors.of(call, "chosen"),
                            *const limits = tensors.of(call, "limits"),
                            *const stop = tensors.of(call, "stop");
  std::int32_t *const ids = tensors.of(call, "ids"), *const lengths = tensors.of(call, "lengths"),
                      *const steps = tensors.of(call, "steps"),
                      *const ended = tensors.of(call, "ended"),
                      *const out = tensors.of(call, "out");
  for (std::int64_t i = 0; i < of.batch; ++i) {
    if (!goes_on(ended[i], lengths[i], of)) {
      ids[i] = of.pad;
      if (ended[i] == 0) ended[i] = 2;
      continue;
    }
    ids[i] = chosen[i];
    lengths[i] = std::max(lengths[i], 0) + 1;
    if (steps[i] >= 0 && steps[i] < of.room) out[i * of.room + steps[i]] = chosen[i];
    steps[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(steps[i]) + 1);
    ended[i] = lengths[i] >= of.cache || lengths[i] + 1 >= limits[i] ? 2 : 0;
    if (stop != nullptr && std::find(stop, stop + of.stops, chosen[i]) != stop + of.stops)
      ended[i] = 1;
  }
}

Program program_of(const Problem& problem,
                   void (*run)(const Sequences&, const Tensors&, const HostCall&)) {
  const Tensors tensors(problem);
  return host_program(tensors.count(), [of = sequences_of(problem), tensors,
                                        run](const HostCall& call) { run(of, tensors, call); });
}

Program embed_program(const Problem& problem, const DeviceFacts&, const Config&) {
  return program_of(problem, [](const Sequences& of, const Tensors& tensors, const HostCall& call) {
    embed(of, tensors, call);
    place(of, tensors, call);
  });
}

Program states_program(const Problem& problem, const DeviceFacts&, const Config&) {
  return program_of(problem, find_states);
}

Program advance_program(const Problem& problem, const DeviceFacts&, const Config&) {
  return program_of(problem, advance);
}

std::optional<std::string> refuse_without_states(const Problem& problem, const DeviceFacts&) {
  if (places_of(problem).at("state_indices") != absent) return std::nullopt;
  return "no layer has states";
}

StageFamily family_of(const char* name, const char* stage, decltype(&embed_program) program,
                      decltype(&refuse_without_states) refusal = nullptr) {
  return cpu_fallback({.name = name,
                       .summary = "a sequence after the other",
                       .stage = stage,
                       .sources = {"decode/cpu_families.cpp"},
                       .refusal = refusal,
                       .program = program});
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const StageFamily embed = family_of("cpu_embed", stage_embed, embed_program);
  static const StageFamily states =
      family_of("cpu_states", stage_states, states_program, refuse_without_states);
  static const StageFamily advance = family_of("cpu_advance", stage_advance, advance_program);
  return {&embed, &states, &advance};
}

}  // namespace fftune::decoding
