#include "apps/fftune/command_line/values.hpp"

#include <string>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune::tool;

TEST_CASE("whole numbers are decimal, in range, and nothing else") {
  CHECK(parse_whole("1", "--d", 1, 10) == 1);
  CHECK(parse_whole("10", "--d", 1, 10) == 10);
  CHECK(parse_whole("-3", "--d", -5, 10) == -3);
  for (const char* text : {"", "-", "+1", " 1", "1 ", "0x1", "1e2", "1.0", "0", "11", "-1",
                           "9223372036854775808", "１"})
    CHECK_THROWS_AS(parse_whole(text, "--d", 1, 10), fftune::Error);
}

TEST_CASE("lists are sorted, each value once") {
  CHECK(parse_whole_list("16,1,16,4", "--m", 1, 100) == std::vector<std::int64_t>{1, 4, 16});
  CHECK(parse_words("a,b", "--op") == std::vector<std::string>{"a", "b"});
  for (const char* text : {"", ",", "a,", ",a", "a,,b"})
    CHECK_THROWS_AS(parse_words(text, "--op"), fftune::Error);
}

TEST_CASE("durations have a unit and are above zero") {
  CHECK(parse_duration("500ms", "--budget") == Approx(0.5));
  CHECK(parse_duration("60s", "--budget") == Approx(60));
  CHECK(parse_duration("2m", "--budget") == Approx(120));
  CHECK(parse_duration("1.5h", "--budget") == Approx(5400));
  for (const char* text :
       {"", "s", "60", "0s", "-1s", "1 s", "1d", "..s", "1.2.3s", "inf s", "1e3s"})
    CHECK_THROWS_AS(parse_duration(text, "--budget"), fftune::Error);
}

TEST_CASE("a duration may be none where that means something") {
  CHECK(parse_duration("0s", "--wait", true) == 0);
  CHECK(parse_duration("0ms", "--wait", true) == 0);
  CHECK(parse_duration("1s", "--wait", true) == 1);
  for (const char* text : {"0", "-1s", "s"})
    CHECK_THROWS_AS(parse_duration(text, "--wait", true), fftune::Error);
}

TEST_CASE("amounts take an exponent") {
  CHECK(parse_percent("1%", "--min-gain") == Approx(0.01));
  CHECK(parse_percent("0%", "--min-gain") == 0);
  for (const char* text : {"1", "-1%", "101%", "%", "nan%", "1 %"})
    CHECK_THROWS_AS(parse_percent(text, "--min-gain"), fftune::Error);
  CHECK(parse_amount("2e11", "--max-flops") == Approx(2e11));
  CHECK(parse_amount("1.5", "--max-flops") == Approx(1.5));
  for (const char* text : {"", "e", "0", "-1", "inf", "nan", "1e999", "1x", "1e"})
    CHECK_THROWS_AS(parse_amount(text, "--max-flops"), fftune::Error);
}

TEST_CASE("seeds fill 64 bits") {
  CHECK(parse_seed("0", "--seed") == 0);
  CHECK(parse_seed("18446744073709551615", "--seed") == ~std::uint64_t{0});
  for (const char* text : {"", "-1", "x", "18446744073709551616"})
    CHECK_THROWS_AS(parse_seed(text, "--seed"), fftune::Error);
}

TEST_CASE("a word must be one of those that are known") {
  const std::vector<std::string> words{"halving", "random", "exhaustive"};
  CHECK_THROWS_AS(check_choice("halvin", "--strategy", words), fftune::Error);
  CHECK_NOTHROW(check_choice("halving", "--strategy", words));
}
