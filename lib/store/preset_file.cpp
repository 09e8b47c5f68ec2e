#include "store/preset_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <system_error>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "store/json.hpp"
#include "store/record_json.hpp"
#include "store/renamed_parameters.hpp"

namespace fftune {
namespace {

bool by_problem(const PresetRecord& a, const PresetRecord& b) {
  return a.problem < b.problem;
}

void rename_parameters(PresetRecord& record) {
  for (auto& stage : record.stages) {
    stage.variant = renamed(stage.variant);
    for (auto* others : {&stage.ties, &stage.runners_up})
      for (auto& other : *others) other.id = renamed_id(other.id);
  }
}

void read_records(const JsonValue::Array& items, PresetFile& file, const std::string& name) {
  std::map<Problem, std::size_t> places;
  for (std::size_t i = 0; i < items.size(); ++i) {
    try {
      auto record = record_from_json(items[i]);
      // Whatever the file's schema: records of several versions may have been put into one by hand.
      rename_parameters(record);
      if (record.problem.op != file.op)
        throw Error(ErrorKind::invalid_input,
                    fmt::format("problem.op: expected \"{}\", the file's op, found \"{}\"", file.op,
                                record.problem.op));
      const auto [place, first] = places.try_emplace(record.problem, i);
      if (!first)
        throw Error(ErrorKind::invalid_input,
                    fmt::format("problem: {} is there twice, in records[{}] too: keep one",
                                record.problem.text(), place->second));
      file.records.push_back(std::move(record));
    } catch (const Error& error) {
      file.complaints.push_back(fmt::format("{}:records[{}]: {}", name, i, error.what()));
    }
  }
  std::sort(file.records.begin(), file.records.end(), by_problem);
}

void check_schema(FieldReader& fields) {
  const auto version = fields.integer("schema", 1, std::numeric_limits<std::int64_t>::max());
  if (version > preset_schema)
    throw Error(ErrorKind::invalid_input,
                fmt::format("schema: {} is newer than {}, the newest that this fftune {} reads: "
                            "update fftune",
                            version, preset_schema, FFTUNE_VERSION));
}

/// "nvidia-h200" of "presets/nvidia-h200/", and of "." there.
std::string name_of(const std::filesystem::path& folder) {
  std::error_code error;
  const auto whole = std::filesystem::canonical(folder, error);
  return (error ? folder : whole).filename().string();
}

/// A folder of presets, and one of its devices: `devices` are the files below the first's folders,
/// `own` those of the second.
struct Listing {
  std::vector<std::filesystem::path> devices, own;
};

Listing json_files(const std::filesystem::path& folder, std::vector<PresetFile>& unreadable) {
  Listing listing;
  const auto complain = [&](const std::filesystem::path& path, const std::error_code& error) {
    PresetFile file;
    file.path = path;
    file.complaints.push_back(
        fmt::format("{}: cannot be listed: {}", path.string(), error.message()));
    unreadable.push_back(std::move(file));
  };
  const auto list = [&](const std::filesystem::path& path, const auto& visit) {
    std::error_code error;
    std::filesystem::directory_iterator entry(path, error);
    if (error) return complain(path, error);
    for (; entry != std::filesystem::directory_iterator(); entry.increment(error)) {
      visit(*entry);
    }
    if (error) complain(path, error);
  };
  const auto add = [](const std::filesystem::directory_entry& file, auto& files) {
    const auto name = file.path().filename().string();
    if (name.front() != '.' && file.path().extension() == ".json") files.push_back(file.path());
  };
  list(folder, [&](const std::filesystem::directory_entry& device) {
    std::error_code ignored;  // not a folder: no device's
    if (!device.is_directory(ignored)) return add(device, listing.own);
    list(device.path(), [&](const auto& file) { add(file, listing.devices); });
  });
  std::sort(listing.devices.begin(), listing.devices.end());
  std::sort(listing.own.begin(), listing.own.end());
  return listing;
}

}  // namespace

PresetFile parse_preset_text(const std::string& text, const std::filesystem::path& path) {
  PresetFile file;
  file.path = path;
  try {
    const auto root = parse_json(text);
    FieldReader fields(root, "");
    check_schema(fields);
    file.device = device_from_json(fields.at("device"), "device");
    file.op = fields.name("op");
    const auto& records = fields.array("records");
    fields.finish();
    read_records(records, file, path.string());
  } catch (const Error& error) {
    file.complaints.push_back(fmt::format("{}: {}", path.string(), error.what()));
  }
  return file;
}

PresetFile read_preset_file(const std::filesystem::path& path) {
  try {
    return parse_preset_text(read_whole_file(path), path);
  } catch (const Error& error) {
    PresetFile file;
    file.path = path;
    file.complaints.push_back(fmt::format("{}: {}", path.string(), error.what()));
    return file;
  }
}

std::vector<PresetFile> read_preset_folder(const std::filesystem::path& folder) {
  std::vector<PresetFile> files;
  std::error_code error;
  const auto status = std::filesystem::status(folder, error);
  if (status.type() == std::filesystem::file_type::not_found) return files;
  if (status.type() == std::filesystem::file_type::regular) return {read_preset_file(folder)};
  const auto add = [&files](PresetFile file, const std::string& place) {
    if (!file.device.slug.empty() && (file.device.slug != place || file.op != file.path.stem()))
      file.misplaced =
          fmt::format("{}: it is the file of {}/{}.json and is read as such: move it there",
                      file.path.string(), file.device.slug, file.op);
    files.push_back(std::move(file));
  };
  const Listing listing = json_files(folder, files);
  for (const auto& path : listing.devices)
    add(read_preset_file(path), path.parent_path().filename().string());
  if (!listing.devices.empty()) return files;
  const std::string place = name_of(folder);
  std::vector<PresetFile> own;
  for (const auto& path : listing.own) own.push_back(read_preset_file(path));
  if (std::any_of(own.begin(), own.end(),
                  [&](const PresetFile& file) { return file.device.slug == place; }))
    for (PresetFile& file : own) add(std::move(file), place);
  return files;
}

std::filesystem::path preset_path(const std::filesystem::path& folder, const std::string& slug,
                                  const std::string& op) {
  return (name_of(folder) == slug ? folder : folder / slug) / (op + ".json");
}

std::string preset_text(const PresetDevice& device, const std::string& op,
                        std::vector<PresetRecord> records) {
  std::sort(records.begin(), records.end(), by_problem);
  JsonValue::Array items;
  for (const auto& record : records) items.push_back(to_json(record));
  return json_page({JsonValue::Object{{"schema", {std::int64_t{preset_schema}}},
                                      {"device", to_json(device)},
                                      {"op", {op}},
                                      {"records", {std::move(items)}}}});
}

}  // namespace fftune
