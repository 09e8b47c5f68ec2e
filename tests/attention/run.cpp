#include "attention/run.hpp"

namespace fftune::test {

void draw_inputs(const Problem& problem, std::mt19937_64& random, ReferenceTensors& tensors) {
  std::normal_distribution<double> normal;
  for (const TensorSpec& spec : attention_op().tensors(problem)) {
    if (spec.role != Role::input || tensors.contains(spec.name)) continue;
    auto& values = tensors[spec.name];
    values.resize(static_cast<std::size_t>(spec.elements()));
    if (spec.draw)
      spec.draw(random(), values);
    else
      for (double& value : values) value = normal(random) * spec.scale;
  }
}

std::vector<double> rounded(DType dtype, const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * dtype_bytes(dtype));
  encode(dtype, std::span<const double>(values), bytes.data());
  std::vector<double> result(values.size());
  decode(dtype, bytes.data(), std::span<double>(result));
  return result;
}

ReferenceTensors run_compiled(Backend& backend, const Executable& executable,
                              const Problem& problem, ReferenceTensors tensors, void* workspace) {
  const auto specs = attention_op().tensors(problem);
  std::vector<std::unique_ptr<Buffer>> buffers;
  std::vector<void*> addresses;
  for (const TensorSpec& spec : specs) {
    std::vector<std::byte> bytes(spec.bytes(), std::byte{0xff});
    if (spec.role == Role::input)
      encode(spec.dtype, std::span<const double>(tensors.at(spec.name)), bytes.data());
    buffers.push_back(backend.allocate(bytes.size()));
    backend.write(buffers.back()->data(), bytes.data(), bytes.size());
    addresses.push_back(buffers.back()->data());
  }
  executable.enqueue(addresses.data(), workspace, backend.stream());
  backend.synchronize();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].role != Role::output) continue;
    std::vector<std::byte> bytes(specs[i].bytes());
    backend.read(bytes.data(), addresses[i], bytes.size());
    auto& values = tensors[specs[i].name];
    values.resize(static_cast<std::size_t>(specs[i].elements()));
    decode(specs[i].dtype, bytes.data(), std::span<double>(values));
  }
  return tensors;
}

std::unique_ptr<Buffer> workspace_of(Backend& backend, const Executable& executable) {
  return backend.allocate(std::max<std::size_t>(256, executable.workspace_bytes()));
}

ReferenceTensors run_family(Backend& backend, const Family& family, const Config& config,
                            const Problem& problem, ReferenceTensors tensors) {
  const auto compiled = backend.compile(family.program(problem, backend.facts(), config));
  REQUIRE(compiled.report.failure == "");
  const auto workspace = workspace_of(backend, *compiled.executable);
  return run_compiled(backend, *compiled.executable, problem, std::move(tensors),
                      workspace->data());
}

double relative_error(const std::vector<double>& values, const std::vector<double>& reference) {
  REQUIRE(values.size() == reference.size());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i] == reference[i]) {
      if (!std::isinf(reference[i])) norm += reference[i] * reference[i];
      continue;
    }
    error += std::pow(values[i] - reference[i], 2);
    norm += std::pow(reference[i], 2);
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace fftune::test
