#include "apps/fftune/check/invariance.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>

#include "core/error.hpp"
#include "device/parallel.hpp"
#include "runtime/choice.hpp"
#include "runtime/plan.hpp"
#include "verify/comparison.hpp"
#include "verify/host_threads.hpp"
#include "verify/input_data.hpp"

namespace fftune::tool {
namespace {

constexpr std::uint64_t seed = 1;
/// Rows of a part begin at multiples of this, so that its tensors are aligned as a buffer is.
constexpr std::int64_t first_row_step = 64;

/// The buffers of the most tokens. Fewer tokens read rows of them, from any row on.
class Rows {
 public:
  Rows(const Op& op, Backend& backend, const Problem& most)
      : op_(op), backend_(backend), most_(most) {
    for (const TensorSpec& spec : op.tensors(most)) {
      if (spec.role == Role::intermediate) continue;
      if (spec.role == Role::updated)
        throw Error(ErrorKind::internal, "rows of updated tensors are not compared");
      specs_.push_back(spec);
      buffers_.push_back(backend.allocate(std::max<std::size_t>(spec.bytes(), 1)));
      if (spec.role == Role::input) draw(spec, buffers_.back()->data());
    }
  }

  /// Runs it for `count` tokens from row `first` on. Returns the results' bytes.
  std::vector<std::vector<std::byte>> run(const Problem& problem, const Recipe& recipe,
                                          std::int64_t first) {
    const Plan plan(backend_, op_, problem, recipe);
    if (!workspace_ || workspace_->bytes() < plan.workspace_bytes())
      workspace_ = backend_.allocate(std::max<std::size_t>(plan.workspace_bytes(), 256));
    std::vector<void*> addresses;
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      auto* const data = static_cast<std::byte*>(buffers_[i]->data());
      const bool is_input = specs_[i].role == Role::input;
      const TensorSpec& own = plan.tensors()[i];
      // Offsets, for instance, have the number of tokens as a value.
      if (is_input && own.draw && !has_tokens(own, i)) draw(own, data);
      addresses.push_back(data + (is_input && has_tokens(own, i) ? bytes_of_rows(i, first) : 0));
      if (!is_input) backend_.fill(data, 0xff, own.bytes());
    }
    plan.run(addresses.data(), workspace_->data(), backend_.stream());
    backend_.synchronize();
    std::vector<std::vector<std::byte>> results;
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].role == Role::input) continue;
      results.emplace_back(plan.tensors()[i].bytes());
      backend_.read(results.back().data(), addresses[i], results.back().size());
    }
    return results;
  }

  /// "y[3] of 17 tokens", for the first row that differs; empty: none does.
  std::string compare(const std::vector<std::vector<std::byte>>& all,
                      const std::vector<std::vector<std::byte>>& part, std::int64_t first) {
    std::size_t at = 0;
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].role == Role::input) continue;
      const std::size_t row = bytes_of_rows(i, 1);
      const std::size_t place =
          first_difference(all[at].data() + static_cast<std::size_t>(first) * row, part[at].data(),
                           part[at].size(), threads_);
      if (place < part[at].size())
        return fmt::format("row {} of {} differs in byte {}", place / row, specs_[i].name,
                           place % row);
      ++at;
    }
    return "";
  }

 private:
  void draw(const TensorSpec& spec, void* device) {
    std::vector<std::byte> bytes(spec.bytes());
    if (spec.draw) {
      std::vector<double> values(static_cast<std::size_t>(spec.elements()));
      spec.draw(seed, values);
      encode(spec.dtype, std::span<const double>(values), bytes.data());
    } else {
      const std::int64_t rows = spec.shape.front();
      random_rows(seed, spec.name, spec.dtype, spec.scale, spec.mean, rows, spec.elements() / rows,
                  bytes.data(), threads_);
    }
    backend_.write(device, bytes.data(), bytes.size());
  }
  bool has_tokens(const TensorSpec& own, std::size_t tensor) const {
    return own.shape != specs_[tensor].shape;
  }
  std::size_t bytes_of_rows(std::size_t tensor, std::int64_t rows) const {
    return specs_[tensor].bytes() / static_cast<std::size_t>(specs_[tensor].shape.front()) *
           static_cast<std::size_t>(rows);
  }

  const Op& op_;
  Backend& backend_;
  Problem most_;
  HostThreads threads_;
  std::vector<TensorSpec> specs_;  // of the most tokens: inputs and outputs
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::unique_ptr<Buffer> workspace_;
};

}  // namespace

std::vector<Problem> invariance_problems(const Catalog& catalog, DeviceKind kind) {
  const bool gpu = kind == DeviceKind::cuda;
  // A device's slices of usual layers, and small ones for the CPU.
  const auto size = [&](std::int64_t there, std::int64_t here) { return gpu ? there : here; };
  std::vector<Problem> problems;
  const auto add = [&](const char* op, DType dtype, std::map<std::string, std::int64_t> sizes,
                       std::map<std::string, std::string> options) {
    const Op& of = catalog.op(op);
    sizes[std::string(of.token_size())] = 1;
    options["batch-invariant"] = "yes";
    problems.push_back(
        canonical(of, {op, "fwd", dtype, std::move(sizes), std::move(options)}, kind));
  };
  const DType types[] = {DType::bf16, DType::f32};
  for (const DType dtype : types) {
    // Sequences that share a cache, some with keys of several chunks (attention/sm90/chunks.cuh),
    // and a prompt with one part or another that is new.
    const bool has_chunks = dtype == DType::bf16;
    add("attention", dtype,
        {{"b", 1},
         {"heads", 4},
         {"kv-heads", 1},
         {"dim", size(64, 16)},
         {"kv", size(has_chunks ? 1280 : 512, 64)},
         {"page", 16},
         {"pages", size(has_chunks ? 5 << 15 : 1 << 16, 512)}},
        {{"lengths", "yes"}});
    add("attention", dtype,
        {{"b", 1},
         {"heads", 8},
         {"kv-heads", 2},
         {"dim", size(128, 16)},
         {"kv", size(2304, 96)},
         {"page", 16}},
        {{"layout", "thd"}, {"mask", "causal"}, {"lengths", "yes"}});
    add("linear", dtype, {{"k", size(4096, 96)}, {"n", size(2048, 80)}}, {{"residual", "yes"}});
    add("linear", dtype, {{"k", 100}, {"n", 36}}, {{"bias", "yes"}});  // rows that are not aligned
    add("qkv", dtype,
        {{"d", size(2048, 64)}, {"heads", 8}, {"kv-heads", 2}, {"dim", size(128, 16)}},
        {{"weights", "packed"}, {"norm", "yes"}, {"rotation", "halves"}});
    add("rmsnorm", dtype, {{"d", size(4096, 64)}}, {{"residual", "yes"}});
    add("moe-ffn", dtype,
        {{"d", size(1024, 32)}, {"h", size(512, 48)}, {"experts", size(32, 6)}, {"top-k", 4}},
        {{"gate-up", "halves"}});
  }
  add("linear", DType::bf16, {{"k", size(14336, 640)}, {"n", size(1024, 48)}}, {});
  add("rmsnorm", DType::bf16, {{"d", size(16384, 160)}}, {});
  add("ffn", DType::bf16, {{"d", size(2048, 64)}, {"h", size(2816, 96)}},
      {{"norm", "rms"}, {"residual", "yes"}});
  add("ffn", DType::fp8, {{"d", size(1024, 128)}, {"h", size(2048, 256)}}, {{"scales", "block"}});
  add("moe-ffn", DType::fp8,
      {{"d", size(1024, 128)}, {"h", size(512, 128)}, {"experts", size(32, 6)}, {"top-k", 4}},
      {{"gate-up", "halves"}, {"scales", "block"}});
  return problems;
}

std::string invariance_rows(const Op& op, const Problem& problem) {
  const bool of_sequences = problem.op == "attention" && !problem.has("layout", "thd");
  return of_sequences ? "b" : std::string(op.token_size());
}

InvarianceResult check_invariance(const Catalog& catalog, Backend& backend,
                                  const PresetLibrary& presets, const Problem& problem,
                                  std::int64_t most, std::span<const std::int64_t> counts,
                                  const std::function<bool()>& cancelled) {
  const Op& op = catalog.op(problem.op);
  const std::string tokens = invariance_rows(op, problem);
  const bool are_last = problem.has("layout", "thd");
  const auto of = [&](std::int64_t count) { return problem.with_size(tokens, count); };
  // A choice may take longer than all that follows.
  std::vector<Recipe> recipes(counts.size() + 1);
  HostThreads threads;
  threads.run(static_cast<int>(recipes.size()), threads.max_threads(), [&](int i) {
    if (cancelled && cancelled()) return;
    const auto at = static_cast<std::size_t>(i);
    const std::int64_t count = at < counts.size() ? counts[at] : most;
    recipes[at] = choose(catalog, op, of(count), backend.facts(), presets).recipe;
  });
  InvarianceResult result;
  std::map<Recipe, std::int64_t> distinct{{recipes.back(), most}};  // each with a number of tokens
  for (std::size_t i = 0; i < counts.size(); ++i) distinct.emplace(recipes[i], counts[i]);
  result.recipes = static_cast<int>(distinct.size());
  // Their kernels are compiled side by side; the runs find them compiled.
  const std::vector<std::pair<Recipe, std::int64_t>> each(distinct.begin(), distinct.end());
  threads.run(static_cast<int>(each.size()), threads.max_threads(), [&](int i) {
    const auto& [recipe, count] = each[static_cast<std::size_t>(i)];
    if (!cancelled || !cancelled()) Plan(backend, op, of(count), recipe);
  });
  if (cancelled && cancelled()) return result;
  Rows rows(op, backend, of(most));
  const auto all = rows.run(of(most), recipes.back(), 0);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (cancelled && cancelled()) return result;
    const std::int64_t count = counts[i];
    // Rows from other places, which other threads compute.
    const std::int64_t places = (most - count) / first_row_step + 1;
    const std::int64_t first = are_last ? most - count : count * 7 % places * first_row_step;
    const auto part = rows.run(of(count), recipes[i], first);
    if (std::string why = rows.compare(all, part, first); !why.empty()) {
      result.difference = fmt::format("{}={} from row {} on, by {}: {}", tokens, count, first,
                                      recipe_text(recipes[i]), why);
      return result;
    }
  }
  return result;
}

}  // namespace fftune::tool
