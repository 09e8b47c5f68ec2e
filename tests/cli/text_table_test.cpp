#include "apps/fftune/text_table.hpp"

#include <string>

#include "apps/fftune/terminal.hpp"
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
