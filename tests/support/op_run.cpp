#include "support/op_run.hpp"

namespace fftune::test {

OpRun::OpRun(Backend& backend, const Op& op, const Problem& problem,
             const std::vector<TensorSpec>& extra, std::uint64_t seed)
    : backend_(&backend), specs_(op.tensors(problem)) {
  specs_.insert(specs_.end(), extra.begin(), extra.end());
  for (const TensorSpec& spec : specs_) {
    buffers_.push_back(std::make_unique<GuardedBuffer>(backend));
    buffers_.back()->resize(spec.bytes());
    addresses_.push_back(buffers_.back()->data());
  }
  draw(seed);
}

void OpRun::draw(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const TensorSpec& spec : specs_) {
    std::normal_distribution<float> normal(static_cast<float>(spec.mean),
                                           static_cast<float>(spec.scale));
    std::vector<float> values(static_cast<std::size_t>(spec.elements()));
    for (float& value : values) value = normal(random);
    if (spec.draw) {
      std::vector<double> drawn(values.size());
      spec.draw(seed, drawn);
      std::copy(drawn.begin(), drawn.end(), values.begin());
    }
    std::vector<std::byte> bytes(spec.bytes());
    encode(spec.dtype, values, bytes.data());
    write(spec.name, bytes);
  }
}

std::string OpRun::damage() const {
  std::string all;
  for (std::size_t i = 0; i < specs_.size(); ++i)
    if (const std::string own = buffers_[i]->damage(); !own.empty())
      all += specs_[i].name + ": " + own + "; ";
  return all;
}

void OpRun::write(const std::string& tensor, const std::vector<std::byte>& bytes) {
  backend_->write(addresses_[tensor_index(specs_, tensor)], bytes.data(), bytes.size());
}

void OpRun::alias(const std::string& tensor, const std::string& same) {
  addresses_[tensor_index(specs_, tensor)] = addresses_[tensor_index(specs_, same)];
}

void OpRun::set(const std::string& tensor, const std::vector<float>& values) {
  const std::size_t at = tensor_index(specs_, tensor);
  std::vector<std::byte> bytes(specs_[at].bytes());
  REQUIRE(values.size() == static_cast<std::size_t>(specs_[at].elements()));
  encode(specs_[at].dtype, values, bytes.data());
  write(tensor, bytes);
}

OpRun::Executables OpRun::compile(const std::vector<Program>& programs) {
  Executables executables;
  for (const Program& program : programs) {
    const auto compiled = backend_->compile(program);
    REQUIRE(compiled.report.failure == "");
    executables.push_back(compiled.executable);
  }
  return executables;
}

OpRun::Executables OpRun::compile(const Op& op, const Problem& problem, const Recipe& recipe) {
  std::vector<Program> programs;
  for (std::size_t place = 0; place < recipe.size(); ++place)
    programs.push_back(program_in(recipe, place, op, problem, backend_->facts()));
  return compile(programs);
}

void OpRun::run(const Executables& executables) {
  std::size_t bytes = 256;
  for (const auto& each : executables) bytes = std::max(bytes, each->workspace_bytes());
  if (!workspace_ || workspace_->bytes() < bytes) workspace_ = backend_->allocate(bytes);
  for (const auto& each : executables)
    each->enqueue(addresses_.data(), workspace_->data(), backend_->stream());
  backend_->synchronize();
}

void OpRun::run(const Op& op, const Problem& problem, const Recipe& recipe) {
  run(compile(op, problem, recipe));
}

std::vector<std::byte> OpRun::bytes(const std::string& tensor) const {
  const std::size_t at = tensor_index(specs_, tensor);
  std::vector<std::byte> bytes(specs_[at].bytes());
  backend_->read(bytes.data(), addresses_[at], bytes.size());
  return bytes;
}

std::vector<float> OpRun::values(const std::string& tensor) const {
  const TensorSpec& spec = specs_[tensor_index(specs_, tensor)];
  std::vector<float> values(static_cast<std::size_t>(spec.elements()));
  decode(spec.dtype, bytes(tensor).data(), values);
  return values;
}

double relative_difference(const std::vector<float>& first, const std::vector<float>& second) {
  REQUIRE(first.size() == second.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < first.size(); ++i) {
    difference += std::pow(static_cast<double>(first[i]) - second[i], 2);
    norm += std::pow(static_cast<double>(second[i]), 2);
  }
  return std::sqrt(difference / norm);
}

void check_baselines(Backend& backend, const Op& op, const Problem& problem, double tolerance) {
  const auto baselines = op.baselines(problem, backend.facts());
  REQUIRE_FALSE(baselines.empty());
  OpRun ours(backend, op, problem);
  ours.run(op, problem, default_recipe(op, problem, backend.facts()));
  for (const Baseline& baseline : baselines) {
    OpRun theirs(backend, op, problem, baseline.extra);
    theirs.run(baseline.program);
    for (const TensorSpec& spec : op.tensors(problem))
      if (spec.role == Role::output) {
        CAPTURE(problem.text(), baseline.name, spec.name);
        CHECK(relative_difference(theirs.values(spec.name), ours.values(spec.name)) < tolerance);
      }
  }
}

void check_in_place(Backend& backend, const Op& op, const Problem& problem,
                    const std::vector<std::pair<std::string, std::string>>& pairs) {
  const auto& facts = backend.facts();
  for (const Recipe& recipe :
       {default_recipe(op, problem, facts), fallback_recipe(op, problem, facts)}) {
    OpRun apart(backend, op, problem), in_place(backend, op, problem);
    for (const auto& [gradient, before] : pairs) in_place.alias(gradient, before);
    apart.run(op, problem, recipe);
    in_place.run(op, problem, recipe);
    for (const auto& [gradient, before] : pairs) {
      CAPTURE(problem.text(), recipe_text(recipe), gradient);
      CHECK(in_place.values(gradient) == apart.values(gradient));
    }
  }
}

}  // namespace fftune::test
