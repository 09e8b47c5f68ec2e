#include "tuning/fake_op.hpp"

namespace fftune {

std::optional<std::string> FakeFamily::refusal(const Problem&, const DeviceFacts&) const {
  return refused;
}

Space FakeFamily::space(const Problem&, const DeviceFacts&) const {
  std::vector<std::int64_t> values;
  for (int i = 0; i < variants_; ++i) values.push_back(i);
  Space space;
  space.parameter("p", "its place", values);
  return space;
}

Config FakeFamily::default_config(const Problem&, const DeviceFacts&) const {
  return {{"p", default_value}};
}

FakeFamily& FakeOp::add(std::string name, std::vector<std::string> stages, int variants) {
  families_.push_back(std::make_unique<FakeFamily>(std::move(name), std::move(stages), variants));
  return *families_.back();
}

std::vector<TensorSpec> FakeOp::tensors(const Problem& problem) const {
  return {{"x", DType::f32, {problem.size("m"), 100}, Role::input, 1},
          {"y", DType::f32, {problem.size("m"), 100}, Role::output, 1}};
}

std::vector<StageSpec> FakeOp::stages(const Problem& problem) const {
  std::vector<StageSpec> all;
  for (int i = 0; i < stages_; ++i)
    all.push_back({std::string(1, static_cast<char>('a' + i)),
                   {},
                   {},
                   1,
                   1e6 * static_cast<double>(problem.size("m")),
                   1e3});
  return all;
}

std::vector<const Family*> FakeOp::families() const {
  std::vector<const Family*> all;
  for (const auto& family : families_) all.push_back(family.get());
  return all;
}

std::vector<Baseline> FakeOp::baselines(const Problem&, const DeviceFacts&) const {
  return {{"unfused", "made up", {}, {}}};
}

std::vector<OpPart> FakeOp::parts(const Problem& problem) const {
  if (!is_made_of_ops) return {};
  return {{"part", this, problem, {}}};
}

FakeCatalog FakeCatalog::of_variants(int variants) {
  FakeCatalog fake(1);
  fake.op.add("f", {"a"}, variants);
  return fake;
}

}  // namespace fftune
