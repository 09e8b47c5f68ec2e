// The bundle's file: what is found in it, and what is said of one that is damaged.
#include "cuda/bundle.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <tuple>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "cuda/kernels.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/temporary_folder.hpp"

namespace fftune::cuda {
namespace {

using testing::TemporaryFolder;
using testing::test_kernels;

const BundleKey scale_key{"sm_90a", "test/scale.cu", "scale<128>"};
const BundleKey narrow{"sm_80", "test/scale.cu", "scale<32>"};

CompiledKernel kernel_named(const std::string& name, std::size_t image_bytes) {
  CompiledKernel kernel;
  kernel.lowered_name = name;
  for (std::size_t i = 0; i < image_bytes; ++i) kernel.image += static_cast<char>((i * 131) % 256);
  kernel.report = {name, 40, 8, 512, {}};
  return kernel;
}

std::string two_kernels() {
  return encode_bundle({{scale_key, {"aaaa", kernel_named("_Z5scale", 700)}},
                        {narrow, {"bbbb", kernel_named("_Z6narrow", 300)}}},
                       "0.1.0", "13.0");
}

struct File {
  explicit File(const std::string& bytes) : path(folder.path() / "kernels.fftune") {
    std::ofstream(path, std::ios::binary) << bytes;
  }
  TemporaryFolder folder;
  std::filesystem::path path;
};

/// Opens a file of these bytes and asks for both kernels; what was said, or "" if both were there.
/// A kernel that is given out has to be the one that was put in.
std::string said_of(const std::string& bytes) {
  const File file(bytes);
  try {
    const Bundle bundle(file.path);
    for (const auto& [key, hash, name, image_bytes] :
         {std::tuple{scale_key, "aaaa", "_Z5scale", 700}, {narrow, "bbbb", "_Z6narrow", 300}}) {
      const auto found = bundle.find(key, hash);
      if (!found.kernel) return found.reason;
      const auto expected = kernel_named(name, static_cast<std::size_t>(image_bytes));
      REQUIRE(found.kernel->image == expected.image);
      REQUIRE(found.kernel->lowered_name == expected.lowered_name);
    }
    return "";
  } catch (const Error& error) {
    CHECK((error.kind() == ErrorKind::invalid_input || error.kind() == ErrorKind::io));
    return error.what();
  }
}

bool one_line(const std::string& text) {
  return !text.empty() && text.find('\n') == text.npos;
}

}  // namespace

TEST_CASE("a bundle gives back the kernels that were put in, by architecture, file and name") {
  const File file(two_kernels());
  const Bundle bundle(file.path);
  CHECK(bundle.size() == 2);
  CHECK(bundle.archs() == std::set<std::string>{"sm_80", "sm_90a"});
  const auto found = bundle.find(scale_key, "aaaa");
  REQUIRE(found.kernel);
  CHECK(found.kernel->report.registers == 40);
  CHECK(found.reason.empty());
  CHECK(said_of(two_kernels()).empty());
}

TEST_CASE("a kernel missing from a bundle is reported in one line") {
  const File file(two_kernels());
  const Bundle bundle(file.path);
  const auto reason = [&](const BundleKey& key, const char* hash) {
    const auto found = bundle.find(key, hash);
    CHECK(!found.kernel);
    CHECK(one_line(found.reason));
    return found.reason;
  };
  CHECK(reason({"sm_86", "test/scale.cu", "scale<128>"}, "aaaa").find("no kernels for sm_86") !=
        std::string::npos);
  CHECK(
      reason({"sm_90a", "test/scale.cu", "scale<64>"}, "aaaa").find("does not have this kernel") !=
      std::string::npos);
  CHECK(reason(scale_key, "cccc").find("is stale: test/scale.cu has changed") != std::string::npos);
}

TEST_CASE("a bundle complains of another architecture and of sources that have changed") {
  const auto sources = test_kernels();
  const auto hash = sources.hash({"test/scale.cu"});
  const File fresh(
      encode_bundle({{scale_key, {hash, kernel_named("_Z5scale", 10)}}}, "0.1.0", "13.0"));
  CHECK(Bundle(fresh.path).complaint("sm_90a", sources).empty());
  const auto other = Bundle(fresh.path).complaint("sm_80", sources);
  CHECK(one_line(other));
  CHECK(other.find("is for sm_90a, not sm_80: make it with --arch sm_80") != std::string::npos);
  const File old(two_kernels());
  const auto stale = Bundle(old.path).complaint("sm_90a", sources);
  CHECK(one_line(stale));
  CHECK(stale.find("made by fftune 0.1.0") != std::string::npos);
  CHECK(stale.find("1 of its 1 kernels has changed, the first test/scale.cu") != std::string::npos);
  const BundleKey gone{"sm_90a", "test/gone.cu", "gone"};
  const File removed(encode_bundle({{gone, {hash, kernel_named("x", 10)}}}, "0.1.0", "13.0"));
  CHECK(!Bundle(removed.path).complaint("sm_90a", sources).empty());
}

TEST_CASE("a bundle that is cut short says so, wherever it is cut") {
  const auto whole = two_kernels();
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    const auto said = said_of(whole.substr(0, bytes));
    CAPTURE(bytes, said);
    REQUIRE(one_line(said));
    REQUIRE(said.find("is cut short") != std::string::npos);
  }
  CHECK(said_of(whole + "x").find("is damaged") != std::string::npos);
}

TEST_CASE("a bundle with any byte changed never gives out another kernel") {
  const auto whole = two_kernels();
  std::mt19937 random(7);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    auto damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << random() % 8));
    CAPTURE(at);
    REQUIRE(one_line(said_of(damaged)));
  }
}

TEST_CASE("mutated bundles are refused or read, and nothing else") {
  const auto whole = two_kernels();
  std::mt19937 random(11);
  const auto below = [&](std::size_t bound) { return random() % bound; };
  for (int round = 0; round < 3000; ++round) {
    auto bytes = whole;
    for (auto changes = 1 + below(4); changes > 0; --changes) {
      const auto at = below(bytes.size());
      const auto length = std::min(bytes.size() - at, 1 + below(24));
      switch (below(4)) {
        case 0:
          for (std::size_t i = 0; i < length; ++i) bytes[at + i] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, length);
          break;
        case 2:
          bytes.insert(at, bytes.substr(at, length));
          break;
        default:
          bytes.replace(at, length, std::string(length, below(2) ? '\xff' : '\0'));
      }
      if (bytes.empty()) break;
    }
    const auto said = said_of(bytes);
    if (bytes != whole) REQUIRE(one_line(said));
  }
}

TEST_CASE("an index whose checksum fits but whose contents do not is refused") {
  // As above, with the index's checksum made to fit: the reader must not trust it.
  const auto whole = two_kernels();
  std::mt19937 random(13);
  std::uint64_t index_bytes = 0;
  std::memcpy(&index_bytes, whole.data() + 16, sizeof index_bytes);
  for (int round = 0; round < 3000; ++round) {
    auto bytes = whole;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      const auto at = 32 + random() % (index_bytes - 8);
      if (random() % 2)
        bytes[at] = static_cast<char>(random());
      else
        bytes.replace(at, 8, std::string(8, random() % 2 ? '\xff' : '\x7f'));
    }
    const auto checksum = fnv1a(std::string_view(bytes).substr(32, index_bytes));
    std::memcpy(bytes.data() + 24, &checksum, sizeof checksum);
    said_of(bytes);  // throws nothing but Error, reads nothing outside of the file
  }
}

TEST_CASE("a bundle is a regular file that is there") {
  const TemporaryFolder folder;
  const auto said = [](const std::filesystem::path& path) {
    return test::error_of(ErrorKind::io, [&] { const Bundle bundle(path); });
  };
  CHECK(said(folder.path() / "none").find("cannot be read: No such file") != std::string::npos);
  CHECK(said(folder.path()).find("is not a regular file") != std::string::npos);
  const auto fifo = folder.path() / "fifo";
  REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
  CHECK(said(fifo).find("is not a regular file") != std::string::npos);
}

}  // namespace fftune::cuda
