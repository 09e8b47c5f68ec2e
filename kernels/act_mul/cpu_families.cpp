// Blocks of rows in vectors, on all threads.
#include <cstddef>
#include <cstdint>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cpu_task.hpp"

namespace fftune::act_mul {
namespace {

/// Rows of a tensor, or, packed, halves of rows that are twice as long.
struct Part {
  std::size_t place = absent;
  std::int64_t offset = 0, stride = 0;  // in bytes

  std::byte* row(const HostCall& call, std::int64_t index) const {
    return static_cast<std::byte*>(call.tensors[place]) + offset + index * stride;
  }
};

RowWork work_of(const Problem& problem) {
  return {.rows = problem.size("m"),
          .row_bytes = problem.size("h") * static_cast<std::int64_t>(dtype_bytes(problem.dtype))};
}

Program program(const Problem& problem, const DeviceFacts& facts, const Config& config) {
  const RowWork work = work_of(problem);
  const RowTasks tasks(work, config);
  const auto h = static_cast<std::size_t>(problem.size("h"));
  const auto activation = parse_activation(problem.option("act"));
  const RowKernels& kernels = row_kernels(facts.arch, problem.dtype);
  const TensorPlaces at(act_mul_op().tensors(problem));
  const auto part = [&](std::string_view name) -> Part {
    const std::string_view tensor = tensor_with(problem, name);
    if (tensor == name) return {at.at(tensor), 0, work.row_bytes};
    return {at.at(tensor), name.ends_with("up") ? work.row_bytes : 0, 2 * work.row_bytes};
  };
  return host_program(
      at.count(), [=, &kernels, gate = part("gate"), up = part("up"), out = part("out"),
                   dout = part("dout"), dgate = part("dgate"), dup = part("dup"),
                   backward = problem.pass == "bwd"](const HostCall& call) {
        tasks.run(call.parallel, kernels.fence, [&](std::int64_t row) {
          if (backward)
            kernels.act_mul_gradient(activation, gate.row(call, row), up.row(call, row),
                                     dout.row(call, row), dgate.row(call, row), dup.row(call, row),
                                     h, tasks.nontemporal);
          else
            kernels.act_mul(activation, gate.row(call, row), up.row(call, row), out.row(call, row),
                            h, tasks.nontemporal);
        });
      });
}

}  // namespace

std::vector<const Family*> cpu_families() {
  static const auto families = cpu_row_families(
      {"cpu_rows", "cpu_gradient_rows"}, "blocks of rows in vectors, on all threads",
      {"act_mul/cpu_families.cpp", activation_source, row_kernel_sources[0], row_kernel_sources[1]},
      {work_of, program});
  return addresses_of(families);
}

}  // namespace fftune::act_mul
