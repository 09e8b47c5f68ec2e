#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/catch.hpp"

namespace {

namespace fs = std::filesystem;

std::string text_of(const fs::path& path) {
  std::ifstream stream(path);
  REQUIRE(stream);
  return {std::istreambuf_iterator<char>(stream), {}};
}

/// The contents of the fenced blocks of a language.
std::vector<std::string> blocks(const std::string& page, const std::string& language) {
  std::vector<std::string> blocks;
  std::istringstream lines(page);
  bool inside = false;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("```", 0) == 0) {
      inside = !inside && line == "```" + language;
      if (inside) blocks.emplace_back();
    } else if (inside) {
      blocks.back() += line + "\n";
    }
  }
  return blocks;
}

}  // namespace

TEST_CASE("the pages quote the example as it is built") {
  const fs::path root = FFTUNE_SOURCE_DIR;
  std::string example;
  for (const auto& entry : fs::directory_iterator(root / "docs/examples/kernels/relu"))
    example += text_of(entry.path());
  for (const char* page : {"docs/adding-an-op.md", "docs/adding-a-family.md"}) {
    const std::string text = text_of(root / page);
    for (const char* language : {"cpp", "cuda"}) {
      const auto quoted = blocks(text, language);
      for (const auto& block : quoted) {
        CAPTURE(page, block);
        CHECK(example.find(block) != example.npos);
      }
    }
    REQUIRE(blocks(text, "cpp").size() > 1);
  }
}
