// all-reduce on the CPU: each rank copies its x into the memory of every peer, greets it, waits for
// its greeting, and adds the rows in rank order. The memory is shared between processes.
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/all_reduce/cpu_peers.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::all_reduce {
namespace {

std::vector<float> floats_of(DType dtype, const std::byte* row, std::int64_t d) {
  std::vector<float> values(static_cast<std::size_t>(d));
  decode(dtype, row, std::span<float>(values));
  return values;
}

/// Makes each value one of the dtype.
void round_all(DType dtype, std::vector<float>& values, std::byte* out) {
  encode(dtype, std::span<const float>(values), out);
  decode(dtype, out, std::span<float>(values));
}

RowWork work(const Problem& problem) {
  const Form form = form_of(problem);
  return {.rows = form.m, .row_bytes = form.row_bytes(), .nontemporal = false};
}

Program program(const Problem& problem, const DeviceFacts&, const Config& config) {
  const Form form = form_of(problem);
  const RowTasks tasks(work(problem), config);
  const TensorPlaces at(all_reduce_op().tensors(problem));
  return peers_program(
      form, at.count(), at.at("group"),
      [=, tag = tag_of(problem, ""), x = at.at("x"), residual = at.at("residual"), w = at.at("w"),
       y = at.at("y"), sum = at.at("sum"), scale = at.at(form.scale_given ? "y_scale" : "scale")](
          const HostCall& call, const Peers& peers) {
        const auto place = [&](std::size_t tensor) {
          return static_cast<std::byte*>(address_of(call, tensor));
        };
        const auto bytes = static_cast<std::size_t>(form.bytes());
        peers.require(form.ranks, bytes);
        for (int p = 0; p < form.ranks; ++p)
          if (peers.is_peer(p)) std::memcpy(peers.sent_to(p), place(x), bytes);
        peers.greet(tag);
        peers.await(tag);
        const auto weights =
            form.normalises ? floats_of(form.dtype, place(w), form.d) : std::vector<float>();
        tasks.run(call.parallel, nullptr, [&](std::int64_t row) {
          const auto offset = static_cast<std::size_t>(row * form.row_bytes());
          const auto row_of = [&](const std::byte* matrix) {
            return floats_of(form.dtype, matrix + offset, form.d);
          };
          const auto part = [&](int p) {
            return row_of(peers.is_peer(p) ? peers.sent_by(p) : place(x));
          };
          auto total = part(0);
          const auto add = [&](const std::vector<float>& other) {
            for (std::size_t i = 0; i < total.size(); ++i) total[i] += other[i];
          };
          for (int p = 1; p < form.ranks; ++p) add(part(p));
          if (form.adds) add(row_of(place(residual)));
          std::byte* const out =
              place(y) + (form.quantises ? row * form.d : row * form.row_bytes());
          std::vector<std::byte> rounded(static_cast<std::size_t>(form.row_bytes()));
          round_all(form.dtype, total,
                    form.normalises && form.adds ? place(sum) + offset : rounded.data());
          if (!form.normalises) std::copy(rounded.begin(), rounded.end(), out);
          if (!form.normalises) return;
          double squares = 0;
          for (const float value : total) squares += double{value} * value;
          const auto r = static_cast<float>(
              1 / std::sqrt(squares / static_cast<double>(form.d) + double{form.eps}));
          for (float& value : total) value *= r;
          if (form.convention == "llama" && !form.quantises)
            round_all(form.dtype, total, rounded.data());
          for (std::size_t i = 0; i < total.size(); ++i)
            total[i] *= form.convention == "gemma" ? 1 + weights[i] : weights[i];
          if (!form.quantises) return encode(form.dtype, std::span<const float>(total), out);
          auto* const scales = reinterpret_cast<float*>(place(scale));
          if (!form.scale_given)
            scales[row] =
                static_cast<float>(scale_of(largest_magnitude(std::span<const float>(total))));
          for (float& value : total) value /= scales[form.scale_given ? 0 : row];
          encode(DType::fp8, std::span<const float>(total), out);
        });
        peers.finish();
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const CpuRowFamily family(
      {.name = "cpu_all_reduce",
       .summary = "rows of all ranks, added on several threads",
       .sources = {"all_reduce/cpu_families.cpp", "all_reduce/cpu_peers.hpp"},
       .refusal = refuse_peers,
       .program = program},
      work);
  return {&family};
}

}  // namespace fftune::all_reduce
