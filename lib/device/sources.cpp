#include "device/sources.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/hash.hpp"
#include "device/source_code.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

bool is_device_source(const fs::path& file) {
  return file.extension() == ".cu" || file.extension() == ".cuh";
}

std::string text_in(const fs::path& file) {
  try {
    return read_whole_file(file);
  } catch (const Error& error) {
    throw Error(ErrorKind::invalid_input,
                fmt::format("the device source '{}' {}", file.string(), error.what()));
  }
}

}  // namespace

SourceSet::SourceSet(std::map<std::string, std::string> files) {
  for (auto& [name, text] : files) files_[name].text = std::move(text);
}

std::vector<std::string> SourceSet::names() const {
  std::vector<std::string> names;
  for (const auto& [name, file] : files_) names.push_back(name);
  return names;
}

SourceSet SourceSet::with_device_sources_of(const fs::path& folder) const {
  std::map<std::string, std::string> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error))
    if (is_device_source(entry->path()))
      files[entry->path().lexically_relative(folder).generic_string()] = text_in(entry->path());
  if (error || files.empty())
    throw Error(ErrorKind::invalid_input,
                fmt::format("'{}' has no device sources{}: give the folder 'kernels' of a checkout",
                            folder.string(), error ? " (" + error.message() + ")" : ""));
  for (const auto& [name, file] : files_)
    if (!is_device_source(name)) files[name] = file.text;
  return SourceSet(std::move(files));
}

const SourceSet::File& SourceSet::file_of(std::string_view name) const {
  const auto found = files_.find(std::string(name));
  if (found == files_.end())
    throw Error(ErrorKind::internal, fmt::format("no embedded source '{}'", name));
  return found->second;
}

const SourceSet::File& SourceSet::read(std::string_view name) const {
  const File& file = file_of(name);
  std::call_once(file.read, [&] {
    const auto tokens = tokens_of(file.text);
    file.code_hash = fnv1a(code_of(tokens));
    for (auto& include : includes_of(tokens))
      if (include.quoted) file.includes.push_back(std::move(include.name));
  });
  return file;
}

const std::string& SourceSet::text(std::string_view file) const {
  return file_of(file).text;
}

std::vector<std::string> SourceSet::closure(std::string_view file) const {
  std::set<std::string> seen;
  std::vector<std::string> open{std::string(file)};
  while (!open.empty()) {
    const std::string name = open.back();
    open.pop_back();
    if (name != file && !seen.insert(name).second) continue;
    for (const auto& include : read(name).includes) {
      const bool follow = include.ends_with(".cuh") || files_.contains(include);
      if (follow && include != file && !seen.contains(include)) open.push_back(include);
    }
  }
  std::vector<std::string> closure{std::string(file)};
  closure.insert(closure.end(), seen.begin(), seen.end());
  return closure;
}

std::string SourceSet::hash(const std::vector<std::string>& files) const {
  std::set<std::string> all;
  for (const auto& name : files)
    all.merge([&] {
      const auto names = closure(name);
      return std::set<std::string>(names.begin(), names.end());
    }());
  std::uint64_t state = fnv1a_offset;
  for (const auto& name : all) {
    state = fnv1a(name, state);
    state = fnv1a(std::string_view("\0", 1), state);
    state = fnv1a(hex(read(name).code_hash), state);
  }
  return hex(state);
}

}  // namespace fftune
