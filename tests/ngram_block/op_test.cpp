#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "core/error.hpp"
#include "ngram_block/problems.hpp"
#include "support/error_of.hpp"
#include "support/op_reference.hpp"
#include "verify/host_threads.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Ids = std::vector<double>;

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

TEST_CASE("ids that followed the last ids before are blocked, by hand") {
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

TEST_CASE("rows that share a prefix are as if each began with it, for each its own end") {
  // Groups of two rows, the last of one; n-grams span the border.
  auto problem = problem_of(3, 2, {{"lengths", "own"}});
  problem.sizes["prefix"] = 6;
  problem.sizes["beams"] = 2;
  problem = canonical(ngram_block_op(), problem, DeviceKind::cpu);
  HostThreads threads;
  ReferenceTensors tensors{{"prefix", {1, 2, 3, 4, 12, 1, 5, 5, 7, 5, 5, 99}},
                           {"prefix_lengths", {6, 5}},
                           {"ids", {2, 9, 3, 4, 0, 0}},
                           {"lengths", {1, 2, 0}},
                           {"logits", Ids(30, 1.0)}};
  ngram_block_op().reference(problem, 0, tensors, threads);
  const auto& logits = tensors.at("logits");
  CHECK(std::isinf(logits[3]));       // 1 2 before: 3
  CHECK(std::isinf(logits[20 + 7]));  // 5 5 before: 7
  CHECK(std::count(logits.begin(), logits.end(), 1.0) == 28);
  CHECK(tensors.at("invalid") == Ids{1, 1, 0});  // the prefix's in each row
}

TEST_CASE("a prefix is an input of each group, with lengths of its own") {
  auto problem = problem_of(17, 5, {{"lengths", "own"}});
  problem.sizes["prefix"] = 100;
  problem.sizes["beams"] = 8;
  const auto tensors = ngram_block_op().tensors(problem);
  REQUIRE(tensors.size() == 6);
  CHECK(tensors[2].name == "prefix");
  CHECK(tensors[2].shape == std::vector<std::int64_t>{3, 100});
  CHECK(tensors[4].name == "prefix_lengths");
  CHECK(tensors[4].shape == std::vector<std::int64_t>{3});
}

TEST_CASE("beams without a prefix are refused, and problems without either say neither") {
  auto problem = problem_of(4, 4);
  CHECK(problem.text().find("prefix") == std::string::npos);
  problem.sizes["beams"] = 2;
  CHECK(test::error_of([&] { canonical(ngram_block_op(), problem, DeviceKind::cpu); }) ==
        "ngram-block: beams without prefix: there is nothing to share");
}

TEST_CASE("numbers that are not whole are refused") {
  CHECK(test::error_of([] {
          problem_of(1, 4, {{"n", "2.5"}});
        }) == "ngram-block: n=2.5 is not a whole number");
}

TEST_CASE("few short rows have many threads with few ids each, as an H100 and an H200 measured") {
  const DeviceFacts facts = facts_of_architecture("sm_90a");
  for (const auto& [ids, bytes] : std::vector<std::pair<std::string, int>>{{"i32", 4}, {"i64", 8}})
    for (const auto& [len, words] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{512, 1}, {1 << 16, 16 / bytes}}) {
      const Problem problem = canonical(ngram_block_op(),
                                        {"ngram-block",
                                         "fwd",
                                         DType::bf16,
                                         {{"b", 256}, {"len", len}, {"vocab", 32128}},
                                         {{"ids", ids}}},
                                        DeviceKind::cuda);
      const Config config = default_recipe(ngram_block_op(), problem, facts).front().config;
      CAPTURE(problem.text(), config.text());
      CHECK(config.at("vector") == words * bytes);
      CHECK(config.at("threads") == (len == 512 ? 512 : 1024));
    }
}
