#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "registry/catalog.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/fake_op.hpp"

using namespace fftune;
using namespace fftune::testing;

namespace {

constexpr DeviceKind cpu = DeviceKind::cpu;
constexpr DeviceKind cuda = DeviceKind::cuda;

std::optional<std::string> always(const Problem&) {
  return "not today";
}

std::vector<std::string> names(const Recipe& recipe) {
  std::vector<std::string> names;
  for (const auto& variant : recipe) names.push_back(variant.family);
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("an untuned recipe takes the first family of each stage that does not refuse") {
  FakeFamily for_gpu("gpu", cuda, {"up"});
  FakeFamily refusing("refusing", cpu, {"up"});
  refusing.refuse(always);
  FakeFamily good("good", cpu, {"up"});
  FakeFamily later("later", cpu, {"up"});
  FakeFamily down("down", cpu, {"down"});
  FakeOp op({"up", "down"});
  op.family(down).family(for_gpu).family(refusing).family(good).family(later);
  REQUIRE(names(default_recipe(op, fake_problem(1, 8), {})) == Names{"good", "down"});
}

TEST_CASE("a family may cover several stages in a row") {
  FakeFamily both("both", cpu, {"up", "down"});
  FakeFamily up("up", cpu, {"up"});
  FakeFamily down("down", cpu, {"down"});
  FakeFamily all("all", cpu, {"up", "down", "norm"});
  FakeFamily norm("norm", cpu, {"norm"});

  FakeOp whole({"up", "down"});
  whole.family(all).family(both).family(up).family(down);
  REQUIRE(names(default_recipe(whole, fake_problem(1, 8), {})) == Names{"both"});

  FakeOp longer({"up", "down", "norm"});
  longer.family(both).family(up).family(down).family(norm);
  REQUIRE(names(default_recipe(longer, fake_problem(1, 8), {})) == Names{"both", "norm"});
}

TEST_CASE("a family that is not preferred serves no stage untuned") {
  FakeFamily both("both", cpu, {"up", "down"});
  both.not_preferred();
  FakeFamily up("up", cpu, {"up"});
  FakeFamily down("down", cpu, {"down"});
  FakeOp op({"up", "down"});
  op.family(both).family(up).family(down);
  REQUIRE(names(default_recipe(op, fake_problem(1, 8), {})) == Names{"up", "down"});
}

TEST_CASE("a first choice that leaves a stage without a family is taken back") {
  FakeFamily up("up", cpu, {"up"});
  FakeFamily both("both", cpu, {"up", "down"});
  FakeOp op({"up", "down"});
  op.family(up).family(both);
  REQUIRE(names(default_recipe(op, fake_problem(1, 8), {})) == Names{"both"});
}

TEST_CASE("the fallback recipe is of fallback families alone") {
  FakeFamily fast("fast", cpu, {"up", "down"});
  FakeFamily up("plain_up", cpu, {"up"});
  FakeFamily down("plain_down", cpu, {"down"});
  up.fallback();
  FakeOp op({"up", "down"});
  op.family(fast).family(up).family(down);
  REQUIRE_THROWS_AS(fallback_recipe(op, fake_problem(1, 8), {}), Error);
  down.fallback();
  REQUIRE(names(fallback_recipe(op, fake_problem(1, 8), {})) == Names{"plain_up", "plain_down"});
}

TEST_CASE("where no family serves, the error names the stage and every refusal") {
  FakeFamily up("up", cpu, {"up"});
  FakeFamily down("down", cpu, {"down"});
  down.refuse(always);
  FakeOp op({"up", "down"});
  op.family(up).family(down);
  DeviceFacts facts;
  facts.name = "a CPU";
  REQUIRE(test::error_of(ErrorKind::unavailable,
                         [&] { default_recipe(op, fake_problem(1, 8), facts); }) ==
          "no family can run stage 'down' of quadruple/fwd f32 act=silu bias=no eps=1e-06 m=1 "
          "n=8 on a CPU; down: not today");
}

TEST_CASE("a recipe covers every stage once for any families, or there is none") {
  std::mt19937 random(5);
  const Names stages{"a", "b", "c", "d"};
  for (int round = 0; round < 2000; ++round) {
    std::deque<FakeFamily> families;
    FakeOp op(stages);
    for (std::size_t i = 0, count = random() % 7; i < count; ++i) {
      const std::size_t begin = random() % stages.size();
      const std::size_t length = 1 + random() % (stages.size() - begin);
      auto& family =
          families.emplace_back("family_" + std::to_string(i), cpu,
                                Names(stages.begin() + static_cast<long>(begin),
                                      stages.begin() + static_cast<long>(begin + length)));
      if (random() % 4 == 0) family.refuse(always);
      op.family(family);
    }
    // Stages that can be covered at all: reachable[i] says whether stages [0, i) can.
    std::vector<bool> reachable(stages.size() + 1, false);
    reachable[0] = true;
    for (std::size_t end = 1; end <= stages.size(); ++end)
      for (const auto& family : families) {
        const auto own = family.stages();
        if (family.refusal({}, {}) || own.back() != stages[end - 1]) continue;
        if (reachable[end - own.size()]) reachable[end] = true;
      }
    Names covered;
    try {
      for (const auto& variant : default_recipe(op, fake_problem(1, 8), {})) {
        REQUIRE(illegality(op, fake_problem(1, 8), {}, variant).empty());
        const auto own = family_of(op, variant.family).stages();
        covered.insert(covered.end(), own.begin(), own.end());
      }
    } catch (const Error&) {
      REQUIRE_FALSE(reachable.back());
      continue;
    }
    REQUIRE(covered == stages);
  }
}

TEST_CASE("an illegal variant is refused with the reason") {
  FakeFamily family("plain", cpu, {"up"});
  FakeFamily for_gpu("gpu", cuda, {"up"});
  FakeFamily refusing("refusing", cpu, {"up"});
  refusing.refuse(always);
  FakeOp op({"up"});
  op.family(family).family(for_gpu).family(refusing);
  const auto why = [&](std::int64_t n, const char* id) {
    return illegality(op, fake_problem(1, n), {}, Variant::parse(id));
  };
  REQUIRE(why(32, "plain/block=32").empty());
  REQUIRE(why(24, "plain/block=16") == "plain/block=16: block must divide n");
  REQUIRE(why(24, "plain/block=12") == "plain/block=12: block=12 is not one of 8, 16, 32");
  REQUIRE(why(24, "plain") == "plain: parameter 'block' is missing");
  REQUIRE(why(24, "gone/block=8") == "there is no family 'gone'");
  REQUIRE(why(24, "gpu/block=8") == "family 'gpu' is for another kind of device");
  REQUIRE(why(24, "refusing/block=8") == "not today");
}

TEST_CASE("ops and families are found by name, or the names there are are said") {
  FakeFamily family("plain", cpu, {"up"});
  FakeOp op({"up"});
  op.family(family);
  const Catalog catalog{{&op}, nullptr};
  REQUIRE(&catalog.op("quadruple") == &op);
  REQUIRE(&family_of(op, "plain") == &family);
  REQUIRE_THROWS_WITH(catalog.op("ffm"), "unknown op 'ffm': there is quadruple");
  REQUIRE_THROWS_WITH(family_of(op, "fast"), "quadruple has no family 'fast': there is plain");
}
