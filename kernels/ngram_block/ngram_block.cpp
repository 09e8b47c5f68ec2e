#include "kernels/ngram_block/ngram_block.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/op_parts.hpp"
#include "kernels/common/test_data.hpp"

namespace fftune::ngram_block {
namespace {

/// Texts of `length` ids that repeat themselves: most of an alphabet of a few tokens, with a little
/// padding and some ids that are no tokens; every fourth of the whole vocabulary. Alphabets of
/// prefixes and of what follows them begin alike, so that texts repeat themselves across the
/// border.
void draw_ids(const Rows& rows, std::int64_t length, std::uint64_t seed, std::span<double> ids) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::int64_t bound) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(bound));
  };
  for (std::size_t first = 0; first < ids.size(); first += static_cast<std::size_t>(length)) {
    const std::int64_t alphabet = below(4) == 0 ? rows.vocab : std::min(rows.vocab, 1 + below(12));
    const std::int64_t origin = rows.prefix > 0 ? 0 : below(rows.vocab - alphabet + 1);
    const bool flawed = below(4) == 0;
    for (double& id : ids.subspan(first, static_cast<std::size_t>(length))) {
      id = static_cast<double>(origin + below(alphabet));
      if (flawed && below(16) == 0) id = static_cast<double>(rows.padding);
      if (flawed && below(16) == 0) id = static_cast<double>(below(2) ? rows.vocab + below(9) : -2);
    }
  }
}

std::vector<TensorSpec> tensors_of(const Rows& rows) {
  const auto texts = [&](const char* name, std::int64_t count, std::int64_t length) {
    TensorSpec ids{name, rows.ids, {count, length}};
    ids.draw = [=](std::uint64_t seed, std::span<double> values) {
      draw_ids(rows, length, seed, values);
    };
    return ids;
  };
  std::vector<TensorSpec> tensors{texts("ids", rows.b, rows.len),
                                  {"logits", rows.dtype, {rows.b, rows.vocab}, Role::updated, 3}};
  if (rows.prefix > 0) tensors.push_back(texts("prefix", rows.groups(), rows.prefix));
  const auto add_counts = [&](const char* name, std::int64_t count, std::int64_t most) {
    tensors.push_back({name, DType::i32, {count}});
    tensors.back().draw = whole_numbers(0, most);
  };
  if (rows.own_lengths) add_counts("lengths", rows.b, rows.len);
  if (rows.own_lengths && rows.prefix > 0) add_counts("prefix_lengths", rows.groups(), rows.prefix);
  if (rows.own_n) add_counts("n", rows.b, 5);
  tensors.push_back({"invalid", DType::i32, {rows.b}, Role::output, 1});
  return tensors;
}

void block_row(const Rows& rows, std::span<const double> ids, std::int64_t n, double* logits,
               double& invalid) {
  const auto is_token = [&](double id) { return id >= 0 && id < static_cast<double>(rows.vocab); };
  const auto padding = static_cast<double>(rows.padding);
  for (const double id : ids) invalid += id != padding && !is_token(id);
  if (n < 1 || n > std::ssize(ids)) return;
  const auto last = ids.last(static_cast<std::size_t>(n) - 1);
  if (std::count(last.begin(), last.end(), padding) > 0) return;
  for (std::size_t end = last.size(); end < ids.size(); ++end) {
    const double follower = ids[end];
    if (follower == padding || !is_token(follower)) continue;
    if (std::equal(last.begin(), last.end(),
                   ids.begin() + static_cast<std::ptrdiff_t>(end - last.size())))
      logits[static_cast<std::size_t>(follower)] = -std::numeric_limits<double>::infinity();
  }
}

bool is_whole(double number) {
  return number == std::floor(number);
}

/// Where a prefix is shared.
std::optional<std::int64_t> usual_beams(const Problem& problem) {
  return problem.sizes.contains("prefix") ? std::optional<std::int64_t>(1) : std::nullopt;
}

OpFacts facts() {
  return {
      .name = "ngram-block",
      .summary = "logits of tokens that would repeat an n-gram of their row become -inf",
      .passes = {"fwd"},
      .sizes = {token_count("b", "rows: sequences, or beams", {1, 32, 256}, {1, 32},
                            SizeField().max, 256),
                {.name = "len",
                 .help = "ids of a row; with a prefix, those after it",
                 .max = most_ids,
                 .example = 512},
                {.name = "vocab", .help = "logits of a row", .max = most_tokens, .example = 32128},
                rare_size("prefix",
                          "ids of a prefix that rows share, before their own; none if left out",
                          most_ids, 8192),
                rare_size("beams", "rows after each other that share a prefix; 1 if left out",
                          most_beams, 8, usual_beams)},
      .options = {{"ids", "element type of the ids", {"i32", "i64"}},
                  {"lengths",
                   "lengths of rows and prefixes: all of len and prefix, or each its own",
                   {"whole", "own"},
                   true},
                  {"ngrams", "one n for all rows, or each its own", {"one", "own"}, true},
                  rare_number("n", "tokens of an n-gram, a whole number", "3", {1, 131072}),
                  rare_number("padding", "the id that never matches, a whole number", "-1",
                              {-1000000, 1000000})},
      .token_size = "b",
      .families = {cuda_families, cpu_families},
      .baselines = baselines};
}

class NgramBlock final : public DescribedOp {
 public:
  NgramBlock() : DescribedOp(facts()) {}

  bool rows_are_alike(const Problem& problem) const override {
    return rows_of(problem).prefix == 0;
  }

  std::string contradiction(const Problem& problem) const override {
    if (problem.sizes.contains("beams") && !problem.sizes.contains("prefix"))
      return "beams without prefix: there is nothing to share";
    for (const char* name : {"n", "padding"})
      if (problem.options.contains(name) && !is_whole(problem.number(name)))
        return fmt::format("{}={} is not a whole number", name, problem.option(name));
    return "";
  }

  std::vector<TensorSpec> tensors(const Problem& problem) const override {
    return tensors_of(rows_of(problem));
  }

  // How many logits are written the ids alone know: a few.
  std::vector<StageSpec> stages(const Problem& problem) const override {
    const Rows rows = rows_of(problem);
    const auto tensors = tensors_of(rows);
    StageSpec stage = whole_stage(ngram_block::stage, tensors);
    stage.bytes = 0;
    for (const auto& tensor : tensors)
      if (tensor.role != Role::updated) stage.bytes += static_cast<double>(tensor.bytes());
    stage.flops = static_cast<double>(rows.b) * static_cast<double>(rows.prefix + rows.len);
    return {stage};
  }

  void reference(const Problem& problem, std::size_t, ReferenceTensors& tensors,
                 Parallel& parallel) const override {
    const Rows rows = rows_of(problem);
    auto& logits = tensors.at("logits");
    std::vector<double> invalid(static_cast<std::size_t>(rows.b));
    // The ids of row `row` of `name` that count, for texts of `whole` ids.
    const auto text = [&](const char* name, const char* lengths, std::int64_t whole,
                          std::size_t row) {
      const auto length = rows.own_lengths
                              ? std::clamp<std::int64_t>(
                                    static_cast<std::int64_t>(tensors.at(lengths)[row]), 0, whole)
                              : whole;
      return std::span<const double>(tensors.at(name))
          .subspan(row * static_cast<std::size_t>(whole), static_cast<std::size_t>(length));
    };
    parallel.run(static_cast<int>(rows.b), parallel.max_threads(), [&](int task) {
      const auto row = static_cast<std::size_t>(task);
      std::vector<double> ids;
      if (rows.prefix > 0) {
        const auto prefix = text("prefix", "prefix_lengths", rows.prefix,
                                 row / static_cast<std::size_t>(rows.beams));
        ids.assign(prefix.begin(), prefix.end());
      }
      const auto row_ids = text("ids", "lengths", rows.len, row);
      ids.insert(ids.end(), row_ids.begin(), row_ids.end());
      const auto n = rows.own_n ? static_cast<std::int64_t>(tensors.at("n")[row]) : rows.n;
      block_row(rows, ids, n, logits.data() + row * static_cast<std::size_t>(rows.vocab),
                invalid[row]);
    });
    tensors["invalid"] = std::move(invalid);
  }
};

}  // namespace

Rows rows_of(const Problem& problem) {
  const auto number = [&](const char* name) {
    return static_cast<std::int64_t>(number_or_default(ngram_block_op(), problem, name));
  };
  Rows rows;
  rows.b = problem.size("b");
  rows.len = problem.size("len");
  if (problem.sizes.contains("prefix")) rows.prefix = problem.size("prefix");
  if (problem.sizes.contains("beams")) rows.beams = problem.size("beams");
  rows.vocab = problem.size("vocab");
  rows.n = number("n");
  rows.padding = number("padding");
  rows.own_lengths = problem.has("lengths", "own");
  rows.own_n = problem.has("ngrams", "own");
  rows.ids = problem.option("ids") == "i64" ? DType::i64 : DType::i32;
  rows.dtype = problem.dtype;
  return rows;
}

}  // namespace fftune::ngram_block

const fftune::Op& fftune::ngram_block_op() {
  static const ngram_block::NgramBlock op;
  return op;
}
