// File access for presets and reports: read in one go, locked by a lock file, replaced atomically.
#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace fftune {

/// Throws Error(io) with the reason alone, without the path: "cannot be read: Permission denied".
/// Only regular files of at most 64 MiB are read.
std::string read_whole_file(const std::filesystem::path& path);

/// Replaces `path` by `text` in one step: a temporary file in the same folder, written and synced,
/// renamed over it, and the folder synced. Whatever fails, `path` holds the old text or the new,
/// whole. Where `path` is a link, what it points to is replaced; the file's mode stays. Where
/// several may write, the caller holds a FileLock. Throws Error(io) that says what to do.
void replace_file(const std::filesystem::path& path, std::string_view text);

/// Throws what replace_file() would throw for a file that is read-only or no regular file, or whose
/// folder cannot be written: for work to fail before it begins.
void require_replaceable(const std::filesystem::path& path);

/// How to wait for a lock that another process holds.
struct LockWait {
  double most_seconds = 60;
  /// Called once, after a second, with a line that says what is waited for.
  std::function<void(const std::string&)> tell = {};
  /// Whether the user wants an end; asked from the second second on.
  std::function<bool()> cancelled = {};
};

/// Holds off every other FileLock of the same path, in any process or thread, until destroyed.
/// The path is a file of its own, made and removed here (a lock on the folder would leave no
/// trace either, but NFS refuses it). Throws Error(io) that says what to do.
class FileLock {
 public:
  explicit FileLock(std::filesystem::path path, const LockWait& wait = {});
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace fftune
