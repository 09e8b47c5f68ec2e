#include "measure/runner.hpp"

#include <algorithm>
#include <cmath>

namespace fftune {
namespace {

constexpr double sample_seconds = 200e-6;
constexpr double longest_round_seconds = 2e-3;
constexpr double most_passes = 4096;

}  // namespace

int passes_per_sample(double pass_seconds, int sets) {
  const double wanted = std::ceil(sample_seconds / std::max(pass_seconds, 1e-9));
  const int passes = static_cast<int>(std::clamp(wanted, 1.0, most_passes));
  if (pass_seconds * sets > longest_round_seconds) return passes;
  return (passes + sets - 1) / sets * sets;
}

double Runner::run(int passes) {
  const int sets = static_cast<int>(pass_.tensors.size());
  const int first_set = rotation_.next % sets;
  auto& replay = replays_[{first_set, passes}];
  if (!replay)
    replay = backend_.capture(passes, [this, first_set](int pass, void* stream) {
      const auto set = static_cast<std::size_t>(first_set + pass) % pass_.tensors.size();
      for (const auto& executable : pass_.executables)
        executable->enqueue(pass_.tensors[set].data(), pass_.workspace, stream);
    });
  rotation_.next = (first_set + passes) % sets;
  return replay->sample();
}

double Runner::probe() {
  return run(1);
}

void Runner::plan(double pass_seconds) {
  passes_ = passes_per_sample(pass_seconds, static_cast<int>(pass_.tensors.size()));
}

double Runner::sample() {
  return run(passes_);
}

}  // namespace fftune
