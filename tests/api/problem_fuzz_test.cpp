// Any text at all is a plan or an error line.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "api/layer.hpp"
#include "support/catch.hpp"

using namespace fftune;
using namespace fftune::test;

namespace {

/// One mutation of the text: of a byte, of a piece, or of a word that JSON or fftune knows.
std::string mutate(std::string text, std::mt19937& random) {
  static const std::vector<std::string> words{"\"",
                                              "{",
                                              "}",
                                              "[",
                                              "]",
                                              ":",
                                              ",",
                                              "null",
                                              "true",
                                              "1e999",
                                              "-1",
                                              "0",
                                              "2147483648",
                                              "9223372036854775808",
                                              "-9223372036854775809",
                                              "\"op\"",
                                              "\"m\"",
                                              "\"d\"",
                                              "\"pass\"",
                                              "\"bwd\"",
                                              "\"dtype\"",
                                              "\"bf16\"",
                                              "\"act\"",
                                              "\"gelu\"",
                                              "\\u0000",
                                              "\xff\xfe",
                                              "\\ud800",
                                              "{\"m\":{\"m\":",
                                              "[[[[[[[[",
                                              "1.0",
                                              "\n"};
  const std::size_t at = text.empty() ? 0 : random() % text.size();
  const std::size_t length = random() % 8;
  switch (random() % 5) {
    case 0:
      if (!text.empty()) text[at] = static_cast<char>(random());
      break;
    case 1:
      text.erase(at, length);
      break;
    case 2:
      text.insert(at, words[random() % words.size()]);
      break;
    case 3:
      text.replace(at, std::min(length, text.size() - at), words[random() % words.size()]);
      break;
    default:
      text.insert(at, text.substr(at, length));
  }
  return text;
}

}  // namespace

TEST_CASE("mutated problems never crash, and each failure says why in one line") {
  std::mt19937 random(20);
  fftune_context* context = nullptr;
  REQUIRE(fftune_context_create(-1, nullptr, &context) == FFTUNE_OK);
  int plans = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string text = ffn_json(4, 16, 24, R"(,"pass":"fwd","dtype":"f32","act":"silu")");
    for (auto times = random() % 4; times > 0; --times) text = mutate(text, random);
    fftune_plan* plan = nullptr;
    const auto status = fftune_plan_create(context, text.c_str(), &plan);
    INFO(text << "\n" << fftune_last_error());
    REQUIRE((status == FFTUNE_OK) == (plan != nullptr));
    if (status == FFTUNE_OK) {
      ++plans;
      fftune_plan_destroy(plan);
      continue;
    }
    REQUIRE((status == FFTUNE_INVALID_INPUT || status == FFTUNE_UNAVAILABLE));
    const std::string said = fftune_last_error();
    REQUIRE(said.size() > 20);
    REQUIRE(said.find('\n') == std::string::npos);
  }
  CHECK(plans > 100);
  CHECK(plans < 2900);
  fftune_context_destroy(context);
}
