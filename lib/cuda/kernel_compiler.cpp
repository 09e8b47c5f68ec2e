#include "cuda/kernel_compiler.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.hpp"
#include "cuda/compile_log.hpp"
#include "cuda/launch_limits.hpp"
#include "cuda/ptx_hash.hpp"

namespace fftune::cuda {
namespace {

/// One compilation; NVRTC keeps its source, log and image until it is destroyed.
class Compilation {
 public:
  /// `headers` are the files that the source may include, by the names that it includes them by.
  Compilation(const Nvrtc& nvrtc, const SourceSet& sources, const std::vector<std::string>& closure)
      : nvrtc_(nvrtc) {
    std::vector<const char*> texts;
    std::vector<const char*> names;
    for (std::size_t i = 1; i < closure.size(); ++i) {
      names.push_back(closure[i].c_str());
      texts.push_back(sources.text(closure[i]).c_str());
    }
    check(nvrtc.create_program(&program_, sources.text(closure[0]).c_str(), closure[0].c_str(),
                               static_cast<int>(names.size()), texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ~Compilation() { nvrtc_.destroy_program(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  nvrtcResult run(const std::string& expression, const std::vector<std::string>& options) {
    check(nvrtc_.add_name_expression(program_, expression.c_str()), "nvrtcAddNameExpression");
    std::vector<const char*> words;
    for (const auto& option : options) words.push_back(option.c_str());
    return nvrtc_.compile_program(program_, static_cast<int>(words.size()), words.data());
  }

  std::string log() const {
    std::size_t size = 0;  // with the terminating zero
    if (nvrtc_.program_log_size(program_, &size) != NVRTC_SUCCESS || size < 2) return {};
    std::string text(size, '\0');
    if (nvrtc_.program_log(program_, text.data()) != NVRTC_SUCCESS) return {};
    // The compiler's part and the assembler's each end with a zero.
    std::replace(text.begin(), text.end(), '\0', '\n');
    return text;
  }

  std::string lowered_name(const std::string& expression) const {
    const char* name = nullptr;
    check(nvrtc_.lowered_name(program_, expression.c_str(), &name), "nvrtcGetLoweredName");
    return name;
  }

  std::string image() const {
    std::size_t size = 0;
    check(nvrtc_.cubin_size(program_, &size), "nvrtcGetCUBINSize");
    std::string bytes(size, '\0');
    check(nvrtc_.cubin(program_, bytes.data()), "nvrtcGetCUBIN");
    return bytes;
  }

 private:
  void check(nvrtcResult result, const char* call) const {
    if (result != NVRTC_SUCCESS)
      throw Error(ErrorKind::internal,
                  fmt::format("NVRTC: {}: {}", call, nvrtc_.error_string(result)));
  }

  const Nvrtc& nvrtc_;
  nvrtcProgram program_ = nullptr;
};

}  // namespace

KernelOrigins compiled_by(std::shared_ptr<const Nvrtc> nvrtc, std::filesystem::path cache_folder) {
  KernelOrigins origins;
  origins.cache_folder = std::move(cache_folder);
  origins.nvrtc = std::make_shared<LazyNvrtc>([nvrtc = std::move(nvrtc)] { return nvrtc; });
  return origins;
}

void check_supported(const Nvrtc& nvrtc, const std::string& arch) {
  if (!nvrtc.supports(arch))
    throw Error(ErrorKind::invalid_input,
                fmt::format("NVRTC {} does not compile for {}: install a newer CUDA Toolkit",
                            nvrtc.version(), arch));
}

KernelCompiler::KernelCompiler(KernelOrigins origins, std::string arch, const SourceSet& sources)
    : origins_(std::move(origins)),
      arch_(std::move(arch)),
      sources_(sources),
      cache_(origins_.cache_folder.empty() ? origins_.cache_folder
                                           : origins_.cache_folder / "cubin"),
      options_{"--std=c++20", "--gpu-architecture=" + arch_, "--ptxas-options=-v",
               "--device-as-default-execution-space", "--generate-line-info"} {}

KernelCompiler::KernelCompiler(std::shared_ptr<const Nvrtc> nvrtc, std::string arch,
                               const SourceSet& sources, const std::filesystem::path& cache_folder)
    : KernelCompiler(compiled_by(nvrtc, cache_folder), std::move(arch), sources) {
  check_supported(*nvrtc, arch_);
}

std::vector<std::string> KernelCompiler::warnings() const {
  std::vector<std::string> warnings;
  if (!cache_.warning().empty()) warnings.push_back(cache_.warning());
  if (origins_.bundle)
    if (auto complaint = origins_.bundle->complaint(arch_, sources_); !complaint.empty())
      warnings.push_back(std::move(complaint));
  return warnings;
}

CompileCounters KernelCompiler::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

const std::string& KernelCompiler::code_hash(const std::string& file) const {
  const std::lock_guard lock(mutex_);
  auto& hash = code_hashes_[file];
  if (hash.empty()) hash = sources_.hash({file});
  return hash;
}

std::string KernelCompiler::cache_key(const Nvrtc& nvrtc, const KernelSource& source,
                                      const std::vector<std::string>& closure) const {
  std::string key = fmt::format("NVRTC {}\n{}\n{}\n", nvrtc.version(), fmt::join(options_, " "),
                                source.expression);
  for (const auto& file : closure) {
    const auto& text = sources_.text(file);
    key += fmt::format("{} {}\n", file, text.size());
    key += text;
  }
  return key;
}

CompileOutcome KernelCompiler::from_bundle(const KernelSource& source) const {
  CompileOutcome outcome;
  auto found =
      origins_.bundle->find({arch_, source.file, source.expression}, code_hash(source.file));
  outcome.failure = std::move(found.reason);
  if (!found.kernel) return outcome;
  outcome.kernel = std::move(*found.kernel);
  outcome.cached = true;
  const std::lock_guard lock(mutex_);
  ++counters_.from_bundle;
  return outcome;
}

CompileOutcome KernelCompiler::compile(const KernelSource& source) const {
  std::string not_bundled;
  if (origins_.bundle) {
    auto outcome = from_bundle(source);
    if (outcome.failure.empty()) return outcome;
    not_bundled = std::move(outcome.failure);
  }
  try {
    const auto nvrtc = origins_.nvrtc->get();
    check_supported(*nvrtc, arch_);
    auto outcome = compile_by(*nvrtc, source);
    if (origins_.no_jit && !outcome.failure.empty() && !not_bundled.empty())
      outcome.failure += ": " + not_bundled;
    return outcome;
  } catch (const Error& error) {
    if (not_bundled.empty()) throw;
    CompileOutcome outcome;
    outcome.failure = fmt::format("{}: {}; {}", source.expression, not_bundled, error.what());
    return outcome;
  }
}

CompileOutcome KernelCompiler::compile_by(const Nvrtc& nvrtc, const KernelSource& source) const {
  const auto closure = sources_.closure(source.file);
  const auto key = cache_key(nvrtc, source, closure);
  CompileOutcome outcome;
  const auto is_cached = [&] {
    auto kernel = cache_.load(key);
    if (!kernel) return false;
    outcome.kernel = std::move(*kernel);
    outcome.cached = true;
    const std::lock_guard lock(mutex_);
    ++counters_.from_cache;
    return true;
  };
  if (is_cached()) return outcome;
  if (origins_.no_jit) {
    outcome.failure = fmt::format(
        "{}: it is not compiled, and compiling is switched off (FFTUNE_NO_JIT)", source.expression);
    return outcome;
  }
  const auto claim = cache_.claim(key);
  if (is_cached()) return outcome;  // by another process, meanwhile
  outcome = build(nvrtc, source, closure);
  {
    const std::lock_guard lock(mutex_);
    ++counters_.compiled;
    counters_.compile_seconds += outcome.seconds;
  }
  if (outcome.failure.empty()) outcome.kernel = cache_.publish(key, std::move(outcome.kernel));
  return outcome;
}

CompileOutcome KernelCompiler::build(const Nvrtc& nvrtc, const KernelSource& source,
                                     const std::vector<std::string>& closure) const {
  CompileOutcome outcome;
  outcome.kernel.report.name = source.expression;
  const auto start = std::chrono::steady_clock::now();
  try {
    Compilation compilation(nvrtc, sources_, closure);
    const auto result = compilation.run(source.expression, options_);
    const auto log = compilation.log();
    if (result == NVRTC_SUCCESS) {
      outcome.kernel.lowered_name = compilation.lowered_name(source.expression);
      outcome.kernel.image = compilation.image();
      outcome.kernel.report = read_assembler_log(log, outcome.kernel.lowered_name);
      outcome.kernel.report.name = source.expression;
    } else {
      outcome.failure = fmt::format("{}: {}", source.expression,
                                    log.empty() ? nvrtc.error_string(result) : first_error(log));
    }
  } catch (const Error& error) {
    outcome.failure = fmt::format("{}: {}", source.expression, error.what());
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  outcome.seconds = elapsed.count();
  return outcome;
}

OfflineCompiler::OfflineCompiler(std::shared_ptr<const Nvrtc> nvrtc, const std::string& arch,
                                 const SourceSet& sources,
                                 const std::filesystem::path& cache_folder)
    : facts_(facts_of_architecture(arch)),
      compiler_(std::move(nvrtc), arch, sources, cache_folder) {}

CompileReport OfflineCompiler::compile(const Program& program) {
  CompileReport report;
  report.cached = true;
  for (const auto& source : program.kernels) {
    auto outcome = compiler_.compile(source);
    report.seconds += outcome.seconds;
    report.cached = report.cached && outcome.cached;
    report.kernels.push_back(std::move(outcome.kernel.report));
    if (!outcome.failure.empty()) {
      report.failure = std::move(outcome.failure);
      return report;
    }
    report.kernels.back().ptx_hash = ptx_hash(outcome.kernel.image);
  }
  for (const auto& step : program.steps) {
    const auto* launch = std::get_if<KernelLaunch>(&step);
    if (launch == nullptr) continue;
    if (launch->kernel >= report.kernels.size())
      throw Error(ErrorKind::internal, fmt::format("a launch of kernel {} of {}", launch->kernel,
                                                   report.kernels.size()));
    const auto& kernel = report.kernels[launch->kernel];
    const auto reason =
        launch_failure(*launch, {kernel.registers, kernel.static_shared_bytes}, facts_);
    if (reason.empty()) continue;
    report.failure = fmt::format("{}: {}", kernel.name, reason);
    break;
  }
  return report;
}

}  // namespace fftune::cuda
