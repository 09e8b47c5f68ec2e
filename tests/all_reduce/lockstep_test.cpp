// Verification on all ranks of a group, where one rank has other results. Ranks are threads.
#include "ranks/lockstep.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "all_reduce/problems.hpp"
#include "cpu/open.hpp"
#include "support/host_backend.hpp"
#include "support/on_threads.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// The failure that each of three ranks finds. Rank 1 changes the first element of y behind the
/// sum. The group serves afterwards.
std::vector<std::string> failures(const std::function<float(float)>& change) {
  static int groups = 0;
  const std::string name = fmt::format("lockstep-{}-{}", ::getpid(), groups++);
  constexpr int ranks = 3;
  const Problem problem = all_reduce_problem(DeviceKind::cpu, DType::f32, ranks, 5, 64,
                                             {{"norm", "t5"}, {"link", "peers"}});
  const auto place = tensor_index(all_reduce_op().tensors(problem), "y");
  return on_threads(ranks, [&](int rank) {
    const auto backend = open_cpu();
    const Group group(*backend, {name, rank, ranks, 4096});
    Lockstep lockstep(*backend, group, all_reduce_op(), problem,
                      [](double seconds) { return seconds; });
    const auto plan = lockstep.plan(default_recipe(all_reduce_op(), problem, backend->facts()));
    Executables all = plan->executables();
    if (rank == 1)
      all.push_back(std::make_shared<HostExecutable>([&](void* const* tensors, void*) {
        auto* const y = static_cast<float*>(tensors[place]);
        y[0] = change(y[0]);
      }));
    std::string found = lockstep.verify(all).failure;
    if (!lockstep.verify(plan->executables()).passed) found += "; and it is wrong afterwards";
    return found;
  });
}

}  // namespace

TEST_CASE("results that are wrong on one rank fail on all, and the ranks stay in step") {
  const auto found = failures([](float value) { return value + 1; });
  CHECK(found[0] == "its results are wrong on another rank");
  CHECK(found[1].find("y: 1 of 320 elements are wrong") == 0);
  CHECK(found[2] == found[0]);
}

TEST_CASE("results that are right on all ranks but have other bits on one fail on all") {
  for (const std::string& own : failures([](float value) { return std::nextafter(value, 9.0F); }))
    CHECK(own == "its results differ between ranks");
}

TEST_CASE("results that are right on all ranks pass") {
  for (const std::string& own : failures([](float value) { return value; })) CHECK(own == "");
}
