#include "device/sources.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;

namespace {

using Names = std::vector<std::string>;
using Files = std::map<std::string, std::string>;

const Files small{
    {"a.cu", "#include \"b.cuh\"\n#include <cstdint>\n// #include \"nowhere.cuh\"\nkernel a"},
    {"b.cuh", "#include \"d.cuh\"\n"},
    {"c.cuh", "#include \"b.cuh\"\n"},
    {"d.cuh", "device"},
    {"loop.cuh", "#include \"loop.cuh\"\n#include \"back.cuh\"\n"},
    {"back.cuh", "#include \"loop.cuh\"\n"},
};

}  // namespace

TEST_CASE("a file's closure is what it includes with quotes, itself first") {
  const SourceSet sources(small);
  REQUIRE(sources.closure("a.cu") == Names{"a.cu", "b.cuh", "d.cuh"});
  REQUIRE(sources.closure("d.cuh") == Names{"d.cuh"});
  REQUIRE(sources.closure("loop.cuh") == Names{"loop.cuh", "back.cuh"});
  REQUIRE(sources.text("d.cuh") == "device");
  REQUIRE_THROWS_AS(sources.closure("e.cu"), Error);
  REQUIRE_THROWS_AS(SourceSet(Files{{"a.cu", "#include \"gone.cuh\"\n"}}).closure("a.cu"), Error);
}

TEST_CASE("the headers of a host source are left out") {
  const SourceSet sources(Files{{"ffn/cpu_plain.cpp", "#include \"core/config.hpp\"\ncode"}});
  REQUIRE(sources.closure("ffn/cpu_plain.cpp") == Names{"ffn/cpu_plain.cpp"});
  REQUIRE(sources.hash({"ffn/cpu_plain.cpp"}).size() == 16);
}

TEST_CASE("a hash changes with every file it depends on, and with no other") {
  const std::string before = SourceSet(small).hash({"a.cu"});
  REQUIRE(before.size() == 16);
  for (const auto& [name, text] : small) {
    Files files = small;
    files[name] += "\nint changed;";
    const bool depends = name == "a.cu" || name == "b.cuh" || name == "d.cuh";
    CAPTURE(name);
    REQUIRE((SourceSet(files).hash({"a.cu"}) != before) == depends);
  }
}

TEST_CASE("neither a comment nor the format of a source changes its hash") {
  const Files plain{{"a.cu", "#include \"b.cuh\"\nint f() { return 1 + two; }\n"},
                    {"b.cuh", "#define two 2\n"}};
  const Files other{{"a.cu",
                     "// Adds.\n#include \"b.cuh\"  // two\n\n\nint f()\n{\n\treturn 1 /* + 7 */ "
                     "+\n\t       two;\n}\n// #include \"c.cuh\"\n"},
                    {"b.cuh", "/* Two.\n*/\n#define two   2"}};
  Files changed = other;
  changed["b.cuh"] = "/* Two.\n*/\n#define two   3";
  const std::string hash = SourceSet(plain).hash({"a.cu"});
  REQUIRE(SourceSet(other).hash({"a.cu"}) == hash);
  REQUIRE(SourceSet(changed).hash({"a.cu"}) != hash);
}

TEST_CASE("a hash does not depend on the order or the number of mentions") {
  const SourceSet sources(small);
  REQUIRE(sources.hash({"a.cu", "c.cuh"}) == sources.hash({"c.cuh", "a.cu", "b.cuh", "c.cuh"}));
  REQUIRE(sources.hash({"a.cu"}) != sources.hash({"a.cu", "c.cuh"}));
  // Where one text ends and the next begins counts.
  REQUIRE(SourceSet(Files{{"a", "xy"}, {"b", "z"}}).hash({"a", "b"}) !=
          SourceSet(Files{{"a", "x"}, {"b", "yz"}}).hash({"a", "b"}));
}

TEST_CASE("a closure is closed, whatever includes what") {
  std::mt19937 random(17);
  for (int round = 0; round < 300; ++round) {
    const std::size_t count = 1 + random() % 8;
    const auto name = [](std::size_t i) { return "file" + std::to_string(i) + ".cuh"; };
    std::map<std::string, Names> includes;
    Files files;
    for (std::size_t i = 0; i < count; ++i) {
      std::string& text = files[name(i)];
      for (std::size_t k = random() % 4; k > 0; --k) {
        const std::string other = name(random() % count);
        text += "#include \"" + other + "\"\n";
        includes[name(i)].push_back(other);
      }
    }
    const SourceSet sources(files);
    for (std::size_t i = 0; i < count; ++i) {
      const Names closure = sources.closure(name(i));
      const auto has = [&](const std::string& file) {
        return std::count(closure.begin(), closure.end(), file) == 1;
      };
      REQUIRE(closure.front() == name(i));
      REQUIRE(std::is_sorted(closure.begin() + 1, closure.end()));
      for (const auto& file : closure) {
        REQUIRE(has(file));
        for (const auto& included : includes[file]) REQUIRE(has(included));
      }
    }
  }
}

TEST_CASE("device sources of a folder take the place of those built in, host sources stay") {
  const fftune::testing::TemporaryFolder folder;
  const auto write = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories((folder.path() / name).parent_path());
    std::ofstream(folder.path() / name) << text;
  };
  Files built_in = small;
  built_in["op/cpu_rows.cpp"] = "host";
  built_in["op/kernel.cu"] = "#include \"a.cuh\"\n";
  const SourceSet before(built_in);
  write("op/kernel.cu", "#include \"op/new.cuh\"\n");
  write("op/new.cuh", "new");
  write("op/cpu_rows.cpp", "edited, but not compiled");
  write("op/notes.txt", "no source");
  const SourceSet sources = before.with_device_sources_of(folder.path());
  CHECK(sources.names() == Names{"op/cpu_rows.cpp", "op/kernel.cu", "op/new.cuh"});
  CHECK(sources.closure("op/kernel.cu") == Names{"op/kernel.cu", "op/new.cuh"});
  CHECK(sources.text("op/new.cuh") == "new");
  CHECK(sources.hash({"op/cpu_rows.cpp"}) == before.hash({"op/cpu_rows.cpp"}));
  const std::string hash = sources.hash({"op/kernel.cu"});
  write("op/new.cuh", "newer");
  CHECK(before.with_device_sources_of(folder.path()).hash({"op/kernel.cu"}) != hash);
  CHECK(sources.hash({"op/kernel.cu"}) == hash);  // read once
}

TEST_CASE("a folder without device sources is wrong input") {
  const fftune::testing::TemporaryFolder folder;
  std::ofstream(folder.path() / "a.cpp") << "host";
  for (const auto& path : {folder.path(), folder.path() / "absent", folder.path() / "a.cpp"})
    CHECK(test::error_of(ErrorKind::invalid_input, [&] {
            (void)SourceSet(small).with_device_sources_of(path);
          }).find("'" + path.string() + "'") != std::string::npos);
}
