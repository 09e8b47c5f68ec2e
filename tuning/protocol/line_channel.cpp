#include "tuning/protocol/line_channel.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>

namespace fftune {
namespace {

/// More than the largest message: the timings of a group of thousands of variants.
constexpr std::size_t longest_line = 64 << 20;

}  // namespace

LineChannel::~LineChannel() {
  ::close(descriptor_);
}

bool LineChannel::send(const std::string& line) {
  const std::string text = line + '\n';
  for (std::size_t sent = 0; sent < text.size();) {
    const auto now = ::send(descriptor_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) return false;
    sent += static_cast<std::size_t>(now);
  }
  return true;
}

std::optional<std::string> LineChannel::take_line() {
  const auto end = pending_.find('\n', searched_);
  searched_ = pending_.size();
  if (end == pending_.npos) {
    closed_ = closed_ || pending_.size() > longest_line;
    return {};
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end + 1);
  searched_ = 0;
  return line;
}

std::optional<std::string> LineChannel::receive(double seconds) {
  if (auto line = take_line()) return line;
  if (closed_) return {};
  pollfd readable{descriptor_, POLLIN, 0};
  const auto wait = static_cast<int>(std::ceil(std::clamp(seconds, 0.0, 1e6) * 1e3));
  if (::poll(&readable, 1, wait) <= 0) return {};  // a signal ends the wait early, no more
  std::array<char, 1 << 16> bytes;
  const auto count = ::recv(descriptor_, bytes.data(), bytes.size(), 0);
  if (count > 0)
    pending_.append(bytes.data(), static_cast<std::size_t>(count));
  else if (count == 0 || errno != EINTR)
    closed_ = true;
  return take_line();
}

}  // namespace fftune
