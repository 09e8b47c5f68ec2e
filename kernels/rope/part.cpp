#include "kernels/rope/part.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <random>
#include <span>
#include <utility>

#include "kernels/common/test_data.hpp"
#include "kernels/rope/rope.hpp"

namespace fftune::rope {
namespace {

void draw_slots(std::uint64_t seed, std::int64_t rows, std::span<double> slots) {
  std::mt19937_64 random(seed);
  const std::vector<double> order = shuffled(0, rows, random);
  for (std::size_t i = 0; i < slots.size(); ++i)
    slots[i] = i < order.size() && i % 7 != 3 ? order[i]
               : i % 2 == 0                   ? -1
                                              : static_cast<double>(rows) + static_cast<double>(i);
}

}  // namespace

SizeField positions_size(const std::string& usual, WhenAbsent when_absent) {
  return neutral(rare_size("positions", "rows of the table of angles; " + usual + " if left out",
                           SizeField().max, 4096, std::move(when_absent)));
}

SizeField cache_slots_size(const std::string& caches, WhenAbsent when_absent) {
  return neutral(rare_size("cache-slots", "rows of " + caches + "; m if left out", SizeField().max,
                           65536, std::move(when_absent)));
}

std::vector<OptionField> angle_options() {
  std::vector<OptionField> fields;
  for (OptionField field : rope_op().options()) {
    if (field.name != "angles" && !field.number) continue;
    field.rare = true;
    field.performance_neutral = field.name == "angles";
    fields.push_back(std::move(field));
  }
  return fields;
}

std::string contradiction_of_angles(const Op& op, const Problem& problem) {
  const double low = number_or_default(op, problem, "low");
  const double high = number_or_default(op, problem, "high");
  if (problem.has("angles", "llama3") && high <= low)
    return fmt::format("high={} is not above low={}", high, low);
  return "";
}

std::vector<TensorSpec> angle_tensors(const RotatedPart& part, std::int64_t tokens) {
  TensorSpec positions{"positions", DType::i32, {tokens}};
  positions.draw = whole_numbers(0, (part.table ? part.positions + 3 : 1 << 17) - 1);
  std::vector<TensorSpec> tensors{std::move(positions)};
  if (part.table)
    tensors.push_back({"angles", DType::f32, {part.positions, part.features}, Role::input, 20});
  return tensors;
}

TensorSpec slots_tensor(DType dtype, std::int64_t tokens, std::int64_t rows) {
  TensorSpec slots{"slots", dtype, {tokens}};
  slots.draw = [rows](std::uint64_t seed, std::span<double> values) {
    draw_slots(seed, rows, values);
  };
  return slots;
}

Turns turns_of(const Problem& problem, const RotatedPart& part) {
  Problem same{"rope",
               "fwd",
               problem.dtype,
               {{"s", 1}, {"b", 1}, {"heads", 1}, {"dim", part.features}},
               {{"layout", "bshd"},
                {"rotation", part.halves ? "halves" : "interleaved"},
                {"angles", part.table ? "table" : problem.option("angles")}}};
  for (const OptionField& field : rope_op().options())
    if (field.number && problem.options.contains(field.name))
      same.options[field.name] = problem.option(field.name);
  auto [values, scale] = frequencies_of(same);
  if (part.table) values.clear();
  return {std::move(values), scale};
}

std::vector<double> angles_of(const RotatedPart& part, const Turns& turns,
                              const ReferenceTensors& tensors, std::size_t token) {
  const auto position = static_cast<std::int64_t>(tensors.at("positions")[token]);
  std::vector<double> angles(static_cast<std::size_t>(part.features / 2));
  for (std::size_t pair = 0; pair < angles.size(); ++pair) {
    if (!part.table) {
      angles[pair] = static_cast<float>(position) * turns.frequencies[pair];
      continue;
    }
    const auto row = std::clamp<std::int64_t>(position, 0, part.positions - 1);
    const std::int64_t column = part.first_of(static_cast<std::int64_t>(pair));
    angles[pair] = tensors.at("angles")[static_cast<std::size_t>(row * part.features + column)];
  }
  return angles;
}

}  // namespace fftune::rope
