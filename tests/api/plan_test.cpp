// Plans: which problems are taken, and what is said of the others.
#include <string>
#include <thread>
#include <vector>

#include "api/layer.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// Makes a plan that must fail; true if the error names `words`.
bool refused(const std::string& problem, const std::string& words,
             fftune_status expected = FFTUNE_INVALID_INPUT) {
  fftune_context* context = nullptr;
  REQUIRE(fftune_context_create(-1, nullptr, &context) == FFTUNE_OK);
  auto* plan = reinterpret_cast<fftune_plan*>(0x10);
  const auto status = fftune_plan_create(context, problem.c_str(), &plan);
  fftune_context_destroy(context);
  UNSCOPED_INFO("status " << status << " for " << problem);
  return status == expected && plan == nullptr && last_error_says(words);
}

}  // namespace

TEST_CASE("a plan needs a context, a problem and somewhere to go") {
  fftune_plan* plan = nullptr;
  CHECK(fftune_plan_create(nullptr, "{}", &plan) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("context is NULL"));
  fftune_context* context = nullptr;
  REQUIRE(fftune_context_create(-1, nullptr, &context) == FFTUNE_OK);
  CHECK(fftune_plan_create(context, nullptr, &plan) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("problem_json is NULL"));
  CHECK(fftune_plan_create(context, "{}", nullptr) == FFTUNE_INVALID_INPUT);
  CHECK(last_error_says("out is NULL"));
  fftune_context_destroy(context);

  CHECK(fftune_plan_buffer_count(nullptr) == 0);
  CHECK(fftune_plan_buffer_bytes(nullptr, 0) == 0);
  CHECK(fftune_plan_workspace_bytes(nullptr) == 0);
  CHECK(fftune_plan_describe(nullptr) == nullptr);
  fftune_plan_destroy(nullptr);
}

TEST_CASE("a problem that is wrong is refused by the field that is wrong") {
  CHECK(refused("", "problem"));
  CHECK(refused("ffn", "problem"));
  CHECK(refused("[1,2]", "problem"));
  CHECK(refused("{\"m\":1}", "op"));
  CHECK(refused(R"({"op":"fnn","m":1,"d":8,"h":8})", "fnn"));
  CHECK(refused(R"({"op":7,"m":1,"d":8,"h":8})", "op"));
  CHECK(refused(R"({"op":"ffn","pass":"sideways","m":1,"d":8,"h":8})", "sideways"));
  CHECK(refused(R"({"op":"ffn","dtype":"f33","m":1,"d":8,"h":8})", "f33"));
  CHECK(refused(R"({"op":"ffn","dtype":"fp16","m":1,"d":8,"h":8})", "fp16"));  // not on the CPU
  CHECK(refused(R"({"op":"ffn","m":1,"d":8})", "h"));
  CHECK(refused(R"({"op":"ffn","m":0,"d":8,"h":8})", "m=0"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":-8,"h":8})", "d=-8"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":8,"h":2147483648})", "h=2147483648"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":8,"h":1e30})", "h"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":8.5,"h":8})", "d"));
  CHECK(refused(R"({"op":"ffn","m":"1","d":8,"h":8})", "m"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":8,"h":8,"act":"sinh"})", "sinh"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":8,"h":8,"act":null})", "act"));
  CHECK(refused(R"({"op":"ffn","m":1,"d":8,"h":8,"width":8})", "width"));
}

TEST_CASE("an option that is a number is taken as a JSON number and as a string") {
  const auto context = cpu_context();
  // A copy: the description lives as long as its plan.
  const auto plan = [&](const std::string& eps) {
    return std::string(
        context.plan(R"({"op":"rmsnorm","m":4,"d":64,"eps":)" + eps + "}").describe());
  };
  const auto expected = plan("\"1e-06\"");
  CHECK(expected.find("\"eps\": \"1e-06\"") != std::string::npos);
  for (const char* eps : {"1e-06", "1e-6", "0.000001", "\"0.000001\"", "1.0E-6"})
    CHECK(plan(eps) == expected);
  CHECK(plan("0") == plan("\"0\""));
  CHECK(plan("1") == plan("1.0"));
  CHECK(refused(R"({"op":"rmsnorm","m":4,"d":64,"eps":2})",
                "rmsnorm: eps=2 is out of range: use a number from 0 to 1"));
}

TEST_CASE("a number may be below zero, or have an exponent with a sign") {
  const auto context = cpu_context();
  const auto plan = [&](const std::string& padding) {
    return std::string(
        context.plan(R"({"op":"ngram-block","b":1,"len":8,"vocab":32,"padding":)" + padding + "}")
            .describe());
  };
  CHECK(plan("-5") == plan("\"-5\""));
  CHECK(plan("\"-1\"") == plan("-1"));
  CHECK(plan("1000000") == plan("\"1e+6\""));
  CHECK(
      refused(R"({"op":"ngram-block","b":1,"len":8,"vocab":32,"padding":"five"})", "padding=five"));
}

TEST_CASE("a size that is no integer says what it is instead") {
  CHECK(
      refused(R"({"op":"ffn","m":"1","d":8,"h":8})",
              "problem JSON: m: expected a size, which is an integer, found \"1\", a string: leave "
              "out the quotes"));
  CHECK(refused(R"({"op":"ffn","m":8.0,"d":8,"h":8})",
                "problem JSON: m: expected a size, which is an integer, found 8.0: leave out the "
                "decimal point or the exponent"));
}

TEST_CASE("sizes that do not fit in memory are refused with the bytes needed and there") {
  const std::string most = "2147483647";
  CHECK(refused("{\"op\":\"ffn\",\"m\":" + most + ",\"d\":" + most + ",\"h\":" + most + "}",
                "bytes", FFTUNE_UNAVAILABLE));
}

TEST_CASE("a plan knows its buffers") {
  const auto context = cpu_context();
  const auto plan = context.plan(ffn_json(3, 8, 20));
  CHECK(plan.buffer_count() == 5);
  const std::vector<std::size_t> elements{3 * 8, 20 * 8, 20 * 8, 8 * 20, 3 * 8};
  for (std::size_t i = 0; i < elements.size(); ++i)
    CHECK(plan.buffer_bytes(i) == elements[i] * sizeof(float));
  CHECK(plan.buffer_bytes(5) == 0);
  const auto half = context.plan(ffn_json(3, 8, 20, ",\"dtype\":\"bf16\""));
  CHECK(half.buffer_bytes(0) == 3 * 8 * 2);
}

TEST_CASE("plans may be made from several threads at once") {
  const auto context = cpu_context();
  std::vector<std::string> descriptions(8);
  {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < descriptions.size(); ++i)
      threads.emplace_back(
          [&, i] { descriptions[i] = context.plan(ffn_json(4 + i % 2, 16, 24)).describe(); });
    for (auto& thread : threads) thread.join();
  }
  for (std::size_t i = 2; i < descriptions.size(); ++i)
    CHECK(descriptions[i] == descriptions[i % 2]);
}
