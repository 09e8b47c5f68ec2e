#include "tuning/journal/quarantine.hpp"

#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <system_error>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/utc.hpp"
#include "store/json.hpp"
#include "store/renamed_parameters.hpp"
#include "tuning/journal/line_sum.hpp"
#include "tuning/log.hpp"

namespace fftune {
namespace {

constexpr const char* file_name = "quarantine.jsonl";

/// Appends the line whole, after the end of one that was torn. Throws Error(io) with the reason.
void append_line(const OwnFolder& folder, const std::string& line) {
  const auto check = [](int code) {
    if (code != 0) throw Error(ErrorKind::io, std::strerror(code));
  };
  FileDescriptor file = folder.append(file_name);
  while (::flock(file.value(), LOCK_EX) != 0)
    if (errno != EINTR) check(errno);
  const auto size = ::lseek(file.value(), 0, SEEK_END);
  char last = '\n';
  if (size > 0 && ::pread(file.value(), &last, 1, size - 1) != 1) last = '\n';
  check(write_all(file.value(), (last == '\n' ? "" : "\n") + line + "\n"));
  check(file.close());  // and so unlocked
}

}  // namespace

Quarantine::Quarantine(const std::filesystem::path& folder, const DeviceFacts& facts)
    : folder_(folder),
      slug_(facts.slug()),
      path_(folder / slug_ / file_name),
      driver_(facts.driver) {
  std::error_code error;
  if (!std::filesystem::exists(path_, error)) return;
  std::istringstream in;
  try {
    in.str(InputFile(own_folder().read(file_name)).read_whole());
  } catch (const Error& unreadable) {
    logging::warn("the quarantine {} {}", path_.string(), unreadable.what());
  }
  for (std::string text; std::getline(in, text);) {
    if (sum_of_line(text) == LineSum::wrong) continue;
    try {
      const JsonValue line = parse_json(text);
      if (field_as<std::string>(line, "driver") != driver_) continue;
      Quarantined entry{field_as<std::string>(line, "op"),
                        field_as<std::string>(line, "problem"),
                        renamed_id(field_as<std::string>(line, "id")),
                        field_as<std::string>(line, "sources"),
                        field_as<std::string>(line, "cause"),
                        field_as<std::string>(line, "date")};
      const Key key{entry.problem, entry.id, entry.source_hash};
      if (field_as<bool>(line, "released"))
        entries_.erase(key);
      else
        entries_[key] = std::move(entry);
    } catch (const Error&) {
      // Torn, or not ours: this line is lost, the rest is not.
    }
  }
}

OwnFolder Quarantine::own_folder() const {
  return OwnFolder(OwnFolder(folder_, OwnFolder::Writers::group), slug_);
}

std::optional<Quarantined> Quarantine::find(const Problem& problem, const std::string& id,
                                            const std::string& source_hash) const {
  const auto found = entries_.find({problem.text(), id, source_hash});
  if (found == entries_.end()) return {};
  return found->second;
}

std::vector<Quarantined> Quarantine::of(const std::string& op) const {
  std::vector<Quarantined> all;
  for (const auto& [key, entry] : entries_)
    if (entry.op == op) all.push_back(entry);
  return all;
}

std::vector<Quarantined> Quarantine::of(const Problem& problem) const {
  auto all = of(problem.op);
  std::erase_if(all, [text = problem.text()](const auto& entry) { return entry.problem != text; });
  return all;
}

void Quarantine::add(const Problem& problem, const std::string& id, const std::string& source_hash,
                     const std::string& cause) {
  const Quarantined entry{problem.op, problem.text(), id, source_hash, cause, utc_now()};
  entries_[{entry.problem, id, source_hash}] = entry;
  append(entry, false);
}

void Quarantine::release(const Problem& problem, const std::string& id,
                         const std::string& source_hash) {
  const auto found = entries_.find({problem.text(), id, source_hash});
  if (found == entries_.end()) return;
  append(found->second, true);
  entries_.erase(found);
}

void Quarantine::append(const Quarantined& entry, bool released) {
  const JsonValue line{{"op", entry.op},       {"problem", entry.problem},
                       {"id", entry.id},       {"sources", entry.source_hash},
                       {"driver", driver_},    {"date", entry.date},
                       {"cause", entry.cause}, {"released", released}};
  try {
    append_line(own_folder(), summed_line(line));
  } catch (const Error& error) {
    logging::warn("the quarantine {} cannot be written: {}", path_.string(), error.what());
  }
}

}  // namespace fftune
