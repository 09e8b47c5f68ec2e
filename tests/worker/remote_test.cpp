// A rank that answers for several devices.
#include "tuning/remote/remote_evaluator.hpp"

#include <sys/socket.h>

#include <array>
#include <future>
#include <memory>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "tuning/evaluate/local_evaluator.hpp"
#include "worker/misbehaving.hpp"

using namespace fftune;
using namespace fftune::test;

TEST_CASE("nonsense from rank 0 ends one device's service, and is an error when all have ended") {
  const MisbehavingOp op("none");
  const Catalog catalog{{&op}, &misbehaving_sources()};
  const auto backend = open_quick_cpu();
  std::vector<std::unique_ptr<LineChannel>> callers, ranks;
  for (int device = 0; device < 2; ++device) {
    std::array<int, 2> ends;
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()) == 0);
    callers.push_back(std::make_unique<LineChannel>(ends[0]));
    ranks.push_back(std::make_unique<LineChannel>(ends[1]));
  }
  auto serving = std::async(std::launch::async, [&] {
    serve_remotes(std::move(ranks), [&](std::size_t) {
      return std::make_unique<LocalEvaluator>(*backend, catalog, 1);
    });
  });
  REQUIRE(callers[0]->receive(60));
  callers[0]->send("nonsense");
  while (!callers[0]->closed()) CHECK_FALSE(callers[0]->receive(60));
  {
    RemoteEvaluator other(std::move(callers[1]), "rank 1");
    CHECK(other.begin(misbehaving_problem()).refusal.empty());
  }
  CHECK_THROWS_AS(serving.get(), Error);
}
