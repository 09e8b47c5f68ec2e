// Files: the one place that opens them. Read in one go or in parts, replaced atomically, locked by
// a lock file, and kept in folders of this user's own.
//
// Only regular files are read, and they are opened without waiting, so that no pipe, device or
// endless file holds the process up. Nothing is mapped into memory: a file that another process
// cuts short is then an error instead of a SIGBUS.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fftune {

/// The most that is read whole, where nothing else is said: no preset, index or report comes near.
constexpr std::size_t most_file_bytes = std::size_t{64} << 20;

class FileDescriptor {
 public:
  explicit FileDescriptor(int value = -1) : value_(value) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : value_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;

  int value() const { return value_; }
  /// The caller closes it.
  int release();
  /// Some file systems report a failed write only here. Returns errno, or 0.
  int close();

 private:
  int value_;
};

/// Writes all of it and syncs the file. Returns errno, or 0.
int write_all(int descriptor, std::string_view text);

/// A regular file, opened to read. Any thread may read from it.
class InputFile {
 public:
  /// Throws Error(io) with the reason alone, without the path: "cannot be read: Permission denied".
  explicit InputFile(const std::filesystem::path& path);
  /// Takes over a descriptor of a regular file.
  explicit InputFile(FileDescriptor file);

  /// When it was opened.
  std::uint64_t size() const { return size_; }
  /// Fills `out` from the byte `offset` on. Returns how many bytes there were: fewer at the end of
  /// the file. Throws Error(io) with the reason alone.
  std::size_t read_at(std::uint64_t offset, std::span<std::byte> out) const;
  /// Throws Error(io) with the reason alone, also where there are more than `most_bytes`.
  std::string read_whole(std::size_t most_bytes = most_file_bytes) const;

 private:
  FileDescriptor file_;
  std::uint64_t size_ = 0;
};

/// Throws Error(io) with the reason alone, like InputFile.
std::string read_whole_file(const std::filesystem::path& path,
                            std::size_t most_bytes = most_file_bytes);

/// The same for files of the system, which may be missing; empty where they cannot be read.
std::string text_of_file(const std::filesystem::path& path);

/// A file that is written beside the one it is to replace, under a name of its own, so that several
/// may write at once; the last to publish wins. Where `path` is a link, the file that it points to
/// is replaced; the file's mode stays. An unpublished file leaves no trace. One that a killed
/// process left behind is removed by the next writer in the folder, or a day later if that process
/// ran on another host or before the machine started again.
class StagedFile {
 public:
  /// Writes and syncs the text. Throws Error(io) that says what to do.
  StagedFile(const std::filesystem::path& path, std::string_view text);
  ~StagedFile();
  StagedFile(const StagedFile&) = delete;
  StagedFile& operator=(const StagedFile&) = delete;

  /// Renames it over the file and syncs the folder. Whatever fails, the file is as it was before.
  void publish();
  /// After publish(): puts back what was there before.
  void withdraw() noexcept;

 private:
  void sync_folder() const;

  std::filesystem::path path_;  // what is replaced, where the path given is a link
  std::filesystem::path folder_;
  std::filesystem::path temporary_;
  std::filesystem::path old_;  // the old file, under another name, once published
  FileDescriptor held_;        // the lock on the new one
  FileDescriptor old_held_;    // the lock on the old one
  bool existed_ = false;
  bool published_ = false;
};

/// Replaces `path` by `text` in one step: StagedFile, published at once.
void replace_file(const std::filesystem::path& path, std::string_view text);

/// Throws what replace_file() would throw for a file that is read-only or no regular file, that
/// belongs to another user in a folder where only owners rename, or whose folder cannot be written:
/// for work to fail before it begins.
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
  FileDescriptor file_;
};

/// A folder that belongs to this user, for what the program keeps between runs. Its files are
/// reached by plain names, through no link, and only those count that belong to this user under one
/// name and that nobody else may write: others can neither plant files there nor have files written
/// elsewhere. All functions throw Error(io) with the reason alone.
class OwnFolder {
 public:
  /// Who else may write to it: nobody, or the group, as where every user has a group of his own.
  enum class Writers { user, group };

  /// Opens it, and makes it with mode 0700 where it is not there.
  explicit OwnFolder(std::filesystem::path path, Writers writers = Writers::user);
  OwnFolder(const OwnFolder& parent, const std::string& name);

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> names() const;
  struct File {
    std::uint64_t bytes = 0;
    timespec changed = {};
  };
  /// Nothing if there is no such file of this user's.
  std::optional<File> find(const std::string& name) const;
  bool is_writable() const;

  FileDescriptor read(const std::string& name) const;
  /// Nothing if the name is taken.
  std::optional<FileDescriptor> create(const std::string& name, mode_t mode = 0600) const;
  /// To read and to append; makes the file where there is none.
  FileDescriptor append(const std::string& name) const;
  /// Each returns whether it did.
  bool remove(const std::string& name) const noexcept;
  bool rename(const std::string& from, const std::string& to, bool replace) const noexcept;
  /// Sets the times of last access and change to now.
  void touch(const std::string& name) const noexcept;

 private:
  void open(int parent, const char* name);
  FileDescriptor opened(const std::string& name, int flags) const;

  std::filesystem::path path_;
  Writers writers_;
  FileDescriptor folder_;
};

/// Gives closed standard descriptors of this process a file that nothing can be written to: else
/// the next file that is opened, such as the journal, has their number, and gets what is printed.
void hold_standard_descriptors();

}  // namespace fftune
