#include "cuda/kernel_pool.hpp"

#include <fmt/format.h>

#include "core/error.hpp"

namespace fftune::cuda {
LoadedKernel::LoadedKernel(const SharedContext& context, CompiledKernel compiled)
    : report_(std::move(compiled.report)) {
  const Driver& driver = context->driver();
  CUmodule module = nullptr;
  driver.accept(driver.module_load_data(&module, compiled.image.data()), "cuModuleLoadData");
  module_ = Owned<CUmodule>(context, module, driver.module_unload);
  driver.accept(driver.module_get_function(&function_, module, compiled.lowered_name.c_str()),
                "cuModuleGetFunction");
  // The query also forces lazy loading to happen now: at the first launch it could be inside a
  // capture.
  attribute(CU_FUNC_ATTRIBUTE_NUM_REGS);
}

int LoadedKernel::attribute(CUfunction_attribute attribute) const {
  int value = 0;
  const Driver& driver = module_.context().driver();
  driver.check(driver.func_get_attribute(&value, attribute, function_), "cuFuncGetAttribute");
  return value;
}

void LoadedKernel::allow(std::uint32_t shared_bytes, bool large_cluster) const {
  const std::lock_guard lock(mutex_);
  const Driver& driver = module_.context().driver();
  if (shared_bytes > allowed_shared_bytes_) {
    driver.accept(
        driver.func_set_attribute(function_, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  static_cast<int>(shared_bytes)),
        "cuFuncSetAttribute of the dynamic shared memory");
    allowed_shared_bytes_ = shared_bytes;
  }
  if (large_cluster)
    driver.accept(driver.func_set_attribute(function_,
                                            CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
                  "cuFuncSetAttribute of the cluster size");
}

std::string LoadedKernel::parameter_failure(const KernelLaunch& launch) const {
  const Driver& driver = module_.context().driver();
  if (driver.func_get_param_info == nullptr) return {};
  const std::size_t count = launch.parameters ? 1 : launch.arguments.size();
  for (std::size_t i = 0; i <= count; ++i) {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    const CUresult result = driver.func_get_param_info(function_, i, &offset, &bytes);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_INVALID_VALUE) return {};
    const bool exists = result == CUDA_SUCCESS;
    if (exists != (i < count))
      return fmt::format("{} arguments given, but the kernel takes {}", count,
                         exists ? "more" : std::to_string(i));
    if (i == count) break;
    const std::size_t given =
        launch.parameters ? launch.parameters->bytes : argument_bytes(launch.arguments[i]);
    if (bytes != given)
      return fmt::format("argument {} (from 0) has {} bytes, but the kernel takes {}", i, given,
                         bytes);
  }
  return {};
}

std::shared_ptr<KernelPool::Entry> KernelPool::entry(const KernelSource& source) {
  const std::lock_guard lock(mutex_);
  auto& entry = entries_[{source.file, source.expression}];
  if (entry == nullptr) entry = std::make_shared<Entry>();
  return entry;
}

LoadOutcome KernelPool::load(const KernelSource& source) {
  const auto slot = entry(source);
  const std::lock_guard lock(slot->mutex);
  LoadOutcome outcome;
  if (auto kernel = slot->kernel.lock()) {
    outcome.report = kernel->report();
    outcome.cached = true;
    outcome.kernel = std::move(kernel);
    return outcome;
  }
  auto compiled = compiler_.compile(source);
  outcome.report = compiled.kernel.report;
  outcome.seconds = compiled.seconds;
  outcome.cached = compiled.cached;
  outcome.failure = std::move(compiled.failure);
  if (!outcome.failure.empty()) return outcome;
  try {
    outcome.kernel = std::make_shared<const LoadedKernel>(context_, std::move(compiled.kernel));
    slot->kernel = outcome.kernel;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::device_fault) throw;
    outcome.failure = fmt::format("{}: {}", source.expression, error.what());
  }
  return outcome;
}

}  // namespace fftune::cuda
