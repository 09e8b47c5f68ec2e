// all-argmax on the CPU: logits, then ids go to every peer.
#include <cmath>
#include <cstring>

#include "kernels/all_argmax/all_argmax.hpp"
#include "kernels/all_reduce/cpu_peers.hpp"
#include "kernels/common/stage_family.hpp"

namespace fftune::all_argmax {
namespace {

Program program(const Problem& problem, const DeviceFacts&, const Config&) {
  const all_reduce::Form form = form_of(problem);
  const TensorPlaces at(all_argmax_op().tensors(problem));
  return all_reduce::peers_program(
      form, at.count(), at.at("group"),
      [=, vocab = problem.size("vocab"), tag = all_reduce::tag_of(problem, ""), ids = at.at("ids"),
       logit = at.at("logit"), best_ids = at.at("best_ids"),
       best_logit = at.at("best_logit")](const HostCall& call, const all_reduce::Peers& peers) {
        const auto place = [&](std::size_t tensor) {
          return static_cast<std::byte*>(address_of(call, tensor));
        };
        const auto rows = static_cast<std::size_t>(form.m);
        peers.require(form.ranks, 8 * rows);
        for (int p = 0; p < form.ranks; ++p) {
          if (!peers.is_peer(p)) continue;
          std::memcpy(peers.sent_to(p), place(logit), 4 * rows);
          std::memcpy(peers.sent_to(p) + 4 * rows, place(ids), 4 * rows);
        }
        peers.greet(tag);
        peers.await(tag);
        for (std::size_t row = 0; row < rows; ++row) {
          float best = 0;
          std::uint32_t best_id = 0;
          for (int p = 0; p < form.ranks; ++p) {
            const bool is_peer = peers.is_peer(p);
            float value = 0;
            std::uint32_t id = 0;
            std::memcpy(&value, (is_peer ? peers.sent_by(p) : place(logit)) + 4 * row, 4);
            std::memcpy(&id, (is_peer ? peers.sent_by(p) + 4 * rows : place(ids)) + 4 * row, 4);
            if (p > 0 && !(value > best || (std::isnan(value) && !std::isnan(best)))) continue;
            best = value;
            best_id = id + static_cast<std::uint32_t>(p * vocab);
          }
          std::memcpy(place(best_logit) + 4 * row, &best, 4);
          std::memcpy(place(best_ids) + 4 * row, &best_id, 4);
        }
        peers.finish();
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const StageFamily family =
      cpu_fallback({.name = "cpu_all_argmax",
                    .summary = "rows of all ranks, compared on one thread",
                    .sources = {"all_argmax/cpu_families.cpp", "all_reduce/cpu_peers.hpp"},
                    .refusal = all_reduce::refuse_peers,
                    .program = program});
  return {&family};
}

}  // namespace fftune::all_argmax
