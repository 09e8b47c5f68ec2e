#include "core/pending_connections.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <utility>
#include <vector>

#include "core/error.hpp"

namespace fftune {
namespace {

using Clock = std::chrono::steady_clock;

/// Connections that are taken before those that wait are read again.
constexpr int most_at_once = 64;

}  // namespace

PendingConnections::PendingConnections(int listener, PendingOptions options)
    : listener_(listener), options_(std::move(options)) {
  // A connection that is gone before it is taken would block.
  ::fcntl(listener_, F_SETFL, ::fcntl(listener_, F_GETFL) | O_NONBLOCK);
}

std::optional<PendingConnections::Introduced> PendingConnections::next(Clock::time_point deadline) {
  for (;;) {
    wait(deadline);
    const auto now = Clock::now();
    for (auto each = pending_.begin(); each != pending_.end();) {
      const Introduction is = read(each->from);
      if (is == Introduction::accepted) {
        Introduced found = std::move(each->from);
        pending_.erase(each);
        return found;
      }
      each = is == Introduction::refused || each->until <= now ? pending_.erase(each)
                                                               : std::next(each);
    }
    take_new();
    if (now >= deadline) return {};
  }
}

/// Until something comes, or a connection's time or all time is over.
void PendingConnections::wait(Clock::time_point deadline) {
  std::vector<pollfd> entries{{listener_, POLLIN, 0}};
  for (const Pending& each : pending_) {
    entries.push_back({each.from.socket.get(), POLLIN, 0});
    deadline = std::min(deadline, each.until);
  }
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  ::poll(entries.data(), entries.size(), static_cast<int>(std::clamp<long>(left, 0, 1 << 30)));
}

void PendingConnections::take_new() {
  for (int count = 0; count < most_at_once; ++count) {
    Socket socket(::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)) {
      if (pending_.empty())
        throw Error(ErrorKind::unavailable, std::generic_category().message(errno));
      pending_.pop_front();
      return;
    }
    if (!socket && (errno == ECONNABORTED || errno == EINTR)) continue;
    if (!socket) return;
    if (!options_.admits(socket.get())) continue;
    if (pending_.size() >= options_.most) pending_.pop_front();
    pending_.push_back(
        {{std::move(socket), {}, FileDescriptor()}, Clock::now() + options_.patience});
  }
}

ssize_t receive_attached(const Socket& socket, void* to, std::size_t most, int flags,
                         FileDescriptor& attached) {
  iovec part{to, most};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t count = 0;
  // One that ends without reading all resets the connection, behind what it sent.
  do count = ::recvmsg(socket.get(), &header, MSG_CMSG_CLOEXEC | flags);
  while (count < 0 && (errno == EINTR || errno == ECONNRESET));
  if (const cmsghdr* const rights = count > 0 ? CMSG_FIRSTHDR(&header) : nullptr;
      rights && rights->cmsg_type == SCM_RIGHTS) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(rights), sizeof descriptor);
    attached = FileDescriptor(descriptor);
  }
  return count;
}

Introduction PendingConnections::read(Introduced& from) const {
  const std::size_t before = from.bytes.size();
  from.bytes.resize(options_.most_bytes);
  const ssize_t count = receive_attached(from.socket, from.bytes.data() + before,
                                         from.bytes.size() - before, MSG_DONTWAIT, from.attached);
  const int error = errno;
  from.bytes.resize(before + static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  if (count < 0) return error == EAGAIN ? Introduction::incomplete : Introduction::refused;
  if (count == 0) return Introduction::refused;
  const Introduction is = options_.judge(from.bytes);
  const bool full = from.bytes.size() == options_.most_bytes;
  return is == Introduction::incomplete && full ? Introduction::refused : is;
}

}  // namespace fftune
