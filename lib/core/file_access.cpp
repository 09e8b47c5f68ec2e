#include "core/file_access.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <memory>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "core/hash.hpp"

namespace fftune {
namespace {

namespace fs = std::filesystem;

std::string errno_text(int code) {
  return std::generic_category().message(code);
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::io, why);
}

[[noreturn]] void refuse_to_read(const std::string& why) {
  refuse("cannot be read: " + why);
}

[[noreturn]] void fail(const std::string& what, const fs::path& path, int code) {
  const char* advice = "see that the folder is sound, or choose another";
  if (code == EACCES || code == EPERM || code == EROFS)
    advice = "choose a folder that you may write to";
  else if (code == ENOSPC || code == EDQUOT || code == EFBIG)
    advice = "free some space, or choose another folder; the old file is as it was";
  refuse(fmt::format("cannot {} '{}': {}: {}", what, path.string(), errno_text(code), advice));
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (value_ >= 0) ::close(value_);
}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  if (this == &other) return *this;
  close();
  value_ = other.release();
  return *this;
}

int FileDescriptor::release() {
  return std::exchange(value_, -1);
}

int FileDescriptor::close() {
  const int value = release();
  return value < 0 || ::close(value) == 0 ? 0 : errno;
}

int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return ENOSPC;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return ::fsync(descriptor) == 0 ? 0 : errno;
}

InputFile::InputFile(const fs::path& path) {
  struct stat status {};
  // Opening a device may do more than wait: it is not even tried.
  if (::stat(path.c_str(), &status) != 0) refuse_to_read(errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse_to_read("it is not a regular file");
  // Without O_NONBLOCK, opening a pipe that took the file's place would wait for a writer.
  *this = InputFile(FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)));
}

InputFile::InputFile(FileDescriptor file) : file_(std::move(file)) {
  struct stat status {};
  if (file_.value() < 0 || ::fstat(file_.value(), &status) != 0) refuse_to_read(errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse_to_read("it is not a regular file");
  size_ = static_cast<std::uint64_t>(status.st_size);
}

std::size_t InputFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  std::size_t done = 0;
  while (done < out.size()) {
    const auto got = ::pread(file_.value(), out.data() + done, out.size() - done,
                             static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse_to_read(errno_text(errno));
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

std::string InputFile::read_whole(std::size_t most_bytes) const {
  const auto check = [&](std::uint64_t bytes) {
    if (bytes > most_bytes)
      refuse_to_read(fmt::format("it is larger than {} MiB, the most that such a file may have",
                                 most_bytes >> 20));
  };
  check(size_);
  // Files of the system say that they have no bytes.
  std::string text;
  for (std::size_t block = std::max<std::size_t>(size_ + 1, 1 << 14);; block = 1 << 16) {
    const std::size_t begin = text.size();
    text.resize(begin + block);
    const std::size_t got = read_at(begin, std::as_writable_bytes(std::span(text).subspan(begin)));
    text.resize(begin + got);
    check(text.size());
    if (got < block) return text;
  }
}

std::string read_whole_file(const fs::path& path, std::size_t most_bytes) {
  return InputFile(path).read_whole(most_bytes);
}

std::string text_of_file(const fs::path& path) {
  try {
    return read_whole_file(path);
  } catch (const Error&) {
    return "";
  }
}

namespace {

/// The file to replace: the one that was named, or that a link points to.
struct Target {
  fs::path path;
  fs::path folder;
  bool exists = false;
  struct stat status {};
};

/// Why the file system would not let the file be renamed over; empty if it would.
std::string reason_against_rename(const fs::path& path) {
  struct statx extended {};
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &extended) != 0)
    return "";
  const auto has = [&](std::uint64_t attribute) {
    return (extended.stx_attributes & attribute) != 0;
  };
  if (has(STATX_ATTR_IMMUTABLE) || has(STATX_ATTR_APPEND))
    return "it may not be changed: chattr -i -a it, or choose another";
#ifdef STATX_ATTR_MOUNT_ROOT
  if (has(STATX_ATTR_MOUNT_ROOT))
    return "something is mounted on it, so it cannot be replaced: mount its folder instead";
#endif
  return "";
}

Target target_of(const fs::path& given) {
  Target target;
  std::error_code error;
  target.path = given;
  if (fs::is_symlink(given, error)) {
    target.path = fs::weakly_canonical(given, error);
    if (error) fail("write", given, error.value());
  }
  target.folder = target.path.has_parent_path() ? target.path.parent_path() : ".";
  if (::stat(target.path.c_str(), &target.status) != 0) {
    if (errno != ENOENT) fail("write", given, errno);
    return target;
  }
  const auto refuse_to_write = [&](const std::string& why) {
    refuse(fmt::format("cannot write '{}': {}", given.string(), why));
  };
  if (!S_ISREG(target.status.st_mode))
    refuse_to_write("it is not a regular file: choose another name");
  target.exists = true;
  // By the mode alone: the superuser may write anything, and in a shared folder another user's file
  // may be replaced.
  if ((target.status.st_mode & 0222) == 0)
    refuse_to_write("it is read-only: chmod u+w it, or choose another");
  // In a folder such as /tmp only the owner of a file, or of the folder, may rename over it.
  struct stat folder {};
  const auto self = ::geteuid();
  if (self != 0 && target.status.st_uid != self && ::stat(target.folder.c_str(), &folder) == 0 &&
      (folder.st_mode & S_ISVTX) != 0 && folder.st_uid != self)
    refuse_to_write("it belongs to another user: choose another name");
  if (const std::string why = reason_against_rename(target.path); !why.empty())
    refuse_to_write(why);
  return target;
}

// Files beside the one that they are for: ".fftune-", eight digits of the kernel that runs, a dash
// and 16 random ones. Their owner holds a lock on them, so that what a killed process left is
// known.
constexpr std::string_view temporary_start = ".fftune-";
constexpr std::size_t random_digits = 16;
/// One of another host or of an older version, whose lock is not seen here, has no owner any more.
constexpr std::time_t orphaned_seconds = 24 * 3600;

/// The start of the names whose locks this process sees: hosts that share a folder may not share
/// its locks.
std::string temporary_start_here() {
  const std::string boot = text_of_file("/proc/sys/kernel/random/boot_id");
  return fmt::format("{}{}-", temporary_start, hex(fnv1a(boot)).substr(0, 8));
}

/// Nobody can have predicted the name, and laid a link there.
fs::path new_name_beside(const Target& target) {
  std::random_device random;
  const std::uint64_t number = std::uint64_t{random()} << 32 | random();
  return target.folder / fmt::format("{}{:0{}x}", temporary_start_here(), number, random_digits);
}

/// Whether the path names the open file.
bool is_named(const FileDescriptor& file, const fs::path& path) {
  struct stat open {
  }, named{};
  return ::fstat(file.value(), &open) == 0 && ::lstat(path.c_str(), &named) == 0 &&
         same_file(open, named);
}

/// A new file beside `target`, locked; sets `path` to its name. A file of a new name gets the mode
/// that the umask leaves.
FileDescriptor create_beside(const Target& target, fs::path& path) {
  for (;;) {
    const fs::path name = new_name_beside(target);
    FileDescriptor file(::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW,
                               target.exists ? 0600 : 0666));
    if (file.value() < 0) fail("create a file beside", target.path, errno);
    // Another process may have taken it for one that nobody holds before this one could lock it.
    while (::flock(file.value(), LOCK_EX) != 0 && errno == EINTR) {
    }
    if (!is_named(file, name)) continue;
    path = name;
    return file;
  }
}

/// A lock that says that the file is in use; none where it cannot be opened or locked.
FileDescriptor in_use(const fs::path& path) {
  FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (file.value() >= 0 && ::flock(file.value(), LOCK_SH | LOCK_NB) != 0) file.close();
  return file;
}

/// Whether no process of this host holds it; errno is EWOULDBLOCK where one does.
FileDescriptor taken_over(const fs::path& path) {
  constexpr int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  // NFS locks only what is open for writing.
  FileDescriptor file(::open(path.c_str(), O_RDWR | flags));
  if (file.value() < 0) file = FileDescriptor(::open(path.c_str(), O_RDONLY | flags));
  if (file.value() < 0 || ::flock(file.value(), LOCK_EX | LOCK_NB) != 0) {
    const int code = errno;
    file = FileDescriptor();
    errno = code;
  }
  return file;
}

/// Removes what no living process holds, judged beside `own`, a file just made there: its time is
/// by the clock of the file system.
void remove_orphans(const fs::path& folder, const FileDescriptor& own) noexcept try {
  struct stat own_status {};
  if (::fstat(own.value(), &own_status) != 0) return;
  const std::string here = temporary_start_here();
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const fs::path& path = entry->path();
    const std::string name = path.filename().string();
    const bool is_here = name.starts_with(here) && name.size() == here.size() + random_digits;
    const bool is_elsewhere = !is_here && name.starts_with(temporary_start) &&
                              (name.size() == here.size() + random_digits ||
                               name.size() == temporary_start.size() + random_digits);
    struct stat status {};
    if (!(is_here || is_elsewhere) || ::lstat(path.c_str(), &status) != 0 ||
        !S_ISREG(status.st_mode) || status.st_uid != ::geteuid())
      continue;
    const FileDescriptor file = taken_over(path);
    if (file.value() < 0 && errno == EWOULDBLOCK) continue;
    const bool is_free = is_here && file.value() >= 0 && is_named(file, path);
    if (is_free || own_status.st_ctime - status.st_ctime > orphaned_seconds) ::unlink(path.c_str());
  }
} catch (const std::exception&) {
  // They can stay.
}

}  // namespace

void require_replaceable(const fs::path& path) {
  const Target target = target_of(path);
  // Permission bits alone do not tell (root, read-only mounts, quotas): only writing does.
  fs::path probe;
  FileDescriptor file = create_beside(target, probe);
  remove_orphans(target.folder, file);
  int code = write_all(file.value(), "probe");
  if (const int closing = file.close(); code == 0) code = closing;
  ::unlink(probe.c_str());
  if (code != 0) fail("write", path, code);
}

StagedFile::StagedFile(const fs::path& given, std::string_view text) {
  const Target target = target_of(given);
  path_ = target.path;
  folder_ = target.folder;
  held_ = create_beside(target, temporary_);
  remove_orphans(folder_, held_);
  int code = write_all(held_.value(), text);
  if (target.exists && code == 0 && ::fchmod(held_.value(), target.status.st_mode & 07777) != 0)
    code = errno;
  // Some file systems tell of a failed write when a descriptor is closed; the other keeps the lock.
  FileDescriptor second(::dup(held_.value()));
  if (const int closing = second.close(); code == 0) code = closing;
  if (code == 0) return;
  ::unlink(temporary_.c_str());
  fail("write", path_, code);
}

StagedFile::~StagedFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
  if (!old_.empty()) ::unlink(old_.c_str());
}

void StagedFile::sync_folder() const {
  const FileDescriptor folder(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder, and say EINVAL: there is nothing more to do there.
  if (folder.value() < 0 || (::fsync(folder.value()) != 0 && errno != EINVAL))
    fail("sync the folder of", path_, errno);
}

void StagedFile::publish() {
  const Target target = target_of(path_);
  if (target.exists) old_held_ = in_use(path_);
  if (target.exists &&
      ::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0) {
    old_ = std::exchange(temporary_, {});
    // Another process may have replaced the file since.
    if (!is_named(old_held_, old_)) old_held_ = in_use(old_);
  } else {
    // File systems that cannot exchange two files may have second names for one.
    const fs::path second = new_name_beside(target);
    if (target.exists && ::link(path_.c_str(), second.c_str()) == 0) old_ = second;
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("write", path_, errno);
    temporary_.clear();
  }
  held_.close();  // for the next one that replaces it
  existed_ = target.exists;
  published_ = true;
  try {
    sync_folder();
  } catch (...) {
    withdraw();
    throw;
  }
}

void StagedFile::withdraw() noexcept {
  if (!std::exchange(published_, false)) return;
  if (!existed_) {
    ::unlink(path_.c_str());
  } else if (!old_.empty() && ::rename(old_.c_str(), path_.c_str()) == 0) {
    old_.clear();
  }
}

void replace_file(const fs::path& path, std::string_view text) {
  StagedFile(path, text).publish();
}

FileLock::FileLock(fs::path path, const LockWait& wait) : path_(std::move(path)) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds look_again{20};
  const auto began = Clock::now();
  bool told = false;
  const auto give_up = [&](const std::string& why) {
    file_.close();
    throw Error(ErrorKind::io, fmt::format("{} while another process held the lock '{}': let it "
                                           "finish, or end it, and try again",
                                           why, path_.string()));
  };
  for (;;) {
    file_ = FileDescriptor(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    // Another user's can be waited for all the same, where the file system does not ask for more.
    if (file_.value() < 0 && errno == EACCES) {
      file_ = FileDescriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
      errno = EACCES;
    }
    if (file_.value() < 0) fail("create the lock", path_, errno);
    int code = 0;
    while ((code = ::flock(file_.value(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno) == EWOULDBLOCK ||
           code == EINTR) {
      const double waited = std::chrono::duration<double>(Clock::now() - began).count();
      if (waited > wait.most_seconds) give_up(fmt::format("waited for {:.0f} s", waited));
      if (waited > 1 && wait.tell && !std::exchange(told, true))
        wait.tell(
            fmt::format("another process holds the lock '{}': waiting for it, {:.0f} s at most",
                        path_.string(), wait.most_seconds));
      if (waited > 1 && wait.cancelled && wait.cancelled()) give_up("interrupted");
      std::this_thread::sleep_for(look_again);
    }
    // The previous holder removed the file that it locked: only a lock on the file that the path
    // names now counts.
    struct stat held {
    }, standing{};
    const bool current = code == 0 && ::fstat(file_.value(), &held) == 0 &&
                         ::stat(path_.c_str(), &standing) == 0 && same_file(held, standing);
    if (current) return;
    file_.close();
    if (code != 0) fail("lock", path_, code);
  }
}

FileLock::~FileLock() {
  // Removed while still locked, so that nobody can have locked this file meanwhile.
  ::unlink(path_.c_str());
  file_.close();
}

namespace {

constexpr int no_link = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;

/// Whether it belongs to this user and no other may write it.
bool is_own(const struct stat& status, OwnFolder::Writers writers) {
  const mode_t others = writers == OwnFolder::Writers::group ? S_IWOTH : S_IWGRP | S_IWOTH;
  return status.st_uid == ::geteuid() && (status.st_mode & others) == 0;
}

/// A second name may be one that others gave it, in a folder of theirs.
bool is_own_file(const struct stat& status, OwnFolder::Writers writers) {
  return S_ISREG(status.st_mode) && status.st_nlink == 1 && is_own(status, writers);
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == name.npos &&
         name.find('\0') == name.npos;
}

}  // namespace

OwnFolder::OwnFolder(fs::path path, Writers writers) : path_(std::move(path)), writers_(writers) {
  std::error_code error;
  if (path_.has_parent_path()) fs::create_directories(path_.parent_path(), error);
  struct stat status {};
  // Who keeps the folder elsewhere may link to it; others may not choose for him.
  if (::lstat(path_.c_str(), &status) == 0 && S_ISLNK(status.st_mode) && status.st_uid != 0 &&
      status.st_uid != ::geteuid())
    refuse("is a link of another user's");
  open(AT_FDCWD, path_.c_str());
}

OwnFolder::OwnFolder(const OwnFolder& parent, const std::string& name)
    : path_(parent.path_ / name), writers_(parent.writers_) {
  if (!is_plain_name(name)) refuse("has no name that a folder can have");
  open(parent.folder_.value(), name.c_str());
}

void OwnFolder::open(int parent, const char* name) {
  if (::mkdirat(parent, name, 0700) != 0 && errno != EEXIST)
    refuse(fmt::format("cannot be made: {}", errno_text(errno)));
  const int links = parent == AT_FDCWD ? 0 : O_NOFOLLOW;
  folder_ = FileDescriptor(::openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | links));
  struct stat status {};
  if (folder_.value() < 0 || ::fstat(folder_.value(), &status) != 0)
    refuse(fmt::format("cannot be opened: {}", errno_text(errno)));
  if (status.st_uid != ::geteuid()) refuse("belongs to another user");
  if (!is_own(status, writers_)) refuse("is writable by others: chmod 700 it");
}

std::vector<std::string> OwnFolder::names() const {
  std::vector<std::string> names;
  FileDescriptor again(::openat(folder_.value(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  struct Close {
    void operator()(DIR* listing) const { ::closedir(listing); }
  };
  const std::unique_ptr<DIR, Close> listing(again.value() < 0 ? nullptr
                                                              : ::fdopendir(again.value()));
  if (!listing) refuse(fmt::format("cannot be listed: {}", errno_text(errno)));
  again.release();
  while (const dirent* entry = ::readdir(listing.get()))
    if (is_plain_name(entry->d_name)) names.emplace_back(entry->d_name);
  return names;
}

std::optional<OwnFolder::File> OwnFolder::find(const std::string& name) const {
  struct stat status {};
  if (!is_plain_name(name) ||
      ::fstatat(folder_.value(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 ||
      !is_own_file(status, writers_))
    return std::nullopt;
  return File{static_cast<std::uint64_t>(status.st_size), status.st_mtim};
}

bool OwnFolder::is_writable() const {
  return ::faccessat(folder_.value(), ".", W_OK | X_OK, AT_EACCESS) == 0;
}

FileDescriptor OwnFolder::opened(const std::string& name, int flags) const {
  if (!is_plain_name(name)) refuse("has no name that a file can have");
  FileDescriptor file(::openat(folder_.value(), name.c_str(), flags | no_link, 0600));
  struct stat status {};
  if (file.value() < 0 && errno == ELOOP) refuse("is a link, which is not followed: remove it");
  if (file.value() < 0 || ::fstat(file.value(), &status) != 0)
    refuse(fmt::format("cannot be opened: {}", errno_text(errno)));
  if (!S_ISREG(status.st_mode)) refuse("is not a regular file: remove it");
  if (status.st_uid != ::geteuid()) refuse("belongs to another user: remove it");
  if (status.st_nlink != 1) refuse("has another name elsewhere: remove it");
  if (!is_own(status, writers_)) refuse("is writable by others: chmod 600 it");
  return file;
}

FileDescriptor OwnFolder::read(const std::string& name) const {
  return opened(name, O_RDONLY);
}

std::optional<FileDescriptor> OwnFolder::create(const std::string& name, mode_t mode) const {
  if (!is_plain_name(name)) refuse("has no name that a file can have");
  FileDescriptor file(::openat(folder_.value(), name.c_str(),
                               O_RDWR | O_APPEND | O_CREAT | O_EXCL | no_link, mode));
  if (file.value() < 0 && errno == EEXIST) return std::nullopt;
  if (file.value() < 0) refuse(fmt::format("cannot be made: {}", errno_text(errno)));
  return file;
}

FileDescriptor OwnFolder::append(const std::string& name) const {
  // With O_CREAT alone a system may refuse to open what another user owns, for its own reasons.
  if (auto file = create(name)) return std::move(*file);
  return opened(name, O_RDWR | O_APPEND);
}

bool OwnFolder::remove(const std::string& name) const noexcept {
  return ::unlinkat(folder_.value(), name.c_str(), 0) == 0;
}

bool OwnFolder::rename(const std::string& from, const std::string& to,
                       bool replace) const noexcept {
  const int folder = folder_.value();
  if (replace) return ::renameat(folder, from.c_str(), folder, to.c_str()) == 0;
  return ::renameat2(folder, from.c_str(), folder, to.c_str(), RENAME_NOREPLACE) == 0;
}

void OwnFolder::touch(const std::string& name) const noexcept {
  ::utimensat(folder_.value(), name.c_str(), nullptr, AT_SYMLINK_NOFOLLOW);
}

void hold_standard_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(descriptor, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", O_RDONLY);
}

}  // namespace fftune
