#include "support/toy_op.hpp"

namespace fftune::test {

std::vector<std::string> ToyFamily::stages() const {
  return stage_.empty() ? std::vector<std::string>{"first", "second"}
                        : std::vector<std::string>{stage_};
}

std::optional<std::string> ToyFamily::refusal(const Problem& problem, const DeviceFacts&) const {
  if (!fallback_ && problem.size("d") % 4 != 0) return "d must be a multiple of 4";
  return std::nullopt;
}

Space ToyFamily::space(const Problem&, const DeviceFacts&) const {
  return Space()
      .parameter("block", "rows at once", {1, 2, 4})
      .constraint("block 4 is out of order", [](const Config& c) { return c.get("block") < 4; });
}

Config ToyFamily::default_config(const Problem&, const DeviceFacts&) const {
  return {{"block", 1}};
}

Program ToyFamily::program(const Problem& problem, const DeviceFacts&, const Config&) const {
  const auto m = problem.size("m");
  const auto d = problem.size("d");
  const auto h = problem.size("h");
  const auto dtype = problem.dtype;
  Program program;
  program.host_tensors = 5;
  if (stage_.empty())
    program.scratch.push_back({static_cast<std::size_t>(m * h) * dtype_bytes(dtype), false});
  if (stage_ != "second")
    program.steps.emplace_back(HostFunction([=, fused = stage_.empty()](const HostCall& call) {
      void* hidden = fused ? call.scratch.at(0) : call.tensors[4];
      toy_product(dtype, m, h, d, call.tensors[0], call.tensors[1], hidden);
    }));
  if (stage_ != "first")
    program.steps.emplace_back(HostFunction([=, fused = stage_.empty()](const HostCall& call) {
      const void* hidden = fused ? call.scratch.at(0) : call.tensors[4];
      toy_product(dtype, m, d, h, hidden, call.tensors[2], call.tensors[3]);
    }));
  return program;
}

std::optional<std::string> WholeToyFamily::refusal(const Problem&, const DeviceFacts&) const {
  return {};
}

std::vector<SizeField> ToyOp::sizes() const {
  return {{.name = "m", .help = "tokens", .default_on_cuda = {1}, .default_on_cpu = {1}},
          {.name = "d", .help = "width"},
          {.name = "h", .help = "hidden width"}};
}

std::vector<DType> ToyOp::dtypes(DeviceKind) const {
  return {DType::f32, DType::bf16, DType::fp16};
}

std::vector<TensorSpec> ToyOp::tensors(const Problem& problem) const {
  const auto m = problem.size("m");
  const auto d = problem.size("d");
  const auto h = problem.size("h");
  const auto t = problem.dtype;
  const double a_scale = 1 / std::sqrt(static_cast<double>(d));
  const double b_scale = 1 / std::sqrt(static_cast<double>(h));
  return {{"x", t, {m, d}, Role::input, 1},
          {"a", t, {h, d}, Role::input, a_scale},
          {"b", t, {d, h}, Role::input, b_scale},
          {"y", t, {m, d}, Role::output, 1},
          {"hidden", t, {m, h}, Role::intermediate, 1}};
}

std::vector<StageSpec> ToyOp::stages(const Problem& problem) const {
  const auto d = problem.size("d");
  const auto h = problem.size("h");
  const double flops = 2.0 * static_cast<double>(problem.size("m")) * static_cast<double>(d * h);
  return {{"first", {"x", "a"}, {"hidden"}, d, flops, 0},
          {"second", {"hidden", "b"}, {"y"}, h, flops, 0}};
}

void ToyOp::reference(const Problem& problem, std::size_t stage, ReferenceTensors& tensors,
                      Parallel&) const {
  ++reference_runs;
  const auto m = static_cast<std::size_t>(problem.size("m"));
  const auto k = static_cast<std::size_t>(problem.size(stage == 0 ? "d" : "h"));
  const auto n = static_cast<std::size_t>(problem.size(stage == 0 ? "h" : "d"));
  const auto& left = tensors.at(stage == 0 ? "x" : "hidden");
  const auto& right = tensors.at(stage == 0 ? "a" : "b");
  auto& out = tensors[stage == 0 ? "hidden" : "y"];
  out.assign(m * n, 0);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < n; ++j)
      for (std::size_t l = 0; l < k; ++l) out[i * n + j] += left[i * k + l] * right[j * k + l];
}

std::vector<const Family*> ToyOp::families() const {
  return {&fused_, &first_, &second_, &first_fallback_, &second_fallback_};
}

Problem ToyOp::problem(DType dtype, std::int64_t m, std::int64_t d, std::int64_t h) {
  return {"toy", "fwd", dtype, {{"m", m}, {"d", d}, {"h", h}}, {}};
}

void toy_product(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, const void* a,
                 const void* b, void* c) {
  const auto width = static_cast<std::size_t>(k);
  const std::size_t element = dtype_bytes(dtype);
  std::vector<float> weights(static_cast<std::size_t>(n) * width);
  decode(dtype, b, weights);
  std::vector<float> row(width);
  std::vector<float> sums(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < static_cast<std::size_t>(m); ++i) {
    decode(dtype, static_cast<const std::byte*>(a) + i * width * element, row);
    for (std::size_t j = 0; j < sums.size(); ++j) {
      float sum = 0;
      for (std::size_t l = 0; l < width; ++l) sum += row[l] * weights[j * width + l];
      sums[j] = sum;
    }
    encode(dtype, sums, static_cast<std::byte*>(c) + i * sums.size() * element);
  }
}

}  // namespace fftune::test
