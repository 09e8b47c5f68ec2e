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

/// Calls block(token) for every token that followed the last n - 1 ids before; returns how many ids
/// are no tokens.
template <typename Id, typename Block>
std::int32_t search(const Rows& rows, std::span<const Id> ids, std::int64_t n, const Block& block) {
  const auto padding = static_cast<Id>(rows.padding);
  const auto is_token = [&](Id id) { return id >= 0 && id < rows.vocab; };
  const auto flaws =
      std::count_if(ids.begin(), ids.end(), [&](Id id) { return id != padding && !is_token(id); });
  const std::int64_t starts = n < 1 ? 0 : std::ssize(ids) - n + 1;
  if (starts <= 0) return static_cast<std::int32_t>(flaws);
  const std::span<const Id> last = ids.last(static_cast<std::size_t>(n) - 1);
  if (std::find(last.begin(), last.end(), padding) != last.end())
    return static_cast<std::int32_t>(flaws);
  for (std::size_t place = 0; place < static_cast<std::size_t>(starts); ++place) {
    const Id follower = ids[place + last.size()];
    if (follower == padding || !is_token(follower)) continue;
    // From the end, where a text differs most often.
    const auto window = ids.subspan(place, last.size());
    if (std::equal(window.rbegin(), window.rend(), last.rbegin()))
      block(static_cast<std::size_t>(follower));
  }
  return static_cast<std::int32_t>(flaws);
}

template <typename Id>
void block_row(const Rows& rows, const Places& at, const HostCall& call, std::int64_t row) {
  const auto counts = [&](std::size_t place) {
    return static_cast<const std::int32_t*>(call.tensors[place])[row];
  };
  const auto* const ids = static_cast<const Id*>(call.tensors[at.ids]) + row * rows.len;
  const std::int64_t length =
      rows.own_lengths ? std::clamp<std::int64_t>(counts(at.lengths), 0, rows.len) : rows.len;
  auto* const logits = static_cast<std::byte*>(call.tensors[at.logits]) +
                       row * rows.vocab * static_cast<std::int64_t>(dtype_bytes(rows.dtype));
  constexpr float blocked[] = {-std::numeric_limits<float>::infinity()};
  const auto block = [&](std::size_t token) {
    encode(rows.dtype, std::span<const float>(blocked), logits + token * dtype_bytes(rows.dtype));
  };
  static_cast<std::int32_t*>(call.tensors[at.invalid])[row] =
      search(rows, std::span<const Id>(ids, static_cast<std::size_t>(length)),
             rows.own_n ? counts(at.n) : rows.n, block);
}

class CpuRows final : public Family {
 public:
  std::string_view name() const override { return "cpu_rows"; }
  std::string_view summary() const override { return "blocks of rows, on all threads"; }
  DeviceKind device_kind() const override { return DeviceKind::cpu; }
  bool is_fallback() const override { return true; }
  std::vector<std::string> stages() const override { return {stage}; }
  std::vector<std::string> sources() const override { return {"ngram_block/cpu_families.cpp"}; }
  std::optional<std::string> refusal(const Problem&, const DeviceFacts&) const override {
    return std::nullopt;
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return task_space(rows_of(problem).b, facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    const Rows rows = rows_of(problem);
    return default_task(rows.b, rows.len * static_cast<std::int64_t>(dtype_bytes(rows.ids)), facts);
  }

  Program program(const Problem& problem, const DeviceFacts&, const Config& config) const override {
    const Rows rows = rows_of(problem);
    const Places at = places_of(problem);
    const std::int64_t of_task = config.at("rows");
    const int threads = config.get("threads");
    Program program;
    program.host_tensors = at.count;
    program.steps.emplace_back(HostFunction([=](const HostCall& call) {
      const auto tasks = static_cast<int>((rows.b + of_task - 1) / of_task);
      call.parallel.run(tasks, threads, [&](int task) {
        for (std::int64_t row = task * of_task; row < std::min(rows.b, (task + 1) * of_task); ++row)
          if (rows.ids == DType::i64)
            block_row<std::int64_t>(rows, at, call, row);
          else
            block_row<std::int32_t>(rows, at, call, row);
      });
    }));
    return program;
  }
};

}  // namespace

const Family& cpu_rows_family() {
  static const CpuRows family;
  return family;
}

}  // namespace fftune::ngram_block
