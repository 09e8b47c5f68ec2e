#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "store/example.hpp"
#include "store/preset_file.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using test::error_of;

namespace {

std::filesystem::path merge(const std::filesystem::path& folder,
                            const std::vector<PresetRecord>& records) {
  return merge_preset_records(folder, example::device(), "ffn", records);
}

/// Runs `work` in a child process and returns its exit status.
pid_t start(const std::function<int()>& work) {
  const auto child = ::fork();
  if (child == 0) ::_exit(work());
  return child;
}

int finish(pid_t child) {
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// How many more folders can be synced; -1: any number.
std::atomic<int> folder_syncs_before_failure{-1};

/// A file or a folder that was synced: what it is, and how many bytes a file had by then.
struct Sync {
  ino_t inode;
  bool folder;
  off_t bytes;
};
std::vector<Sync> syncs;
bool watch_syncs = false;

}  // namespace

/// The system's, unless a test has a folder's fail; noted where a test asks for it.
extern "C" int fsync(int descriptor) {
  struct stat status {};
  const bool known = ::fstat(descriptor, &status) == 0;
  if (watch_syncs && known)
    syncs.push_back({status.st_ino, S_ISDIR(status.st_mode), status.st_size});
  if (folder_syncs_before_failure >= 0 && known && S_ISDIR(status.st_mode) &&
      folder_syncs_before_failure-- == 0) {
    errno = EIO;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}

TEST_CASE("records are added to the file, and replaced where the problem is the same") {
  const testing::TemporaryFolder folder;
  const auto path = merge(folder.path() / "new" / "folder", {example::record(example::ffn(256))});
  REQUIRE(path == folder.path() / "new" / "folder" / "nvidia-h200" / "ffn.json");
  merge(folder.path() / "new" / "folder",
        {example::record(example::ffn(16)), example::record(example::ffn(256), 9.5)});
  const auto file = read_preset_file(path);
  REQUIRE(file.complaints.empty());
  REQUIRE(file.records.size() == 2);
  REQUIRE(file.records[0].problem == example::ffn(16));
  REQUIRE(file.records[1].verdict.median_us == 9.5);
  // Neither the lock nor the temporary file is left for somebody to commit.
  REQUIRE(names_in(path.parent_path()) == std::vector<std::string>{"ffn.json"});
}

TEST_CASE("a merge keeps the aliases that people wrote and takes the device's new facts") {
  const testing::TemporaryFolder folder;
  merge(folder.path(), {example::record(example::ffn(16))});
  auto device = example::device();
  device.aliases = {"A"};
  device.multiprocessors = 130;
  const auto path =
      merge_preset_records(folder.path(), device, "ffn", {example::record(example::ffn(32))});
  const auto file = read_preset_file(path);
  REQUIRE(file.records.size() == 2);
  REQUIRE(file.device.multiprocessors == 130);
  REQUIRE(file.device.aliases == std::vector<std::string>{"A", "NVIDIA H200 NVL"});
}

TEST_CASE("sixteen processes write at once and no record is lost") {
  const testing::TemporaryFolder folder;
  constexpr int processes = 16;
  constexpr int each = 3;
  std::vector<pid_t> children;
  for (int process = 0; process < processes; ++process)
    children.push_back(start([&] {
      for (int i = 0; i < each; ++i)
        merge(folder.path(), {example::record(example::ffn(1 + process * each + i))});
      return 0;
    }));
  for (const auto child : children) REQUIRE(finish(child) == 0);
  const auto file = read_preset_file(folder.path() / "nvidia-h200" / "ffn.json");
  REQUIRE(file.complaints.empty());
  REQUIRE(file.records.size() == processes * each);
  REQUIRE(names_in(folder.path() / "nvidia-h200").size() == 1);
}

TEST_CASE("a file that cannot be read whole is refused and left as it is") {
  const auto text =
      GENERATE(std::string(), std::string("{"),
               preset_text(example::device(), "ffn", {example::record(example::ffn(16), -1)}),
               preset_text(example::device(), "rope", {}), std::string("{\"schema\": 4}"));
  const testing::TemporaryFolder folder;
  const auto path = folder.path() / "nvidia-h200" / "ffn.json";
  example::write(path, text);
  REQUIRE(error_of(ErrorKind::invalid_input, [&] {
            merge(folder.path(), {example::record(example::ffn(16))});
          }).find("move it away") != std::string::npos);
  REQUIRE(example::text(path) == text);
  REQUIRE(names_in(path.parent_path()).size() == 1);
}

TEST_CASE("a record that could not be read again is not written") {
  const testing::TemporaryFolder folder;
  auto record = example::record(example::ffn(16));
  record.verdict.median_us = 0.0 / (record.stages.empty() ? 1.0 : 0.0);  // NaN
  REQUIRE_THROWS_AS(merge(folder.path(), {record}), Error);
  auto device = example::device();
  device.slug = "../elsewhere";
  REQUIRE_THROWS_AS(merge_preset_records(folder.path(), device, "ffn", {}), Error);
  REQUIRE_FALSE(std::filesystem::exists(folder.path() / "nvidia-h200" / "ffn.json"));
}

TEST_CASE("a folder that cannot be written is an error that says so") {
  const testing::TemporaryFolder folder;
  example::write(folder.path() / "file", "");
  REQUIRE(error_of(ErrorKind::io, [&] {
            merge(folder.path() / "file", {example::record(example::ffn(16))});
          }).find("Not a directory") != std::string::npos);
  // Permissions do not hold root back: a child of another user tries.
  if (::geteuid() == 0 && !folder.others_can_reach())
    FFTUNE_SKIP("another user cannot reach the temporary folder");
  merge(folder.path(), {example::record(example::ffn(16))});
  const auto before = example::text(folder.path() / "nvidia-h200" / "ffn.json");
  ::chmod((folder.path() / "nvidia-h200").c_str(), 0555);
  ::chmod(folder.path().c_str(), 0755);
  const auto child = start([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 2;
    try {
      merge(folder.path(), {example::record(example::ffn(32))});
    } catch (const Error& error) {
      const std::string what = error.what();
      return error.kind() == ErrorKind::io && what.find("Permission denied") != what.npos &&
                     what.find("that you may write to") != what.npos
                 ? 0
                 : 3;
    }
    return 4;
  });
  REQUIRE(finish(child) == 0);
  ::chmod((folder.path() / "nvidia-h200").c_str(), 0755);
  REQUIRE(example::text(folder.path() / "nvidia-h200" / "ffn.json") == before);
}

TEST_CASE("a full disk leaves the old file whole") {
  const testing::TemporaryFolder folder;
  const auto path = merge(folder.path(), {example::record(example::ffn(16))});
  const auto before = example::text(path);
  const auto child = start([&] {
    // Stands for a full disk: no file may grow past the old one's size plus a few bytes.
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{before.size() + 100, before.size() + 100};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    try {
      merge(folder.path(), {example::record(example::ffn(32))});
    } catch (const Error& error) {
      const std::string what = error.what();
      return error.kind() == ErrorKind::io && what.find("free some space") != what.npos ? 0 : 3;
    }
    return 4;
  });
  REQUIRE(finish(child) == 0);
  REQUIRE(example::text(path) == before);
  REQUIRE(names_in(path.parent_path()).size() == 1);
}

TEST_CASE(
    "a file system without room leaves the old file whole, and takes a record once there is") {
  const testing::TemporaryFolder folder;
  constexpr int not_allowed = 77;
  const auto child = start([&] {
    // A file system of 64 KiB that this child alone sees.
    const int own = CLONE_NEWNS | (::geteuid() == 0 ? 0 : CLONE_NEWUSER);
    if (::unshare(own) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
      return not_allowed;
    const auto path = merge(folder.path(), {example::record(example::ffn(16))});
    const auto before = example::text(path);
    const auto filler = folder.path() / "filler";
    std::ofstream(filler) << std::string(1 << 20, 'x');
    try {
      merge(folder.path(), {example::record(example::ffn(32))});
      return 2;
    } catch (const Error& error) {
      const std::string what = error.what();
      if (error.kind() != ErrorKind::io || what.find("free some space") == what.npos) return 3;
    }
    if (example::text(path) != before || names_in(path.parent_path()).size() != 1) return 4;
    std::filesystem::remove(filler);
    merge(folder.path(), {example::record(example::ffn(32))});
    return read_preset_file(path).records.size() == 2 ? 0 : 5;
  });
  const int code = finish(child);
  if (code == not_allowed) FFTUNE_SKIP("a file system of its own is not allowed here");
  REQUIRE(code == 0);
}

TEST_CASE("a link is followed, a mode is kept, and what is read-only is refused") {
  const testing::TemporaryFolder folder;
  const auto path = merge(folder.path(), {example::record(example::ffn(16))});
  const auto elsewhere = folder.path() / "elsewhere.json";
  std::filesystem::rename(path, elsewhere);
  std::filesystem::create_symlink("../elsewhere.json", path);
  ::chmod(elsewhere.c_str(), 0600);
  merge(folder.path(), {example::record(example::ffn(32))});
  CHECK(std::filesystem::is_symlink(path));
  CHECK(read_preset_file(elsewhere).records.size() == 2);
  struct stat status {};
  REQUIRE(::stat(elsewhere.c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0600);
  ::chmod(elsewhere.c_str(), 0444);
  CHECK(error_of([&] {
          merge(folder.path(), {example::record(example::ffn(64))});
        }).find("read-only") != std::string::npos);
  CHECK(error_of([&] {
          require_mergeable(folder.path(), example::device(), "ffn");
        }).find("read-only") != std::string::npos);
  CHECK(read_preset_file(elsewhere).records.size() == 2);
}

TEST_CASE("a lock that is not let go is given up, after it was told of") {
  const testing::TemporaryFolder folder;
  const FileLock held(folder.path() / "lock");
  std::vector<std::string> told;
  LockWait wait;
  wait.most_seconds = 1.3;
  wait.tell = [&](const std::string& line) { told.push_back(line); };
  CHECK(error_of([&] {
          const FileLock second(folder.path() / "lock", wait);
        }).find("waited for 1 s") != std::string::npos);
  REQUIRE(told.size() == 1);
  CHECK(told[0].find("another process holds the lock") != std::string::npos);
}

namespace {

PresetBatch batch_of(const char* op, std::int64_t m) {
  auto record = example::record(example::ffn(m));
  record.problem.op = op;
  return {example::device(), op, {record}};
}

}  // namespace

TEST_CASE("a merge into several files that is refused at the last changes none") {
  const testing::TemporaryFolder folder;
  merge_preset_batches(folder.path(), {batch_of("ffn", 1)});
  const auto place = folder.path() / example::device().slug;
  const auto before = read_whole_file(place / "ffn.json");
  const FileLock held(place / ".zz.lock");
  LockWait wait;
  wait.most_seconds = 1.2;
  CHECK(error_of([&] {
          merge_preset_batches(folder.path(),
                               {batch_of("aa", 1), batch_of("ffn", 2), batch_of("zz", 2)}, wait);
        }).find(".zz.lock") != std::string::npos);
  CHECK(read_whole_file(place / "ffn.json") == before);
  CHECK(names_in(place) == std::vector<std::string>{".zz.lock", "ffn.json"});
}

TEST_CASE("a file that cannot be replaced midway leaves those before it as they were") {
  const testing::TemporaryFolder folder;
  merge_preset_batches(folder.path(), {batch_of("aa", 1), batch_of("ffn", 1)});
  const auto place = folder.path() / example::device().slug;
  const auto before = read_whole_file(place / "aa.json");
  // While the last lock is waited for, the others are staged: now the second's place is blocked.
  auto held = std::make_unique<FileLock>(place / ".zz.lock");
  LockWait wait;
  wait.tell = [&](const std::string&) {
    std::filesystem::remove(place / "ffn.json");
    std::filesystem::create_directories(place / "ffn.json" / "wall");
    held.reset();
  };
  CHECK(error_of([&] {
          merge_preset_batches(
              folder.path(),
              {batch_of("aa", 2), batch_of("bb", 2), batch_of("ffn", 2), batch_of("zz", 2)}, wait);
        }).find("cannot write") != std::string::npos);
  CHECK(read_whole_file(place / "aa.json") == before);
  CHECK(names_in(place) == std::vector<std::string>{"aa.json", "ffn.json"});
}

TEST_CASE("a folder that cannot be synced leaves every file as it was, the last too") {
  const testing::TemporaryFolder folder;
  merge_preset_batches(folder.path(), {batch_of("aa", 1), batch_of("ffn", 1)});
  const auto place = folder.path() / example::device().slug;
  const auto before = names_in(place);
  const auto aa = read_whole_file(place / "aa.json"), ffn = read_whole_file(place / "ffn.json");
  for (int good = 0; good < 3; ++good) {
    CAPTURE(good);
    folder_syncs_before_failure = good;
    const auto why = error_of([&] {
      merge_preset_batches(folder.path(),
                           {batch_of("aa", 2), batch_of("bb", 2), batch_of("ffn", 2)});
    });
    folder_syncs_before_failure = -1;
    CHECK(why.find("cannot sync the folder") != std::string::npos);
    CHECK(names_in(place) == before);
    CHECK(read_whole_file(place / "aa.json") == aa);
    CHECK(read_whole_file(place / "ffn.json") == ffn);
  }
  for (const char* name : {"aa.json", "new.json"}) {
    folder_syncs_before_failure = 0;
    CHECK(!error_of([&] { replace_file(place / name, "text"); }).empty());
    folder_syncs_before_failure = -1;
  }
  CHECK(names_in(place) == before);
  CHECK(read_whole_file(place / "aa.json") == aa);
  merge_preset_batches(folder.path(), {batch_of("aa", 2), batch_of("bb", 2)});
  CHECK(read_preset_file(place / "aa.json").records.size() == 2);
}

TEST_CASE("a file is synced whole before it takes its place, and its folder behind it") {
  const testing::TemporaryFolder folder;
  for (const char* text : {"new", "replaced by a longer one"}) {
    const auto path = folder.path() / "file.json";
    syncs.clear();
    watch_syncs = true;
    replace_file(path, text);
    watch_syncs = false;
    struct stat file {
    }, parent{};
    REQUIRE(::stat(path.c_str(), &file) == 0);
    REQUIRE(::stat(folder.path().c_str(), &parent) == 0);
    REQUIRE(syncs.size() == 2);
    CHECK(syncs[0].inode == file.st_ino);
    CHECK(syncs[0].bytes == file.st_size);
    CHECK(syncs[1].folder);
    CHECK(syncs[1].inode == parent.st_ino);
  }
}

TEST_CASE("later batches for one file replace the records of earlier ones") {
  const testing::TemporaryFolder folder;
  auto later = batch_of("ffn", 2);
  later.records.front().verdict.median_us = 77;
  const auto paths = merge_preset_batches(folder.path(), {batch_of("ffn", 2), later});
  REQUIRE(paths.size() == 2);
  CHECK(paths[0] == paths[1]);
  const auto records = read_preset_file(paths[0]).records;
  REQUIRE(records.size() == 1);
  CHECK(records[0].verdict.median_us == 77);
  CHECK(merge_preset_batches(folder.path(), {}).empty());
}

TEST_CASE("records that differ in what is performance-neutral merge into the one measured last") {
  const Comparison neutral{"m", {}, {}, {"angles", "positions"}};
  const auto measured = [](const char* angles, const char* date) {
    auto record = example::record(example::ffn(16));
    record.problem.options["angles"] = angles;
    record.provenance.date = date;
    return record;
  };
  const auto older = measured("table", "2026-11-21T14:03:22Z");
  auto newer = measured("llama3", "2026-11-22T09:00:00Z");
  newer.problem = newer.problem.with_size("positions", 4096);
  const auto other = example::record(example::ffn(64));
  const auto left = [&](std::vector<PresetBatch> batches) {
    const testing::TemporaryFolder folder;
    std::filesystem::path path;
    for (auto& batch : batches) {
      batch.comparison = neutral;
      path = merge_preset_batches(folder.path(), {batch}).front();
    }
    std::vector<Problem> problems;
    for (const auto& record : read_preset_file(path).records) problems.push_back(record.problem);
    return problems;
  };
  const auto device = example::device();
  const std::vector<Problem> both{newer.problem, other.problem};
  CHECK(left({{device, "ffn", {older, newer, other}}}) == both);
  CHECK(left({{device, "ffn", {newer, older, other}}}) == both);
  // A merged record replaces the present one, whenever either was measured.
  CHECK(left({{device, "ffn", {newer, other}}, {device, "ffn", {older}}}) ==
        std::vector<Problem>{older.problem, other.problem});
  // A file that has both is left with one, of whatever else it is given.
  const testing::TemporaryFolder folder;
  const auto path = merge(folder.path(), {older, newer});
  REQUIRE(read_preset_file(path).records.size() == 2);
  merge_preset_records(folder.path(), device, "ffn", {other}, {}, neutral);
  REQUIRE(read_preset_file(path).records.size() == 2);
  CHECK(read_preset_file(path).records.front().problem == newer.problem);
}
