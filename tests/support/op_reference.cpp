#include "support/op_reference.hpp"

namespace fftune::test {

void check_registration(const Op& op) {
  const auto& catalog = builtin_catalog();
  REQUIRE(&catalog.op(op.name()) == &op);
  REQUIRE_FALSE(op.families().empty());
  for (const auto* family : op.families()) {
    REQUIRE_FALSE(family->sources().empty());
    REQUIRE(catalog.sources->hash(family->sources()).size() == 16);
    REQUIRE(&family_of(op, family->name()) == family);
  }
}

std::vector<std::string> tensor_names(const Problem& problem) {
  std::vector<std::string> names;
  for (const auto& tensor : builtin_catalog().op(problem.op).tensors(problem))
    names.push_back(tensor.name);
  return names;
}

std::vector<std::byte> drawn_bytes(const TensorSpec& spec, std::mt19937_64& random) {
  std::normal_distribution<double> normal(spec.mean, spec.scale);
  std::vector<double> values(static_cast<std::size_t>(spec.elements()));
  if (spec.draw)
    spec.draw(1, values);
  else
    for (double& value : values) value = normal(random);
  std::vector<std::byte> bytes(spec.bytes());
  encode(spec.dtype, std::span<const double>(values), bytes.data());
  return bytes;
}

ReferenceTensors run_reference(const Problem& problem, ReferenceTensors tensors) {
  HostThreads threads;
  builtin_catalog().op(problem.op).reference(problem, 0, tensors, threads);
  return tensors;
}

}  // namespace fftune::test
