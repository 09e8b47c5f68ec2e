#include "kernels/decode/kinds.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <map>
#include <string_view>

#include "core/error.hpp"
#include "core/split.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/layer/layer.hpp"

namespace fftune::decoding {
namespace {

constexpr const char *pattern_option = "pattern", *usual_pattern = "a", *no_kind = "none",
                     *angles_option = "angles-for", *angles_of_all = "all";
/// Fields of the problem that all kinds of layers share.
constexpr std::array common_sizes{"batch", "d", "cache", "page", "pages"};
constexpr std::array common_options{"lengths"};
/// A decode step has one token of each sequence. Ranks have slices of layers that are all alike.
constexpr std::array sizes_of_no_kind{"s", "layers", "ranks", "own-experts", "states"};
constexpr std::array options_of_no_kind{"conv-indices", "null-index", "link"};

[[noreturn]] void reject(const std::string& what) {
  throw Error(ErrorKind::invalid_input, what);
}

template <typename Names>
bool lists(const Names& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool describes(const Problem& problem, std::size_t kind) {
  return option_or(problem, kind_parts[kind], no_kind) != no_kind;
}

char letter_of(std::size_t kind) {
  return static_cast<char>('a' + kind);
}

using Fields = std::map<std::string, std::string>;

/// "conv:dim=64,heads=32".
Fields fields_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  if (colon == std::string::npos)
    reject(fmt::format("'{}' is no kind of layers: use MIXER:NAME=VALUE,NAME=VALUE", text));
  Fields fields{{"mixer", text.substr(0, colon)}};
  for (const std::string_view field : split_at_commas(std::string_view(text).substr(colon + 1))) {
    const std::size_t equals = field.find('=');
    if (equals == field.npos || equals == 0)
      reject(fmt::format("'{}' is no field: use NAME=VALUE", field));
    if (!fields.emplace(field.substr(0, equals), field.substr(equals + 1)).second)
      reject(fmt::format("{} is given twice", field.substr(0, equals)));
  }
  return fields;
}

/// Adds them to a problem of layers, which canonical() checks.
void add_fields(const Fields& fields, Problem& layer) {
  const auto sizes = layer_op().sizes();
  for (const auto& [name, value] : fields) {
    if (lists(common_sizes, name) || lists(common_options, name))
      reject(fmt::format("{} is that of all layers: give it by itself", name));
    if (lists(sizes_of_no_kind, name) || lists(options_of_no_kind, name))
      reject(fmt::format("layers of several kinds have no {}", name));
    const bool is_size = std::any_of(sizes.begin(), sizes.end(),
                                     [&, &name = name](const auto& f) { return f.name == name; });
    if (!is_size) {
      layer.options[name] = value;
      continue;
    }
    std::int64_t size = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), size);
    if (error != std::errc() || end != value.data() + value.size())
      reject(fmt::format("{}={} is no size", name, value));
    layer.sizes[name] = size;
  }
}

}  // namespace

std::vector<OptionField> kind_options() {
  std::vector<OptionField> fields{
      {.name = pattern_option,
       .help =
           "the kinds of the layers in order, from the first on again behind the last one: bbba "
           "is three layers b and one a; with `layers` and several kinds",
       .choices = {usual_pattern},
       .rare = true},
      rare_option(angles_option,
                  "with several kinds of layers, whether all rotate by the same angles, or each "
                  "kind by its own",
                  {angles_of_all, "kinds"})};
  for (std::size_t kind = 1; kind < most_kinds; ++kind)
    fields.push_back(
        {.name = kind_parts[kind],
         .help = fmt::format("the mixer and the fields of layers {} in the pattern, as "
                             "conv:dim=64,h=8192,heads=32,width=3; batch, d, cache, page, pages "
                             "and lengths are those of "
                             "all layers",
                             letter_of(kind)),
         .choices = {no_kind},
         .rare = true});
  return fields;
}

std::size_t kinds_of(const Problem& problem) {
  std::size_t kinds = 1;
  while (kinds < most_kinds && describes(problem, kinds)) ++kinds;
  return kinds;
}

bool has_own_angles(const Problem& problem) {
  return option_or(problem, angles_option, angles_of_all) != angles_of_all;
}

std::string contradiction_of_kinds(const Problem& problem) {
  const std::size_t kinds = kinds_of(problem);
  for (std::size_t kind = kinds + 1; kind < most_kinds; ++kind)
    if (describes(problem, kind))
      return fmt::format("{} without {}: give kinds in their order", kind_parts[kind],
                         kind_parts[kinds]);
  const std::string letters = option_or(problem, pattern_option, usual_pattern);
  if (letters != usual_pattern && (kinds == 1 || !problem.sizes.contains("layers")))
    return fmt::format("pattern={} without {}: there is one layer of each kind", letters,
                       kinds == 1 ? "layers-b" : "layers");
  if (kinds == 1 && has_own_angles(problem))
    return fmt::format("{}={} without layers-b: layers of one kind have the same angles",
                       angles_option, problem.option(angles_option));
  if (kinds == 1) return "";
  for (const char* name : {"ranks", "own-experts"})
    if (problem.sizes.contains(name))
      return fmt::format("{}={} with layers-b: ranks have slices of layers that are all alike",
                         name, problem.size(name));
  if (!problem.sizes.contains("layers")) return "";
  for (const char letter : letters)
    if (letter < 'a' || letter >= letter_of(kinds))
      return fmt::format("pattern={}: give letters from a to {}, one for each layer", letters,
                         letter_of(kinds - 1));
  const auto order = kinds_in_order(problem);
  for (std::size_t kind = 0; kind < kinds; ++kind)
    if (std::find(order.begin(), order.end(), kind) == order.end())
      return fmt::format("pattern={}: none of the {} layers is of kind {}", letters, order.size(),
                         letter_of(kind));
  return "";
}

Problem layers_of_kind(const Problem& problem, std::size_t kind) {
  Problem layer{"layer", "fwd", problem.dtype, {}, {}};
  if (kind == 0) {
    for (const SizeField& field : layer_op().sizes())
      if (const auto size = problem.sizes.find(field.name); size != problem.sizes.end())
        layer.sizes.insert(*size);
    for (const OptionField& field : layer_op().options())
      if (const auto option = problem.options.find(field.name); option != problem.options.end())
        layer.options.insert(*option);
    if (kinds_of(problem) > 1) layer.sizes.erase("layers");
  } else {
    add_fields(fields_of(problem.option(kind_parts[kind])), layer);
  }
  const bool has_cache = layer::has_cache(layer);
  for (const char* name : common_sizes)
    if (const bool is_any = name == std::string_view("batch") || name == std::string_view("d");
        problem.sizes.contains(name) && (is_any || has_cache))
      layer.sizes[name] = problem.size(name);
    else
      layer.sizes.erase(name);
  for (const char* name : common_options)
    if (problem.options.contains(name) && has_cache)
      layer.options[name] = problem.option(name);
    else
      layer.options.erase(name);
  // A sequence that has ended keeps its states.
  if (layer::has_states(layer)) layer.options["conv-indices"] = "yes";
  // The kind of device decides about dtypes alone: those that CUDA has not, no op has.
  return canonical(layer_op(), std::move(layer), DeviceKind::cuda);
}

std::vector<std::size_t> kinds_in_order(const Problem& problem) {
  const std::size_t kinds = kinds_of(problem);
  std::vector<std::size_t> order;
  if (kinds == 1) return {0};
  if (!problem.sizes.contains("layers")) {
    for (std::size_t kind = 0; kind < kinds; ++kind) order.push_back(kind);
    return order;
  }
  const std::string letters = option_or(problem, pattern_option, usual_pattern);
  for (std::size_t layer = 0; layer < static_cast<std::size_t>(problem.size("layers")); ++layer)
    order.push_back(static_cast<std::size_t>(letters[layer % letters.size()] - 'a'));
  return order;
}

std::string LayerNames::prefix(std::size_t layer) const {
  if (repeated_) return fmt::format("layers.{}.", layer);
  return layer == 0 ? "" : fmt::format("{}.", letter_of(layer));
}

std::string LayerNames::operator()(std::size_t layer, const std::string& own) const {
  if (own == "lengths") return "key_lengths";
  if (own == "x" && layer > 0) return (*this)(layer - 1, "y");
  if (own == "y") return layer + 1 == kinds_.size() ? "last_hidden" : prefix(layer) + "y";
  if (own == "angles" && own_angles_ && kinds_[layer] > 0)
    return fmt::format("{}.{}", letter_of(kinds_[layer]), own);
  return layer::is_shared(own) ? own : prefix(layer) + own;
}

bool LayerNames::are_shared(const std::string& name) {
  return layer::is_shared(name) || name.find(".angles") == 1;
}

}  // namespace fftune::decoding
