#include "tuning/decide/verdict.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "registry/catalog.hpp"
#include "tuning/search/group.hpp"

namespace fftune {
namespace {

/// A clock that settles, and the luck of few samples, make less than this.
constexpr double clearly = 1.1;
/// Stages leave each other their results in the caches, and overlap: both together make less.
constexpr double whole_over_stages = 1.25;
constexpr double stages_over_whole = 2;

constexpr std::size_t most_outsiders = 8;
constexpr int contradiction_samples = 21;

double fastest_us(const VariantGroup& group, const std::vector<std::size_t>& indices) {
  double fastest = std::numeric_limits<double>::infinity();
  for (const auto index : indices) fastest = std::min(fastest, group.median_us(index));
  return fastest;
}

/// The fastest variants that are no finalists but were timed as clearly faster than each of them.
std::vector<std::size_t> faster_outsiders(const VariantGroup& group,
                                          const std::vector<std::size_t>& finalists) {
  const double limit = fastest_us(group, finalists) / clearly;
  auto indices = group.timed();
  std::erase_if(indices, [&](std::size_t index) { return group.median_us(index) > limit; });
  std::stable_sort(indices.begin(), indices.end(), [&](std::size_t a, std::size_t b) {
    return group.median_us(a) < group.median_us(b);
  });
  indices.resize(std::min(indices.size(), most_outsiders));
  return indices;
}

enum class Repeat { always, if_contradicted };

/// The variants that decide about a group's winner, and the faster ones, beside each other.
void repeat_finals_of(Session& session, Searched& searched, Repeat repeat) {
  if (!session.stop_reason().empty()) return;
  VariantGroup& group = *searched.group;
  auto finalists = deciders(searched);
  if (finalists.empty()) return;
  const auto outsiders = faster_outsiders(group, finalists);
  if (repeat == Repeat::if_contradicted && (searched.finalists.empty() || outsiders.empty()))
    return;
  if (searched.finalists.empty()) {
    std::stable_sort(finalists.begin(), finalists.end(), [&](std::size_t a, std::size_t b) {
      return group.median_us(a) < group.median_us(b);
    });
    finalists.resize(std::min(finalists.size(), most_outsiders));
  }
  finalists.insert(finalists.end(), outsiders.begin(), outsiders.end());
  group.forget(finalists);
  group.measure(finalists, contradiction_samples,
                std::clamp(session.seconds_left() * 0.3, 0.3, 3.0));
  group.record_finalists(finalists);
  searched.finalists = std::move(finalists);
}

}  // namespace

void repeat_contradicted_finals(Session& session, std::vector<Searched>& groups) {
  for (auto& searched : groups) repeat_finals_of(session, searched, Repeat::if_contradicted);
}

void repeat_finals(Session& session, std::vector<Searched>& groups) {
  session.settle();
  for (auto& searched : groups) repeat_finals_of(session, searched, Repeat::always);
}

std::vector<std::string> contradictions(const PresetRecord& record) {
  std::vector<std::string> found;
  double stages_us = 0;
  for (const auto& stage : record.stages) {
    stages_us += stage.median_us;
    auto others = stage.ties;
    others.insert(others.end(), stage.runners_up.begin(), stage.runners_up.end());
    const auto fastest =
        std::min_element(others.begin(), others.end(),
                         [](const Timed& a, const Timed& b) { return a.median_us < b.median_us; });
    if (fastest != others.end() && fastest->median_us * clearly < stage.median_us)
      found.push_back(fmt::format("{} took {} µs at {}, where the winner takes {}", fastest->id,
                                  note_microseconds(fastest->median_us),
                                  fmt::join(stage.stages, "+"),
                                  note_microseconds(stage.median_us)));
  }
  const double whole_us = record.verdict.median_us;
  const double most = record.stages.size() == 1 ? clearly : whole_over_stages;
  const bool longer = whole_us > most * stages_us;
  if (stages_us > 0 && (longer || whole_us * stages_over_whole < stages_us))
    found.push_back(fmt::format("the whole took {} µs, and its stages {} together",
                                note_microseconds(whole_us), note_microseconds(stages_us)));
  return found;
}

std::vector<std::string> doubts(const PresetRecord& record, const Catalog& catalog,
                                DeviceKind kind) {
  const Verdict& verdict = record.verdict;
  if (verdict.decided.value_or(true)) return {};
  std::vector<std::string> found;
  for (const auto& stage : record.stages)
    if (const int tried = stage.measured + stage.failed;
        !verdict.complete && tried < least_tried && tried < stage.feasible)
      found.push_back(fmt::format("only {} of {} variants of {} were tried", tried, stage.feasible,
                                  fmt::join(stage.stages, "+")));
  // In place the times of stages by themselves decide nothing.
  const bool in_place = std::any_of(catalog.ops.begin(), catalog.ops.end(), [&](const Op* op) {
    return op->name() == record.problem.op && !op->parts(record.problem).empty();
  });
  if (!in_place)
    for (auto& contradiction : contradictions(record)) found.push_back(std::move(contradiction));
  if (const double band = TuneOptions().tie_band; kind == DeviceKind::cpu && verdict.noise > band)
    found.push_back(noise_words(verdict.noise, band));
  if (found.empty())
    found.push_back(verdict.complete ? "some variants cannot be told from the fastest"
                                     : "the search ended before all variants could be told apart");
  return found;
}

}  // namespace fftune
