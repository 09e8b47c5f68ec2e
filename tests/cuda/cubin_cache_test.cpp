#include "cuda/cubin_cache.hpp"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <iterator>
#include <random>
#include <thread>

#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

namespace fftune::cuda {
namespace {

using testing::TemporaryFolder;

CompiledKernel some_kernel(std::size_t image_bytes = 300) {
  CompiledKernel kernel;
  kernel.lowered_name = "_Z5scaleILi128EEvPff";
  for (std::size_t i = 0; i < image_bytes; ++i) kernel.image += static_cast<char>((i * 131) % 256);
  kernel.report = {"scale<128>", 40, 8, 512, {"(C7510) serialised", ""}};
  return kernel;
}

bool same(const CompiledKernel& a, const CompiledKernel& b) {
  return a.lowered_name == b.lowered_name && a.image == b.image && a.report.name == b.report.name &&
         a.report.registers == b.report.registers && a.report.spill_bytes == b.report.spill_bytes &&
         a.report.static_shared_bytes == b.report.static_shared_bytes &&
         a.report.warnings == b.report.warnings;
}

std::string content_of(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_content(const std::filesystem::path& file, std::string_view content) {
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
}

std::size_t file_count(const std::filesystem::path& folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

}  // namespace

TEST_CASE("an entry of a terabyte, and one that is a pipe, are rebuilt") {
  const TemporaryFolder folder;
  const CubinCache cache(folder.path() / "cubin");
  cache.publish("key", some_kernel());
  const auto entry = folder.path() / "cubin" / CubinCache::file_name("key");
  std::filesystem::resize_file(entry, std::uintmax_t{1} << 40);
  CHECK_FALSE(cache.load("key"));
  CHECK(same(cache.publish("key", some_kernel()), some_kernel()));
  REQUIRE(cache.load("key"));
  CHECK(std::filesystem::file_size(entry) < 10000);
  std::filesystem::remove(entry);
  REQUIRE(mkfifo(entry.c_str(), 0600) == 0);
  CHECK_FALSE(cache.load("key"));
  cache.publish("key", some_kernel());
  CHECK(cache.load("key"));
}

TEST_CASE("a published kernel is loaded again") {
  const TemporaryFolder folder;
  const CubinCache cache(folder.path() / "deep" / "cubin");
  CHECK(cache.warning().empty());
  CHECK_FALSE(cache.load("key"));
  CHECK(same(cache.publish("key", some_kernel()), some_kernel()));
  REQUIRE(cache.load("key"));
  CHECK(same(*cache.load("key"), some_kernel()));
  CHECK_FALSE(cache.load("another key"));
  CHECK(file_count(folder.path() / "deep" / "cubin") == 1);  // no temporary file is left
  struct stat status {};
  REQUIRE(stat((folder.path() / "deep" / "cubin").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0700);
  CHECK(same(*CubinCache(folder.path() / "deep" / "cubin").load("key"), some_kernel()));
}

TEST_CASE("no damage to a cached kernel goes unnoticed") {
  const std::string content = encode_cubin_file("key", some_kernel(40));
  REQUIRE(decode_cubin_file("key", content));
  for (std::size_t size = 0; size < content.size(); ++size)
    REQUIRE_FALSE(decode_cubin_file("key", std::string_view(content).substr(0, size)));
  for (std::size_t at = 0; at < content.size(); ++at)
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = content;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << bit));
      REQUIRE_FALSE(decode_cubin_file("key", damaged));
    }
  CHECK_FALSE(decode_cubin_file("key", content + '\0'));
  CHECK_FALSE(decode_cubin_file("yek", content));
}

TEST_CASE("any bytes can be read as a cached kernel") {
  std::mt19937 random(7);
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = "fftunek1";
    const auto size = random() % 200;
    for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(random());
    REQUIRE_FALSE(decode_cubin_file("key", bytes));
  }
}

TEST_CASE("a damaged entry is rebuilt, not loaded") {
  const TemporaryFolder folder;
  const CubinCache cache(folder.path() / "cubin");
  cache.publish("key", some_kernel());
  const auto file = folder.path() / "cubin" / CubinCache::file_name("key");
  const auto content = content_of(file);
  write_content(file, content.substr(0, content.size() / 2));
  CHECK_FALSE(cache.load("key"));
  CHECK(same(cache.publish("key", some_kernel()), some_kernel()));
  REQUIRE(cache.load("key"));
  CHECK(same(*cache.load("key"), some_kernel()));
  CHECK(file_count(folder.path() / "cubin") == 1);
}

TEST_CASE("the loser of a race uses the winner's kernel") {
  const TemporaryFolder folder;
  const CubinCache first(folder.path() / "cubin");
  const CubinCache second(folder.path() / "cubin");
  first.publish("key", some_kernel(100));
  CHECK(same(second.publish("key", some_kernel(200)), some_kernel(100)));
  CHECK(file_count(folder.path() / "cubin") == 1);
}

TEST_CASE("threads and processes share a cache") {
  const TemporaryFolder folder;
  const auto work = [&](unsigned seed) {
    const CubinCache cache(folder.path() / "cubin");
    std::mt19937 random(seed);
    for (int round = 0; round < 60; ++round) {
      const auto size = std::size_t{1000} + random() % 8;
      const auto key = std::to_string(size);
      auto kernel = cache.load(key);
      if (!kernel) kernel = cache.publish(key, some_kernel(size));
      if (!same(*kernel, some_kernel(size))) return false;
      if (random() % 4 == 0)
        std::filesystem::remove(folder.path() / "cubin" / CubinCache::file_name(key));
    }
    return true;
  };
  std::vector<pid_t> children;
  for (unsigned i = 0; i < 3; ++i) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) _exit(work(i) ? 0 : 1);
    children.push_back(child);
  }
  bool good[2] = {};
  std::thread one([&] { good[0] = work(10); });
  std::thread two([&] { good[1] = work(11); });
  one.join();
  two.join();
  CHECK(good[0]);
  CHECK(good[1]);
  for (const pid_t child : children) {
    int status = 1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  for (const auto& entry : std::filesystem::directory_iterator(folder.path() / "cubin"))
    CHECK(entry.path().filename().string().front() != '.');
}

TEST_CASE(
    "a cache beyond its bound loses what was not used for longest, and what was left behind") {
  using namespace std::chrono_literals;
  const TemporaryFolder folder;
  const auto path = folder.path() / "cubin";
  const auto key = [](int i) { return "key " + std::to_string(i); };
  std::uintmax_t each = 0;
  {
    const CubinCache cache(path);
    for (int i = 0; i < 20; ++i) cache.publish(key(i), some_kernel());
    each = std::filesystem::file_size(path / CubinCache::file_name(key(0)));
    const auto now = std::filesystem::file_time_type::clock::now();
    for (int i = 0; i < 20; ++i)
      std::filesystem::last_write_time(path / CubinCache::file_name(key(i)), now - (100h - i * 1h));
    write_content(path / ".0123.cubin.77.1", "left behind");
    std::filesystem::last_write_time(path / ".0123.cubin.77.1", now - 50h);
    write_content(path / ".0123.cubin.77.2", "being written");
    write_content(path / "a note", "of the user");
    std::filesystem::last_write_time(path / "a note", now - 5000h);
    CHECK(cache.load(key(3)));  // used just now
  }
  const CubinCache tight(path, 16 * each);
  tight.publish("new", some_kernel());
  // Twelve of the twenty are three quarters of the bound.
  for (int i = 0; i < 20; ++i) {
    CAPTURE(i);
    CHECK(tight.load(key(i)).has_value() == (i == 3 || i >= 9));
  }
  CHECK(tight.load("new"));
  CHECK_FALSE(std::filesystem::exists(path / ".0123.cubin.77.1"));
  CHECK(std::filesystem::exists(path / ".0123.cubin.77.2"));
  CHECK(std::filesystem::exists(path / "a note"));
}

TEST_CASE("processes share a cache that each of them prunes") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "cubin";
  const auto work = [&](int process) {
    for (int round = 0; round < 40; ++round) {
      const CubinCache cache(path, 3000);  // looks through the folder at its first new entry
      const auto key = "key " + std::to_string((round * 7 + process) % 20);
      if (const auto found = cache.load(key); found && !same(*found, some_kernel())) return false;
      if (!same(cache.publish(key, some_kernel()), some_kernel())) return false;
    }
    return true;
  };
  std::vector<pid_t> children;
  for (int process = 0; process < 8; ++process) {
    const pid_t child = fork();
    if (child == 0) _exit(work(process) ? 0 : 1);
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    waitpid(child, &status, 0);
    CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  }
  CHECK(file_count(path) < 20);
}

TEST_CASE("a claim of a process that is killed ends with it") {
  const TemporaryFolder folder;
  const CubinCache cache(folder.path() / "cubin");
  int claimed[2];
  REQUIRE(pipe(claimed) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const auto claim = cache.claim("key");
    const char made = claim ? 'y' : 'n';
    if (write(claimed[1], &made, 1) == 1) pause();
    _exit(1);
  }
  char made = 'n';
  REQUIRE(read(claimed[0], &made, 1) == 1);
  CHECK(made == 'y');
  CHECK(cache.claim("another key"));
  const auto begin = std::chrono::steady_clock::now();
  std::thread killer([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    kill(child, SIGKILL);
  });
  CHECK(cache.claim("key"));
  CHECK(std::chrono::steady_clock::now() - begin > std::chrono::milliseconds(30));
  killer.join();
  waitpid(child, nullptr, 0);
  for (const int end : claimed) close(end);
  CHECK(file_count(folder.path() / "cubin") == 0);
  CHECK_FALSE(CubinCache("").claim("key"));
}

TEST_CASE("a folder that others may write is not trusted") {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "cubin");
  REQUIRE(chmod((folder.path() / "cubin").c_str(), 0770) == 0);
  const CubinCache cache(folder.path() / "cubin");
  CHECK(cache.warning().find("writable by others") != std::string::npos);
  CHECK(cache.warning().find((folder.path() / "cubin").string()) != std::string::npos);
  CHECK(same(cache.publish("key", some_kernel()), some_kernel()));
  CHECK_FALSE(cache.load("key"));
  CHECK(file_count(folder.path() / "cubin") == 0);
}

TEST_CASE("another user's folder is not trusted") {
  if (geteuid() == 0) {
    const TemporaryFolder folder;
    std::filesystem::create_directory(folder.path() / "cubin");
    REQUIRE(chown((folder.path() / "cubin").c_str(), 12345, 12345) == 0);
    CHECK(CubinCache(folder.path() / "cubin").warning().find("another user") != std::string::npos);
  } else {
    CHECK_FALSE(CubinCache("/").warning().empty());
  }
}

TEST_CASE("a cache that cannot be made or read costs only time") {
  const TemporaryFolder folder;
  write_content(folder.path() / "file", "a file where a folder should be");
  const CubinCache below_a_file(folder.path() / "file" / "cubin");
  CHECK_FALSE(below_a_file.warning().empty());
  CHECK(same(below_a_file.publish("key", some_kernel()), some_kernel()));
  const CubinCache a_file(folder.path() / "file");
  CHECK_FALSE(a_file.warning().empty());
  const CubinCache none{std::filesystem::path()};
  CHECK(none.warning().empty());
  CHECK_FALSE(none.load("key"));
  CHECK(same(none.publish("key", some_kernel()), some_kernel()));
}

TEST_CASE("a link in place of an entry is not followed") {
  const TemporaryFolder folder;
  const CubinCache cache(folder.path() / "cubin");
  const auto file = folder.path() / "cubin" / CubinCache::file_name("key");
  cache.publish("key", some_kernel());
  std::filesystem::rename(file, folder.path() / "elsewhere");
  std::filesystem::create_symlink(folder.path() / "elsewhere", file);
  CHECK_FALSE(cache.load("key"));
}

}  // namespace fftune::cuda
