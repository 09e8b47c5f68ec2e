// fftune worker: the process that a sweep starts to work with a device. Not for users.
#include <CLI/CLI.hpp>

#include <memory>
#include <optional>
#include <string>

#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"
#include "apps/fftune/saved_inputs.hpp"
#include "apps/fftune/values.hpp"
#include "runtime/devices.hpp"
#include "tuning/worker/serve.hpp"

namespace fftune::tool {

namespace {

struct Options {
  std::string device;
  std::string seed = "0";
  std::string op;  // of the saved values
  WeightOptions weights;
};

int run(const Options& options, const Session& session) {
  std::optional<SavedInputs> saved;
  if (options.weights.given()) saved.emplace(session.catalog.op(options.op), options.weights);
  const InputData data(parse_seed(options.seed, "--seed"), saved ? &*saved : nullptr);
  return serve_worker(session.catalog, data, [&] {
    return open_device(options.device, *session.catalog.sources, session.environment);
  });
}

}  // namespace

void add_worker(CommandLine& line) {
  auto options = std::make_shared<Options>();
  CLI::App& command =
      line.add(line.root(), "worker", "serve a sweep, which starts it",
               [options](const Session& session) { return run(*options, session); });
  command.group("");  // hidden
  command.add_option("--device", options->device, "the device to open")->required();
  command.add_option("--seed", options->seed, "seed of the data");
  command.add_option("--op", options->op, "op of the saved values");
  add_weight_options(command, options->weights);
}

}  // namespace fftune::tool
