// Lines over a connected descriptor, in both directions.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace fftune {

/// The end of a socket that is closed on destruction.
class LineChannel {
 public:
  /// `read`: what was read from it before.
  explicit LineChannel(int descriptor, std::string read = {})
      : descriptor_(descriptor), pending_(std::move(read)) {}
  ~LineChannel();
  LineChannel(const LineChannel&) = delete;
  LineChannel& operator=(const LineChannel&) = delete;

  /// Sends the line and its end; false if nobody is there to read it.
  bool send(const std::string& line);
  /// The next line without its end, if one comes within `seconds`. Nothing else is nothing: see
  /// closed().
  std::optional<std::string> receive(double seconds);
  /// No further line will come: the other end is closed, or sent a line longer than any message.
  bool closed() const { return closed_; }

 private:
  std::optional<std::string> take_line();

  int descriptor_;
  std::string pending_;
  std::size_t searched_ = 0;  // of pending_, without finding an end of line
  bool closed_ = false;
};

}  // namespace fftune
