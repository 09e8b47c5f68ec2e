#include "kernels/layer/sequences.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>

#include "kernels/common/op_parts.hpp"
#include "kernels/gemm/problem.hpp"

namespace fftune::layer {

std::int64_t pages_of(const Problem& problem) {
  return size_or(problem, "pages",
                 problem.size("batch") * ceil_div(problem.size("cache"), problem.size("page")));
}

std::int64_t cache_rows(const Problem& problem) {
  return problem.sizes.contains("page") ? pages_of(problem) * problem.size("page")
                                        : problem.size("batch") * problem.size("cache");
}

std::string contradiction_of_cache(const Problem& problem) {
  if (const auto s = size_or(problem, "s", 1); s > problem.size("cache"))
    return fmt::format("s={} exceeds cache={}: new tokens go to the cache too", s,
                       problem.size("cache"));
  if (problem.sizes.contains("pages") && !problem.sizes.contains("page"))
    return "pages without page: give the keys of a page";
  return "";
}

std::string contradiction_of_pages(const Problem& problem) {
  if (!problem.sizes.contains("page")) return "";
  const std::int64_t least = Sequences::written_pages(problem);
  if (pages_of(problem) < least)
    return fmt::format("pages={}: new tokens alone are in up to {} pages", pages_of(problem),
                       least);
  return "";
}

Sequences::Sequences(const Problem& problem)
    : s_(size_or(problem, "s", 1)),
      cache_(problem.size("cache")),
      page_(size_or(problem, "page", 0)) {
  const auto count = static_cast<std::size_t>(problem.size("batch"));
  lengths_.assign(count, cache_);
  std::mt19937_64 random(count);
  if (problem.has("lengths", "ragged"))
    for (std::size_t i = 1; i < count; ++i)
      lengths_[i] =
          s_ + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(cache_ - s_ + 1));
  if (page_ > 0) deal_pages(pages_of(problem), random);
}

std::int64_t Sequences::written_pages(const Problem& problem) {
  const std::int64_t page = problem.size("page");
  return problem.size("batch") * std::min(ceil_div(size_or(problem, "s", 1) - 1, page) + 1,
                                          ceil_div(problem.size("cache"), page));
}

void Sequences::set_draw(const Problem& problem, TensorSpec& tensor) {
  const auto by = [&](void (Sequences::*draw)(std::span<double>) const) {
    tensor.draw = [of = std::make_shared<const Problem>(problem), draw](
                      std::uint64_t, std::span<double> values) { (Sequences(*of).*draw)(values); };
  };
  if (tensor.name == "positions") by(&Sequences::draw_positions);
  if (tensor.name == "slots") by(&Sequences::draw_slots);
  if (tensor.name == "lengths") by(&Sequences::draw_lengths);
  if (tensor.name == "pages") by(&Sequences::draw_pages);
}

void Sequences::draw_lengths(std::span<double> values) const {
  std::copy(lengths_.begin(), lengths_.end(), values.begin());
}

void Sequences::draw_positions(std::span<double> values) const {
  for_each_token(values, [](std::size_t, std::int64_t place) { return place; });
}

void Sequences::draw_slots(std::span<double> values) const {
  for_each_token(values, [&](std::size_t sequence, std::int64_t place) {
    if (page_ == 0) return static_cast<std::int64_t>(sequence) * cache_ + place;
    return pages_[sequence * width() + static_cast<std::size_t>(place / page_)] * page_ +
           place % page_;
  });
}

void Sequences::draw_pages(std::span<double> values) const {
  std::copy(pages_.begin(), pages_.end(), values.begin());
}

template <typename ValueOf>
void Sequences::for_each_token(std::span<double> values, const ValueOf& value_of) const {
  for (std::size_t row = 0; row < values.size(); ++row) {
    const auto sequence = row / static_cast<std::size_t>(s_);
    const auto token = static_cast<std::int64_t>(row) % s_;
    values[row] = static_cast<double>(value_of(sequence, lengths_[sequence] - s_ + token));
  }
}

std::size_t Sequences::width() const {
  return static_cast<std::size_t>(ceil_div(cache_, page_));
}

/// Pages with new tokens belong to one sequence; the others may be shared, as prefixes are.
void Sequences::deal_pages(std::int64_t count, std::mt19937_64& random) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  pages_.assign(lengths_.size() * width(), -1);
  std::size_t dealt = 0;
  for (std::size_t i = 0; i < lengths_.size(); ++i)
    for (std::int64_t at = (lengths_[i] - s_) / page_; at <= (lengths_[i] - 1) / page_; ++at)
      pages_[i * width() + static_cast<std::size_t>(at)] = order[dealt++];
  const std::size_t others = order.size() - dealt;
  std::size_t shared = 0;
  for (std::int64_t& page : pages_)
    if (page < 0 && others > 0) page = order[dealt + shared++ % others];
}

}  // namespace fftune::layer
