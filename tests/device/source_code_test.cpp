#include "device/sources.hpp"

#include <random>
#include <string>
#include <vector>

#include "support/catch.hpp"

using namespace fftune;

namespace {

std::string code(std::string_view source) {
  return code_of(tokens_of(source));
}

std::vector<std::string> texts(std::string_view source) {
  std::vector<std::string> all;
  for (const auto& token : tokens_of(source)) all.emplace_back(token.text);
  return all;
}

using Texts = std::vector<std::string>;

// A function with what a kernel's source has: directives, literals, operators, numbers.
const std::string example =
    "#pragma once\n#define TWICE(x) \\\n  ((x) + (x))\n#if defined(FAST)\nint f(int *p) {\n"
    "  asm volatile(\"// no /* comment */ \\\"here\\\"\" : : \"r\"(a - -b), '\\'');\n"
    "  return 1'000'000 / *p + R\"x( // kept\n )\" )x\"[0] >= 0x1p-3f;\n}\n#endif\n";

}  // namespace

TEST_CASE("a source's tokens are words, literals and single characters") {
  REQUIRE(texts("int x_1 = 1'000'000 + .5f;") ==
          Texts{"int", "x_1", "=", "1'000'000", "+", ".", "5f", ";"});
  REQUIRE(texts(R"(f("ex\"it(", 'x', '\'', u'"', 1);)") == Texts{"f", "(", R"("ex\"it(")", ",",
                                                                 "'x'", ",", R"('\'')", ",", "u",
                                                                 R"('"')", ",", "1", ")", ";"});
  REQUIRE(texts("u8R\"x(exit() \")x\" + 1'000") == Texts{"u8R\"x(exit() \")x\"", "+", "1'000"});
  REQUIRE(texts("FOR\"a(\"b") == Texts{"FOR", "\"a(\"", "b"});
  REQUIRE(texts("café") == Texts{"café"});
}

TEST_CASE("a source that ends too early ends its last token") {
  REQUIRE(tokens_of("").empty());
  REQUIRE(tokens_of(" // never").empty());
  REQUIRE(tokens_of("/* never").empty());
  REQUIRE(tokens_of("/*/").empty());
  REQUIRE(texts("\"never") == Texts{"\"never"});
  REQUIRE(texts("\"never\\") == Texts{"\"never\\"});
  REQUIRE(texts("R\"x(never)y\"") == Texts{"R\"x(never)y\""});
  REQUIRE(texts("R\"never") == Texts{"R\"never"});
  REQUIRE(texts("a /") == Texts{"a", "/"});
  REQUIRE(texts("a \\") == Texts{"a", "\\"});
}

TEST_CASE("comments are no code") {
  REQUIRE(code("a; // exit()\nb;") == "a;b;");
  REQUIRE(code("a; /* x\n// */b;") == "a;b;");
  REQUIRE(code("int/**/x;") == "int x;");
  REQUIRE(code("a; // goes on \\\n still\nb;") == "a;b;");
  REQUIRE(code("x = a / b; // c") == "x=a/b;");
}

TEST_CASE("text that looks like a comment in a literal is kept") {
  REQUIRE(code("f(\"a // b\");") == "f(\"a // b\");");
  REQUIRE(code("f(\"a /* b\"); g(\"*/\");") == "f(\"a /* b\");g(\"*/\");");
  REQUIRE(code("f('\"'); // '\"'") == "f('\"');");
  REQUIRE(code("f(\"a\\\"  // b\");") == "f(\"a\\\"  // b\");");
  REQUIRE(code("f(R\"(a  // b\n\"  c)\");") == "f(R\"(a  // b\n\"  c)\");");
  REQUIRE(code("1'0 // '") == "1'0");
}

TEST_CASE("a space stays where two tokens would be another without it") {
  REQUIRE(code("int  x") == "int x");
  REQUIRE(code("a - -b") != code("a--b"));
  REQUIRE(code("a / *b") != code("a/*b*/"));
  REQUIRE(code("a + ++b") != code("a++ + b"));
  REQUIRE(code("x<y<z> >") != code("x<y<z>>"));
  REQUIRE(code("L \"x\"") != code("L\"x\""));
  REQUIRE(code("\"x\" _s") != code("\"x\"_s"));
  REQUIRE(code("f(\n    a,\n    b)") == code("f(a, b)"));
}

TEST_CASE("a directive keeps its line") {
  REQUIRE(code("a\n#if X\nb\n#endif\nc") == "a\n#if X\nb\n#endif\nc");
  REQUIRE(code("#define A\nb") != code("#define A b"));
  REQUIRE(code("#define F(x) y") != code("#define F (x) y"));
  REQUIRE(code("#define A b \\\n  c\nd") == "#define A b c\nd");
  REQUIRE(code("#define A b \\\n  c") != code("#define A b\n  c"));
  REQUIRE(code("#define A /* why,\nand why */ b // this\nc") == "#define A b\nc");
  REQUIRE(code("#define\tA     b\n\n\n") == code("  #define A b"));
  REQUIRE(code("  /* x */ #if 1\n") == "#if 1");
  // Within a line it begins nothing.
  REQUIRE(code("a #\nb") == "a#b");
}

TEST_CASE("comments and line breaks between any two tokens change nothing") {
  std::mt19937 random(5);
  const std::string before = code(example);
  const Texts inside{" ", "\t", " /* a */ ", " /* \" */ ", " \\\n "};
  const Texts outside{" ", "\n", "\n\n", " // it's\n", " /* # */ ", "\n// #if 0\n "};
  for (int round = 0; round < 200; ++round) {
    std::string source;
    bool in_directive = false;
    for (const auto& token : tokens_of(example)) {
      const bool directive = token.begins_line && token.text == "#";
      if (directive || (in_directive && token.begins_line)) source += '\n';
      in_directive = directive || (in_directive && !token.begins_line);
      const auto& gaps = in_directive ? inside : outside;
      if (token.apart && !directive) source += gaps[random() % gaps.size()];
      source += token.text;
    }
    CAPTURE(source);
    REQUIRE(code(source) == before);
  }
}

TEST_CASE("every token that is changed, left out or doubled changes the code") {
  const std::string before = code(example);
  const Tokens tokens = tokens_of(example);
  for (const auto& token : tokens) {
    const auto begin = static_cast<std::size_t>(token.text.data() - example.data());
    const auto with = [&](const std::string& text) {
      std::string source = example;
      return code(source.replace(begin, token.text.size(), text));
    };
    CAPTURE(std::string(token.text));
    REQUIRE(with(std::string(token.text)) == before);
    REQUIRE(with("other") != before);
    REQUIRE(with("") != before);
    REQUIRE(with(std::string(token.text) + " " + std::string(token.text)) != before);
  }
}

TEST_CASE("the code of code is itself") {
  REQUIRE(code(code(example)) == code(example));
}

TEST_CASE("tokens lie one behind the other in their source, whatever it is") {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string source;
    for (int i = 0; i < 30; ++i) source += "\"'/*\\\n #R()x1."[random() % 14];
    CAPTURE(source);
    const char* end = source.data();
    for (const auto& token : tokens_of(source)) {
      REQUIRE_FALSE(token.text.empty());
      REQUIRE(token.text.data() >= end);
      end = token.text.data() + token.text.size();
    }
    REQUIRE(end <= source.data() + source.size());
    code(source);
  }
}

TEST_CASE("includes are read as the preprocessor reads them") {
  const auto includes = includes_of(tokens_of(
      "// #include \"no.hpp\"\n#include <sys/a-b.h>\n  #  include \"core/a.hpp\"  // why\n"
      "/*\n#include \"no.hpp\"\n*/\n#define include 3\nR\"(\n#include \"no.hpp\"\n)\"\n"
      "#include MACRO\na # include \"no.hpp\"\n#include"));
  REQUIRE(includes.size() == 2);
  REQUIRE(includes[0].name == "sys/a-b.h");
  REQUIRE_FALSE(includes[0].quoted);
  REQUIRE(includes[1].name == "core/a.hpp");
  REQUIRE(includes[1].quoted);
}
