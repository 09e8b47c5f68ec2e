#include "store/renamed_parameters.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "core/error.hpp"

namespace fftune {
namespace {

struct Rename {
  std::string_view families;  // as fits_family() has it
  std::string_view was;
  std::string_view is;
  std::vector<std::string_view> words{};  // what the values 0, 1, 2, ... are called now
};

/// The first row that fits a family and a parameter holds.
const std::vector<Rename>& renames() {
  static const std::vector<Rename> table{
      {"*_sm90", "schedule", "schedule", {"cooperative", "pingpong", "swap_ab"}},
      {"*_sm90", "consumers", "mma_warpgroups"},
      {"*_sm90", "output_boxes", "epilogue_stages"},
      {"*_sm90", "turns", "a_reuse"},
      {"*_sm90", "gatherers", "gather_warps"},
      {"*_sm90", "sorts", "pre_permute"},
      {"ffn_decode", "patient", "poll_first"},
      {"ffn_decode", "late", "late_down"},
      {"cpu_*blas", "token_block", "block_m"},
      {"cpu_*blas", "rows", "block_m"},
      {"cpu_*blas", "inter_block", "block_n"},
      {"cpu_*blas", "feature_block", "block_n"},
      {"cpu_*blas", "columns", "block_n"},
      {"cpu_*", "streams", "nontemporal"},
      {"*_columns", "streams", "evict_first"},
      {"*_rows", "streams", "evict_first"},
      {"*rows", "early", "l2_prefetch"},
      {"backward_rows", "ahead", "prefetch"},
      {"backward_rows", "asked", "l2_prefetch_rows"},
  };
  return table;
}

const Rename* rename_of(std::string_view family, std::string_view parameter) {
  const auto& table = renames();
  const auto row = std::find_if(table.begin(), table.end(), [&](const Rename& rename) {
    return rename.was == parameter && fits_family(rename.families, family);
  });
  return row == table.end() ? nullptr : &*row;
}

ParameterValue renamed_value(const Rename& rename, const ParameterValue& value) {
  if (value.is_word()) return value;
  const auto number = value.number();
  if (number < 0 || number >= static_cast<std::int64_t>(rename.words.size())) return value;
  return rename.words[static_cast<std::size_t>(number)];
}

}  // namespace

bool fits_family(std::string_view pattern, std::string_view family) {
  if (const auto dot = family.rfind('.'); dot != family.npos) family.remove_prefix(dot + 1);
  const auto star = pattern.find('*');
  if (star == pattern.npos) return pattern == family;
  const auto before = pattern.substr(0, star), after = pattern.substr(star + 1);
  return family.size() >= before.size() + after.size() && family.starts_with(before) &&
         family.ends_with(after);
}

Variant renamed(const Variant& variant) {
  Variant result{variant.family, {}};
  for (const auto& [name, value] : variant.config.entries()) {
    const Rename* rename = rename_of(variant.family, name);
    // Two names of one parameter at once are a mistake that must not be hidden by dropping one of
    // the values.
    const bool taken = rename && rename->is != rename->was &&
                       (variant.config.contains(rename->is) || result.config.contains(rename->is));
    if (rename && !taken)
      result.config.set(rename->is, renamed_value(*rename, value));
    else
      result.config.set(name, value);
  }
  return result;
}

std::string renamed_id(const std::string& id) {
  constexpr std::string_view separator = " + ";
  std::string result;
  for (std::size_t begin = 0; begin <= id.size();) {
    const auto end = std::min(id.find(separator, begin), id.size());
    const auto part = id.substr(begin, end - begin);
    if (begin > 0) result += separator;
    try {
      result += renamed(Variant::parse(part)).id();
    } catch (const Error&) {
      result += part;
    }
    begin = end + separator.size();
  }
  return result;
}

}  // namespace fftune
