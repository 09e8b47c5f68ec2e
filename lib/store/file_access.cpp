#include "store/file_access.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "store/staged_file.hpp"

namespace fftune {
namespace {

constexpr std::size_t largest_file = std::size_t{64} << 20;

std::string errno_text(int code) {
  return std::generic_category().message(code);
}

[[noreturn]] void fail(const std::string& what, const std::filesystem::path& path, int code) {
  const char* advice = "see that the folder is sound, or choose another";
  if (code == EACCES || code == EPERM || code == EROFS)
    advice = "choose a folder that you may write to";
  else if (code == ENOSPC || code == EDQUOT || code == EFBIG)
    advice = "free some space, or choose another folder; the old file is as it was";
  throw Error(ErrorKind::io,
              fmt::format("cannot {} '{}': {}: {}", what, path.string(), errno_text(code), advice));
}

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

  /// Some file systems report a failed write only here. Returns errno, or 0.
  int close() { return ::close(std::exchange(value_, -1)) == 0 ? 0 : errno; }

 private:
  int value_;
};

/// Returns errno, or 0.
int write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const auto written = ::write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  return ::fsync(descriptor) == 0 ? 0 : errno;
}

bool same_file(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

}  // namespace

std::string read_whole_file(const std::filesystem::path& path) {
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorKind::io, "cannot be read: " + why);
  };
  // Without O_NONBLOCK, opening a pipe would wait for a writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (file.value() < 0 || ::fstat(file.value(), &status) != 0) refuse(errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse("it is not a regular file");
  std::string text;
  for (;;) {
    char block[1 << 14];
    const auto got = ::read(file.value(), block, sizeof(block));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(errno_text(errno));
    if (got == 0) return text;
    text.append(block, static_cast<std::size_t>(got));
    if (text.size() > largest_file) refuse("it is larger than 64 MiB, too large to be a preset");
  }
}

namespace {

/// What is to be replaced: the file itself, or what a link points to.
struct Target {
  std::filesystem::path path;
  std::filesystem::path folder;
  bool exists = false;
  mode_t mode = 0;
};

Target target_of(const std::filesystem::path& given) {
  Target target;
  std::error_code error;
  target.path = given;
  if (std::filesystem::is_symlink(given, error)) {
    target.path = std::filesystem::weakly_canonical(given, error);
    if (error) fail("write", given, error.value());
  }
  target.folder = target.path.has_parent_path() ? target.path.parent_path() : ".";
  struct stat status {};
  if (::stat(target.path.c_str(), &status) != 0) {
    if (errno != ENOENT) fail("write", given, errno);
    return target;
  }
  const auto refuse = [&](const char* why) {
    throw Error(ErrorKind::io, fmt::format("cannot write '{}': {}", given.string(), why));
  };
  if (!S_ISREG(status.st_mode)) refuse("it is not a regular file: choose another name");
  target.exists = true;
  target.mode = status.st_mode & 07777;
  // By the mode alone: the superuser may write anything, and in a shared folder another user's file
  // may be replaced.
  if ((target.mode & 0222) == 0) refuse("it is read-only: chmod u+w it, or choose another");
  return target;
}

}  // namespace

void require_replaceable(const std::filesystem::path& path) {
  const Target target = target_of(path);
  // Permission bits alone do not tell (root, read-only mounts, quotas): only writing does. The name
  // is random and the file new, so that no link which others laid is followed.
  std::string probe = (target.folder / ".writable-XXXXXX").string();
  Descriptor file(::mkostemp(probe.data(), O_CLOEXEC));
  if (file.value() < 0) fail("write", path, errno);
  int code = write_all(file.value(), "probe");
  if (const int closing = file.close(); code == 0) code = closing;
  ::unlink(probe.c_str());
  if (code != 0) fail("write", path, code);
}

StagedFile::StagedFile(const std::filesystem::path& given, std::string_view text) {
  const auto [path, folder, exists, mode] = target_of(given);
  path_ = path;
  // One name for all, so that what a crash leaves behind is overwritten by the next writer.
  temporary_ = folder / ("." + path.filename().string() + ".new");
  ::unlink(temporary_.c_str());
  Descriptor file(
      ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, exists ? 0600 : 0666));
  if (file.value() < 0) {
    const int code = errno;
    fail("create", std::exchange(temporary_, ""), code);
  }
  int code = write_all(file.value(), text);
  if (exists && code == 0 && ::fchmod(file.value(), mode) != 0) code = errno;
  if (const int closing = file.close(); code == 0) code = closing;
  if (code == 0) return;
  ::unlink(temporary_.c_str());
  fail("write", path, code);
}

StagedFile::~StagedFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void StagedFile::publish() {
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("write", path_, errno);
  temporary_.clear();
  const auto own_folder = path_.has_parent_path() ? path_.parent_path() : ".";
  const Descriptor folder(::open(own_folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder, and say EINVAL: there is nothing more to do there.
  if (folder.value() < 0 || (::fsync(folder.value()) != 0 && errno != EINVAL))
    fail("sync the folder of", path_, errno);
}

void replace_file(const std::filesystem::path& path, std::string_view text) {
  StagedFile(path, text).publish();
}

FileLock::FileLock(std::filesystem::path path, const LockWait& wait) : path_(std::move(path)) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds look_again{20};
  const auto began = Clock::now();
  bool told = false;
  const auto give_up = [&](const std::string& why) {
    ::close(descriptor_);
    throw Error(ErrorKind::io, fmt::format("{} while another process held the lock '{}': let it "
                                           "finish, or end it, and try again",
                                           why, path_.string()));
  };
  for (;;) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    // Another user's can be waited for all the same, where the file system does not ask for more.
    if (descriptor_ < 0 && errno == EACCES) {
      descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
      errno = EACCES;
    }
    if (descriptor_ < 0) fail("create the lock", path_, errno);
    int code = 0;
    while ((code = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno) == EWOULDBLOCK ||
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
    const bool current = code == 0 && ::fstat(descriptor_, &held) == 0 &&
                         ::stat(path_.c_str(), &standing) == 0 && same_file(held, standing);
    if (current) return;
    ::close(descriptor_);
    if (code != 0) fail("lock", path_, code);
  }
}

FileLock::~FileLock() {
  // Removed while still locked, so that nobody can have locked this file meanwhile.
  ::unlink(path_.c_str());
  ::close(descriptor_);
}

}  // namespace fftune
