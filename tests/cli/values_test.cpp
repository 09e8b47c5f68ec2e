#include "apps/fftune/command_line/values.hpp"

#include <optional>
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

namespace {

/// The value that a reader makes of a text. Throws its error.
template <class Value, class MakeReader>
Value read(MakeReader&& reader, const std::string& text) {
  Value value{};
  reader(value).read(text, "--option");
  return value;
}

double seconds(const std::string& text, bool or_none = false) {
  return read<double>([&](double& value) { return duration(value, or_none); }, text);
}

}  // namespace

TEST_CASE("durations have a unit and are above zero") {
  CHECK(seconds("500ms") == Approx(0.5));
  CHECK(seconds("60s") == Approx(60));
  CHECK(seconds("2m") == Approx(120));
  CHECK(seconds("1.5h") == Approx(5400));
  for (const char* text :
       {"", "s", "60", "0s", "-1s", "1 s", "1d", "..s", "1.2.3s", "inf s", "1e3s"})
    CHECK_THROWS_AS(seconds(text), fftune::Error);
}

TEST_CASE("a duration may be none where that means something") {
  CHECK(seconds("0s", true) == 0);
  CHECK(seconds("0ms", true) == 0);
  CHECK(seconds("1s", true) == 1);
  for (const char* text : {"0", "-1s", "s"}) CHECK_THROWS_AS(seconds(text, true), fftune::Error);
}

TEST_CASE("amounts take an exponent") {
  const auto part = [](const std::string& text) {
    return read<std::optional<double>>(percent, text).value();
  };
  CHECK(part("1%") == Approx(0.01));
  CHECK(part("0%") == 0);
  for (const char* text : {"1", "-1%", "101%", "%", "nan%", "1 %"})
    CHECK_THROWS_AS(part(text), fftune::Error);
  CHECK(read<double>(amount, "2e11") == Approx(2e11));
  CHECK(read<double>(amount, "1.5") == Approx(1.5));
  for (const char* text : {"", "e", "0", "-1", "inf", "nan", "1e999", "1x", "1e"})
    CHECK_THROWS_AS(read<double>(amount, text), fftune::Error);
}

TEST_CASE("seeds fill 64 bits") {
  CHECK(read<std::uint64_t>(seed, "0") == 0);
  CHECK(read<std::uint64_t>(seed, "18446744073709551615") == ~std::uint64_t{0});
  for (const char* text : {"", "-1", "x", "18446744073709551616"})
    CHECK_THROWS_AS(read<std::uint64_t>(seed, text), fftune::Error);
}

TEST_CASE("help names the value of an option that is left out, if it can be given") {
  int count = 8, none = 0;
  double wait = 10, budget = 0;
  CHECK(whole(count, 1, 10).initial == "8");
  CHECK(whole(none, 1, 10).initial.empty());
  CHECK(whole(none, 0, 10).initial == "0");
  CHECK(duration(wait).initial == "10s");
  CHECK(duration(budget).initial.empty());
}

TEST_CASE("a word must be one of those that are known") {
  const std::vector<std::string> words{"halving", "random", "exhaustive"};
  CHECK_THROWS_AS(check_choice("halvin", "--strategy", words), fftune::Error);
  CHECK_NOTHROW(check_choice("halving", "--strategy", words));
}
