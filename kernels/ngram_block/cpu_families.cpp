// Blocks of rows on all threads: the last n - 1 ids are looked for, in order.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "kernels/common/cpu_task.hpp"
#include "kernels/common/stage_family.hpp"
#include "kernels/ngram_block/ngram_block.hpp"

namespace fftune::ngram_block {
namespace {

/// What a row says: its own ids, after those of its prefix where `joined`.
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

/// What counts of row `row` of ids [rows, whole].
template <typename Id>
std::span<const Id> counted(const Rows& rows, const HostCall& call, std::size_t ids,
                            std::size_t lengths, std::int64_t whole, std::int64_t row) {
  std::int64_t length = whole;
  if (rows.own_lengths)
    length = std::clamp<std::int64_t>(static_cast<const std::int32_t*>(call.tensors[lengths])[row],
                                      0, whole);
  return {static_cast<const Id*>(call.tensors[ids]) + row * whole,
          static_cast<std::size_t>(length)};
}

template <typename Id, bool joined>
void block_row(const Rows& rows, const Places& at, const HostCall& call, std::int64_t row) {
  Text<Id, joined> text;
  text.own = counted<Id>(rows, call, at.ids, at.lengths, rows.len, row);
  if constexpr (joined)
    text.prefix =
        counted<Id>(rows, call, at.prefix, at.prefix_lengths, rows.prefix, row / rows.beams);
  auto* const logits = static_cast<std::byte*>(call.tensors[at.logits]) +
                       row * rows.vocab * static_cast<std::int64_t>(dtype_bytes(rows.dtype));
  constexpr float blocked[] = {-std::numeric_limits<float>::infinity()};
  const auto block = [&](std::size_t token) {
    encode(rows.dtype, std::span<const float>(blocked), logits + token * dtype_bytes(rows.dtype));
  };
  const std::int64_t n =
      rows.own_n ? static_cast<const std::int32_t*>(call.tensors[at.n])[row] : rows.n;
  static_cast<std::int32_t*>(call.tensors[at.invalid])[row] = search(rows, text, n, block);
}

using BlockRow = void (*)(const Rows&, const Places&, const HostCall&, std::int64_t row);

BlockRow block_row_of(const Rows& rows) {
  if (rows.ids == DType::i64)
    return rows.prefix > 0 ? block_row<std::int64_t, true> : block_row<std::int64_t, false>;
  return rows.prefix > 0 ? block_row<std::int32_t, true> : block_row<std::int32_t, false>;
}

class CpuRows final : public StageFamily {
 public:
  CpuRows()
      : StageFamily({.name = "cpu_rows",
                     .summary = "blocks of rows, on all threads",
                     .device_kind = DeviceKind::cpu,
                     .stage = stage,
                     .pass = "fwd",
                     .sources = {"ngram_block/cpu_families.cpp"},
                     .is_fallback = true}) {}

  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return task_space(rows_of(problem).b, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const Rows rows = rows_of(problem);
    return default_task(
        rows.b, (rows.prefix + rows.len) * static_cast<std::int64_t>(dtype_bytes(rows.ids)), facts);
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const Rows rows = rows_of(problem);
    const Places at = places_of(problem);
    const std::int64_t of_task = config.at("rows");
    const int threads = config.get("threads");
    const BlockRow block = block_row_of(rows);
    Program program;
    program.host_tensors = at.count;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const auto tasks = static_cast<int>((rows.b + of_task - 1) / of_task);
      call.parallel.run(tasks, threads, [&](int task) {
        for (std::int64_t row = task * of_task; row < std::min(rows.b, (task + 1) * of_task); ++row)
          block(rows, at, call, row);
      });
    }));
    return program;
  }
};

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRows rows;
  return {&rows};
}

}  // namespace fftune::ngram_block
