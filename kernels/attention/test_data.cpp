// Test data that are no noise: lengths, offsets, pages, masks, and the lse of a backward pass. They
// do not depend on the seed, because some of them follow from others: the bits and the flags from
// the mask, and lse from all that decides which keys a query has.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "kernels/attention/test_data.hpp"
#include "kernels/common/test_data.hpp"

namespace fftune::attention {
namespace {

/// Documents begin at each of eight parts of a sequence, by up to half a part later.
std::int64_t document_of(std::int64_t position, std::int64_t length) {
  constexpr std::int64_t parts = 8;
  const std::int64_t part = std::max<std::int64_t>(1, length / parts);
  const std::int64_t document = position / part;
  const auto late = static_cast<std::int64_t>(mix(static_cast<std::uint64_t>(document) + golden) %
                                              static_cast<std::uint64_t>(part / 2 + 1));
  return position % part < late ? document - 1 : document;
}

template <typename Visit>
void for_each_row(std::int64_t masks_of_sequence, std::int64_t s, std::size_t rows,
                  const Visit& visit) {
  for (std::size_t row = 0; row < rows; ++row) {
    const auto at = static_cast<std::int64_t>(row);
    visit(at, at / s / masks_of_sequence, at % s);
  }
}

}  // namespace

bool mask_allows(MaskData data, std::int64_t sequence, std::int64_t i, std::int64_t j,
                 std::int64_t s, std::int64_t kv) {
  const std::int64_t position = i + kv - s;
  switch (data) {
    case MaskData::random: {
      const auto row = mix(static_cast<std::uint64_t>(sequence * s + i) + golden);
      return (mix((row ^ static_cast<std::uint64_t>(j / 64)) + golden) >> (j % 64) & 1) != 0;
    }
    case MaskData::documents:
      return document_of(std::max<std::int64_t>(0, position), kv) == document_of(j, kv);
    case MaskData::causal_documents:
      return j <= position && document_of(position, kv) == document_of(j, kv);
    case MaskData::upper:
      return j >= position;
    case MaskData::all:
      return true;
    case MaskData::none:
      return false;
  }
  throw Error(ErrorKind::internal, "mask_allows: a value outside the enumeration");
}

OptionField mask_data_option() {
  return rare_option("mask-data", "distribution of the mask in tests and measurements",
                     {"random", "documents", "causal-documents", "upper", "all", "none"});
}

MaskData mask_data_named(std::string_view word) {
  const auto choices = mask_data_option().choices;  // in the order of MaskData
  const auto found = std::find(choices.begin(), choices.end(), word);
  return found == choices.end() ? MaskData::random : static_cast<MaskData>(found - choices.begin());
}

void draw_mask(MaskData data, std::int64_t masks_of_sequence, std::int64_t s, std::int64_t kv,
               std::span<double> values) {
  for_each_row(masks_of_sequence, s, values.size() / static_cast<std::size_t>(kv),
               [&](std::int64_t row, std::int64_t sequence, std::int64_t i) {
                 for (std::int64_t j = 0; j < kv; ++j)
                   values[static_cast<std::size_t>(row * kv + j)] =
                       mask_allows(data, sequence, i, j, s, kv) ? 1.0 + static_cast<double>(j % 255)
                                                                : 0.0;
               });
}

void draw_mask_bits(MaskData data, std::int64_t masks_of_sequence, std::int64_t s, std::int64_t kv,
                    std::span<double> values) {
  const std::int64_t words = mask_words(kv);
  for_each_row(masks_of_sequence, s, values.size() / static_cast<std::size_t>(words),
               [&](std::int64_t row, std::int64_t sequence, std::int64_t i) {
                 for (std::int64_t word = 0; word < words; ++word) {
                   std::uint32_t bits = 0;
                   for (std::int64_t j = 32 * word; j < std::min(kv, 32 * word + 32); ++j)
                     if (mask_allows(data, sequence, i, j, s, kv))
                       bits |= std::uint32_t{1} << (j % 32);
                   values[static_cast<std::size_t>(row * words + word)] =
                       static_cast<std::int32_t>(bits);
                 }
               });
}

void draw_mask_flags(MaskData data, std::int64_t masks_of_sequence, std::int64_t s, std::int64_t kv,
                     std::span<double> values) {
  const std::int64_t down = (s + mask_tile - 1) / mask_tile;
  const std::int64_t across = (kv + mask_tile - 1) / mask_tile;
  for_each_row(masks_of_sequence, down, values.size() / static_cast<std::size_t>(across),
               [&](std::int64_t row, std::int64_t sequence, std::int64_t tile) {
                 for (std::int64_t column = 0; column < across; ++column) {
                   bool any = false, all = true;
                   for (std::int64_t i = tile * mask_tile; i < std::min(s, (tile + 1) * mask_tile);
                        ++i)
                     for (std::int64_t j = column * mask_tile;
                          j < std::min(kv, (column + 1) * mask_tile); ++j)
                       (mask_allows(data, sequence, i, j, s, kv) ? any : all) =
                           mask_allows(data, sequence, i, j, s, kv);
                   values[static_cast<std::size_t>(row * across + column)] = all ? 1 : any ? 2 : 0;
                 }
               });
}

void draw_offsets(std::int64_t tokens, std::span<double> offsets) {
  std::mt19937_64 random(offsets.size());
  for (double& offset : offsets)
    offset = static_cast<double>(random() % (static_cast<std::uint64_t>(tokens) + 1));
  offsets.front() = 0;
  offsets.back() = static_cast<double>(tokens);
  std::sort(offsets.begin(), offsets.end());
}

void draw_lengths(std::int64_t most, std::span<double> lengths) {
  std::mt19937_64 random(lengths.size());
  for (double& length : lengths)
    length = static_cast<double>(random() % (static_cast<std::uint64_t>(most) + 1));
  lengths.front() = static_cast<double>(most);
  if (lengths.size() > 2) lengths[1] = 0;
}

void draw_pages(std::uint64_t seed, std::int64_t count, std::span<double> pages) {
  std::mt19937_64 random(seed);
  const std::vector<double> order = shuffled(0, count, random);
  for (std::size_t i = 0; i < pages.size(); ++i) pages[i] = order[i % order.size()];
}

void draw_lse(const Layer& layer, std::uint64_t seed, std::span<double> lse) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> noise(-0.5, 0.5);
  // For n scores with mean 0 and deviation 1 it is about log(n) + 1/2; a bias adds as much again.
  const double spread = layer.bias ? 1 : 0.5;
  const auto sequences = static_cast<std::size_t>(layer.b);
  std::vector<double> offsets(sequences + 1), kv_offsets(sequences + 1), lengths(sequences);
  draw_lengths(layer.kv, lengths);
  draw_offsets(layer.s, offsets);
  draw_offsets(layer.kv, kv_offsets);
  if (!layer.kv_offsets) kv_offsets = offsets;
  for (std::int64_t sequence = 0; sequence < layer.b; ++sequence) {
    const auto at = static_cast<std::size_t>(sequence);
    std::int64_t first = 0, queries = layer.s, keys = layer.kv;
    if (layer.layout == Layout::thd) {
      first = static_cast<std::int64_t>(offsets[at]);
      queries = static_cast<std::int64_t>(offsets[at + 1]) - first;
      keys = static_cast<std::int64_t>(kv_offsets[at + 1] - kv_offsets[at]);
    }
    if (layer.lengths) keys = static_cast<std::int64_t>(lengths[at]);
    for (std::int64_t i = 0; i < queries; ++i) {
      const std::int64_t position = i + keys - queries;
      const std::int64_t end = layer.mask == Mask::causal ? std::min(keys, position + 1) : keys;
      const std::int64_t begin =
          layer.window > 0 ? std::max<std::int64_t>(0, position - layer.window + 1) : 0;
      std::int64_t allowed = std::max<std::int64_t>(0, end - begin);
      if (layer.masked()) {
        allowed = 0;
        for (std::int64_t j = begin; j < end; ++j)
          allowed += mask_allows(layer.mask_data, sequence, i, j, layer.s, layer.kv);
      }
      for (std::int64_t head = 0; head < layer.heads; ++head) {
        const double value = std::log(static_cast<double>(allowed)) + spread + noise(random);
        const double without =
            layer.sinks ? noise(random) : -std::numeric_limits<double>::infinity();
        lse[static_cast<std::size_t>(layer.lse_at(sequence, head) + first + i)] =
            allowed > 0 ? value : without;
      }
    }
  }
}

}  // namespace fftune::attention
