// Files of hostile kinds: read in bounded time and memory or refused, replaced whole or not at all,
// and kept where nobody else can plant them.
#include "core/file_access.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/temporary_folder.hpp"

using namespace fftune;
using fftune::testing::TemporaryFolder;

namespace {

namespace fs = std::filesystem;

void write(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

/// The complaint, one line; empty if there is none.
template <typename Body>
std::string complaint(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::io);
    CHECK(std::string(error.what()).find('\n') == std::string::npos);
    return error.what();
  }
  return "";
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

}  // namespace

TEST_CASE("only regular files of a bounded size are read, and none is waited for") {
  const TemporaryFolder folder;
  const auto at = [&](const char* name) { return folder.path() / name; };
  REQUIRE(::mkfifo(at("pipe").c_str(), 0600) == 0);
  fs::create_directory(at("folder"));
  fs::create_symlink("loop", at("loop"));
  fs::create_symlink("pipe", at("link to a pipe"));
  write(at("sparse"), "");
  fs::resize_file(at("sparse"), std::uintmax_t{1} << 40);
  write(at("one too many"), std::string(1001, 'x'));
  struct Case {
    fs::path path;
    const char* why;
  };
  for (const Case& each : {Case{at("pipe"), "not a regular file"},
                           {at("link to a pipe"), "not a regular file"},
                           {at("folder"), "not a regular file"},
                           {"/dev/zero", "not a regular file"},
                           {"/dev/full", "not a regular file"},
                           {at("loop"), "symbolic links"},
                           {at("sparse"), "larger than"},
                           {at("one too many"), "larger than"},
                           {"/proc/self/mem", "cannot be read"},
                           {at("none"), "No such file"},
                           {at("sparse") / "below", "Not a directory"},
                           {at(std::string(300, 'x').c_str()), "too long"}}) {
    CAPTURE(each.path);
    const auto began = std::chrono::steady_clock::now();
    CHECK_THAT(complaint([&] { read_whole_file(each.path, 1000); }), ContainsSubstring(each.why));
    CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(2));
    CHECK(text_of_file(each.path).size() <= 1001);
  }
  write(at("just right"), std::string(1000, 'x'));
  CHECK(read_whole_file(at("just right"), 1000).size() == 1000);
  write(at("empty"), "");
  CHECK(read_whole_file(at("empty")).empty());
  // Files of the system have no size of their own.
  CHECK(text_of_file("/proc/self/status").starts_with("Name:"));
}

TEST_CASE("a part of a file is read, or what is left of it") {
  const TemporaryFolder folder;
  write(folder.path() / "a", "0123456789");
  const InputFile file(folder.path() / "a");
  CHECK(file.size() == 10);
  std::string part(4, '.');
  const auto bytes = std::as_writable_bytes(std::span(part));
  CHECK(file.read_at(3, bytes) == 4);
  CHECK(part == "3456");
  CHECK(file.read_at(8, bytes) == 2);
  fs::resize_file(folder.path() / "a", 0);
  CHECK(file.read_at(3, bytes) == 0);
}

TEST_CASE("any number of writers replace one file, and none fails") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "report.html";
  std::atomic<int> failed{0};
  {
    std::vector<std::jthread> writers;
    for (char letter = 'a'; letter < 'i'; ++letter)
      writers.emplace_back([&, letter] {
        for (int i = 0; i < 40; ++i) try {
            replace_file(path, std::string(10000, letter));
          } catch (const Error&) {
            ++failed;
          }
      });
  }
  CHECK(failed == 0);
  const std::string text = read_whole_file(path);
  CHECK(text == std::string(10000, text.at(0)));
  CHECK(names_in(folder.path()) == std::set<std::string>{"report.html"});
}

TEST_CASE("a staged file takes its place, and goes back to what was there") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a";
  { const StagedFile never(path, "new"); }
  CHECK(names_in(folder.path()).empty());
  {
    StagedFile file(path, "new");
    file.publish();
    CHECK(read_whole_file(path) == "new");
    file.withdraw();
  }
  CHECK(names_in(folder.path()).empty());
  write(path, "old");
  ::chmod(path.c_str(), 0640);
  {
    StagedFile file(path, "new");
    file.publish();
    CHECK(read_whole_file(path) == "new");
    file.withdraw();
  }
  CHECK(read_whole_file(path) == "old");
  replace_file(path, "newest");
  CHECK(read_whole_file(path) == "newest");
  struct stat status {};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0640);
  CHECK(names_in(folder.path()) == std::set<std::string>{"a"});
}

TEST_CASE("a killed writer's file is removed by the next writer, and a living one's is not") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a", other = folder.path() / "b";
  // Those of other hosts, of older versions and of other programs are not this writer's to judge.
  const std::set<std::string> foreign = {".fftune-0123456789abcdef",
                                         ".fftune-00000000-0123456789abcdef", ".fftune-notes"};
  for (const std::string& name : foreign) write(folder.path() / name, "theirs");
  const auto temporaries = [&] {
    std::set<std::string> found;
    for (const std::string& name : names_in(folder.path()))
      if (name.starts_with(".fftune-") && !foreign.contains(name)) found.insert(name);
    return found;
  };
  const std::function<void()> writers[] = {[&] { replace_file(other, "new"); },
                                           [&] { require_replaceable(other); }};
  for (const bool published : {false, true}) {
    write(path, "old");
    for (const auto& next_writer : writers) {
      int ready[2];
      REQUIRE(::pipe(ready) == 0);
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        StagedFile file(path, "new");
        if (published) file.publish();
        if (::write(ready[1], "", 1) != 1) ::_exit(1);
        for (;;) ::pause();
      }
      char byte = 0;
      REQUIRE(::read(ready[0], &byte, 1) == 1);
      const auto held = temporaries();
      CHECK(held.size() == 1);
      next_writer();
      CHECK(temporaries() == held);
      REQUIRE(::kill(child, SIGKILL) == 0);
      REQUIRE(::waitpid(child, nullptr, 0) == child);
      next_writer();
      CHECK(temporaries().empty());
      ::close(ready[0]);
      ::close(ready[1]);
    }
  }
  for (const std::string& name : foreign) CHECK(read_whole_file(folder.path() / name) == "theirs");
}

TEST_CASE("a file that is put back was not taken for one that nobody holds") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a";
  write(path, "old");
  StagedFile file(path, "new");
  replace_file(folder.path() / "b", "another");
  file.publish();
  replace_file(folder.path() / "b", "another");
  CHECK(read_whole_file(path) == "new");
  file.withdraw();
  CHECK(read_whole_file(path) == "old");
}

TEST_CASE("names of any length and of any bytes are replaced") {
  const TemporaryFolder folder;
  for (const std::string& name :
       {std::string(255, 'x'), std::string("a\nb"), std::string("\xff'\"`$"), std::string("-o")}) {
    CAPTURE(name);
    replace_file(folder.path() / name, "text");
    CHECK(read_whole_file(folder.path() / name) == "text");
    require_replaceable(folder.path() / name);
  }
}

TEST_CASE("obstacles to a write are found before it") {
  const TemporaryFolder folder;
  const auto at = [&](const char* name) { return folder.path() / name; };
  fs::create_directory(at("folder"));
  fs::create_symlink("loop", at("loop"));
  REQUIRE(::mkfifo(at("pipe").c_str(), 0600) == 0);
  write(at("read-only"), "");
  ::chmod(at("read-only").c_str(), 0444);
  for (const char* name :
       {"folder", "loop", "pipe", "read-only", "read-only/below", "none/below"}) {
    CAPTURE(name);
    const auto before = complaint([&] { require_replaceable(at(name)); });
    CHECK_THAT(before, ContainsSubstring("cannot"));
    CHECK(complaint([&] { replace_file(at(name), "new"); }) == before);
  }
  if (::geteuid() != 0 || !folder.others_can_reach()) return;
  // As in /tmp: who is neither the owner of the file nor of the folder may not rename over it.
  ::chmod(folder.path().c_str(), 01777);
  write(at("of root"), "");
  ::chmod(at("of root").c_str(), 0666);
  REQUIRE(::seteuid(65534) == 0);
  const auto before = complaint([&] { require_replaceable(at("of root")); });
  const auto in_write = complaint([&] { replace_file(at("of root"), "new"); });
  REQUIRE(::seteuid(0) == 0);
  CHECK_THAT(before, ContainsSubstring("belongs to another user"));
  CHECK(in_write == before);
}

TEST_CASE("a folder of one's own takes no file that others planted") {
  const TemporaryFolder folder;
  const auto victim = folder.path() / "victim";
  const auto other = folder.path() / "other victim";
  write(victim, "precious\n");
  write(other, "precious\n");
  const OwnFolder own(folder.path() / "own");
  const auto at = [&](const char* name) { return own.path() / name; };
  fs::create_symlink(other, at("link"));
  fs::create_hard_link(victim, at("second name"));
  REQUIRE(::mkfifo(at("pipe").c_str(), 0600) == 0);
  fs::create_directory(at("folder"));
  write(at("open to all"), "mine");
  ::chmod(at("open to all").c_str(), 0666);
  std::vector<std::string> planted{"link", "second name", "pipe", "folder", "open to all"};
  if (::geteuid() == 0) {
    write(at("another's"), "theirs");
    REQUIRE(::chown(at("another's").c_str(), 65534, 65534) == 0);
    planted.emplace_back("another's");
  }
  for (const std::string& name : planted) {
    CAPTURE(name);
    CHECK(!own.find(name));
    CHECK(!own.create(name));
    CHECK(!complaint([&] { own.append(name); }).empty());
    CHECK(!complaint([&] { own.read(name); }).empty());
  }
  for (const char* name : {"", ".", "..", "../victim", "/etc/passwd"}) {
    CAPTURE(name);
    CHECK(!own.find(name));
    CHECK(!complaint([&] { own.append(name); }).empty());
    CHECK(!complaint([&] { own.create(name); }).empty());
  }
  CHECK(read_whole_file(victim) == "precious\n");
  CHECK(read_whole_file(other) == "precious\n");

  const auto file = own.append("fine");
  REQUIRE(write_all(file.value(), "a") == 0);
  REQUIRE(write_all(own.append("fine").value(), "b") == 0);
  CHECK(InputFile(own.read("fine")).read_whole() == "ab");
  CHECK(own.find("fine")->bytes == 2);
}

TEST_CASE("a folder that others write to, own or chose is not one's own") {
  const TemporaryFolder folder;
  const auto path = folder.path() / "a";
  fs::create_directory(path);
  ::chmod(path.c_str(), 0777);
  CHECK_THAT(complaint([&] { OwnFolder{path}; }), ContainsSubstring("writable by others"));
  CHECK_THAT(complaint([&] { OwnFolder(path, OwnFolder::Writers::group); }),
             ContainsSubstring("writable by others"));
  ::chmod(path.c_str(), 0770);
  CHECK_THAT(complaint([&] { OwnFolder{path}; }), ContainsSubstring("writable by others"));
  CHECK(complaint([&] { OwnFolder(path, OwnFolder::Writers::group); }).empty());
  const OwnFolder own(path, OwnFolder::Writers::group);
  fs::create_directory_symlink("/tmp", path / "below");
  CHECK(!complaint([&] { OwnFolder(own, "below"); }).empty());
  CHECK(!complaint([&] { OwnFolder(own, "../b"); }).empty());
  write(folder.path() / "file", "");
  CHECK(!complaint([&] { OwnFolder{folder.path() / "file"}; }).empty());
  if (::geteuid() != 0) return;
  fs::create_directory_symlink(path, folder.path() / "link");
  CHECK(complaint([&] { OwnFolder(folder.path() / "link", OwnFolder::Writers::group); }).empty());
  REQUIRE(::lchown((folder.path() / "link").c_str(), 65534, 65534) == 0);
  CHECK_THAT(complaint([&] { OwnFolder(folder.path() / "link", OwnFolder::Writers::group); }),
             ContainsSubstring("link of another user's"));
  REQUIRE(::chown(path.c_str(), 65534, 65534) == 0);
  CHECK_THAT(complaint([&] { OwnFolder(path, OwnFolder::Writers::group); }),
             ContainsSubstring("belongs to another user"));
}
