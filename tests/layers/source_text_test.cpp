#include "layers/source_text.hpp"

#include "support/catch.hpp"

using namespace fftune::testing;

TEST_CASE("comments and the contents of literals are no code") {
  REQUIRE(code_of("a // exit()\nb", false) == "a  \nb");
  REQUIRE(code_of("a /* x\n// */b", false) == "a  b");
  REQUIRE(code_of(R"(f("ex\"it(", 'x', '\'');)", false) == R"(f("", '', '');)");
  REQUIRE(code_of(R"(f("a // b");)", true) == R"(f("a // b");)");
  REQUIRE(code_of("R\"x(exit() \")x\" + 1'000'000", false) == "R\"\" + 1'000'000");
  REQUIRE(code_of("\"never closed", false) == "\"\"");
}

TEST_CASE("includes are read as the preprocessor reads them") {
  const auto includes = includes_of(
      "// #include \"no.hpp\"\n#include <vector>\n  #  include \"core/a.hpp\"  // why\n"
      "/*\n#include \"no.hpp\"\n*/\n#define include 3\n");
  REQUIRE(includes.size() == 2);
  REQUIRE(includes[0].name == "vector");
  REQUIRE_FALSE(includes[0].quoted);
  REQUIRE(includes[1].name == "core/a.hpp");
  REQUIRE(includes[1].quoted);
}

TEST_CASE("a call is a whole word before a parenthesis") {
  REQUIRE(calls("std::exit(1)", "exit"));
  REQUIRE(calls("if (x) exit  (1)", "exit"));
  REQUIRE_FALSE(calls("on_exit(1)", "exit"));
  REQUIRE_FALSE(calls("exit_code(1) + exit", "exit"));
}
