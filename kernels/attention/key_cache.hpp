// The keys of sequences in a cache that all heads share, contiguous or in pages, as mla and indexer
// read it. The s queries of a sequence are its last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "core/problem.hpp"
#include "core/saturated.hpp"
#include "kernels/common/op_parts.hpp"

namespace fftune::attention {

struct KeyCache {
  explicit KeyCache(const Problem& problem)
      : b(problem.size("b")),
        s(problem.size("s")),
        kv(problem.size("kv")),
        page(size_or(problem, "page", 0)),
        lengths(problem.has("lengths", "yes")) {
    if (page > 0) pages = size_or(problem, "pages", b * pages_of_sequence());
  }

  std::int64_t b = 0;      // sequences
  std::int64_t s = 0;      // queries of a sequence
  std::int64_t kv = 0;     // keys of a sequence at most
  std::int64_t page = 0;   // keys of a page; 0: not paged
  std::int64_t pages = 0;  // in memory
  bool lengths = false;

  std::int64_t pages_of_sequence() const { return (kv + page - 1) / page; }
  /// Pages, or sequences, of keys, and the keys of one.
  std::int64_t blocks() const { return page > 0 ? pages : b; }
  std::int64_t keys_of_block() const { return page > 0 ? page : kv; }
  /// The most keys that a sequence of test data has: kv, or where sequences of that length do not
  /// fit in the pages together, its share of those.
  std::int64_t usual_kv() const {
    if (page == 0 || !lengths) return kv;
    return std::min(kv, std::max<std::int64_t>(pages * page / b, 1));
  }
  /// Keys that a query of a sequence of `length` keys sees.
  std::int64_t visible(std::int64_t query, std::int64_t length) const {
    return std::clamp<std::int64_t>(query + length - s + 1, 0, length);
  }
};

/// The keys of a sequence: its length, cut to [0, kv].
template <typename Length>
std::int64_t length_of(const KeyCache& cache, const Length* lengths, std::int64_t sequence) {
  if (!cache.lengths) return cache.kv;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(lengths[sequence]), 0, cache.kv);
}

/// The page, or sequence, that has a key of a sequence; -1 where it is not in memory.
template <typename Page>
std::int64_t block_of(const KeyCache& cache, const Page* pages, std::int64_t sequence,
                      std::int64_t key) {
  if (cache.page == 0) return sequence;
  const auto page =
      static_cast<std::int64_t>(pages[sequence * cache.pages_of_sequence() + key / cache.page]);
  return page < 0 || page >= cache.pages ? -1 : page;
}

/// The pages of a problem that leaves their number out (SizeField::when_absent).
inline std::optional<std::int64_t> usual_pages(const Problem& problem) {
  const std::int64_t page = size_or(problem, "page", 0);
  if (page == 0) return std::nullopt;
  const std::int64_t kv = size_or(problem, "kv", size_or(problem, "s", 0));
  return saturated_product(size_or(problem, "b", 0), kv / page + (kv % page != 0));
}

// Fields of ops over such a cache.

inline SizeField queries_size(std::int64_t max) {
  return {.name = "s", .help = "queries of a sequence, its last", .max = max, .example = 1};
}
inline SizeField keys_size(std::int64_t max, std::int64_t example) {
  return {.name = "kv",
          .help = "keys of a sequence, with lengths=yes at most",
          .max = max,
          .example = example};
}
/// `keys` says what a page has.
inline SizeField page_size(const std::string& keys, std::int64_t max) {
  return rare_size("page", keys + "; a page id out of range reads zeros; contiguous if left out",
                   max, 64);
}
inline SizeField pages_size(std::int64_t max) {
  return neutral(rare_size("pages",
                           "pages in memory; as many as the sequences need if left out. With fewer "
                           "and lengths=yes, test "
                           "data have shorter sequences",
                           max, 4096, usual_pages));
}
inline OptionField lengths_option() {
  return rare_option("lengths", "whether each sequence has its own number of keys, of kv at most",
                     {"no", "yes"});
}

}  // namespace fftune::attention
