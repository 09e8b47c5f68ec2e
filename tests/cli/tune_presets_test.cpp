// fftune tune-presets: the problems of preset files, and those that are searched.
#include <filesystem>
#include <string>

#include "sandbox.hpp"
#include "support/catch.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

using testing::lines_in;
using testing::Sandbox;
using testing::text_of;
using testing::write_text;

TEST_CASE("tune-presets searches what other devices' presets name, and no problem twice") {
  const Sandbox sandbox;
  const std::string quick = " --device cpu --budget 2s --wait 0s --max-variants 1 ";
  REQUIRE(sandbox.fftune("rmsnorm --d 64 --m 3,4 --dtype f32 --out theirs" + quick).code == 0);
  REQUIRE(sandbox.fftune("act-mul --h 64 --m 3 --dtype f32 --out theirs" + quick).code == 0);

  const auto listed = sandbox.fftune("tune-presets theirs theirs --list");
  CHECK(listed.code == 0);
  CHECK(lines_in(listed.out) == 3);
  CHECK(listed.out.find("act-mul/fwd f32") == 0);
  CHECK(lines_in(sandbox.fftune("tune-presets theirs --list --op rmsnorm --m 4").out) == 1);

  const auto first = sandbox.fftune("tune-presets theirs --out ours --op rmsnorm --m 4" + quick);
  CHECK(first.code == 0);
  CHECK(first.out.find("/rmsnorm.json") != std::string::npos);
  const auto rest = sandbox.fftune("tune-presets theirs --out ours" + quick);
  CHECK(rest.code == 0);
  CHECK(rest.err.find("ours has records of 1 problem already: --again searches it too") !=
        std::string::npos);
  CHECK(lines_in(sandbox.fftune("tune-presets ours --list").out) == 3);
  const auto none = sandbox.fftune("tune-presets theirs --out ours" + quick);
  CHECK(none.code == 0);
  CHECK(none.out.find("rmsnorm") == std::string::npos);
  CHECK(sandbox.fftune("tune-presets theirs --out ours --again --op act-mul" + quick)
            .out.find("/act-mul.json") != std::string::npos);

  CHECK(sandbox.fftune("tune-presets no-such").code == 2);
  write_text(sandbox.folder() / "cut/a/ffn.json", "{\"ver");
  for (const std::string words : {"cut", "cut/a/ffn.json", "cut --list"}) {
    const auto cut = sandbox.fftune("tune-presets " + words);
    CHECK(cut.code == 2);
    CHECK(cut.err.find("it is cut short; nothing else is there to search") != std::string::npos);
  }
  CHECK(sandbox.fftune("tune-presets theirs --op no-such --list").code == 2);
}

TEST_CASE("a search begins with the variants that presets name, and with what the library runs") {
  const Sandbox sandbox;
  const std::string one = "--d 64 --m 3 --dtype f32";
  const std::string quick = " --device cpu --budget 2s --wait 0s --max-variants 1";
  // Whether it tried the variant that no search begins with by itself.
  const auto tries_other = [&](const std::string& words) {
    fs::remove_all(sandbox.folder() / ".local/state");
    const auto found = sandbox.fftune(words + quick);
    CAPTURE(words, found.err);
    CHECK(found.code == 0);
    std::string tried;
    for (const auto& entry : fs::recursive_directory_iterator(sandbox.folder() / ".local/state"))
      if (entry.path().extension() == ".jsonl") tried += text_of(entry.path());
    CHECK(tried.find("nontemporal=0") != tried.npos);  // the default
    return tried.find("nontemporal=1") != tried.npos;
  };
  CHECK_FALSE(tries_other("rmsnorm --out theirs " + one));
  fs::path theirs;
  for (const auto& entry : fs::recursive_directory_iterator(sandbox.folder() / "theirs"))
    if (entry.path().filename() == "rmsnorm.json") theirs = entry.path();
  std::string text = text_of(theirs);
  const std::size_t at = text.find("\"nontemporal\": 0");
  REQUIRE(at != text.npos);
  write_text(theirs, text.replace(at, 16, "\"nontemporal\": 1"));

  CHECK(tries_other("tune-presets theirs --out ours"));
  CHECK_FALSE(tries_other("rmsnorm --out elsewhere " + one));
  REQUIRE(sandbox.fftune("presets install theirs").code == 0);
  CHECK(tries_other("rmsnorm --out installed " + one));
}

}  // namespace
}  // namespace fftune
