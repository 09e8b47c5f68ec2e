#include "tuning/journal/journal.hpp"

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <filesystem>
#include <limits>
#include <random>

#include "core/error.hpp"
#include "fake_evaluator.hpp"
#include "fake_op.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/temporary_folder.hpp"
#include "support/text_file.hpp"

using namespace fftune;
using testing::TemporaryFolder;
using testing::text_of;
using testing::write_text;

namespace {

DeviceFacts facts_of_test() {
  DeviceFacts facts;
  facts.name = "Fake Device";
  facts.driver = "1";
  return facts;
}

Outcome measured(const std::string& id, double us) {
  Outcome outcome;
  outcome.first_stage = 1;
  outcome.id = id;
  outcome.kind = OutcomeKind::measured;
  outcome.samples = 3;
  outcome.median_us = us;
  outcome.low_us = us - 1;
  outcome.high_us = us + 1;
  outcome.registers = 40;
  outcome.error = 0.001;
  outcome.bits = "0123456789abcdef";
  return outcome;
}

/// A journal in which three variants were measured.
struct JournalOfThree {
  const TemporaryFolder folder;
  const Problem problem{"fake", "fwd", DType::f32, {{"m", 4}}, {}};
  std::filesystem::path path;
  std::string whole;  // its text

  JournalOfThree() {
    auto journal = Journal::open(folder.path(), facts_of_test(), "fake", false);
    for (int p = 0; p < 3; ++p) journal.add(problem, "h", measured("f/p=" + std::to_string(p), 9));
    path = journal.path();
    whole = text_of(path);
  }
};

/// Variant 7 of 12 is the fastest.
double truth(const Variant& variant) {
  return 100 + 5 * std::abs(static_cast<double>(variant.config.at("p")) - 7);
}

/// A sweep of 12 variants: its record and its journal.
std::pair<PresetRecord, std::filesystem::path> sweep(const TemporaryFolder& folder,
                                                     FakeEvaluator& evaluator, bool resume) {
  auto fake = FakeCatalog::of_variants(12);
  auto options = evaluator.options();
  auto journal = Journal::open(folder.path(), evaluator.facts(), "fake", resume);
  options.journal = &journal;
  auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  REQUIRE(result.record);
  return {*result.record, journal.path()};
}

/// That journal in a folder of its own.
struct JournalOfSweep {
  const TemporaryFolder folder;
  PresetRecord record;
  std::filesystem::path path;
  std::string text;

  JournalOfSweep() {
    FakeEvaluator evaluator(truth);
    std::tie(record, path) = sweep(folder, evaluator, false);
    text = text_of(path);
  }
};

}  // namespace

TEST_CASE(
    "a journal that --resume reads has what was written, and the last line of a variant counts") {
  const TemporaryFolder folder;
  const Problem problem{"fake", "fwd", DType::f32, {{"m", 4}}, {}};
  std::filesystem::path path;
  {
    auto journal = Journal::open(folder.path(), facts_of_test(), "fake", false);
    path = journal.path();
    journal.add(problem, "hash", measured("f/p=1", 100));
    journal.add(problem, "hash", measured("f/p=1", 90));
    Outcome failed;
    failed.id = "f/p=2";
    failed.kind = OutcomeKind::verify_failed;
    failed.reason = "wrong \"by\" \xff a lot\n";
    failed.error = std::numeric_limits<double>::quiet_NaN();
    journal.add(problem, "hash", failed);
    CHECK(journal.known_count() == 0);
  }
  CHECK(path.parent_path() == folder.path() / facts_of_test().slug());
  const auto journal = Journal::open(folder.path(), facts_of_test(), "fake", true);
  CHECK(journal.path() == path);
  CHECK(journal.known_count() == 2);
  CHECK(journal.damaged_lines().empty());
  const auto known = journal.known(problem, "hash", 1, "f/p=1");
  REQUIRE(known);
  CHECK(known->median_us == 90);
  CHECK(known->low_us == 89);
  CHECK(known->registers == 40);
  CHECK(known->samples == 3);
  CHECK(known->error == 0.001);
  CHECK(journal.known(problem, "hash", 0, "f/p=2")->kind == OutcomeKind::verify_failed);
  CHECK_FALSE(journal.known(problem, "hash", 0, "f/p=1"));
  CHECK_FALSE(journal.known(problem, "other", 1, "f/p=1"));
  CHECK_FALSE(journal.known(problem.with_size("m", 5), "hash", 1, "f/p=1"));
}

TEST_CASE("a journal with old names of parameters is resumed under today's") {
  const TemporaryFolder folder;
  const Problem problem{"fake", "fwd", DType::f32, {{"m", 4}}, {}};
  const std::string was = "down_sm90/bm=128,schedule=1,consumers=2";
  const std::string is = "down_sm90/bm=128,schedule=pingpong,mma_warpgroups=2";
  {
    auto journal = Journal::open(folder.path(), facts_of_test(), "fake", false);
    journal.launch(problem, {was, "down_sm90/bm=64,schedule=2,consumers=1"});
    journal.add(problem, "hash", measured(was, 100));
  }
  const auto journal = Journal::open(folder.path(), facts_of_test(), "fake", true);
  CHECK(journal.damaged_lines().empty());
  const auto known = journal.known(problem, "hash", 1, is);
  REQUIRE(known);
  CHECK(known->id == is);
  CHECK(journal.interrupted() ==
        std::set<std::string>{"down_sm90/bm=64,schedule=swap_ab,mma_warpgroups=1"});
}

TEST_CASE("another driver's outcomes are not taken") {
  const TemporaryFolder folder;
  const Problem problem{"fake", "fwd", DType::f32, {{"m", 4}}, {}};
  Journal::open(folder.path(), facts_of_test(), "fake", false)
      .add(problem, "hash", measured("f/p=1", 100));
  auto newer = facts_of_test();
  newer.driver = "2";
  CHECK(Journal::open(folder.path(), newer, "fake", true).known_count() == 0);
  CHECK(Journal::open(folder.path(), facts_of_test(), "fake", true).known_count() == 1);
}

TEST_CASE("outcomes of other data are not taken: errors and bits are of the data") {
  const TemporaryFolder folder;
  const Problem problem{"fake", "fwd", DType::f32, {{"m", 4}}, {}};
  const auto open = [&](bool resume, const char* data) {
    return Journal::open(folder.path(), facts_of_test(), "fake", resume, data);
  };
  open(false, "seed 0").add(problem, "hash", measured("f/p=1", 100));
  CHECK(open(true, "seed 1").known_count() == 0);
  CHECK(open(true, "seed 0").known_count() == 1);
}

TEST_CASE("a journal cut at any byte is repaired: whole lines are kept, and it can be continued") {
  const JournalOfThree three;
  const auto& [folder, problem, path, whole] = three;
  for (std::size_t cut = 0; cut <= whole.size(); ++cut) {
    const auto text = whole.substr(0, cut);
    write_text(path, text);
    const auto lines = std::count(text.begin(), text.end(), '\n');
    {
      auto journal = Journal::open(folder.path(), facts_of_test(), "fake", true);
      CHECK(journal.known_count() ==
            static_cast<std::size_t>(std::max<std::ptrdiff_t>(lines - 1, 0)));
      CHECK(journal.damaged_lines().size() == (text.empty() || text.back() == '\n' ? 0u : 1u));
      journal.add(problem, "h", measured("f/p=7", 9));
    }
    const auto again = Journal::open(folder.path(), facts_of_test(), "fake", true);
    CHECK(again.damaged_lines().empty());
    CHECK(again.known(problem, "h", 1, "f/p=7"));
  }
}

TEST_CASE("garbage in a journal never throws and never becomes a time") {
  const JournalOfThree three;
  const auto& [folder, problem, path, whole] = three;
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    auto text = whole;
    for (int hit = 0; hit < 4; ++hit)
      text[random() % text.size()] = static_cast<char>(random() % 256);
    write_text(path, text);
    const auto journal = Journal::open(folder.path(), facts_of_test(), "fake", true);
    CHECK(journal.known_count() <= 3);
    for (int p = 0; p < 3; ++p)
      if (const auto known = journal.known(problem, "h", 1, "f/p=" + std::to_string(p));
          known && known->kind == OutcomeKind::measured)
        CHECK(known->median_us == 9);
  }
  write_text(path, "\n[]\n7\nnull\n{}\n\"x\"\n");
  CHECK(Journal::open(folder.path(), facts_of_test(), "fake", true).damaged_lines() ==
        std::vector<std::size_t>{1, 2, 3, 4, 5, 6});
}

TEST_CASE("a flipped bit anywhere in a journal loses its line alone, whose number is told") {
  const JournalOfThree three;
  const auto& [folder, problem, path, whole] = three;
  std::mt19937 random(11);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    const unsigned bit = random() % 8;
    INFO("bit " << bit << " of byte " << at);
    auto text = whole;
    text[at] = static_cast<char>(text[at] ^ (1 << bit));
    write_text(path, text);
    const auto line = static_cast<std::size_t>(
        1 + std::count(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    const auto journal = Journal::open(folder.path(), facts_of_test(), "fake", true);
    // A newline that comes or goes makes two lines of one, or one of two.
    const bool splits = text[at] == '\n', joins = whole[at] == '\n';
    const auto& damaged = journal.damaged_lines();
    // A first line without a sum, which an older version might have written, has the same text.
    if (line > 1 || joins) CHECK_FALSE(damaged.empty());
    CHECK(damaged.size() <= (splits ? 2u : 1u));
    if (!damaged.empty()) CHECK(damaged.front() == line);
    for (std::size_t p = 0; p < 3; ++p) {
      const std::size_t own_line = p + 2;
      const bool lost = own_line == line || (joins && own_line == line + 1);
      const auto known = journal.known(problem, "h", 1, "f/p=" + std::to_string(p));
      CHECK(known.has_value() == !lost);
      if (known) CHECK((known->median_us == 9 && known->bits == "0123456789abcdef"));
    }
  }
}

TEST_CASE("the numbers of damaged lines are one phrase") {
  CHECK(line_numbers({7}) == "line 7");
  CHECK(line_numbers({7, 9}) == "lines 7 and 9");
  CHECK(line_numbers({7, 9, 12}) == "lines 7, 9 and 12");
  CHECK(line_numbers({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) == "lines 1, 2, 3, 4, 5, 6, 7, 8 and 2 more");
}

TEST_CASE("a sweep resumes from a journal with flipped bits to the same winner and times") {
  const JournalOfSweep whole;
  const auto& [folder, record, path, text] = whole;
  std::mt19937 random(7);
  for (int trial = 0; trial < 60; ++trial) {
    auto damaged = text;
    for (unsigned hit = 0; hit <= random() % 4; ++hit) {
      char& byte = damaged[random() % damaged.size()];
      byte = static_cast<char>(byte ^ (1 << random() % 8));
    }
    write_text(path, damaged);
    FakeEvaluator again(truth);
    INFO("trial " << trial);
    const auto resumed = sweep(folder, again, true).first;
    CHECK(resumed.stages[0].variant == record.stages[0].variant);
    CHECK(resumed.stages[0].median_us == Approx(record.stages[0].median_us).epsilon(0.05));
  }
}

TEST_CASE("only the op's own journals are resumed, the newest of them") {
  const TemporaryFolder folder;
  const auto own = folder.path() / facts_of_test().slug();
  std::filesystem::create_directories(own);
  for (const auto* name : {"fake-20260101T000000Z-9.jsonl", "fake-20260201T000000Z-1.jsonl",
                           "fake-x-20270101T000000Z-1.jsonl", "fake-20280101T000000Z-1.txt"})
    write_text(own / name, "");
  CHECK(Journal::open(folder.path(), facts_of_test(), "fake", true).path().filename() ==
        "fake-20260201T000000Z-1.jsonl");
}

TEST_CASE("the oldest journals of an op are removed, no other's, and never the own") {
  const TemporaryFolder folder;
  const auto own = folder.path() / facts_of_test().slug();
  std::filesystem::create_directories(own);
  for (int day = 10; day < 60; ++day)
    write_text(own / ("fake-202601" + std::to_string(day) + "T000000Z-9.jsonl"), "");
  write_text(own / "fake-x-20200101T000000Z-1.jsonl", "");
  write_text(own / "quarantine.jsonl", "");
  const auto path = Journal::open(folder.path(), facts_of_test(), "fake", false).path();
  CHECK(std::filesystem::exists(path));
  CHECK_FALSE(std::filesystem::exists(own / "fake-20260128T000000Z-9.jsonl"));
  CHECK(std::filesystem::exists(own / "fake-20260129T000000Z-9.jsonl"));
  CHECK(std::filesystem::exists(own / "fake-x-20200101T000000Z-1.jsonl"));
  CHECK(std::filesystem::exists(own / "quarantine.jsonl"));
  Journal::open(folder.path(), facts_of_test(), "fake", true);
  CHECK(std::filesystem::exists(own / "fake-20260129T000000Z-9.jsonl"));
}

TEST_CASE("journals dated in the future neither take the own one's place nor are resumed for it") {
  const TemporaryFolder folder;
  const auto own = folder.path() / facts_of_test().slug();
  std::filesystem::create_directories(own);
  for (int i = 10; i < 42; ++i) {
    const auto path = own / ("fake-20990101T0000" + std::to_string(i) + "Z-9.jsonl");
    write_text(path, "");
    std::filesystem::last_write_time(
        path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(1));
  }
  const auto path = Journal::open(folder.path(), facts_of_test(), "fake", false).path();
  CHECK(std::filesystem::exists(path));
  CHECK(Journal::open(folder.path(), facts_of_test(), "fake", true).path() == path);
}

TEST_CASE("a sweep whose journal was cut at any byte by a power loss resumes to the same winner") {
  const JournalOfSweep whole;
  const auto& [folder, record, path, text] = whole;
  std::mt19937 random(5);
  // The repair is tested at every byte, above; this is a sweep for each.
  for (std::size_t cut = 0; cut <= text.size(); cut += 1 + random() % 60) {
    // Where the file system had made room already, zeros follow.
    write_text(path,
               text.substr(0, cut) + std::string(random() % 4 == 0 ? random() % 600 : 0, '\0'));
    FakeEvaluator again(truth);
    INFO("cut after " << cut << " of " << text.size());
    CHECK(sweep(folder, again, true).first.stages[0].variant == record.stages[0].variant);
    // Known variants are not screened again: they are finalists or untouched.
    const auto kept = Journal::open(folder.path(), again.facts(), "fake", true);
    CHECK(kept.damaged_lines().empty());
    CHECK(kept.known_count() >= 12);
  }
}

TEST_CASE("a folder that cannot be written is one clear error") {
  const TemporaryFolder folder;
  write_text(folder.path() / "file", "");
  const auto file = folder.path() / "file";
  CHECK(test::error_of(ErrorKind::io, [&] {
          Journal::open(file, facts_of_test(), "fake", false);
        }).find(file.string()) != std::string::npos);
}

TEST_CASE("a disk that takes no more ends the journal, not the sweep") {
  const TemporaryFolder folder;
  auto fake = FakeCatalog::of_variants(10);
  FakeEvaluator evaluator([](const Variant&) { return 100.0; });
  auto options = evaluator.options();
  auto journal = Journal::open(folder.path(), evaluator.facts(), "fake", false);
  options.journal = &journal;
  // A limit on the size of files stands in for the full disk.
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit tight = before;
  tight.rlim_cur = std::filesystem::file_size(journal.path()) + 300;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &tight) == 0);
  const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  CHECK(result.record);
  CHECK(std::filesystem::file_size(journal.path()) <= tight.rlim_cur);
}

TEST_CASE("a resumed sweep measures only what was not, and finds the same winner") {
  const TemporaryFolder folder;
  FakeCatalog fake(2);
  fake.op.add("f", {"a"}, 80);
  fake.op.add("g", {"b"}, 80);
  const auto truth = [](const Variant& v) {
    return 100 + 3 * std::abs(static_cast<double>(v.config.at("p")) - 50);
  };
  FakeEvaluator whole(truth);
  whole.misbehaving["f/p=9"] = Misbehaviour::wrong;
  const auto uninterrupted = tune(fake.catalog(), whole, fake.problem(), whole.options());

  for (const int after : {5, 60, 150, 260}) {
    std::filesystem::remove_all(folder.path() / facts_of_test().slug());
    std::atomic<bool> cancel{false};
    FakeEvaluator first(truth);
    first.misbehaving = whole.misbehaving;
    first.cancel = &cancel;
    first.cancel_after = after;
    auto options = first.options();
    options.cancel = &cancel;
    {
      auto journal = Journal::open(folder.path(), first.facts(), "fake", false);
      options.journal = &journal;
      CHECK(tune(fake.catalog(), first, fake.problem(), options).cancelled);
    }
    FakeEvaluator second(truth);
    second.misbehaving = whole.misbehaving;
    auto journal = Journal::open(folder.path(), second.facts(), "fake", true);
    auto resumed = second.options();
    resumed.journal = &journal;
    const auto result = tune(fake.catalog(), second, fake.problem(), resumed);
    INFO("after " << after);
    REQUIRE(result.record);
    CHECK(result.record->verdict.complete);
    CHECK(result.record->stages[0].variant == uninterrupted.record->stages[0].variant);
    CHECK(result.record->stages[1].variant == uninterrupted.record->stages[1].variant);
    CHECK(result.record->stages[0].failed == 1);
    // A slow variant that the first run screened is not touched again.
    for (const auto& [id, count] : first.sampled)
      if (id.starts_with("f/p=7") && id.find('+') == id.npos) CHECK(second.sampled[id] == 0);
    if (first.verified["f/p=9"]) CHECK(second.verified["f/p=9"] == 0);
  }
}

TEST_CASE("a variant that crashed is tried again by a resumed sweep that is told to") {
  for (const bool retry : {false, true}) {
    const TemporaryFolder folder;
    auto fake = FakeCatalog::of_variants(10);
    FakeEvaluator evaluator([](const Variant&) { return 100.0; });
    Outcome crashed;
    crashed.id = "f/p=3";
    crashed.kind = OutcomeKind::crashed;
    crashed.reason = "segmentation fault";
    Journal::open(folder.path(), evaluator.facts(), "fake", false)
        .add(fake.problem(), fake.sources.hash({"fake.cu"}), crashed);
    auto journal = Journal::open(folder.path(), evaluator.facts(), "fake", true);
    auto options = evaluator.options();
    options.journal = &journal;
    options.retry_quarantined = retry;
    const auto result = tune(fake.catalog(), evaluator, fake.problem(), options);
    REQUIRE(result.record);
    CHECK(evaluator.compiled["f/p=3"] == (retry ? 1 : 0));
    CHECK(result.record->stages[0].failed == (retry ? 0 : 1));
  }
}

TEST_CASE("links and files that others planted are neither continued nor written") {
  const TemporaryFolder folder;
  const auto facts = facts_of_test();
  const auto victim = folder.path() / "victim";
  const std::string precious = "a line\nand a last one without an end";
  write_text(victim, precious);
  const auto own = Journal::open(folder.path() / "state", facts, "fake", false).path();
  const auto place = own.parent_path();
  std::filesystem::create_symlink(victim, place / "fake-29991231T000000Z-1.jsonl");
  std::filesystem::create_hard_link(victim, place / "fake-29991231T000000Z-2.jsonl");
  if (::geteuid() == 0) {
    write_text(place / "fake-29991231T000000Z-3.jsonl", "{}\n");
    REQUIRE(::chown((place / "fake-29991231T000000Z-3.jsonl").c_str(), 65534, 65534) == 0);
  }
  CHECK(Journal::open(folder.path() / "state", facts, "fake", true).path() == own);

  // Every name that this process could give a journal within the next seconds is taken.
  const std::time_t now = std::time(nullptr);
  for (std::time_t later = 0; later < 60; ++later) {
    const std::time_t then = now + later;
    std::tm utc{};
    gmtime_r(&then, &utc);
    char stamp[sizeof "20261121T140322Z"];
    std::strftime(stamp, sizeof stamp, "%Y%m%dT%H%M%SZ", &utc);
    const auto name = place / fmt::format("fake-{}-{}.jsonl", stamp, ::getpid());
    if (!std::filesystem::exists(name)) std::filesystem::create_symlink(victim, name);
  }
  {
    auto journal = Journal::open(folder.path() / "state", facts, "fake", false);
    CHECK(!std::filesystem::is_symlink(journal.path()));
    journal.launch(Problem{"fake", "fwd", DType::f32, {{"m", 4}}, {}}, {"f/p=1"});
  }
  CHECK(text_of(victim) == precious);
}

TEST_CASE("a journal is kept in no folder that others write to") {
  const TemporaryFolder folder;
  const auto complaint = [&] {
    try {
      Journal::open(folder.path() / "state", facts_of_test(), "fake", false);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(complaint().empty());
  ::chmod((folder.path() / "state" / facts_of_test().slug()).c_str(), 0777);
  CHECK_THAT(complaint(), ContainsSubstring("writable by others: chmod 700 it") &&
                              ContainsSubstring("XDG_STATE_HOME"));
}

TEST_CASE("a journal that is too large to read is named") {
  const TemporaryFolder folder;
  const auto path = Journal::open(folder.path(), facts_of_test(), "fake", false).path();
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40);
  CHECK_THROWS_WITH(Journal::open(folder.path(), facts_of_test(), "fake", true),
                    ContainsSubstring(path.string()) && ContainsSubstring("larger than"));
  CHECK_THROWS_WITH(read_journal(path), ContainsSubstring(path.string()));
}
