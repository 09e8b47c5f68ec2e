#include "ranks/lockstep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "core/memory.hpp"

namespace fftune {
namespace {

constexpr const char* group_tensor = "group";

/// A first run that takes this many times as long as another needs no second one.
constexpr double hopeless = 3;
/// Below this, a captured sequence runs once before it is timed: the first run uploads it.
constexpr double short_seconds = 1e-3;

/// Buffer sets for a rank: as many as overflow the last-level cache by what a whole plan touches.
/// Ranks on a CPU share its memory and its cache.
int sets_for(const Group& group, const Backend& backend, std::size_t bytes) {
  DeviceFacts facts = backend.facts();
  const auto sharing = facts.kind == DeviceKind::cpu ? group.ranks() : 1;
  facts.l2_bytes /= sharing;
  return set_count({}, bytes, facts, backend.free_bytes() / static_cast<std::size_t>(2 * sharing));
}

}  // namespace

Lockstep::Lockstep(Backend& backend, const Group& group, const Op& op, const Problem& problem,
                   std::function<double(double)> clock)
    : backend_(backend), group_(group), op_(op), problem_(problem), clock_(std::move(clock)) {
  const auto specs = op.tensors(problem);
  const Holders holders = holders_of(op, problem, specs);
  const std::size_t bytes = layout_of(specs, holders).bytes;
  // All ranks rotate among as many.
  const int count = static_cast<int>(-group.largest(-sets_for(group, backend, bytes)));
  if (count == 0)
    throw Error(
        ErrorKind::unavailable,
        fmt::format("{} needs {} of memory on each rank, and one has less: use smaller sizes",
                    problem.text(), bytes_text(static_cast<double>(bytes))));
  on_all("hold the tensors", [&] {
    sets_.emplace(backend, specs, count, seed, holders);
    InputData data(seed + 1);
    data.in_place[group_tensor] = group.memory();
    verifier_.emplace(backend, op, problem, std::move(data));
  });
  sets_->replicate();
  const std::size_t place = tensor_index(specs, group_tensor);
  for (int set = 0; set < count; ++set) {
    tensors_.push_back(sets_->tensors(set));
    tensors_.back().at(place) = group.memory();
  }
}

bool Lockstep::all_have(const std::string& text) const {
  const auto number = static_cast<double>(fnv1a(text) >> 12);  // exact in a double
  // Both calls by every rank, whatever the first says.
  const double most = group_.largest(number), least = -group_.largest(-number);
  return most == least;
}

std::string Lockstep::of_rank_0(const std::string& text) const {
  // Whole numbers below 2^48 are exact in a double, and no other rank's 0 is larger.
  constexpr std::size_t bytes_each = 6;
  const auto told = [&](std::uint64_t value) {
    return static_cast<std::uint64_t>(
        group_.largest(group_.rank() == 0 ? static_cast<double>(value) : 0));
  };
  std::string all(told(text.size()), '\0');
  for (std::size_t at = 0; at < all.size(); at += bytes_each) {
    std::uint64_t part = 0;
    if (group_.rank() == 0) std::memcpy(&part, &text[at], std::min(bytes_each, text.size() - at));
    part = told(part);
    std::memcpy(&all[at], &part, std::min(bytes_each, all.size() - at));
  }
  return all;
}

void Lockstep::on_all(const std::string& what, const std::function<void()>& body) const {
  std::exception_ptr own;
  try {
    body();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::device_fault) throw;  // others have it too
    own = std::current_exception();
  } catch (const std::exception&) {
    own = std::current_exception();
  }
  const bool failed = group_.largest(own ? 1 : 0) > 0;
  if (own) std::rethrow_exception(own);
  if (failed)
    throw Error(ErrorKind::unavailable,
                fmt::format("another rank could not {}: its own error says why", what));
}

std::optional<Plan> Lockstep::plan(const Recipe& recipe) {
  std::optional<Plan> made;
  try {
    made.emplace(backend_, op_, problem_, recipe);
    const std::size_t bytes = std::max<std::size_t>(scratch_bytes(made->executables()), 256);
    if (!workspace_ || workspace_->bytes() < bytes) workspace_ = backend_.allocate(bytes);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::device_fault) throw;
    made.reset();
  }
  if (group_.largest(made ? 0 : 1) > 0) return std::nullopt;
  return made;
}

Verification Lockstep::verify(const Executables& executables) {
  Verification own = verifier_->verify(0, op_.stages(problem_).size(), executables);
  group_.check();
  const bool all = group_.largest(own.passed ? 0 : 1) == 0;
  const bool alike = all_have(own.bits);
  own.error = group_.largest(own.error);
  if (own.passed && !all) own.failure = "its results are wrong on another rank";
  if (all && !alike) own.failure = "its results differ between ranks";
  own.passed = all && alike;
  return own;
}

void Lockstep::compute_intermediates(const Plan& plan) {
  for (const auto& executable : plan.executables())
    executable->enqueue(tensors_.front().data(), workspace_->data(), backend_.stream());
  backend_.synchronize();
  group_.check();
  sets_->replicate();
}

std::vector<std::vector<double>> Lockstep::time(const std::vector<Executables>& all, int samples,
                                                double give_up) {
  std::vector<Runner> runners;
  std::vector<std::vector<double>> times(all.size());
  std::vector<bool> waits(all.size(), true);
  for (std::size_t i = 0; i < all.size(); ++i) {
    runners.emplace_back(backend_, Pass{all[i], tensors_, workspace_->data()}, rotation_);
    const double first = group_.largest(clock_(runners[i].probe()));
    runners[i].plan(first);
    waits[i] = first <= hopeless * give_up;
    if (!waits[i]) times[i].push_back(first);
    if (waits[i] && first < short_seconds) runners[i].sample();
  }
  // The first round brings the ranks together, and no message between samples parts them again.
  for (int round = 0; round <= samples; ++round)
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!waits[i]) continue;
      const double seconds = runners[i].sample();
      if (round > 0) times[i].push_back(clock_(seconds));
    }
  group_.check();
  for (std::size_t i = 0; i < all.size(); ++i)
    if (waits[i]) times[i] = largest(std::move(times[i]));
  return times;
}

std::vector<double> Lockstep::largest(std::vector<double> values) const {
  for (double& value : values) value = group_.largest(value);
  return values;
}

}  // namespace fftune
