// Blocks of rows on all threads: the last n - 1 ids are looked for, in order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/common/cpu_task.hpp"
#include "kernels/ngram_block/ngram_block.hpp"

namespace fftune::ngram_block {
namespace {

/// The text of a row: its own ids, after those of its prefix if `joined`.
template <typename Id, bool joined>
struct Text {
  std::span<const Id> prefix;
  std::span<const Id> own;

  std::int64_t size() const { return std::ssize(prefix) + std::ssize(own); }
  Id operator[](std::int64_t place) const {
    if constexpr (joined) {
      if (place < std::ssize(prefix)) return prefix[static_cast<std::size_t>(place)];
      place -= std::ssize(prefix);
    }
    return own[static_cast<std::size_t>(place)];
  }
};

/// Calls block(token) for every token that followed the last n - 1 ids before; returns how many ids
/// are no tokens.
template <typename Id, bool joined, typename Block>
std::int32_t search(const Rows& rows, const Text<Id, joined>& text, std::int64_t n,
                    const Block& block) {
  const auto padding = static_cast<Id>(rows.padding);
  const auto is_token = [&](Id id) { return id >= 0 && id < rows.vocab; };
  const auto is_flaw = [&](Id id) { return id != padding && !is_token(id); };
  auto flaws = std::count_if(text.own.begin(), text.own.end(), is_flaw);
  if constexpr (joined) flaws += std::count_if(text.prefix.begin(), text.prefix.end(), is_flaw);
  const std::int64_t starts = n < 1 ? 0 : text.size() - n + 1;
  // The window that ends before `end`, against the last one from the end, where a text differs most
  // often; each place of the last one is met before any match.
  const auto matches = [&](std::int64_t end) {
    for (std::int64_t back = 1; back < n; ++back) {
      const Id id = text[end - back];
      if (id != text[text.size() - back] || id == padding) return false;
    }
    return true;
  };
  for (std::int64_t end = n - 1; end < starts + n - 1; ++end) {
    const Id follower = text[end];
    if (follower == padding || !is_token(follower)) continue;
    if (matches(end)) block(static_cast<std::size_t>(follower));
  }
  return static_cast<std::int32_t>(flaws);
}

/// The tensors of a call; null for absent ones.
struct Tensors {
  const void* ids = nullptr;
  const void* prefix = nullptr;
  const std::int32_t* lengths = nullptr;
  const std::int32_t* prefix_lengths = nullptr;
  const std::int32_t* n = nullptr;
  std::byte* logits = nullptr;
  std::int32_t* invalid = nullptr;
};

/// The ids of row `row` of ids [rows, whole] within its length.
template <typename Id>
std::span<const Id> counted(const void* ids, const std::int32_t* lengths, std::int64_t whole,
                            std::int64_t row) {
  const std::int64_t length = lengths ? std::clamp<std::int64_t>(lengths[row], 0, whole) : whole;
  return {static_cast<const Id*>(ids) + row * whole, static_cast<std::size_t>(length)};
}

template <typename Id, bool joined>
void block_row(const Rows& rows, const Tensors& tensors, std::int64_t row) {
  Text<Id, joined> text;
  text.own = counted<Id>(tensors.ids, tensors.lengths, rows.len, row);
  if constexpr (joined)
    text.prefix =
        counted<Id>(tensors.prefix, tensors.prefix_lengths, rows.prefix, row / rows.beams);
  const std::size_t bytes = dtype_bytes(rows.dtype);
  auto* const logits = tensors.logits + row * rows.vocab * static_cast<std::int64_t>(bytes);
  constexpr float blocked[] = {-std::numeric_limits<float>::infinity()};
  const auto block = [&](std::size_t token) {
    encode(rows.dtype, std::span<const float>(blocked), logits + token * bytes);
  };
  const std::int64_t n = tensors.n ? tensors.n[row] : rows.n;
  tensors.invalid[row] = search(rows, text, n, block);
}

using BlockRow = void (*)(const Rows&, const Tensors&, std::int64_t row);

BlockRow block_row_of(const Rows& rows) {
  if (rows.ids == DType::i64)
    return rows.prefix > 0 ? block_row<std::int64_t, true> : block_row<std::int64_t, false>;
  return rows.prefix > 0 ? block_row<std::int32_t, true> : block_row<std::int32_t, false>;
}

RowWork work(const Problem& problem) {
  const Rows rows = rows_of(problem);
  return {.rows = rows.b,
          .row_bytes = (rows.prefix + rows.len) * static_cast<std::int64_t>(dtype_bytes(rows.ids)),
          .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts&, const Config& config) {
  const Rows rows = rows_of(problem);
  const TensorPlaces at(ngram_block_op().tensors(problem));
  const RowTasks tasks(work(problem), config);
  return host_program(
      at.count(),
      [=, block = block_row_of(rows), ids = at.at("ids"), prefix = at.at("prefix"),
       lengths = at.at("lengths"), prefix_lengths = at.at("prefix_lengths"), n = at.at("n"),
       logits = at.at("logits"), invalid = at.at("invalid")](const HostCall& call) {
        const auto counts = [&](std::size_t place) {
          return static_cast<std::int32_t*>(address_of(call, place));
        };
        const Tensors tensors{.ids = call.tensors[ids],
                              .prefix = address_of(call, prefix),
                              .lengths = counts(lengths),
                              .prefix_lengths = counts(prefix_lengths),
                              .n = counts(n),
                              .logits = static_cast<std::byte*>(call.tensors[logits]),
                              .invalid = counts(invalid)};
        tasks.run(call.parallel, nullptr, [&](std::int64_t row) { block(rows, tensors, row); });
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRowFamily rows({.name = "cpu_rows",
                                  .summary = "blocks of rows, on all threads",
                                  .stage = stage,
                                  .sources = {"ngram_block/cpu_families.cpp"},
                                  .program = program},
                                 work);
  return {&rows};
}

}  // namespace fftune::ngram_block
