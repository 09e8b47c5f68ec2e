// Full disks, locks, links, limits and bytes that do not belong where they are: one line that says
// so, the documented exit code, and nothing of the user's lost.
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fcntl.h>
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "sandbox.hpp"
#include "support/catch.hpp"

using namespace std::chrono_literals;
using namespace fftune::testing;

namespace {

const std::string sweep = "ffn --d 16 --h 16 --m 1 --budget 1s --wait 0s --device cpu";

/// The tool by means of a shell, in whose script "$@" is the tool with its words.
Finished by_shell(const Sandbox& sandbox, const std::string& script, const std::string& words) {
  return sandbox.start_by({"/bin/sh", "-c", script, "sh"}, words, {})->wait();
}

/// The same, but ended after 90 s: code 124.
Finished in_time(const Sandbox& sandbox, const std::string& words) {
  return sandbox.start_by({"/usr/bin/timeout", "90"}, words, {})->wait();
}

std::filesystem::path device_folder(const Sandbox& sandbox, const std::string& presets) {
  for (const auto& entry : std::filesystem::directory_iterator(sandbox.folder() / presets))
    return entry.path();
  return {};
}

}  // namespace

TEST_CASE("output that cannot be printed whole is an error, for the help too") {
  const Sandbox sandbox;
  for (const char* words : {"--help", "--version", "ffn --help", "ops"}) {
    CAPTURE(words);
    const Finished done = by_shell(sandbox, "\"$@\" >/dev/full", words);
    CHECK(done.code == 2);
    CHECK(done.err.find("standard output cannot be written") != std::string::npos);
  }
}

TEST_CASE("where standard output and error are closed, no file gets what is printed") {
  for (const char* closed : {"exec \"$@\" >&-", "exec \"$@\" 2>&-", "exec \"$@\" >&- 2>&-",
                             "exec \"$@\" <&- >&- 2>&-"}) {
    CAPTURE(closed);
    const Sandbox sandbox;
    const bool has_output = std::string(closed) == "exec \"$@\" 2>&-";
    CHECK(by_shell(sandbox, closed, sweep + " -v --max-variants 2").code == (has_output ? 0 : 2));
    CHECK(sandbox.fftune("presets validate presets").code == 0);
    const auto state =
        sandbox.folder() / ".local/state/fftune" / device_folder(sandbox, "presets").filename();
    for (const auto& journal : std::filesystem::directory_iterator(state)) {
      std::ifstream lines(journal.path());
      int count = 0;
      for (std::string line; std::getline(lines, line); ++count)
        CHECK((line.front() == '{' && line.back() == '}'));
      CHECK(count > 3);
    }
  }
}

TEST_CASE("a report is written before anything is printed, and whole") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  write_text(sandbox.folder() / "r.xml", "old");
  const Finished done = by_shell(sandbox, "\"$@\" >/dev/full",
                                 "check --op ffn --device cpu --report r.xml --presets presets");
  CHECK(done.code == 2);
  CHECK(text_of(sandbox.folder() / "r.xml").find("</testsuites>") != std::string::npos);
}

TEST_CASE("pipes in the place of files hang nobody") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  REQUIRE(mkfifo((sandbox.folder() / "pipe").c_str(), 0600) == 0);
  const Finished report =
      in_time(sandbox, "check --op ffn --device cpu --report pipe --presets presets");
  CHECK(report.code == 2);
  CHECK(report.err.find("not a regular file") != std::string::npos);

  const auto state =
      sandbox.folder() / ".local/state/fftune" / device_folder(sandbox, "presets").filename();
  REQUIRE(mkfifo((state / "quarantine.jsonl").c_str(), 0600) == 0);
  const Finished swept = in_time(sandbox, sweep);
  CHECK(swept.code == 0);
  CHECK(swept.err.find("not a regular file") != std::string::npos);
}

TEST_CASE("links that others laid at names to come are not followed") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const auto victim = sandbox.folder() / "victim";
  write_text(victim, "precious");
  const auto place = device_folder(sandbox, "presets");
  for (int ahead = 1; ahead < 3000; ++ahead)
    std::filesystem::create_symlink(
        victim, place / (".writable-" + std::to_string((getpid() + ahead) % 4194304)));
  CHECK(sandbox.fftune(sweep).code == 0);
  CHECK(text_of(victim) == "precious");
}

namespace {

/// Takes the lock of ffn's preset file; closing the descriptor lets it go.
int hold_presets_lock(const Sandbox& sandbox) {
  const auto lock = device_folder(sandbox, "presets") / ".ffn.lock";
  const int held = open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  REQUIRE(flock(held, LOCK_EX) == 0);
  return held;
}

}  // namespace

TEST_CASE(
    "a lock that another process holds is told of, before the search, and Ctrl-C ends the wait") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const int held = hold_presets_lock(sandbox);
  auto waiting = sandbox.start(sweep);
  CHECK(waiting->says("another process holds the lock", 20s));
  CHECK(waiting->err().find("screen") == std::string::npos);  // nothing was searched
  const auto sent = std::chrono::steady_clock::now();
  waiting->send(SIGTERM);
  const Finished done = waiting->wait();
  CHECK(done.code == 2);
  CHECK(done.err.find("interrupted while another process held the lock") != std::string::npos);
  CHECK(std::chrono::steady_clock::now() - sent < 5s);
  close(held);
}

TEST_CASE("a lock that is let go is waited for") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const int held = hold_presets_lock(sandbox);
  auto waiting = sandbox.start(sweep);
  std::this_thread::sleep_for(1500ms);
  close(held);
  CHECK(waiting->wait().code == 0);
}

TEST_CASE("no byte of a name, an argument or a file reaches a terminal as a control character") {
  const Sandbox sandbox;
  const auto file = sandbox.tuned("1");
  const auto bad = [](const std::string& text) {
    for (const char c : text)
      if (c != '\n' && (static_cast<unsigned char>(c) < 0x20 || c == 0x7f)) return true;
    return false;
  };
  const auto clean = [&](const Finished& done) {
    INFO(done.out << done.err);
    CHECK_FALSE(bad(done.out));
    CHECK_FALSE(bad(done.err));
  };
  std::string text = text_of(file);
  const auto name = text.find("\"name\": \"");
  REQUIRE(name != std::string::npos);
  text.insert(name + 9, "\\u001b[31m\\u0007\\u009b");
  std::filesystem::create_directories(sandbox.folder() / "evil" / file.parent_path().filename());
  write_text(sandbox.folder() / "evil" / file.parent_path().filename() / "ffn.json", text);
  const Finished shown = sandbox.fftune("presets show evil");
  clean(shown);
  CHECK(shown.out.find("\\x1b[31m\\x07\\xc2\\x9b") != std::string::npos);
  CHECK(shown.out.find("µ") != std::string::npos);
  std::filesystem::create_directories(sandbox.folder() / "e\033[2Jvil");
  write_text(sandbox.folder() / "e\033[2Jvil/\n.json", "{");
  clean(sandbox.fftune("presets show e\033[2Jvil/"));
  const Finished argument = sandbox.fftune("ff\033[2Jn\007");
  clean(argument);
  CHECK(lines_in(argument.err) == 1);
}

TEST_CASE("a merge into several files is all or nothing") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const Finished other =
      sandbox.fftune("act-mul --h 16 --m 1 --budget 1s --wait 0s --device cpu --max-variants 2");
  REQUIRE(other.code == 0);
  const auto broken = sandbox.folder() / "B" / device_folder(sandbox, "presets").filename();
  std::filesystem::create_directories(broken);
  write_text(broken / "ffn.json", "{");
  const Finished done = sandbox.fftune("presets merge presets --out B");
  CHECK(done.code == 2);
  CHECK(done.err.find("ffn.json") != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(broken / "act-mul.json"));
}

TEST_CASE("a limit on the size of files is like a full disk") {
  const Sandbox sandbox;
  const Finished done = by_shell(sandbox, "ulimit -f 1; exec \"$@\"", sweep + " -q");
  INFO(done.err);
  CHECK(done.code == 2);
}

TEST_CASE("too few file descriptors are named") {
  const Sandbox sandbox;
  const Finished done = by_shell(sandbox, "ulimit -n 8; exec \"$@\"", sweep);
  INFO(done.err);
  CHECK(done.code == 3);
  CHECK(done.err.find("ulimit -n") != std::string::npos);
  CHECK(lines_in(done.err) == 1);
}

TEST_CASE("a dumb terminal gets no escapes") {
  const Sandbox sandbox;
  const auto on_terminal = [&](const std::string& term) {
    // script(1) gives the tool a terminal.
    const std::string inner = "exec script -qec \"$*\" /dev/null";
    return sandbox.start_by({"/bin/sh", "-c", inner, "sh"}, sweep, {"TERM=" + term})->wait().out;
  };
  if (on_terminal("xterm").find('\033') == std::string::npos)
    FFTUNE_SKIP("script(1) gives no terminal here");
  CHECK(on_terminal("dumb").find('\033') == std::string::npos);
}

TEST_CASE("without a home, a folder that others can write to is not used") {
  Sandbox sandbox;
  if (geteuid() != 0 || !std::filesystem::exists("/usr/bin/setpriv"))
    FFTUNE_SKIP("only root can become a user without a home");
  if (!sandbox.open_to_others()) FFTUNE_SKIP("another user cannot reach the temporary folder");
  const auto trap = sandbox.folder() / "fftune-54321";
  std::filesystem::create_directories(trap);
  std::filesystem::permissions(trap, std::filesystem::perms::all);
  const auto swept = [&] {
    return sandbox
        .start_by({"/usr/bin/setpriv", "--reuid=54321", "--regid=54321", "--clear-groups",
                   "/usr/bin/env", "-u", "HOME"},
                  sweep, {"TMPDIR=" + sandbox.folder().string()})
        ->wait();
  };
  const Finished refused = swept();
  CHECK(refused.code == 2);
  CHECK(refused.err.find("XDG_STATE_HOME") != std::string::npos);
  CHECK(std::filesystem::is_empty(trap));
  std::filesystem::remove(trap);
  CHECK(swept().code == 0);
  CHECK_FALSE(std::filesystem::is_empty(trap));
}

TEST_CASE("a small address space hangs nothing, and is room enough for what needs no OpenBLAS") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const auto limited = [&](int kilobytes, const std::string& words) {
    return by_shell(sandbox, "ulimit -v " + std::to_string(kilobytes) + "; exec timeout 60 \"$@\"",
                    words);
  };
  CHECK(limited(81920, "--version").code == 0);
  for (const int kilobytes : {300000, 400000}) {
    const Finished checked = limited(kilobytes, "check --op ffn --device cpu --presets presets");
    INFO(checked.err);
    CHECK(checked.code == 0);
    CHECK(limited(kilobytes, "devices").out.find("and ulimit -v is") != std::string::npos);
  }
}

TEST_CASE("too few processes and threads are named, and hang nobody") {
  Sandbox sandbox;
  if (geteuid() != 0 || !std::filesystem::exists("/usr/bin/setpriv") ||
      !std::filesystem::exists("/usr/bin/prlimit"))
    FFTUNE_SKIP("only root can become a user without other processes");
  if (!sandbox.open_to_others()) FFTUNE_SKIP("another user cannot reach the temporary folder");
  int refused = 0;
  for (const int most : {2, 3, 4, 5, 6}) {
    const std::string limit = "--nproc=" + std::to_string(most);
    const Finished done =
        sandbox
            .start_by({"/usr/bin/prlimit", limit, "/usr/bin/setpriv", "--reuid=54322",
                       "--regid=54322", "--clear-groups", "/usr/bin/timeout", "-s", "KILL", "60"},
                      sweep + " -q --out found", {})
            ->wait();
    CAPTURE(most, done.err);
    CHECK((done.code == 0 || done.code == 3));
    refused += done.code == 3;
    if (done.code == 3) CHECK(done.err.find("ulimit -u") != std::string::npos);
    if (done.code == 3) CHECK(lines_in(done.err) == 1);
  }
  CHECK(refused > 0);
}

TEST_CASE("a budget that cannot be kept is told before the search") {
  const Sandbox sandbox;
  auto running = sandbox.start(
      "ffn --d 16 --h 16 --m 1,2,3,4,5,6,7,8,9,10,11,12,13,14 --budget 1s --wait 0s --device cpu");
  const Finished done = running->wait();
  CHECK(done.code == 0);
  CHECK(done.err.find("--budget 1s is too short for 14 problems") != std::string::npos);
  // And once it is spent, by what the problems have taken here.
  const Finished short_one = sandbox.fftune(
      "ffn --d 16 --h 16 --m 1,2,3,4 --budget 100ms --wait 0s --device cpu --progress none");
  CHECK(short_one.code == 0);
  CHECK(short_one.err.find("the budget of 0.1 s is spent after ") != std::string::npos);
  CHECK(short_one.err.find(" of 4 problems: the others take about ") != std::string::npos);
  const Finished last =
      sandbox.fftune("ffn --d 16 --h 16 --m 1,2 --budget 100ms --wait 0s --device cpu");
  CHECK(last.err.find(" after 1 of 2 problems: the last takes about ") != std::string::npos);
}

TEST_CASE("work of more than a minute is announced") {
  const Sandbox sandbox;
  auto running = sandbox.start("bench ffn --d 4096 --h 65536 --m 4096 --device cpu --dtype f32");
  CHECK(running->says("minutes before anything is timed", 20s));
}

TEST_CASE("timeout(1), a terminal that closes, and other signals in pairs let a search keep all") {
  for (const int signal : {SIGTERM, SIGHUP}) {
    CAPTURE(signal);
    const Sandbox sandbox;
    const auto search = sandbox.start(
        "ffn --d 256 --h 512 --m 64,65 --device cpu --budget 10m --progress plain --wait 0s");
    CHECK(search->says("screen"));
    search->send(signal);
    CHECK(search->says("interrupted"));
    search->send(signal);
    const Finished done = search->wait();
    INFO(done.err);
    CHECK(done.code == 130);
    CHECK(done.err.find("what was known is written") != std::string::npos);
    CHECK(done.out.find("wrote presets/") != std::string::npos);
  }
}

TEST_CASE("a search under nohup survives its terminal") {
  const Sandbox sandbox;
  const auto search =
      sandbox.start_by({"/bin/sh", "-c", "trap '' HUP; exec \"$@\"", "sh"}, sweep, {});
  CHECK(search->says("m=1"));
  search->send(SIGHUP);
  CHECK(search->wait().code == 0);
}

TEST_CASE("a search goes on when nobody reads its progress any more") {
  const Sandbox sandbox;
  by_shell(sandbox, "{ \"$@\" 2>&1 >table; echo $? >code; } | head -n 1", sweep);
  CHECK(text_of(sandbox.folder() / "code") == "0\n");
  CHECK(text_of(sandbox.folder() / "table").find("wrote presets/") != std::string::npos);
}

TEST_CASE("a record that cannot be written is told and kept, and the search goes on") {
  const Sandbox sandbox;
  const auto file = sandbox.tuned("1");
  const std::string before = text_of(file);
  for (const bool mended : {true, false}) {
    CAPTURE(mended);
    write_text(file, before);
    const auto search = sandbox.start(
        "ffn --d 32 --h 64 --m 2,3,4 --budget 6s --max-variants 4 --wait 0s --device cpu");
    CHECK(search->says("screen"));
    write_text(file, "{");
    CHECK(search->says("not written, and tried again later"));
    if (mended) write_text(file, before);
    const Finished done = search->wait();
    INFO(done.out << done.err);
    CHECK(done.code == (mended ? 0 : 2));
    for (const char* row : {"\n2  f32", "\n3  f32", "\n4  f32"})
      CHECK(done.out.find(row) != std::string::npos);
    CHECK((done.out.find("wrote presets/") != std::string::npos) == mended);
    CHECK(done.err.find("m=2: not written") != std::string::npos);
    if (mended) {
      const Finished shown = sandbox.fftune("presets validate presets");
      INFO(shown.out);
      CHECK(shown.out.find("4 readable records, 0 faults") != std::string::npos);
    } else {
      CHECK(text_of(file) == "{");
    }
  }
}

TEST_CASE("a search of fewer threads than the device has cores is refused") {
  const Sandbox sandbox;
  const Finished done = sandbox.start_by({"/usr/bin/env", "FFTUNE_THREADS=1"}, sweep, {})->wait();
  if (sandbox.preset_file().string().find("on-1-core/") != std::string::npos) return;
  CHECK(done.code == 2);
  CHECK(done.err.find("FFTUNE_THREADS is 1") != std::string::npos);
  CHECK(done.err.find("taskset") != std::string::npos);
}

TEST_CASE("a report does not replace what it is made of") {
  const Sandbox sandbox;
  const auto file = sandbox.tuned("1");
  const std::string before = text_of(file);
  const std::string name = std::filesystem::relative(file, sandbox.folder()).string();
  for (const std::string& words : {"report presets -o " + name, "report " + name + " -o " + name}) {
    CAPTURE(words);
    const Finished done = sandbox.fftune(words);
    CHECK(done.code == 2);
    CHECK(done.err.find("give another name") != std::string::npos);
    CHECK(text_of(file) == before);
  }
  CHECK(sandbox.fftune("report presets -o page.html").code == 0);
  CHECK(sandbox.fftune("report presets -o page.html").code == 0);
}

TEST_CASE("the command that installs presets can be pasted whatever their folder is called") {
  const Sandbox sandbox;
  const Finished done = by_shell(sandbox, "\"$@\" --out \"it's \\$1\"", sweep + " -v");
  INFO(done.out);
  REQUIRE(done.code == 0);
  const std::string command = "fftune presets install 'it'\\''s $1' takes";
  CHECK(done.out.find(command) != std::string::npos);
}

TEST_CASE("an install that cannot write names the user's folder, not an option that it has not") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const Finished done =
      sandbox.start_by({"/usr/bin/env", "XDG_DATA_HOME=/proc"}, "presets install", {})->wait();
  CHECK(done.code == 2);
  CHECK(done.err.find("(XDG_DATA_HOME) /proc/fftune/presets cannot be written") !=
        std::string::npos);
  CHECK(done.err.find("--out") == std::string::npos);
}

TEST_CASE("a search that resumes says what of its journal is damaged") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const auto state =
      sandbox.folder() / ".local/state/fftune" / device_folder(sandbox, "presets").filename();
  const auto path = std::filesystem::directory_iterator(state)->path();
  const std::string whole = text_of(path);
  write_text(path, whole + "nonsense\n{\"torn");
  const auto lines = std::count(whole.begin(), whole.end(), '\n');
  const Finished done = sandbox.fftune(sweep + " --resume");
  CHECK(done.code == 0);
  CHECK_THAT(done.err, ContainsSubstring(fmt::format("damaged and skipped: lines {} and {};",
                                                     lines + 1, lines + 2)));

  // Another letter in the hash of the results' bits, which records hold.
  std::string changed = whole;
  const auto bits = changed.find("\"bits\":\"");
  REQUIRE(bits != changed.npos);
  changed[bits + 8] = 'q';
  write_text(path, changed);
  const auto line =
      1 + std::count(changed.begin(), changed.begin() + static_cast<long>(bits), '\n');
  const Finished again = sandbox.fftune(sweep + " --resume");
  CHECK(again.code == 0);
  CHECK_THAT(again.err, ContainsSubstring(fmt::format("damaged and skipped: line {};", line)));
  CHECK(again.out.find("wrote ") != std::string::npos);
}

TEST_CASE("no input of any kind is waited for, read for ever, or takes all memory") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const auto& folder = sandbox.folder();
  REQUIRE(mkfifo((folder / "pipe").c_str(), 0600) == 0);
  write_text(folder / "sparse", "");
  std::filesystem::resize_file(folder / "sparse", std::uintmax_t{1} << 40);
  for (const char* input : {"pipe", "sparse", "zero"}) {
    // By every name that an input is known by.
    for (const char* kind : {"json", "jsonl", "safetensors", "txt"})
      std::filesystem::create_symlink(
          std::string(input) == "zero" ? std::filesystem::path("/dev/zero") : folder / input,
          folder / (std::string(input) + "." + kind));
    const std::string at(input);
    for (const std::string& words : std::vector<std::string>{
             "check --op ffn --device cpu --saved-weights " + at + ".safetensors",
             "check --op ffn --device cpu --input " + at + ".safetensors",
             "bench ffn --d 16 --h 16 --m 1 --device cpu --against " + at + ".json",
             "bench moe-ffn --d 16 --h 16 --m 1 --experts 4 --top-k 2 --device cpu --routing "
             "file:" +
                 at + ".txt",
             "report -o page.html " + at + ".jsonl", "report -o page.html " + at + ".json",
             "presets show " + at + ".json", "presets merge --out other " + at + ".json",
             "presets diff presets " + at + ".json",
             "presets import-vllm E=8,N=8.json --d 8 --top-k 2"}) {
      CAPTURE(words);
      std::filesystem::remove(folder / "E=8,N=8.json");
      std::filesystem::create_symlink(folder / (at + ".json"), folder / "E=8,N=8.json");
      const Finished done =
          by_shell(sandbox, "ulimit -v 8000000; exec timeout -s KILL 60 \"$@\"", words);
      INFO(done.err);
      CHECK(done.code == 2);
      CHECK((done.err.find("regular file") != std::string::npos ||
             done.err.find("larger than") != std::string::npos ||
             done.err.find("safetensors file") != std::string::npos));
    }
  }
}

TEST_CASE("writers of one report at once all succeed") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const Finished done = by_shell(sandbox,
                                 "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do "
                                 "\"$@\" >/dev/null 2>>errors || echo failed >>errors & done; wait",
                                 "report -o page.html presets");
  CHECK(done.code == 0);
  CHECK(text_of(sandbox.folder() / "errors").empty());
  CHECK(text_of(sandbox.folder() / "page.html").find("</html>") != std::string::npos);
}

TEST_CASE("what lies at the names of temporary files in --out disturbs no search") {
  const Sandbox sandbox;
  sandbox.tuned("1");
  const auto place = device_folder(sandbox, "presets");
  std::filesystem::create_directories(place / ".ffn.json.new" / "wall");
  CHECK(sandbox.fftune(sweep).code == 0);
}

TEST_CASE("a second SIGTERM ends what does not end by itself") {
  const Sandbox sandbox;
  auto running = sandbox.start(
      "bench ffn --d 4096 --h 65536 --m 4096 --device cpu --dtype f32 --progress plain");
  REQUIRE(running->says("0/1", 20s));
  std::this_thread::sleep_for(500ms);
  running->send(SIGTERM);
  REQUIRE(running->says("interrupted", 20s));
  std::this_thread::sleep_for(1200ms);
  const auto sent = std::chrono::steady_clock::now();
  running->send(SIGTERM);
  CHECK(running->wait().code == 130);
  CHECK(std::chrono::steady_clock::now() - sent < 5s);
}

TEST_CASE("a limit of the data segment is no endless wait") {
  const Sandbox sandbox;
  for (const int mib : {20, 60, 150, 300, 400, 600, 1000}) {
    CAPTURE(mib);
    const Finished done = by_shell(
        sandbox, "ulimit -d " + std::to_string(mib * 1024) + "; exec timeout -s KILL 100 \"$@\"",
        "bench ffn --d 256 --h 256 --m 16 --device cpu --budget 0.1s --samples 1 --progress none");
    INFO(done.err);
    CHECK((done.code == 0 || done.code == 1 || done.code == 3));
  }
}

TEST_CASE("no name of a file reaches the terminal as a command to it") {
  const Sandbox sandbox;
  const auto& folder = sandbox.folder();
  const std::string name = "a\x1b[2J\n\xe2\x80\xae.json";
  write_text(folder / name, "{");
  for (const char* words : {"presets show", "presets validate", "presets merge", "report"}) {
    CAPTURE(words);
    const Finished done =
        by_shell(sandbox, "exec \"$@\" \"$(printf 'a\\033[2J\\n\\342\\200\\256.json')\"", words);
    INFO(done.err << done.out);
    CHECK((done.code == 1 || done.code == 2));
    CHECK((done.err + done.out).find('\x1b') == std::string::npos);
    CHECK((done.err + done.out).find("\xe2\x80\xae") == std::string::npos);
    CHECK((done.err + done.out).find("a\\x1b[2J\\x0a\\xe2\\x80\\xae.json") != std::string::npos);
  }
}
