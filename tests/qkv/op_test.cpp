// The op qkv: its buffers, its refusals, its counts, and a definition by hand.
#include <cmath>

#include "core/error.hpp"
#include "kernels/qkv/qkv.hpp"
#include "qkv/problems.hpp"
#include "registry/catalog.hpp"
#include "support/error_of.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

using Names = std::vector<std::string>;

Names names_of(const Options& options) {
  Names names;
  const Problem problem =
      qkv_problem(DeviceKind::cuda, DType::bf16, qkv_sizes(5, 32, 4, 2, 16), options);
  for (const auto& tensor : qkv_op().tensors(problem)) names.push_back(tensor.name);
  return names;
}

std::string complaint(std::map<std::string, std::int64_t> more, const Options& options) {
  more.insert({{"m", 5}, {"d", 32}, {"heads", 4}, {"dim", 16}});
  return error_of([&] { qkv_problem(DeviceKind::cuda, DType::bf16, more, options); });
}

}  // namespace

TEST_CASE("each family of qkv is found by its name") {
  for (const auto* family : builtin_catalog().op("qkv").families())
    REQUIRE(&family_of(qkv_op(), family->name()) == family);
}

TEST_CASE("qkv's buffers are in the order that the API promises") {
  CHECK(names_of({}) == Names{"x", "w_q", "w_k", "w_v", "q", "k", "v"});
  CHECK(names_of({{"weights", "packed"}, {"bias", "yes"}}) ==
        Names{"x", "w", "bias", "q", "k", "v"});
  CHECK(names_of({{"bias", "yes"}, {"norm", "yes"}, {"rotation", "halves"}}) ==
        Names{"x", "w_q", "w_k", "w_v", "b_q", "b_k", "b_v", "q_norm", "k_norm", "positions",
              "angles", "q", "k", "v"});
  CHECK(names_of({{"rotation", "interleaved"}, {"angles", "base"}, {"cache", "yes"}}) ==
        Names{"x", "w_q", "w_k", "w_v", "positions", "k_cache", "v_cache", "slots", "q"});
}

TEST_CASE("qkv's second stage reads what the product wrote") {
  const Sizes sizes = qkv_sizes(5, 32, 4, 2, 16);
  CHECK(names_of({{"norm", "rows"}, {"rotation", "halves"}, {"cache", "yes"}}) ==
        Names{"x", "w_q", "w_k", "w_v", "q_norm", "k_norm", "positions", "angles", "k_cache",
              "v_cache", "slots", "q", "q_raw", "k_raw", "v_raw"});
  CHECK(names_of({{"weights", "grouped"}, {"bias", "yes"}, {"norm", "layer"}}) ==
        Names{"x", "w", "bias", "q_norm", "k_norm", "q_norm_bias", "k_norm_bias", "q", "k", "v",
              "qkv_raw"});
  CHECK(names_of({{"gates", "yes"}}) ==
        Names{"x", "w_q", "w_k", "w_v", "q", "k", "v", "gates", "q_raw", "k_raw", "v_raw"});
  const Problem gated = qkv_problem(DeviceKind::cuda, DType::bf16, sizes, {{"gates", "yes"}});
  const auto of_gated = qkv_op().tensors(gated);
  CHECK(of_gated[tensor_index(of_gated, "w_q")].shape == std::vector<std::int64_t>{128, 32});
  CHECK(qkv_op().stages(gated)[1].outputs == Names{"q", "k", "v", "gates"});
  const Problem problem = qkv_problem(DeviceKind::cuda, DType::bf16, sizes, {{"norm", "rows"}});
  const auto tensors = qkv_op().tensors(problem);
  CHECK(tensors[tensor_index(tensors, "q_norm")].shape == std::vector<std::int64_t>{64});
  CHECK(tensors[tensor_index(tensors, "k_norm")].shape == std::vector<std::int64_t>{32});
  const auto stages = qkv_op().stages(problem);
  REQUIRE(stages.size() == 2);
  CHECK(stages[0].outputs == Names{"q_raw", "k_raw", "v_raw"});
  CHECK(stages[1].outputs == Names{"q", "k", "v"});
  CHECK(qkv_op()
            .stages(qkv_problem(DeviceKind::cuda, DType::bf16, sizes, {{"norm", "yes"}}))
            .size() == 1);
  // A norm of v has no weights.
  CHECK(names_of({{"norm", "yes"}, {"v-norm", "yes"}}) == Names{"x", "w_q", "w_k", "w_v", "q_norm",
                                                                "k_norm", "q", "k", "v", "q_raw",
                                                                "k_raw", "v_raw"});
}

TEST_CASE("q may have no keys and values beside it") {
  CHECK(names_of({{"keys", "no"}, {"bias", "yes"}, {"norm", "yes"}}) ==
        Names{"x", "w_q", "b_q", "q_norm", "q", "q_raw"});
  CHECK(complaint({}, {{"keys", "no"}, {"cache", "yes"}}).find("keys=no with cache=yes") !=
        std::string::npos);
  CHECK(complaint({}, {{"keys", "no"}, {"weights", "packed"}}).find("not separate") !=
        std::string::npos);
  const Problem problem =
      qkv_problem(DeviceKind::cpu, DType::f32, {{"m", 1}, {"d", 2}, {"heads", 2}, {"dim", 2}},
                  {{"keys", "no"}, {"norm", "yes"}, {"eps", "0"}});
  ReferenceTensors tensors{{"x", {1, 2}}, {"w_q", {3, 0, 0, 2, 1, 0, 0, 0.5}}, {"q_norm", {1, 2}}};
  HostThreads threads;
  for (std::size_t stage : {0, 1}) qkv_op().reference(problem, stage, tensors, threads);
  // The heads are (3, 4) and (1, 1).
  CHECK(tensors.at("q").at(0) == Approx(3 / std::sqrt(12.5)));
  CHECK(tensors.at("q").at(1) == Approx(8 / std::sqrt(12.5)));
  CHECK(tensors.at("q").at(2) == Approx(1));
  CHECK(tensors.at("q").at(3) == Approx(2));
}

TEST_CASE("qkv refuses fields that do not go together") {
  CHECK(complaint({}, {}) == "");
  CHECK(complaint({{"rotary", 32}}, {{"rotation", "halves"}}).find("rotary=32 exceeds dim=16") !=
        std::string::npos);
  CHECK(complaint({{"rotary", 7}}, {{"rotation", "halves"}}).find("rotary=7 is odd") !=
        std::string::npos);
  CHECK(complaint({{"rotary", 8}}, {}).find("nothing is rotated") != std::string::npos);
  CHECK(complaint({{"positions", 8}}, {{"rotation", "halves"}, {"angles", "base"}})
            .find("there is none") != std::string::npos);
  CHECK(complaint({{"cache-slots", 8}}, {}).find("there is no cache") != std::string::npos);
  CHECK(complaint({{"cache-head", 32}}, {}).find("there is no cache") != std::string::npos);
  CHECK(
      complaint({{"cache-head", 25}}, {{"cache", "yes"}}).find("cache-head=25 is no multiple of") !=
      std::string::npos);
  CHECK(complaint({}, {{"norm", "rows"}, {"norm-order", "after"}}).find("norm=rows") !=
        std::string::npos);
  CHECK(complaint({}, {{"norm-order", "after"}}).find("norm=no") != std::string::npos);
  CHECK(complaint({}, {{"gates", "yes"}, {"weights", "packed"}})
            .find("gates=yes with weights=packed: gates are rows of w_q") != std::string::npos);
  CHECK(complaint({}, {{"norm", "layer"}, {"convention", "gemma"}}).find("norm=layer") !=
        std::string::npos);
  CHECK(complaint({{"kv-heads", 3}}, {{"weights", "grouped"}}).find("do not divide") !=
        std::string::npos);
}

TEST_CASE("qkv counts the products, and of caches the rows that are written") {
  const std::map<std::string, std::int64_t> sizes{
      {"m", 5}, {"d", 32}, {"heads", 4}, {"kv-heads", 2}, {"dim", 16}};
  const auto plain = qkv_op().stages(qkv_problem(DeviceKind::cuda, DType::bf16, sizes)).at(0);
  CHECK(plain.flops == 2.0 * 5 * 32 * 128);
  CHECK(plain.bytes == 2.0 * (5 * 32 + 128 * 32 + 5 * 128));
  auto large = sizes;
  large["cache-slots"] = 1000;
  const auto cached =
      qkv_op().stages(qkv_problem(DeviceKind::cuda, DType::bf16, large, {{"cache", "yes"}})).at(0);
  CHECK(cached.bytes == plain.bytes + 4 * 5);  // and the slots
}

TEST_CASE("qkv's reference is what one token gives by hand") {
  // x = (1, 2); one head of two features of each of q, k and v; a turn by a quarter.
  const Problem problem = qkv_problem(
      DeviceKind::cpu, DType::f32,
      {{"m", 1}, {"d", 2}, {"heads", 1}, {"dim", 2}, {"positions", 2}, {"cache-slots", 3}},
      {{"weights", "packed"},
       {"bias", "yes"},
       {"norm", "yes"},
       {"eps", "0"},
       {"rotation", "halves"},
       {"cache", "yes"}});
  const double quarter = std::acos(-1.0) / 2;
  ReferenceTensors tensors{{"x", {1, 2}},
                           {"w", {1, 0, 0, 1, 1, 1, 0, 2, 1, 0, 0, 1}},
                           {"bias", {2, 2, -3, 3, 10, 20}},
                           {"q_norm", {1, 2}},
                           {"k_norm", {1, 1}},
                           {"positions", {9}},  // past the end: the last row
                           {"angles", {0, 0, quarter, 0}},
                           {"slots", {2}},
                           {"k_cache", {-1, -1, -1, -1, -1, -1}},
                           {"v_cache", {-1, -1, -1, -1, -1, -1}}};
  const auto backend = open_cpu();
  HostThreads threads;
  qkv_op().reference(problem, 0, tensors, threads);
  // q = (3, 4) / sqrt(12.5) * (1, 2), turned: (-second, first).
  const double root = std::sqrt(12.5);
  CHECK(tensors.at("q").at(0) == Approx(-8 / root));
  CHECK(tensors.at("q").at(1) == Approx(3 / root));
  // k = (0, 7) / sqrt(24.5), turned.
  CHECK(tensors.at("k_cache").at(4) == Approx(-7 / std::sqrt(24.5)));
  CHECK(tensors.at("k_cache").at(5) == Approx(0).margin(1e-12));
  CHECK(tensors.at("v_cache") == std::vector<double>{-1, -1, -1, -1, 11, 22});
}

TEST_CASE("values are divided by the root of their mean square, and have no weights") {
  const Problem problem =
      qkv_problem(DeviceKind::cpu, DType::f32, {{"m", 1}, {"d", 2}, {"heads", 2}, {"dim", 2}},
                  {{"v-norm", "yes"}, {"eps", "0"}});
  ReferenceTensors tensors{{"x", {1, 2}},
                           {"w_q", {1, 0, 0, 1, 1, 1, 1, 0}},
                           {"w_k", {1, 0, 0, 1, 1, 1, 1, 0}},
                           {"w_v", {3, 0, 0, 2, 0, 0.5, 7, 0}}};
  HostThreads threads;
  for (std::size_t stage : {0, 1}) qkv_op().reference(problem, stage, tensors, threads);
  CHECK(tensors.at("q") == std::vector<double>{1, 2, 3, 1});
  CHECK(tensors.at("k") == std::vector<double>{1, 2, 3, 1});
  // The heads are (3, 4) and (1, 7): mean squares of 12.5 and 25.
  CHECK(tensors.at("v").at(0) == Approx(3 / std::sqrt(12.5)));
  CHECK(tensors.at("v").at(1) == Approx(4 / std::sqrt(12.5)));
  CHECK(tensors.at("v").at(2) == Approx(1 / 5.0));
  CHECK(tensors.at("v").at(3) == Approx(7 / 5.0));
}
