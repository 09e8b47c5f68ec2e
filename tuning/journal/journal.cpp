#include "tuning/journal/journal.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/utc.hpp"
#include "tuning/log.hpp"

namespace fftune {
namespace {

/// Where the clock and the number of the process have named one before, `attempt` tells them apart.
std::string new_name(const std::string& op, int attempt) {
  return fmt::format("{}-{}-{}{}.jsonl", op, utc_now("%Y%m%dT%H%M%SZ"), getpid(),
                     attempt == 0 ? "" : fmt::format("_{}", attempt));
}

/// The journals of the op by the time of their last line, the newest last: a name has the time by a
/// clock that may have been wrong.
std::vector<std::string> journals_of(const OwnFolder& folder, const std::string& op) {
  std::vector<std::tuple<std::time_t, long, std::string>> dated;
  for (std::string& name : folder.names()) {
    // The stamp begins with a digit, so that op "ffn" does not take the journals of "ffn-x".
    const bool ours = name.starts_with(op + "-") && name.ends_with(".jsonl") &&
                      name[op.size() + 1] >= '0' && name[op.size() + 1] <= '9';
    if (const auto file = ours ? folder.find(name) : std::nullopt)
      dated.emplace_back(file->changed.tv_sec, file->changed.tv_nsec, std::move(name));
  }
  std::sort(dated.begin(), dated.end());
  std::vector<std::string> names;
  for (auto& [seconds, nanoseconds, name] : dated) names.push_back(std::move(name));
  return names;
}

/// How many journals of each op and device are kept. A sweep that runs is among the newest; one
/// whose journal is removed nevertheless goes on, and cannot be resumed.
constexpr std::size_t most_journals = 32;

void remove_oldest(const OwnFolder& folder, const std::vector<std::string>& journals,
                   const std::string& own) {
  for (std::size_t i = 0; i + most_journals < journals.size(); ++i)
    if (journals[i] != own) folder.remove(journals[i]);  // another process may have been first
}

/// A journal under a name that nobody has.
std::pair<std::string, FileDescriptor> new_journal(const OwnFolder& folder, const std::string& op) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    std::string name = new_name(op, attempt);
    if (auto file = folder.create(name)) return {std::move(name), std::move(*file)};
  }
  throw Error(ErrorKind::io, "has no name left for a journal: empty it");
}

}  // namespace

Journal Journal::open(const std::filesystem::path& folder, const DeviceFacts& facts,
                      const std::string& op, bool resume, const std::string& data) {
  const JournalHeader header{FFTUNE_VERSION, facts.name, facts.driver, facts.toolkit, data};
  Journal journal;
  journal.path_ = folder;
  journal.header_hash_ = hash_of(header);
  try {
    const OwnFolder state(folder, OwnFolder::Writers::group);
    journal.path_ = folder / facts.slug();
    const OwnFolder own_folder(state, facts.slug());
    const auto present = journals_of(own_folder, op);
    std::string name;
    FileDescriptor file;
    if (resume && !present.empty()) {
      name = present.back();
      journal.path_ = own_folder.path() / name;
      file = own_folder.append(name);
      journal.read_back(file.value());
    } else {
      std::tie(name, file) = new_journal(own_folder, op);
      journal.path_ = own_folder.path() / name;
    }
    journal.file_.reset(::fdopen(file.value(), "ab"));
    if (!journal.file_) throw Error(ErrorKind::io, std::strerror(errno));
    file.release();
    journal.write_line(journal_line(header));
    remove_oldest(own_folder, journals_of(own_folder, op), name);
  } catch (const Error& error) {
    throw Error(ErrorKind::io, fmt::format("cannot keep the sweep's journal: {} {}; give another "
                                           "state folder by XDG_STATE_HOME",
                                           journal.path_.string(), error.what()));
  }
  return journal;
}

void Journal::read_back(int descriptor) {
  JournalText text =
      parse_journal(InputFile(FileDescriptor(::dup(descriptor))).read_whole(most_journal_bytes));
  damaged_lines_ = std::move(text.damaged_lines);
  if (text.whole_bytes < text.bytes &&
      ::ftruncate(descriptor, static_cast<off_t>(text.whole_bytes)) != 0)
    throw Error(ErrorKind::io, fmt::format("cannot be repaired: {}", std::strerror(errno)));
  for (JournalEntry& entry : text.entries) switch (entry.kind) {
      case JournalEntry::Kind::header:
        break;
      case JournalEntry::Kind::launch:
        interrupted_ = {entry.ids.begin(), entry.ids.end()};
        break;
      case JournalEntry::Kind::outcome:
        interrupted_.erase(entry.outcome.id);
        if (entry.header_hash == header_hash_)
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
  if (file_) write_line(journal_line(header_hash_, problem.text(), ids));
}

void Journal::add(const Problem& problem, const std::string& source_hash, const Outcome& outcome) {
  if (!file_) return;
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begun_;
  write_line(journal_line(header_hash_, problem.text(), source_hash, seconds.count(), outcome));
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
  logging::warn("the sweep goes on without its journal {}: {}", path_.string(),
                std::strerror(errno));
  file_.reset();
}

}  // namespace fftune
