// File access for presets: read in one go, locked by a lock file, replaced atomically.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace fftune {

/// Throws Error(io) with the reason alone, without the path: "cannot be read: Permission denied".
/// Only regular files of at most 64 MiB are read.
std::string read_whole_file(const std::filesystem::path& path);

/// Replaces `path` by `text` in one step: a temporary file in the same folder, written and synced,
/// renamed over it, and the folder synced. Whatever fails, `path` holds the old text or the new,
/// whole. The caller holds a FileLock. Throws Error(io) that says what to do.
void replace_file(const std::filesystem::path& path, std::string_view text);

/// Holds off every other FileLock of the same path, in any process or thread, until destroyed.
/// The path is a file of its own, made and removed here (a lock on the folder would leave no
/// trace either, but NFS refuses it). Throws Error(io) that says what to do.
class FileLock {
 public:
  explicit FileLock(std::filesystem::path path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace fftune
