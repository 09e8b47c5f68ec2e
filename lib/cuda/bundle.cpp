#include "cuda/bundle.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <utility>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "cuda/bytes.hpp"
#include "cuda/cubin_cache.hpp"

namespace fftune::cuda {
namespace {

// magic | bytes of the file | bytes of the index | checksum of the index | index | kernels, each as
// in the cache, with a checksum of its own. The index: versions of fftune and NVRTC, the number of
// kernels, and of each its key, its code's hash, and its place in the file.
constexpr std::string_view bundle_magic = "fftuneb1";
constexpr std::uint64_t header_bytes = 32;
/// No index and no kernel comes near: memory for it is not even asked for.
constexpr std::uint64_t most_part_bytes = std::uint64_t{256} << 20;

std::string cubin_key(const BundleKey& key, std::string_view code_hash) {
  return fmt::format("{}\n{}\n{}\n{}", key.arch, key.file, code_hash, key.expression);
}

}  // namespace

std::string encode_bundle(const std::map<BundleKey, BundledKernel>& kernels,
                          std::string_view fftune_version, std::string_view nvrtc_version) {
  std::string images;
  const auto index_of = [&](std::uint64_t images_at) {
    ByteWriter index;
    index.text(fftune_version);
    index.text(nvrtc_version);
    index.number(kernels.size());
    images.clear();
    for (const auto& [key, bundled] : kernels) {
      const auto image = encode_cubin_file(cubin_key(key, bundled.code_hash), bundled.kernel);
      index.text(key.arch);
      index.text(key.file);
      index.text(key.expression);
      index.text(bundled.code_hash);
      index.number(images_at + images.size());
      index.number(image.size());
      images += image;
    }
    return std::move(index.out);
  };
  // Numbers have one size, so the index is as long whatever the places are.
  const std::uint64_t index_bytes = index_of(0).size();
  const auto index = index_of(header_bytes + index_bytes);
  ByteWriter file;
  file.out = bundle_magic;
  file.number(header_bytes + index_bytes + images.size());
  file.number(index_bytes);
  file.number(fnv1a(index));
  return file.out + index + images;
}

Bundle::Bundle(const std::filesystem::path& path) : path_(path) {
  try {
    file_.emplace(path_);
  } catch (const Error& error) {
    throw Error(error.kind(), fmt::format("the bundle '{}' {}", path_.string(), error.what()));
  }
  read_index(file_->size());
}

void Bundle::refuse(const std::string& why) const {
  throw Error(
      ErrorKind::invalid_input,
      fmt::format("the bundle '{}' {}: make it again with fftune bundle", path_.string(), why));
}

std::string Bundle::read(std::uint64_t offset, std::uint64_t bytes) const {
  std::string content(bytes, '\0');
  content.resize(file_->read_at(offset, std::as_writable_bytes(std::span(content))));
  return content;
}

void Bundle::read_index(std::uint64_t file_bytes) {
  const auto header = read(0, std::min(file_bytes, header_bytes));
  if (header.substr(0, bundle_magic.size()) != bundle_magic.substr(0, header.size()))
    refuse("is no bundle of fftune's, or of another version's");
  if (header.size() < header_bytes)
    refuse(fmt::format("is cut short: it has {} bytes", file_bytes));
  ByteReader numbers(std::string_view(header).substr(bundle_magic.size()));
  const auto whole = numbers.number();
  const auto index_bytes = numbers.number();
  const auto checksum = numbers.number();
  if (whole > file_bytes)
    refuse(fmt::format("is cut short: {} of {} bytes are there", file_bytes, whole));
  if (whole < file_bytes || index_bytes > whole - header_bytes || index_bytes > most_part_bytes)
    refuse("is damaged");
  const auto content = read(header_bytes, index_bytes);
  if (content.size() != index_bytes || fnv1a(content) != checksum) refuse("is damaged");
  ByteReader index(content);
  version_ = index.text();
  index.text();  // of NVRTC: for people who look into the file
  for (auto left = index.number(); left > 0 && index.good(); --left) {
    BundleKey key;
    Entry entry;
    key.arch = index.text();
    key.file = index.text();
    key.expression = index.text();
    entry.code_hash = index.text();
    entry.offset = index.number();
    entry.bytes = index.number();
    if (entry.offset > whole || entry.bytes > whole - entry.offset || entry.bytes > most_part_bytes)
      refuse("is damaged");
    entries_[std::move(key)] = std::move(entry);
  }
  if (!index.at_end()) refuse("is damaged");
}

Bundle::Found Bundle::find(const BundleKey& key, std::string_view code_hash) const {
  const auto entry = entries_.find(key);
  const auto without = [&](const std::string& why) {
    return Found{std::nullopt, fmt::format("the bundle '{}' {}", path_.string(), why)};
  };
  if (entry == entries_.end())
    return without(archs().contains(key.arch) ? "does not have this kernel"
                                              : fmt::format("has no kernels for {}", key.arch));
  const auto& [own_hash, offset, bytes] = entry->second;
  if (own_hash != code_hash)
    return without(fmt::format("is stale: {} has changed since it was made", key.file));
  auto kernel = decode_cubin_file(cubin_key(key, code_hash), read(offset, bytes));
  if (!kernel) return without("is damaged where this kernel is");
  return {std::move(kernel), ""};
}

std::set<std::string> Bundle::archs() const {
  std::set<std::string> archs;
  for (const auto& [key, entry] : entries_) archs.insert(key.arch);
  return archs;
}

std::string Bundle::complaint(const std::string& arch, const SourceSet& sources) const {
  std::map<std::string, bool> current;  // by file and hash
  std::size_t kernels = 0;
  std::size_t stale = 0;
  std::string first;
  for (const auto& [key, entry] : entries_) {
    if (key.arch != arch) continue;
    ++kernels;
    const auto [known, added] = current.try_emplace(key.file + "\n" + entry.code_hash);
    if (added) known->second = sources.has(key.file) && sources.hash({key.file}) == entry.code_hash;
    if (known->second) continue;
    if (stale++ == 0) first = key.file;
  }
  if (kernels == 0)
    return fmt::format("the bundle '{}' is for {}, not {}: make it with --arch {}", path_.string(),
                       fmt::join(archs(), ", "), arch, arch);
  if (stale == 0) return "";
  return fmt::format(
      "the bundle '{}' is stale: it was made by fftune {}, and the source of {} of its {} kernels "
      "has changed, the first {}: make it again with fftune bundle",
      path_.string(), version_, stale, kernels, first);
}

}  // namespace fftune::cuda
