#include "tuning/journal/journal.hpp"

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <system_error>
#include <vector>

#include "core/error.hpp"

namespace fftune {
namespace {

std::string new_name(const std::string& op) {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char stamp[sizeof "20261121T140322Z"];
  std::strftime(stamp, sizeof stamp, "%Y%m%dT%H%M%SZ", &utc);
  return fmt::format("{}-{}-{}.jsonl", op, stamp, getpid());
}

/// The journals of the op by the time of their last line, the newest last: a name has the time by a
/// clock that may have been wrong.
std::vector<std::filesystem::path> journals_of(const std::filesystem::path& folder,
                                               const std::string& op) {
  std::vector<std::filesystem::path> all;
  std::error_code ignored;  // no folder: no journal
  for (const auto& entry : std::filesystem::directory_iterator(folder, ignored)) {
    const auto name = entry.path().filename().string();
    // The stamp begins with a digit, so that op "ffn" does not take the journals of "ffn-x".
    const bool ours = name.starts_with(op + "-") && name.ends_with(".jsonl") &&
                      name[op.size() + 1] >= '0' && name[op.size() + 1] <= '9';
    if (ours && entry.is_regular_file(ignored)) all.push_back(entry.path());
  }
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> dated;
  for (auto& path : all) dated.emplace_back(std::filesystem::last_write_time(path, ignored), path);
  std::sort(dated.begin(), dated.end());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = std::move(dated[i].second);
  return all;
}

/// How many journals of each op and device are kept. A sweep that runs is among the newest; one
/// whose journal is removed nevertheless goes on, and cannot be resumed.
constexpr std::size_t most_journals = 32;

void remove_oldest(const std::vector<std::filesystem::path>& journals,
                   const std::filesystem::path& own) {
  std::error_code ignored;  // another process may have been first
  for (std::size_t i = 0; i + most_journals < journals.size(); ++i)
    if (journals[i] != own) std::filesystem::remove(journals[i], ignored);
}

}  // namespace

Journal Journal::open(const std::filesystem::path& folder, const DeviceFacts& facts,
                      const std::string& op, bool resume, const std::string& data) {
  const JournalHeader header{FFTUNE_VERSION, facts.name, facts.driver, facts.toolkit, data};
  const auto own_folder = folder / facts.slug();
  const auto fail = [&](const std::filesystem::path& path, const std::string& why) {
    throw Error(ErrorKind::io, fmt::format("cannot write the sweep's journal {}: {}; give another "
                                           "state folder by XDG_STATE_HOME",
                                           path.string(), why));
  };
  std::error_code error;
  std::filesystem::create_directories(own_folder, error);
  if (error) fail(own_folder, error.message());

  Journal journal;
  const auto present = journals_of(own_folder, op);
  if (resume && !present.empty()) {
    journal.path_ = present.back();
    journal.read_back(header);
  } else {
    journal.path_ = own_folder / new_name(op);
  }
  journal.file_.reset(std::fopen(journal.path_.c_str(), "ab"));
  if (!journal.file_) fail(journal.path_, std::strerror(errno));
  journal.write_line(journal_line(header));
  remove_oldest(journals_of(own_folder, op), journal.path_);
  return journal;
}

void Journal::read_back(const JournalHeader& own) {
  JournalText text = read_journal(path_);
  damaged_lines_ = text.damaged_lines;
  if (text.whole_bytes < text.bytes) {
    std::error_code error;
    std::filesystem::resize_file(path_, text.whole_bytes, error);
    if (error)
      throw Error(ErrorKind::io,
                  fmt::format("cannot repair {}: {}", path_.string(), error.message()));
  }
  bool ours = false;  // the lines after a header of this very device, driver, toolkit and data
  for (JournalEntry& entry : text.entries) switch (entry.kind) {
      case JournalEntry::Kind::header:
        ours = entry.header == own;
        break;
      case JournalEntry::Kind::launch:
        interrupted_ = {entry.ids.begin(), entry.ids.end()};
        break;
      case JournalEntry::Kind::outcome:
        interrupted_.erase(entry.outcome.id);
        if (ours)
          known_[{entry.problem, entry.sources, entry.outcome.first_stage, entry.outcome.id}] =
              std::move(entry.outcome);
    }
}

std::optional<Outcome> Journal::known(const Problem& problem, const std::string& source_hash,
                                      std::size_t first_stage, const std::string& id) const {
  const auto found = known_.find({problem.text(), source_hash, first_stage, id});
  if (found == known_.end()) return {};
  return found->second;
}

void Journal::launch(const Problem& problem, const std::vector<std::string>& ids) {
  if (file_) write_line(journal_line(problem.text(), ids));
}

void Journal::add(const Problem& problem, const std::string& source_hash, const Outcome& outcome) {
  if (!file_) return;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun_;
  write_line(journal_line(problem.text(), source_hash, seconds.count(), outcome));
}

void Journal::sync() {
  // Synced one by one, lines would take longer than the variants that they tell of.
  const auto now = std::chrono::steady_clock::now();
  if (now - synced_ < std::chrono::seconds(1)) return;
  synced_ = now;
  ::fdatasync(::fileno(file_.get()));
}

void Journal::write_line(const std::string& line) {
  const std::string text = line + '\n';
  if (std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size() &&
      std::fflush(file_.get()) == 0)
    return sync();
  spdlog::warn("the sweep goes on without its journal {}: {}", path_.string(),
               std::strerror(errno));
  file_.reset();
}

}  // namespace fftune
