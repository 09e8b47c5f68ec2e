#include "device/group_layout.hpp"

#include <fmt/format.h>

namespace fftune {

std::string fault_text(std::uint32_t code, std::chrono::nanoseconds timeout) {
  const auto rank = code >> 8;
  const auto seconds = std::chrono::duration<double>(timeout).count();
  switch (static_cast<GroupFault>(code & 0xff)) {
    case GroupFault::timeout:
      return fmt::format(
          "rank {} did not arrive within {} s: it hangs, or calls fewer collectives; "
          "end the group and make a new one",
          rank, seconds);
    case GroupFault::other_problem:
      return fmt::format(
          "rank {} brought another problem, or another variant of it: call the same "
          "collectives in the same order on all ranks, with the same presets",
          rank);
    case GroupFault::too_large:
      return "a message is larger than the group's memory: make the group with larger max_bytes";
    case GroupFault::lost:
      return fmt::format("rank {} died: end the group and make a new one", rank);
    case GroupFault::left:
      return fmt::format("rank {} has left the group: it calls fewer collectives", rank);
    case GroupFault::none:
      break;
  }
  return fmt::format("unknown error {:#x} of a group", code);
}

}  // namespace fftune
