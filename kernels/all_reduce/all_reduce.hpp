// all-reduce: the sum of x over the ranks of a group, the residual and RMSNorm behind it.
//
//   sum = round(x_0 + x_1 + … + residual)    y = rmsnorm(sum), or the sum itself
//
// y may be quantised to fp8: with a scale for each token, which is written, or with a given scale
// for all (fp8-static). q is y / scale rounded once, from an unrounded y, as in
// kernels/norm/norm.hpp.
//
// x, residual, y, sum [m, d], w [d], scale [m], the given y_scale [1]. Sums are of float, in the
// order of the ranks, so every rank has the same bits. `group` is the rank's own memory
// (kernels/common/group_memory.cuh), as fftune_group_memory gives it. With link=nccl it names the
// communicator of NCCL, which adds, and rounds in between. With link=loopback there is
// none: one rank plays all, whose x are equal, in memory of the plan; so a device that is alone can
// check and time the kernels.
#pragma once

#include "core/dtype.hpp"
#include "device/program.hpp"
#include "kernels/common/all_reduce.cuh"
#include "kernels/common/op_parts.hpp"
#include "kernels/common/parameter_fields.hpp"
#include "registry/op.hpp"

namespace fftune {

/// Defined in op.cpp; listed in kernels/catalog.cpp.
const Op& all_reduce_op();

namespace all_reduce {

/// A problem's sizes and options, read once.
struct Form {
  std::int64_t m = 0, d = 0;
  int ranks = 0;
  DType dtype = DType::f32;
  bool adds = false;        // a residual
  bool normalises = false;  // and `convention` says how
  std::string convention;   // "llama", "gemma", "t5"
  float eps = 0;
  bool quantises = false;    // y, to fp8
  bool scale_given = false;  // one for all tokens
  bool loopback = false;
  bool nccl = false;      // the library adds
  bool as_words = false;  // a kernel's choice: it needs the area of words too

  std::int64_t row_bytes() const { return d * static_cast<std::int64_t>(dtype_bytes(dtype)); }
  std::int64_t bytes() const { return m * row_bytes(); }
};
Form form_of(const Problem& problem);

/// Whether one rank plays all: the problem has no group.
bool is_loopback(const Problem& problem);

/// The scale of a token whose elements are at most `largest`, in fp8.
constexpr double scale_of(double largest) {
  return largest <= 0x1p-100 ? 1 : largest / 448;
}

/// The rank's memory as an input of a collective, with link=peers.
TensorSpec group_tensor();

/// The layout of the memory of a rank that is alone, for one message: its table without addresses.
group_table loopback_table(const Form& form);
/// Bytes of that memory.
std::size_t loopback_bytes(const Form& form);

/// Hash that ranks compare: of the problem, and of the variant where it decides how they exchange
/// data.
std::uint32_t tag_of(const Problem& problem, const std::string& variant);

/// Sets the table of a rank that is alone: its memory is scratch, cleared before each run.
void set_loopback(ParameterFields<group_table> fields, Program& program, const Form& form);

/// Sets the members of a kernel's parameters that say where the group is: `loopback`, or `table`,
/// the address of the tensor at the place `group`.
template <class Params>
void set_group(ParameterFields<Params> fields, Program& program, const Form& form,
               std::size_t group) {
  if (form.loopback) return set_loopback(fields.inside(&Params::loopback), program, form);
  fields.set(&Params::table, TensorArgument{group});
}

/// Why kernels of peers do not serve the problem, or nothing.
std::optional<std::string> refuse_peers(const Problem& problem, const DeviceFacts& facts);

std::vector<const Family*> cuda_families(), cpu_families();

}  // namespace all_reduce
}  // namespace fftune
