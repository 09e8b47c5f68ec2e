#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "core/error.hpp"
#include "ngram_block/problems.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Ids = std::vector<double>;
using Options = std::map<std::string, std::string>;

Problem problem_of(std::int64_t b, std::int64_t len, Options options = {}) {
  return canonical(ngram_block_op(),
                   {"ngram-block",
                    "fwd",
                    DType::f32,
                    {{"b", b}, {"len", len}, {"vocab", 10}},
                    std::move(options)},
                   DeviceKind::cpu);
}

/// The blocked tokens of one row, and its count of ids that are no tokens.
std::pair<std::set<int>, int> blocked(const Ids& ids, Options options = {}, double length = 0) {
  const auto problem = problem_of(1, std::ssize(ids), std::move(options));
  HostThreads threads;
  ReferenceTensors tensors{{"ids", ids}, {"logits", Ids(10, 1.0)}, {"lengths", {length}}};
  ngram_block_op().reference(problem, 0, tensors, threads);
  std::set<int> tokens;
  for (int i = 0; i < 10; ++i)
    if (std::isinf(tensors.at("logits")[static_cast<std::size_t>(i)])) tokens.insert(i);
  return {tokens, static_cast<int>(tensors.at("invalid")[0])};
}

}  // namespace

TEST_CASE("ngram-block is in the catalog, and every source that its families name is embedded") {
  const auto& catalog = builtin_catalog();
  REQUIRE(&catalog.op("ngram-block") == &ngram_block_op());
  for (const auto* family : ngram_block_op().families())
    REQUIRE(catalog.sources->hash(family->sources()).size() == 16);
}

TEST_CASE("what followed the last ids before is blocked, by hand") {
  using Tokens = std::set<int>;
  CHECK(blocked({1, 2, 3, 1, 2, 4, 1, 2}).first == Tokens{3, 4});
  CHECK(blocked({1, 2, 3, 1, 2, 4, 1, 2}, {{"n", "4"}}).first == Tokens{});
  CHECK(blocked({5, 1, 2, 3, 7, 1, 2}, {{"n", "2"}}).first == Tokens{3});
  CHECK(blocked({4, 4, 9}, {{"n", "1"}}).first == Tokens{4, 9});
  CHECK(blocked({4, 4, 4, 4}).first == Tokens{4});
  CHECK(blocked({4, 4}).first == Tokens{});
  CHECK(blocked({1}, {{"n", "2"}}).first == Tokens{});
}

TEST_CASE("padding never matches, and what is no token is counted and never blocked") {
  using Tokens = std::set<int>;
  CHECK(blocked({-1, -1, 3, -1, -1}).first == Tokens{});
  CHECK(blocked({-1, 1, 2, -1, 1, 2, 5, 1, 2}) == std::pair{Tokens{5}, 0});
  CHECK(blocked({0, 7, 1, 0, 7, 3, 0, 7}, {{"padding", "3"}}).first == Tokens{1});
  CHECK(blocked({1, 2, 12, 1, 2, -7, 1, 2}) == std::pair{Tokens{}, 2});
  CHECK(blocked({12, 12, 4, 12, 12}) == std::pair{Tokens{4}, 4});
}

TEST_CASE("a row's own length cuts it short") {
  CHECK(blocked({1, 2, 3, 1, 2, 9, 9, 9}, {{"lengths", "own"}}, 5).first == std::set<int>{3});
  CHECK(blocked({1, 2, 3, 1, 2, 9, 9, 99}, {{"lengths", "own"}}, -4) ==
        std::pair{std::set<int>{}, 0});
}

TEST_CASE("logits are updated in place") {
  const auto tensors = ngram_block_op().tensors(problem_of(2, 5, {{"lengths", "own"}}));
  REQUIRE(tensors.size() == 4);
  CHECK(tensors[1].name == "logits");
  CHECK(tensors[1].role == Role::updated);
  CHECK(tensors[0].dtype == DType::i32);
  CHECK(ngram_block_op().tensors(problem_of(2, 5, {{"ids", "i64"}}))[0].dtype == DType::i64);
}

TEST_CASE("beams that share a prefix block what it says, each for its own end") {
  const auto problem = problem_of(2, 6, {{"n", "2"}});
  HostThreads threads;
  ReferenceTensors tensors{{"ids", {1, 2, 3, 4, 5, 1, 1, 2, 3, 4, 5, 3}}, {"logits", Ids(20, 1.0)}};
  ngram_block_op().reference(problem, 0, tensors, threads);
  CHECK(std::isinf(tensors.at("logits")[2]));
  CHECK(std::isinf(tensors.at("logits")[14]));
  CHECK(std::count(tensors.at("logits").begin(), tensors.at("logits").end(), 1.0) == 18);
}

TEST_CASE("numbers that are not whole are refused") {
  try {
    problem_of(1, 4, {{"n", "2.5"}});
    FAIL("accepted");
  } catch (const Error& error) {
    CHECK(std::string(error.what()) == "ngram-block: n=2.5 is not a whole number");
  }
}
