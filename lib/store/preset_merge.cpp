#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <system_error>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "store/preset_file.hpp"

namespace fftune {
namespace {

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& why) {
  throw Error(ErrorKind::invalid_input,
              fmt::format("cannot merge into {}: {}", path.string(), why));
}

void check_existing(const PresetFile& file, const PresetDevice& device, const std::string& op) {
  if (!file.complaints.empty()) {
    const auto others = file.complaints.size() - 1;
    refuse(file.path, fmt::format("{}{}: repair it or move it away", file.complaints.front(),
                                  others ? fmt::format(" (and {} more complaints)", others) : ""));
  }
  if (file.op != op || file.device.slug != device.slug || file.device.kind != device.kind)
    refuse(file.path, fmt::format("it holds {} of device '{}', not {} of '{}': move it away",
                                  file.op, file.device.slug, op, device.slug));
}

/// The written text must be readable: a record that would be refused is an internal error.
void check_text(const std::string& text, const std::filesystem::path& path) {
  const auto file = parse_preset_text(text, path);
  if (!file.complaints.empty())
    throw Error(ErrorKind::internal, "a record is not fit to be written: " +
                                         file.complaints.front() + ": please report this");
}

std::vector<std::string> united(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  a.erase(std::unique(a.begin(), a.end()), a.end());
  return a;
}

std::vector<PresetRecord> values(const std::map<Problem, PresetRecord>& records) {
  std::vector<PresetRecord> all;
  for (const auto& [problem, record] : records) all.push_back(record);
  return all;
}

/// The lock of a preset file, in its folder, which is made.
std::filesystem::path lock_path(const std::filesystem::path& path) {
  const auto place = path.parent_path();
  std::error_code error;
  std::filesystem::create_directories(place, error);
  if (error)
    throw Error(ErrorKind::io,
                fmt::format("cannot create the folder '{}': {}: choose one that you may write to",
                            place.string(), error.message()));
  return place / ("." + path.stem().string() + ".lock");
}

/// The file as it is, checked; nothing if there is none.
std::optional<PresetFile> existing_file(const std::filesystem::path& path,
                                        const PresetDevice& device, const std::string& op) {
  std::error_code error;
  if (std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found)
    return std::nullopt;
  auto file = read_preset_file(path);
  check_existing(file, device, op);
  return file;
}

}  // namespace

void require_mergeable(const std::filesystem::path& folder, const PresetDevice& device,
                       const std::string& op, const LockWait& wait) {
  const auto path = preset_path(folder, device.slug, op);
  const FileLock lock(lock_path(path), wait);
  existing_file(path, device, op);
  require_replaceable(path);
}

namespace {

/// The new contents of one file.
struct Destination {
  std::filesystem::path path;
  PresetDevice device;
  std::string op;
  Comparison comparison;
  std::map<Problem, PresetRecord> records;  // by compared_part()
  std::unique_ptr<FileLock> lock;
  std::unique_ptr<StagedFile> staged;
};

/// By path, which is the order in which everybody takes the locks.
std::map<std::filesystem::path, Destination> destinations_of(
    const std::filesystem::path& folder, const std::vector<PresetBatch>& batches) {
  std::map<std::filesystem::path, Destination> destinations;
  for (const auto& batch : batches) {
    const auto path = preset_path(folder, batch.device.slug, batch.op);
    auto& destination = destinations[path];
    if (!destination.path.empty()) {
      const auto aliases = united(destination.device.aliases, batch.device.aliases);
      destination.device.aliases = aliases;
    } else {
      destination.path = path;
      destination.device = batch.device;
      destination.op = batch.op;
      destination.comparison = batch.comparison;
    }
    for (auto& [key, record] : by_compared_part(batch.records, batch.comparison))
      destination.records.insert_or_assign(key, std::move(record));
  }
  // Before any name in them becomes a path.
  for (const auto& [path, destination] : destinations)
    check_text(preset_text(destination.device, destination.op, values(destination.records)), path);
  return destinations;
}

void lock_and_stage(Destination& destination, const LockWait& wait) {
  destination.lock = std::make_unique<FileLock>(lock_path(destination.path), wait);
  if (auto existing = existing_file(destination.path, destination.device, destination.op)) {
    destination.records.merge(by_compared_part(existing->records, destination.comparison));
    // The caller's facts were just read from the device, so they replace the old; aliases are
    // edited by hand and stay.
    destination.device.aliases = united(existing->device.aliases, destination.device.aliases);
  }
  destination.staged = std::make_unique<StagedFile>(
      destination.path,
      preset_text(destination.device, destination.op, values(destination.records)));
}

}  // namespace

std::vector<std::filesystem::path> merge_preset_batches(const std::filesystem::path& folder,
                                                        const std::vector<PresetBatch>& batches,
                                                        const LockWait& wait) {
  auto destinations = destinations_of(folder, batches);
  for (auto& [path, destination] : destinations) lock_and_stage(destination, wait);
  try {
    for (auto& [path, destination] : destinations) destination.staged->publish();
  } catch (...) {
    for (auto& [path, destination] : destinations) destination.staged->withdraw();
    throw;
  }
  std::vector<std::filesystem::path> paths;
  for (const auto& batch : batches)
    paths.push_back(preset_path(folder, batch.device.slug, batch.op));
  return paths;
}

std::filesystem::path merge_preset_records(const std::filesystem::path& folder,
                                           const PresetDevice& device, const std::string& op,
                                           const std::vector<PresetRecord>& records,
                                           const LockWait& wait, const Comparison& comparison) {
  return merge_preset_batches(folder, {{device, op, records, comparison}}, wait).front();
}

}  // namespace fftune
