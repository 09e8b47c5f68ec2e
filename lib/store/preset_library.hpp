// All presets that could serve, and the rules that choose one record among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "store/preset_file.hpp"
#include "store/record.hpp"

namespace fftune {

/// How a record's device relates to this one, best first.
enum class DeviceMatch { exact, alias, same_arch_and_size, same_arch };

/// How a preset's device relates to `device`; nothing if they do not match. An alias is one
/// of the file's names for devices that behave the same; size is the number of SMs.
std::optional<DeviceMatch> device_match(const PresetDevice& preset, const DeviceFacts& device);

struct PresetMatch {
  const PresetRecord* record = nullptr;  // lives as long as the library
  std::filesystem::path path;
  DeviceMatch device = DeviceMatch::exact;
  bool exact_shape = false;
  double distance = 0;  // 0 for the exact shape
  std::string reason;   // for people: "presets/nvidia-h200/ffn.json: exact device, nearest m=4096"
};

/// Why the record may not be used for a problem; empty if it may.
using Legality = std::function<std::string(const PresetRecord&, const Problem&)>;

class PresetLibrary {
 public:
  PresetLibrary();

  /// Reads the folders in order of precedence; complaints are collected, never thrown.
  static PresetLibrary load(const std::vector<std::filesystem::path>& folders);

  /// The best legal record, or none. Device matches are tried in order; within one, folders in
  /// order of precedence; within a folder the exact shape, then the nearest by distance(), then
  /// the device nearest in size. After 16 illegal records those of other shapes are not looked at.
  /// Records of another op, pass, dtype or options never match; performance-neutral fields are not
  /// looked at.
  std::optional<PresetMatch> find(const Problem& problem, const DeviceFacts& device,
                                  const Legality& illegal, const Comparison& comparison) const;

  /// The token counts of the records that differ from the problem in nothing else, of devices that
  /// match this one.
  std::set<std::int64_t> recorded_tokens(const Problem& problem, const DeviceFacts& device,
                                         const Comparison& comparison) const;

  /// Why find() has none, for people: "no preset for NVIDIA A100 or another sm_80 device".
  std::string absence(const Problem& problem, const DeviceFacts& device, const Legality& illegal,
                      const Comparison& comparison) const;

  const std::vector<PresetFile>& files() const { return files_; }
  std::vector<std::string> complaints() const;

 private:
  struct RecordIndex {
    std::size_t file = 0, record = 0;
  };
  struct Shelf;
  struct Index;
  struct Indexes;
  struct Search {
    std::optional<PresetMatch> match;
    std::size_t refused = 0;  // illegal records that were nearer
    std::size_t untried = 0;  // Records whose legality nobody has asked for.
    std::string first_refusal;
  };

  Search search(const Problem& problem, const DeviceFacts& device, const Legality& illegal,
                const Comparison& comparison) const;
  /// The records of one op that could serve this device; made when it is first asked for.
  std::shared_ptr<const Index> index_of(const std::string& op, const DeviceFacts& device,
                                        const Comparison& comparison) const;
  std::shared_ptr<const Index> make_index(const std::string& op, const DeviceFacts& device,
                                          const Comparison& comparison) const;
  const PresetRecord& record_at(const RecordIndex& index) const {
    return files_[index.file].records[index.record];
  }

  std::vector<PresetFile> files_;
  std::vector<std::size_t> folders_;  // of each file: its folder's place in the precedence
  std::shared_ptr<Indexes> indexes_;
};

/// Sum over the sizes of |log2(one/other)|, the token count weighing half of the others: a plan
/// depends on it through the number of tiles alone. Infinite if the problems do not have the same
/// sizes, those that are performance-neutral aside. Documented in docs/presets.md.
double distance(const Problem& one, const Problem& other, const Comparison& comparison);

}  // namespace fftune
