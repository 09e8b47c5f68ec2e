#include "apps/fftune/terminal/text_table.hpp"

#include <algorithm>
#include <sstream>
#include <string>

#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"
#include "support/catch.hpp"

using namespace fftune::tool;

TEST_CASE("columns are aligned by what is seen, and no line ends in spaces") {
  TextTable table({{"name"}, {"µs", Align::right}, {"note"}});
  table.row({"a", "1.5", "long note"});
  table.row({"longer", {"123.5", Style::good}, ""});
  table.row({"×", "2"});
  const std::string plain =
      "name       µs  note\n"
      "a         1.5  long note\n"
      "longer  123.5\n"
      "×           2\n";
  CHECK(table.text(false) == plain);

  // Colour adds escape sequences and moves nothing.
  std::string stripped;
  const std::string coloured = table.text(true);
  for (std::size_t i = 0; i < coloured.size(); ++i) {
    if (coloured[i] == '\033')
      i = coloured.find('m', i);
    else
      stripped += coloured[i];
  }
  CHECK(coloured != plain);
  CHECK(stripped == plain);
}

TEST_CASE("a row has no more cells than there are columns") {
  TextTable table({{"one"}});
  CHECK(table.empty());
  CHECK_THROWS_AS(table.row({"1", "2"}), fftune::Error);
}

TEST_CASE("text is cut at whole code points") {
  CHECK(truncated("12 µs", 5) == "12 µs");
  CHECK(truncated("12 µs", 4) == "12 …");
  CHECK(truncated("µµµµ", 3) == "µµ…");
  CHECK(truncated("abc", 1) == "…");
  CHECK(truncated("abc", 0).empty());
}

TEST_CASE("a table that is too wide is broken between words") {
  TextTable table({{"m", Align::right}, {"device"}, {"median µs", Align::right}, {"winner"}});
  table.row({"1", "a-long-name-of-a-device", "12.5", "nothing worked at all"});
  table.row({"16", "cpu", "7.25", {"tiles/bm=64,bn=128", Style::bad}});
  const std::string narrow =
      " m  device             median  winner\n"
      "                           µs\n"
      " 1  a-long-name-of-      12.5  nothing worked\n"
      "    a-device                   at all\n"
      "16  cpu                  7.25  tiles/bm=64,\n"
      "                               bn=128\n";
  CHECK(table.text(false, 47) == narrow);
  CHECK(table.text(false, 80) == table.text(false));
}

TEST_CASE("texts for which there is no room go below their row") {
  TextTable table({{"problem"}, {"dtype"}, {"winner"}, {"median µs", Align::right}});
  table.row({"d=1024", "bf16", "family/a_rather_long_parameter=1,b=2", "12.5"});
  const std::string narrow =
      "problem  dtype  median µs\n"
      "    winner\n"
      "d=1024   bf16        12.5\n"
      "    family/\n"
      "    a_rather_long_parameter=1,\n"
      "    b=2\n";
  CHECK(table.text(false, 30) == narrow);
  for (const std::size_t width : {20, 30, 40, 80}) {
    std::istringstream lines(table.text(false, width));
    // A single word may be wider than the page.
    for (std::string line; std::getline(lines, line);)
      CHECK(display_width(line) <= std::max<std::size_t>(width, 30));
  }
}
