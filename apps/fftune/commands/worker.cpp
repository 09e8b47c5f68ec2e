// fftune worker: what a sweep starts to work with a device in a process of its own. For no person.
#include <CLI/CLI.hpp>

#include <memory>
#include <string>

#include "apps/fftune/command.hpp"
#include "apps/fftune/commands/all.hpp"
#include "apps/fftune/values.hpp"
#include "runtime/devices.hpp"
#include "tuning/worker/serve.hpp"

namespace fftune::tool {

namespace {

struct Options {
  std::string device;
  std::string seed = "0";
};

int run(const Options& options, const Session& session) {
  return serve_worker(session.catalog, parse_seed(options.seed, "--seed"), [&] {
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
  command.add_option("--seed", options->seed, "of the data");
}

}  // namespace fftune::tool
