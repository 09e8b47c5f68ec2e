// The baseline that a user would write without grouped kernels: batched products, as in torch.bmm.
// The number of tokens of an expert is known only on the device, so a loop over each expert's own
// tokens would have to synchronise with the device in each call, and could not be captured in a
// CUDA graph.
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "core/distribution.hpp"
#include "kernels/common/cpu_rows.hpp"
#include "kernels/common/cuda_kernel.hpp"
#include "kernels/common/op_parts.hpp"
#include "kernels/moe/moe.hpp"

namespace fftune::moe {
namespace {

constexpr const char* baselines_file = "moe/baselines.cu";
constexpr std::uint32_t threads = 256;

/// One product for each choice, with a copy of its expert's weights; or one for each expert, of all
/// tokens.
enum class Products { of_choices, of_experts };

class Batches {
 public:
  Batches(const Problem& problem, const DeviceFacts& facts, Products products)
      : problem_(problem),
        facts_(facts),
        shape_(shape_of(problem)),
        gathered_(products == Products::of_choices),
        packed_(packing_of(problem) == Packing::halves),
        count_(gathered_ ? shape_.rows() : shape_.all_experts()),
        rows_(gathered_ ? 1 : shape_.m),
        weights_(packed_ ? std::vector<std::string>{"w_gate_up", "w_down"}
                         : std::vector<std::string>{"w_gate", "w_up", "w_down"}) {}

  /// Bytes besides the op's tensors.
  double bytes() const {
    double bytes = 0;
    for (const TensorSpec& tensor : extra()) bytes += static_cast<double>(tensor.bytes());
    return bytes;
  }

  Baseline baseline() {
    Baseline baseline;
    baseline.name = "unfused";
    baseline.summary = fmt::format(
        "{} in batches, {}, and the sum of the choices",
        facts_.kind == DeviceKind::cpu ? "products of OpenBLAS" : "products of cuBLASLt",
        gathered_ ? "of a copy of each choice's weights" : "of all tokens by every expert");
    baseline.extra = extra();
    places_ = TensorPlaces(moe_ffn_op().tensors(problem_), baseline.extra);
    program_.host_tensors = places_.count();
    append_places();
    if (gathered_) append_copies();
    const std::string x = has_copied_x() ? "x_rows" : "x";
    const std::int64_t of_x = has_copied_x() ? shape_.d : 0;
    if (packed_) {
      append_products(x, of_x, "w_gate_up", "gate_up_rows", 2 * shape_.h, shape_.d);
    } else {
      append_products(x, of_x, "w_gate", "gate_rows", shape_.h, shape_.d);
      append_products(x, of_x, "w_up", "up_rows", shape_.h, shape_.d);
    }
    append_activation();
    append_products("hidden_rows", rows_ * shape_.h, "w_down", "rows", shape_.d, shape_.h);
    append_sum();
    baseline.program = std::move(program_);
    return baseline;
  }

 private:
  bool is_cpu() const { return facts_.kind == DeviceKind::cpu; }
  bool has_copied_x() const { return gathered_ && shape_.m > 1; }
  std::string copy_of(const std::string& weight) const {
    return gathered_ ? weight + "_of_choices" : weight;
  }
  std::int64_t elements_of(const std::string& weight) const {
    return (weight == "w_gate_up" ? 2 : 1) * shape_.h * shape_.d;
  }

  std::vector<TensorSpec> extra() const {
    std::vector<TensorSpec> extra;
    const auto add = [&](const std::string& name, DType dtype, std::vector<std::int64_t> extents) {
      extra.push_back({name, dtype, std::move(extents), Role::intermediate, 1});
    };
    const DType dtype = problem_.dtype;
    add("experts_of", DType::i32, {shape_.rows()});
    if (has_copied_x()) add("x_rows", dtype, {shape_.rows(), shape_.d});
    if (gathered_)
      for (const std::string& weight : weights_)
        add(copy_of(weight), dtype, {count_, elements_of(weight)});
    if (packed_) {
      add("gate_up_rows", dtype, {count_ * rows_, 2 * shape_.h});
    } else {
      add("gate_rows", dtype, {count_ * rows_, shape_.h});
      add("up_rows", dtype, {count_ * rows_, shape_.h});
    }
    add("hidden_rows", dtype, {count_ * rows_, shape_.h});
    add("rows", dtype, {count_ * rows_, shape_.d});
    return extra;
  }

  void append(const char* file, const std::string& expression, Dim3 grid,
              std::vector<Argument> arguments) {
    append_kernel(program_, file, expression, grid, threads, std::move(arguments));
  }

  void append_places() {
    if (is_cpu()) {
      program_.steps.emplace_back(HostFunction(
          [shape = shape_, gathered = gathered_, ids = places_.at("ids"),
           experts_of = places_.at("experts_of"), at = places_.at("places")](const HostCall& call) {
            const auto* const given = static_cast<const std::int32_t*>(call.tensors[ids]);
            const auto chosen = all_choices(shape, {given, given + shape.m * shape.top_k});
            for (std::size_t i = 0; i < chosen.size(); ++i) {
              const auto token = static_cast<std::int64_t>(i) / shape.choices();
              const auto place =
                  gathered ? static_cast<std::int64_t>(i) : chosen[i] * shape.m + token;
              static_cast<std::int32_t*>(call.tensors[experts_of])[i] = std::max(chosen[i], 0);
              static_cast<std::int32_t*>(call.tensors[at])[i] =
                  chosen[i] < 0 ? -1 : static_cast<std::int32_t>(place);
            }
          }));
      return;
    }
    append(
        baselines_file,
        fmt::format("choice_places<{}, {}, {}>", shape_.choices(), shape_.top_k, gathered_),
        {static_cast<std::uint32_t>(ceil_div(shape_.rows(), threads))},
        {tensor_of(places_, "ids"), tensor_of(places_, "experts_of"), tensor_of(places_, "places"),
         static_cast<std::int32_t>(shape_.m), static_cast<std::int32_t>(shape_.experts)});
  }

  /// Without an index a slice of `from` is copied to `repeats` ones.
  void append_copy(const std::string& from, const std::string& index, const std::string& to,
                   std::int64_t repeats, std::int64_t elements) {
    const std::int64_t bytes = elements * static_cast<std::int64_t>(dtype_bytes(problem_.dtype));
    if (is_cpu()) {
      program_.steps.emplace_back(HostFunction([=, slices = static_cast<int>(shape_.rows()),
                                                source = places_.at(from),
                                                at = index.empty() ? absent : places_.at(index),
                                                target = places_.at(to)](const HostCall& call) {
        call.parallel.run(slices, call.parallel.max_threads(), [&](int slice) {
          const std::int64_t of = at == absent
                                      ? slice / repeats
                                      : static_cast<const std::int32_t*>(call.tensors[at])[slice];
          std::memcpy(static_cast<std::byte*>(call.tensors[target]) + slice * bytes,
                      static_cast<const std::byte*>(call.tensors[source]) + of * bytes,
                      static_cast<std::size_t>(bytes));
        });
      }));
      return;
    }
    const bool is_aligned = bytes % 16 == 0;
    const std::int64_t units = is_aligned ? bytes / 16 : elements;
    append(baselines_file,
           fmt::format("copy_slices<{}>",
                       is_aligned ? "fftune::vector16" : element_type(problem_.dtype)),
           grid_of_matrix(shape_.rows(), units, threads),
           {tensor_of(places_, from), tensor_or_null(index.empty() ? absent : places_.at(index)),
            tensor_of(places_, to), static_cast<std::int32_t>(shape_.rows()),
            static_cast<std::int32_t>(repeats), units});
  }

  void append_copies() {
    if (has_copied_x()) append_copy("x", "", "x_rows", shape_.choices(), shape_.d);
    for (const std::string& weight : weights_)
      append_copy(weight, "experts_of", copy_of(weight), 1, elements_of(weight));
  }

  /// c [count, rows, n] = a [.., rows, k] · weight [count, n, k]ᵀ
  void append_products(const std::string& a, std::int64_t of_a, const std::string& weight,
                       const std::string& c, std::int64_t n, std::int64_t k) {
    program_.steps.emplace_back(
        LibraryGemm{.dtype = problem_.dtype,
                    .m = rows_,
                    .n = n,
                    .k = k,
                    .a = tensor_of(places_, a),
                    .b = tensor_of(places_, copy_of(weight)),
                    .c = tensor_of(places_, c),
                    .batch = {.count = count_, .a = of_a, .b = n * k, .c = rows_ * n}});
  }

  /// hidden = act(gate) ⊙ up, of all rows.
  void append_activation() {
    const std::int64_t all = count_ * rows_;
    const auto activation = parse_activation(problem_.option("act"));
    const std::size_t gate = places_.at(packed_ ? "gate_up_rows" : "gate_rows");
    const std::size_t up = packed_ ? gate : places_.at("up_rows"),
                      hidden = places_.at("hidden_rows");
    if (is_cpu()) {
      const std::size_t row = static_cast<std::size_t>(shape_.h) * dtype_bytes(problem_.dtype);
      program_.steps.emplace_back(
          HostFunction([=, packed = packed_, columns = static_cast<std::size_t>(shape_.h),
                        kernels = &row_kernels(facts_.arch, problem_.dtype)](const HostCall& call) {
            call.parallel.run(static_cast<int>(all), call.parallel.max_threads(), [&](int at) {
              const auto of = [&](std::size_t place, std::size_t stride) {
                return static_cast<std::byte*>(call.tensors[place]) +
                       static_cast<std::size_t>(at) * stride;
              };
              const std::size_t stride = packed ? 2 * row : row;
              kernels->act_mul(activation, of(gate, stride), of(up, stride) + (packed ? row : 0),
                               of(hidden, row), columns, false);
            });
          }));
      return;
    }
    const auto elements = static_cast<std::int64_t>(16 / dtype_bytes(problem_.dtype));
    append(
        "ffn/baselines.cu",
        fmt::format("act_mul<{}, {}>", element_type(problem_.dtype), activation_type(activation)),
        grid_of_matrix(all, shape_.h, elements * threads),
        {TensorArgument{gate}, tensor_or_null(packed_ ? absent : up), TensorArgument{hidden}, all,
         shape_.h});
  }

  /// y = Σ weight · row over a token's choices, and the residual.
  void append_sum() {
    const std::size_t residual = has_residual(problem_) ? places_.at("residual") : absent;
    if (!is_cpu()) {
      const auto vector = static_cast<std::int64_t>(16 / dtype_bytes(problem_.dtype));
      const bool is_aligned = shape_.d % vector == 0;
      append("moe/combine.cu",
             fmt::format("combine_rows<{}, {}, {}, {}, {}>", element_type(problem_.dtype),
                         shape_.choices(), shape_.top_k, is_aligned, threads),
             grid_of_matrix(shape_.m, shape_.d, (is_aligned ? vector : 1) * threads),
             {tensor_of(places_, "rows"), tensor_of(places_, "places"),
              tensor_of(places_, "weights"), tensor_or_null(residual), tensor_of(places_, "y"),
              static_cast<std::int32_t>(shape_.m), shape_.d});
      return;
    }
    program_.steps.emplace_back(
        HostFunction([=, shape = shape_, dtype = problem_.dtype, rows = places_.at("rows"),
                      at = places_.at("places"), weights = places_.at("weights"),
                      y = places_.at("y")](const HostCall& call) {
          const auto columns = static_cast<std::size_t>(shape.d);
          const auto row_of = [&](std::size_t place, std::int64_t row) {
            return static_cast<std::byte*>(call.tensors[place]) +
                   static_cast<std::size_t>(row) * columns * dtype_bytes(dtype);
          };
          call.parallel.run(static_cast<int>(shape.m), call.parallel.max_threads(), [&](int token) {
            std::vector<float> sum(columns), row(columns);
            if (residual != absent) decode(dtype, row_of(residual, token), sum);
            for (std::int64_t i = 0; i < shape.choices(); ++i) {
              const std::int32_t place =
                  static_cast<const std::int32_t*>(call.tensors[at])[token * shape.choices() + i];
              if (place < 0) continue;
              const float weight =
                  i < shape.top_k
                      ? static_cast<const float*>(call.tensors[weights])[token * shape.top_k + i]
                      : 1;
              decode(dtype, row_of(rows, place), row);
              for (std::size_t column = 0; column < columns; ++column)
                sum[column] += weight * row[column];
            }
            encode(dtype, sum, row_of(y, token));
          });
        }));
  }

  const Problem& problem_;
  const DeviceFacts& facts_;
  Shape shape_;
  bool gathered_, packed_;
  std::int64_t count_, rows_;  // of products, and of each
  std::vector<std::string> weights_;
  TensorPlaces places_{{}};
  Program program_;
};

}  // namespace

std::vector<Baseline> baselines(const Problem& problem, const DeviceFacts& facts) {
  if (problem.pass != "fwd" || problem.dtype == DType::fp8 || stores_gates(problem) ||
      weighs_before(problem) || has_bias(problem) || packing_of(problem) == Packing::interleaved ||
      problem.option("act") == "swiglu-oai" || packed_format(problem).packed ||
      quantises(problem) || has_own_experts(problem))
    return {};
  // Copies are read, written, and read again.
  const Shape shape = shape_of(problem);
  const bool copies = 3 * shape.rows() <= shape.all_experts();
  Batches batches(problem, facts, copies ? Products::of_choices : Products::of_experts);
  constexpr double most_bytes = 8e9;
  if (batches.bytes() > most_bytes) return {};
  return {batches.baseline()};
}

}  // namespace fftune::moe
