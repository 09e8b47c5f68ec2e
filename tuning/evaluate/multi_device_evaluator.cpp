#include "tuning/evaluate/multi_device_evaluator.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "core/error.hpp"
#include "measure/statistics.hpp"
#include "tuning/log.hpp"

namespace fftune {
namespace {

/// Candidates that a device tries between two timings of the sentinel.
constexpr std::size_t interval = 12;
/// A pace that changed by more over an interval spoils the times measured in it.
constexpr double most_change = 0.04;
/// How often the same candidate is measured again for that.
constexpr int most_repeats = 2;
/// A device whose pace differs by more is spoken of.
constexpr double worth_telling = 0.03;

}  // namespace

struct MultiDeviceEvaluator::Member {
  std::string name;
  std::unique_ptr<Evaluator> evaluator;  // used by the thread alone
  bool lost = false;
  bool refused = false;  // the problem at hand
  bool told_pace = false;
  bool told_change = false;
  WorkerThread thread;  // first to end
};

/// Candidates that are tried on several devices.
struct MultiDeviceEvaluator::Trials {
  struct Done {
    std::size_t index;
    Verified verified;
    Timing timing;
  };

  const Candidates& candidates;
  const TrialCalls& calls;
  std::mutex mutex;  // guards all below, and the calls
  std::deque<std::size_t> left;
  std::vector<int> repeats;
  bool stopped = false;

  Trials(const Candidates& all, const TrialCalls& told)
      : candidates(all), calls(told), repeats(all.size()) {
    for (std::size_t i = 0; i < all.size(); ++i) left.push_back(i);
  }

  std::optional<std::size_t> next() {
    const std::lock_guard lock(mutex);
    if (stopped || left.empty()) return {};
    const auto index = left.front();
    left.pop_front();
    calls.begins(index);
    return index;
  }
  void put_back(std::size_t index) {
    const std::lock_guard lock(mutex);
    left.push_front(index);
  }
  void end(const Done& done) {
    const std::lock_guard lock(mutex);
    if (!calls.ends(done.index, done.verified, done.timing)) stopped = true;
  }
  void stop() {
    const std::lock_guard lock(mutex);
    stopped = true;
  }
  /// `slower`: how many times as long as on the reference everything takes here.
  TimeRequest request(double slower) {
    const std::lock_guard lock(mutex);
    auto request = calls.request();
    request.abandon_above_us *= slower;
    return request;
  }
};

MultiDeviceEvaluator::MultiDeviceEvaluator(std::vector<Device> devices) {
  std::exception_ptr thrown;
  std::vector<std::future<void>> opening;
  for (auto& device : devices) {
    members_.push_back(std::make_unique<Member>());
    auto& member = *members_.back();
    member.name = device.name;
    opening.push_back(member.thread.start(
        [&member, open = std::move(device.open)] { member.evaluator = open(); }));
  }
  for (std::size_t i = 0; i < opening.size(); ++i) {
    try {
      opening[i].get();
    } catch (const Error& error) {
      if (!thrown) thrown = std::current_exception();
      members_[i]->lost = true;
      remark(fmt::format("{} is left out: {}", members_[i]->name, error.what()));
    }
  }
  if (live().empty() && thrown) std::rethrow_exception(thrown);
  facts_ = live().front()->evaluator->facts();
  for (const auto* member : live())
    if (const auto& facts = member->evaluator->facts(); facts.name != facts_.name)
      throw Error(ErrorKind::invalid_input,
                  fmt::format("{} is {} and {} is {}: one search is for devices of one kind",
                              live().front()->name, facts_.name, member->name, facts.name));
}

MultiDeviceEvaluator::~MultiDeviceEvaluator() {
  // A worker is ended by the thread that started it.
  for (auto& member : members_)
    member->thread.start([&member] { member->evaluator.reset(); }).wait();
}

std::vector<MultiDeviceEvaluator::Member*> MultiDeviceEvaluator::live() const {
  const std::lock_guard lock(mutex_);
  std::vector<Member*> all;
  for (const auto& member : members_)
    if (!member->lost && !member->refused) all.push_back(member.get());
  return all;
}

MultiDeviceEvaluator::Member& MultiDeviceEvaluator::first_opened() {
  return **std::find_if(members_.begin(), members_.end(),
                        [](const auto& member) { return member->evaluator != nullptr; });
}

std::string MultiDeviceEvaluator::lost() const {
  const std::lock_guard lock(mutex_);
  for (const auto& member : members_)
    if (!member->lost) return "";
  return last_loss_;
}

void MultiDeviceEvaluator::remark(const std::string& text) {
  logging::warn("{}", text);
  const std::lock_guard lock(mutex_);
  remarks_.push_back(text);
}

std::vector<std::string> MultiDeviceEvaluator::remarks() {
  const std::lock_guard lock(mutex_);
  return std::exchange(remarks_, {});
}

void MultiDeviceEvaluator::retire_if_lost(Member& member) {
  const auto why = member.evaluator->lost();
  if (why.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    member.lost = true;
    last_loss_ = why;
  }
  remark(fmt::format("{} is lost, and its part goes to the others: {}", member.name, why));
}

void MultiDeviceEvaluator::leave_out(Member& member, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    member.refused = true;
  }
  remark(fmt::format("{} takes no part in this problem: {}", member.name, why));
}

void MultiDeviceEvaluator::on_all(const std::function<void(Member&)>& work) {
  std::vector<std::future<void>> working;
  for (auto* member : live())
    working.push_back(member->thread.start([this, member, &work] {
      work(*member);
      retire_if_lost(*member);
    }));
  for (auto& each : working) each.wait();
  for (auto& each : working) each.get();
}

void MultiDeviceEvaluator::on_reference(const std::function<void(Evaluator&)>& work) {
  for (;;) {
    const auto there = live();
    // One that is lost still says so of whatever it is asked.
    Member& member = there.empty() ? first_opened() : *there.front();
    std::exception_ptr thrown;
    try {
      member.thread.start([&] { work(*member.evaluator); }).get();
    } catch (const Error&) {
      thrown = std::current_exception();
    }
    const bool gone = !there.empty() && !member.evaluator->lost().empty();
    if (gone) retire_if_lost(member);
    // A device that is being lost gives no valid answer, as long as there is another one to ask.
    if (gone && !live().empty()) continue;
    if (thrown) std::rethrow_exception(thrown);
    return;
  }
}

Limits MultiDeviceEvaluator::limits(DType dtype) {
  Limits limits;
  on_reference([&](Evaluator& evaluator) { limits = evaluator.limits(dtype); });
  return limits;
}

std::vector<std::string> MultiDeviceEvaluator::disturbances() {
  std::vector<std::string> found;
  on_reference([&](Evaluator& evaluator) { found = evaluator.disturbances(); });
  return found;
}

void MultiDeviceEvaluator::avoid(std::set<std::string> ids) {
  on_all([&](Member& member) { member.evaluator->avoid(ids); });
}

Setup MultiDeviceEvaluator::begin(const Problem& problem) {
  sentinel_.reset();
  sentinel_us_ = 0;
  std::vector<std::pair<Member*, Setup>> setups;
  {
    const std::lock_guard lock(mutex_);
    for (auto& member : members_) member->refused = false;
  }
  std::mutex together;
  on_all([&](Member& member) {
    auto setup = member.evaluator->begin(problem);
    const std::lock_guard lock(together);
    setups.emplace_back(&member, std::move(setup));
  });
  const Setup* accepted = nullptr;
  for (const auto& [member, setup] : setups)
    if (setup.refusal.empty() && (!accepted || !setup.left_out.empty())) accepted = &setup;
  if (!accepted) return setups.empty() ? Setup{.refusal = lost()} : setups.front().second;
  for (const auto& [member, setup] : setups)
    if (!setup.refusal.empty() && !member->lost) leave_out(*member, setup.refusal);
  return *accepted;
}

std::vector<Compiled> MultiDeviceEvaluator::compile(const Candidates& candidates,
                                                    const CompileSink& sink) {
  auto results = not_started(candidates.size());
  std::vector<bool> done(candidates.size());
  std::mutex one_at_a_time;
  bool stopped = false;
  GuardedSink guarded(sink);
  const auto compile = [&](Evaluator& evaluator, const std::vector<std::size_t>& places) {
    Candidates part;
    for (const auto place : places) part.push_back(candidates[place]);
    evaluator.compile(part, [&](std::size_t i, const Compiled& compiled) {
      const std::lock_guard lock(one_at_a_time);
      results[places[i]] = compiled;
      done[places[i]] = true;
      if (!stopped) stopped = !guarded(places[i], compiled);
      return !stopped;
    });
  };
  const auto there = live();
  on_all([&](Member& member) {
    const auto first = static_cast<std::size_t>(
        std::distance(there.begin(), std::find(there.begin(), there.end(), &member)));
    std::vector<std::size_t> places;
    for (auto place = first; place < candidates.size(); place += there.size())
      places.push_back(place);
    if (!places.empty()) compile(*member.evaluator, places);
  });
  // The candidates that a lost device has left.
  std::vector<std::size_t> rest;
  for (std::size_t place = 0; place < candidates.size(); ++place)
    if (!done[place]) rest.push_back(place);
  if (!rest.empty() && !stopped)
    on_reference([&](Evaluator& evaluator) { compile(evaluator, rest); });
  guarded.rethrow();
  return results;
}

Verified MultiDeviceEvaluator::verify(const Candidate& candidate) {
  Verified verified;
  on_reference([&](Evaluator& evaluator) { verified = evaluator.verify(candidate); });
  return verified;
}

std::vector<Timing> MultiDeviceEvaluator::time(const Candidates& candidates,
                                               const TimeRequest& request) {
  std::vector<Timing> timings;
  on_reference([&](Evaluator& evaluator) { timings = evaluator.time(candidates, request); });
  return timings;
}

std::optional<double> MultiDeviceEvaluator::time_sentinel(Member& member) {
  TimeRequest request;
  request.samples = 5;
  const auto timing = member.evaluator->time({*sentinel_}, request).front();
  if (!timing.failure.empty() || timing.samples_us.empty()) return {};
  return median(timing.samples_us);
}

void MultiDeviceEvaluator::find_sentinel(Trials& trials) {
  while (!sentinel_) {
    const auto index = trials.next();
    if (!index) return;
    const auto& candidate = trials.candidates[*index];
    Trials::Done done{*index, verify(candidate), {}};
    if (done.verified.passed) done.timing = std::move(time({candidate}, trials.request(1)).front());
    if (done.verified.passed && done.timing.failure.empty()) sentinel_ = candidate;
    trials.end(done);
  }
}

void MultiDeviceEvaluator::try_each(const Candidates& candidates, const TrialCalls& calls) {
  Trials trials(candidates, calls);
  find_sentinel(trials);
  // One that is lost puts back what it had: another turn, unless nobody is left for it.
  while (!trials.left.empty() && !trials.stopped && !live().empty()) {
    const auto reference = live().front();
    if (sentinel_us_ <= 0) {
      reference_ = reference->name;
      reference->thread.start([&] { sentinel_us_ = time_sentinel(*reference).value_or(0); }).get();
    }
    if (sentinel_us_ <= 0) {
      retire_if_lost(*reference);
      sentinel_.reset();
      find_sentinel(trials);
      if (!sentinel_) return;
      continue;
    }
    on_all([&](Member& member) {
      try {
        try_on(member, trials);
      } catch (...) {  // on_all() rethrows it when the others have ended
        trials.stop();
        throw;
      }
    });
  }
}

void MultiDeviceEvaluator::try_on(Member& member, Trials& trials) {
  auto before = time_sentinel(member);
  if (!before && member.evaluator->lost().empty())
    leave_out(member, fmt::format("{} does not run there", sentinel_->id()));
  while (before) {
    const double slower = *before / sentinel_us_;
    if (std::abs(slower - 1) > worth_telling && !std::exchange(member.told_pace, true))
      remark(
          fmt::format("{} takes {:.2f} times as long as {} took at first: its times are divided "
                      "by that",
                      member.name, slower, reference_));
    std::vector<Trials::Done> pending;
    while (pending.size() < interval) {
      const auto index = trials.next();
      if (!index) break;
      const auto& candidate = trials.candidates[*index];
      Trials::Done done{*index, member.evaluator->verify(candidate), {}};
      if (done.verified.passed)
        done.timing =
            std::move(member.evaluator->time({candidate}, trials.request(slower)).front());
      if (!member.evaluator->lost().empty()) {
        trials.put_back(*index);
        break;
      }
      if (done.verified.passed && done.timing.failure.empty())
        pending.push_back(std::move(done));
      else
        trials.end(done);
    }
    if (pending.empty()) return;
    logging::debug("{}: {} tried, the sentinel takes {:.3f} of what it took on {} at first",
                   member.name, pending.size(), slower, reference_);
    const auto after = member.evaluator->lost().empty() ? time_sentinel(member) : std::nullopt;
    const bool steady = after && std::abs(*after / *before - 1) <= most_change;
    if (after && !steady && !std::exchange(member.told_change, true))
      remark(fmt::format("{} changed its pace by {:+.0f}% while it measured: that is done again",
                         member.name, 100 * (*after / *before - 1)));
    for (auto& done : pending) {
      if (!after || (!steady && trials.repeats[done.index]++ < most_repeats)) {
        trials.put_back(done.index);
        continue;
      }
      for (double& us : done.timing.samples_us) us *= 2 * sentinel_us_ / (*before + *after);
      trials.end(done);
    }
    before = after;
  }
}

}  // namespace fftune
