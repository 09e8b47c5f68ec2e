// The host side of choose_decode.cu: which problems it serves, its space, and its launches.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/least_cost.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/struct_text.hpp"
#include "kernels/gemm/decode/decode.hpp"
#include "kernels/head/head.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/sample/sample.hpp"
#include "registry/part_family.hpp"

namespace fftune::head {
namespace {

constexpr const char* kernel_file = "head/choose_decode.cu";

struct Stream : stream_shape {
  int warps = 4, blocks = 1;  // of a block; of an SM
  std::int64_t m, d, vocab;
  int of_token;  // registers for the best id of each token

  /// The part that all configurations of a problem share.
  explicit Stream(const Problem& problem)
      : stream_shape{.operands = 1, .tokens = stream_tokens(problem.size("m"))},
        m(problem.size("m")),
        d(problem.size("d")),
        vocab(problem.size("vocab")),
        of_token(3 + (problem.has("logprobs", "yes") ? 2 : 0) +
                 (problem.has("choose", "sample") ? 4 : 0)) {}
  Stream(const Problem& problem, const Config& config) : Stream(problem) {
    rows = config.get("rows");
    warps = config.get("warps");
    unroll = config.get("unroll");
    blocks = config.get("blocks");
  }

  /// Registers of a thread: the stream's, addresses and loops, and the best ids.
  int thread_registers() const { return registers() + 32 + of_token * halves(); }
  std::int64_t grid(const DeviceFacts& facts) const {
    return std::clamp<std::int64_t>(quotient_up(quotient_up(vocab, rows), warps), 1,
                                    std::int64_t{blocks} * std::max(facts.multiprocessors, 1));
  }
};

TypedSpace<Stream> streams_of(const Problem& problem) {
  using Streams = TypedSpace<Stream>;
  Streams space{Stream(problem)};
  space
      .parameter("rows", "rows of w that a warp takes at once", Streams::to<&Stream::rows>,
                 {8, 16, 32})
      .parameter("warps", "warps of a block", Streams::to<&Stream::warps>, {4, 8, 16})
      .parameter("unroll", "16-byte loads of a row that a thread issues at once",
                 Streams::to<&Stream::unroll>, {1, 2, 4, 8})
      .parameter("blocks", "blocks of an SM", Streams::to<&Stream::blocks>, {1, 2, 3, 4, 6});
  limit_stream(space, {"rows", "warps", "unroll"}, [](const Stream& stream) {
    return StreamNeeds{.loads = stream.loads(),
                       .registers = stream.thread_registers(),
                       .threads = stream.warps * 32,
                       .is_short = stream.d <= 64};
  });
  space.constraint("an SM's blocks share 65,536 registers and 2048 threads",
                   {"rows", "warps", "unroll", "blocks"}, [](const Stream& stream) {
                     const int threads = stream.blocks * stream.warps * 32;
                     return threads <= 1024 + 512 &&
                            stream.thread_registers() <= most_registers(threads);
                   });
  space.constraint(
      "unroll is at most the number of loads of a row", {"unroll"},
      [](const Stream& stream) { return stream.unroll == 1 || 32 * stream.unroll <= stream.d; });
  return space;
}

class ChooseDecode final : public Family {
 public:
  std::string_view name() const override { return "choose_decode"; }
  std::string_view summary() const override {
    return "up to 16 tokens: the product and the choice at the speed of reading the weights once";
  }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override {
    return {std::string("product.") + linear::stage_product,
            std::string("choose.") + sample::stage};
  }
  std::vector<std::string> sources() const override { return {kernel_file, "sample/choose.cu"}; }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (auto reason = refuse_cuda(problem, "fwd", facts)) return reason;
    if (problem.has("choose", "none")) return "it writes no logits: choose=argmax or choose=sample";
    if (problem.has("choose", "filtered"))
      return "what a filter keeps depends on all logits, which it does not have";
    if (packed_format(problem).packed) return "it reads a dense weight";
    if (problem.sizes.contains("best"))
      return "the best ids are found among all logits, which it does not have";
    const GemmProblem gemm = product(problem);
    if (auto reason = no_decode(gemm)) return reason;
    if (gemm.k % 8 != 0)
      return fmt::format("it loads 16 bytes of a row at a time: d={} is no multiple of 8", gemm.k);
    return std::nullopt;
  }

  Space space(const Problem& problem, const DeviceFacts&) const override {
    return streams_of(problem).space();
  }

  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return least_cost(streams_of(problem), name(),
                      [&](const Stream& stream) { return microseconds(stream, facts); });
  }

  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    return 1e-6 * microseconds(Stream(problem, config), facts);
  }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const Stream stream(problem, config);
    const sample::Form form = sample::form_of(part_named(parts_of(problem), "choose")->problem);
    const TensorPlaces places(head_op().tensors(problem));
    const bool normalises = !problem.has("norm", "none");
    const std::int64_t m = problem.size("m"), vocab = problem.size("vocab"),
                       grid = stream.grid(facts), parts = grid * stream.warps;
    Program program;
    program.scratch.push_back({static_cast<std::size_t>(m * parts * sample::partial_bytes), false});
    const std::string expression =
        fmt::format("choose_decode<{}, {}, {}>", element_type(problem.dtype),
                    StructText("choice_form", "draws", form.draws, "sums", form.logprobs),
                    StructText("head_config", "tokens", stream.tokens, "rows", stream.rows, "warps",
                               stream.warps, "unroll", stream.unroll, "blocks", stream.blocks,
                               "bias", problem.has("bias", "yes"), "rounds",
                               !problem.has("logits", "f32"), "caps", form.softcap > 0));
    append_pdl_kernel(
        program, facts, kernel_file, expression, {static_cast<std::uint32_t>(grid)},
        static_cast<std::uint32_t>(stream.warps * 32),
        {tensor_of(places, normalises ? "normalised" : "x"), tensor_of(places, "w"),
         tensor_or_null(places, "bias"), tensor_or_null(places, "temperature"),
         tensor_or_null(places, "seeds"), tensor_or_null(places, "steps"), ScratchArgument{0},
         form.softcap, static_cast<std::int32_t>(m), static_cast<std::int32_t>(vocab),
         static_cast<std::int32_t>(problem.size("d"))});
    sample::append_finish(program, form, places, facts, 0, m, parts);
    return program;
  }

 private:
  static GemmProblem product(const Problem& problem) {
    return linear::product_gemm(part_named(parts_of(problem), "product")->problem);
  }

  /// Memory delivers at full speed once each SM has latency * bandwidth in flight; the last tiles
  /// leave some warps idle.
  static double microseconds(const Stream& stream, const DeviceFacts& facts) {
    const double processors = std::max(facts.multiprocessors, 1);
    const double bytes_per_us =
        0.9e-6 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 2e12);
    const double vocab = static_cast<double>(stream.vocab);
    const double bytes = 2 * vocab * static_cast<double>(stream.d);
    constexpr double latency_us = 1.73;
    const double in_flight = stream.blocks * stream.warps * 512.0 * stream.loads();
    const double starved =
        std::pow(std::max(1.0, latency_us * bytes_per_us / processors / in_flight), 0.21);
    const double tiles = std::ceil(vocab / stream.rows);
    const double warps = static_cast<double>(stream.grid(facts)) * stream.warps;
    const double imbalance = std::ceil(tiles / warps) * warps / tiles;
    // Tiles of 8 rows read their tokens as fast as tiles of 32 do.
    const double tokens_read = 1 + 0.0004 * static_cast<double>(stream.m);
    return bytes / bytes_per_us * std::pow(imbalance, 0.28) * tokens_read * starved *
               (1 + 0.085 / stream.loads()) +
           0.0002 * warps;
  }
};

}  // namespace

const Family& choose_decode() {
  static const ChooseDecode family;
  return family;
}

}  // namespace fftune::head
