// Test data of attention and of pack-mask that are no noise.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/attention/attention.hpp"

namespace fftune::attention {

/// Whether a mask of those data allows query i of `s` key j of `kv`; the same in every head.
bool mask_allows(MaskData data, std::int64_t sequence, std::int64_t i, std::int64_t j,
                 std::int64_t s, std::int64_t kv);

/// The option mask-data, which says what masks look like in tests and measurements, and its value
/// by its word; that of no word is the first.
OptionField mask_data_option();
MaskData mask_data_named(std::string_view word);

// Masks of those data, `masks_of_sequence` for each sequence: bytes [masks, s, kv], packed rows
// [masks, s, mask_words(kv)] as i32, and flags [masks, ceil(s / 64), ceil(kv / 64)].
void draw_mask(MaskData data, std::int64_t masks_of_sequence, std::int64_t s, std::int64_t kv,
               std::span<double> values);
void draw_mask_bits(MaskData data, std::int64_t masks_of_sequence, std::int64_t s, std::int64_t kv,
                    std::span<double> values);
void draw_mask_flags(MaskData data, std::int64_t masks_of_sequence, std::int64_t s, std::int64_t kv,
                     std::span<double> values);

/// Sequences of unlike lengths, some of them empty, that fill all tokens.
void draw_offsets(std::int64_t tokens, std::span<double> offsets);
/// From 0 to `most`; the first is `most`, and of three or more the second is 0.
void draw_lengths(std::int64_t most, std::span<double> lengths);
/// Pages of `all` in any order, each once where there are enough.
void draw_pages(std::uint64_t seed, std::int64_t all, std::span<double> pages);
/// About what the forward pass would write for scores of deviation 1, and -inf where it would.
void draw_lse(const Layer& layer, std::uint64_t seed, std::span<double> lse);

}  // namespace fftune::attention
