#include "runtime/group_messages.hpp"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/error.hpp"

namespace fftune::group_messages {

std::string reason() {
  return std::generic_category().message(errno);
}

bool wait_readable(int descriptor, Clock::time_point deadline) {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd entry{descriptor, POLLIN, 0};
    const int found = ::poll(&entry, 1, static_cast<int>(std::clamp<long>(left, 0, 1 << 30)));
    if (found > 0) return true;
    if (found == 0 && left <= 0) return false;
    if (found < 0 && errno != EINTR) return true;  // the read reports it
  }
}

bool send_message(const Socket& socket, const Message& message, int descriptor) {
  Message copy = message;
  iovec part{&copy, sizeof copy};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &descriptor, sizeof descriptor);
  }
  return ::sendmsg(socket.get(), &header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof copy);
}

std::optional<Received> received_as(Message message, std::size_t bytes, FileDescriptor attached) {
  if (bytes < sizeof message.version || ((message.version ^ protocol) & protocol_name) != 0)
    return {};
  if (message.version != protocol) return Received{.message = {}, .other_version = true};
  if (bytes != sizeof message) return {};
  message.text.back() = '\0';
  message.device.back() = '\0';
  message.library.back() = '\0';
  message.group.back() = '\0';
  return Received{message, attached.release()};
}

std::optional<Received> receive_message(const Socket& socket) {
  Message message;
  FileDescriptor attached;
  const ssize_t bytes = receive_attached(socket, &message, sizeof message, MSG_WAITALL, attached);
  return received_as(message, static_cast<std::size_t>(std::max<ssize_t>(bytes, 0)),
                     std::move(attached));
}

Address::Address(const std::string& name)
    : is_file(name.starts_with('/')), is_tcp(name.starts_with(tcp_scheme)) {
  if (is_tcp) {
    find(name);
    return;
  }
  auto& local = reinterpret_cast<sockaddr_un&>(value);
  // A first byte of zero: the abstract namespace.
  const std::string path = is_file ? name : '\0' + ("fftune-group-" + name);
  local.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), local.sun_path);
  bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
}

const char* Address::path() const {
  return reinterpret_cast<const sockaddr_un&>(value).sun_path;
}

Socket Address::open() const {
  Socket socket(
      ::socket(value.ss_family, (is_tcp ? SOCK_STREAM : SOCK_SEQPACKET) | SOCK_CLOEXEC, 0));
  if (is_tcp) watch_line(socket.get());
  return socket;
}

void Address::watch_line(int socket) {
  const auto set = [&](int level, int option, int number) {
    ::setsockopt(socket, level, option, &number, sizeof number);
  };
  set(SOL_SOCKET, SO_REUSEADDR, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 20000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  const timeval limit{5, 0};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO})
    ::setsockopt(socket, SOL_SOCKET, option, &limit, sizeof limit);
}

bool Address::remove_left() const {
  struct stat file {};
  if (!is_file || ::lstat(path(), &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  const Socket probe = open();
  return ::connect(probe.get(), get(), bytes) != 0 && errno == ECONNREFUSED &&
         ::unlink(path()) == 0;
}

void Address::remove() const {
  if (is_file) ::unlink(path());
}

void Address::find(const std::string& name) {
  const std::string place =
      name.substr(tcp_scheme.size(), name.find('/', tcp_scheme.size()) - tcp_scheme.size());
  const auto colon = place.rfind(':');
  std::string host = place.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int result =
      colon == std::string::npos || host.empty()
          ? EAI_NONAME
          : ::getaddrinfo(host.c_str(), place.substr(colon + 1).c_str(), &hints, &found);
  if (result != 0)
    throw Error(ErrorKind::invalid_input,
                fmt::format("group '{}': {}: give tcp://host:port/word, of the host of rank 0",
                            name, ::gai_strerror(result)));
  std::memcpy(&value, found->ai_addr, found->ai_addrlen);
  bytes = found->ai_addrlen;
  ::freeaddrinfo(found);
}

bool is_own_user(const Address& address, int socket) {
  if (address.is_tcp) return true;
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         peer.uid == ::geteuid();
}

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorKind::unavailable, why);
}

std::string cannot_meet(const std::string& name, const std::string& why) {
  return fmt::format("group '{}': no socket for the ranks to meet: {}", name, why);
}

Introduction introduction_of(std::string_view bytes, const Address& address,
                             const std::string& name) {
  Message message;
  const std::size_t count = std::min(bytes.size(), sizeof message);
  std::memcpy(&message, bytes.data(), count);
  if (count < sizeof message.version)
    return address.is_tcp ? Introduction::incomplete : Introduction::refused;
  if (((message.version ^ protocol) & protocol_name) != 0) return Introduction::refused;
  // A packet of a process of this user, which came whole.
  if (!address.is_tcp) return Introduction::accepted;
  // Another version may have the name elsewhere.
  const bool knows_word = bytes.find(name + '\0') != bytes.npos;
  if (count == sizeof message && !knows_word) return Introduction::refused;
  const bool whole = knows_word && (message.version != protocol || count == sizeof message);
  return whole ? Introduction::accepted : Introduction::incomplete;
}

}  // namespace fftune::group_messages
