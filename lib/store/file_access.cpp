#include "store/file_access.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/error.hpp"

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

void replace_file(const std::filesystem::path& path, std::string_view text) {
  // One name for all, so that what a crash leaves behind is overwritten by the next writer.
  const auto temporary = path.parent_path() / ("." + path.filename().string() + ".new");
  ::unlink(temporary.c_str());
  Descriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.value() < 0) fail("create", temporary, errno);
  int code = write_all(file.value(), text);
  if (const int closing = file.close(); code == 0) code = closing;
  if (code == 0 && ::rename(temporary.c_str(), path.c_str()) != 0) code = errno;
  if (code != 0) {
    ::unlink(temporary.c_str());
    fail("write", path, code);
  }
  const Descriptor folder(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder, and say EINVAL: there is nothing more to do there.
  if (folder.value() < 0 || (::fsync(folder.value()) != 0 && errno != EINVAL))
    fail("sync the folder of", path, errno);
}

FileLock::FileLock(std::filesystem::path path) : path_(std::move(path)) {
  for (;;) {
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (descriptor_ < 0) fail("create the lock", path_, errno);
    int locked = 0;
    do {
      locked = ::flock(descriptor_, LOCK_EX);
    } while (locked != 0 && errno == EINTR);
    const int code = locked == 0 ? 0 : errno;
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
