#include "cuda/backend.hpp"

#include <fmt/format.h>

#include <utility>

#include "core/error.hpp"
#include "cuda/ceilings.hpp"
#include "cuda/cublaslt_product.hpp"
#include "cuda/executable.hpp"
#include "cuda/facts.hpp"
#include "cuda/gemm.hpp"
#include "cuda/launch_limits.hpp"
#include "cuda/session.hpp"

namespace fftune::cuda {

struct CudaBackend::Parts {
  CompileReport report;
  std::vector<std::shared_ptr<const LoadedKernel>> kernels;
  std::vector<std::unique_ptr<const GemmPlan>> products;
};

CudaBackend::CudaBackend(SharedContext context, KernelOrigins origins, DeviceFacts facts,
                         const SourceSet& sources, CudaOptions options)
    : context_(std::move(context)),
      facts_(std::move(facts)),
      options_(std::move(options)),
      compiler_(origins, facts_.arch, sources),
      pool_(context_, compiler_),
      nvml_(Nvml::open(pci_bus(context_->driver(), context_->device()))) {
  const Current current(*context_);
  session_ = std::make_shared<const Session>(context_, facts_.clock_hz,
                                             [context = context_, nvrtc = origins.nvrtc,
                                              arch = facts_.arch, folder = options_.cache_folder] {
                                               return load_delay_kernel(context, nvrtc->get(), arch,
                                                                        folder);
                                             });
}

CudaBackend::~CudaBackend() = default;

std::vector<std::string> CudaBackend::disturbances() {
  return nvml_ ? cuda::disturbances(nvml_->read()) : std::vector<std::string>{};
}

CompileResult CudaBackend::compile(const Program& program) {
  return make_executable(program, AlgorithmChoice::fastest);
}

CompileResult CudaBackend::bind(const Program& program) {
  return make_executable(program, AlgorithmChoice::first);
}

std::size_t CudaBackend::workspace_bytes(const Program& program) const {
  return WorkspaceLayout(program).bytes;
}

CompileResult CudaBackend::make_executable(const Program& program, AlgorithmChoice choice) {
  const Current current(*context_);
  Parts parts;
  parts.report.failure = load_kernels(program, parts);
  if (parts.report.failure.empty()) parts.report.failure = plan_products(program, choice, parts);
  CompileResult result;
  if (parts.report.failure.empty()) {
    try {
      auto executable = std::make_shared<const CudaExecutable>(
          session_, program, std::move(parts.kernels), std::move(parts.products), parts.report);
      result.executable = std::move(executable);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unavailable) throw;
      parts.report.failure = error.what();
    }
  }
  result.report = std::move(parts.report);
  return result;
}

std::string CudaBackend::load_kernels(const Program& program, Parts& parts) {
  parts.report.cached = true;
  for (const auto& source : program.kernels) {
    auto outcome = pool_.load(source);
    parts.report.seconds += outcome.seconds;
    parts.report.cached = parts.report.cached && outcome.cached;
    parts.report.kernels.push_back(std::move(outcome.report));
    if (outcome.kernel == nullptr) return outcome.failure;
    parts.kernels.push_back(std::move(outcome.kernel));
  }
  for (const auto& step : program.steps) {
    if (std::holds_alternative<HostFunction>(step))
      return "a host function cannot be a step on a CUDA device";
    const auto* launch = std::get_if<KernelLaunch>(&step);
    if (launch == nullptr) continue;
    if (launch->kernel >= parts.kernels.size())
      throw Error(ErrorKind::internal,
                  fmt::format("a launch of kernel {} of {}", launch->kernel, parts.kernels.size()));
    const auto& kernel = *parts.kernels[launch->kernel];
    const KernelNeeds needs{kernel.attribute(CU_FUNC_ATTRIBUTE_NUM_REGS),
                            kernel.attribute(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)};
    auto reason = launch_failure(*launch, needs, facts_);
    const auto threads = static_cast<std::int64_t>(launch->block.x) * launch->block.y *
                         launch->block.z;  // in range where there is no reason yet
    const auto most_threads = kernel.attribute(CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK);
    if (reason.empty() && threads > most_threads)
      reason =
          fmt::format("a block of {} threads: the kernel is built for {}", threads, most_threads);
    if (reason.empty()) reason = kernel.parameter_failure(*launch);
    if (!reason.empty()) return fmt::format("{}: {}", kernel.report().name, reason);
  }
  return {};
}

std::string CudaBackend::plan_products(const Program& program, AlgorithmChoice choice,
                                       Parts& parts) {
  try {
    for (const auto& step : program.steps)
      if (const auto* product = std::get_if<LibraryGemm>(&step)) {
        const std::lock_guard lock(products_mutex_);
        parts.products.push_back(std::make_unique<const GemmPlan>(session_, cublaslt(), *product,
                                                                  facts_.l2_bytes, choice));
      }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    return error.what();
  }
  return {};
}

std::shared_ptr<const CublasLt> CudaBackend::cublaslt() {
  if (cublaslt_ == nullptr)
    cublaslt_ = std::make_shared<const CublasLt>(context_, options_.toolkit_folders);
  return cublaslt_;
}

std::shared_ptr<const Nccl> CudaBackend::nccl() {
  const std::lock_guard lock(products_mutex_);
  if (nccl_ == nullptr) nccl_ = Nccl::open(options_.toolkit_folders, options_.nccl);
  return nccl_;
}

CommunicatorOptions::Id CudaBackend::communicator_id() {
  const Current current(*context_);
  const auto library = nccl();
  Nccl::Id id{};
  library->check(library->get_unique_id(&id), "ncclGetUniqueId", ErrorKind::unavailable);
  return id.bytes;
}

std::unique_ptr<Communicator> CudaBackend::communicate(const CommunicatorOptions& options) {
  return std::make_unique<NcclCommunicator>(
      nccl(), options, [context = context_](const std::function<void()>& call) {
        const Current current(*context);
        call();
      });
}

std::size_t CudaBackend::free_bytes() const {
  const Current current(*context_);
  std::size_t free = 0;
  std::size_t total = 0;
  context_->driver().check(context_->driver().mem_get_info(&free, &total), "cuMemGetInfo");
  return free;
}

std::unique_ptr<Buffer> CudaBackend::allocate(std::size_t bytes) {
  const Current current(*context_);
  return cuda::allocate(context_, bytes);
}

void CudaBackend::write(void* device, const void* host, std::size_t bytes) {
  if (bytes == 0) return;
  const Current current(*context_);
  context_->driver().check(
      context_->driver().memcpy_htod_async(device_address(device), host, bytes, session_->stream()),
      "cuMemcpyHtoD");
  session_->synchronize();  // `host` is the caller's again on return
}

void CudaBackend::read(void* host, const void* device, std::size_t bytes) {
  if (bytes == 0) return;
  const Current current(*context_);
  context_->driver().check(
      context_->driver().memcpy_dtoh_async(host, device_address(device), bytes, session_->stream()),
      "cuMemcpyDtoH");
  session_->synchronize();
}

void CudaBackend::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const Current current(*context_);
  cuda::copy(*session_, to, from, bytes);
}

void CudaBackend::fill(void* device, std::uint8_t byte, std::size_t bytes) {
  if (bytes == 0) return;
  const Current current(*context_);
  context_->driver().check(
      context_->driver().memset_d8_async(device_address(device), byte, bytes, session_->stream()),
      "cuMemsetD8");
}

void CudaBackend::synchronize() {
  const Current current(*context_);
  session_->synchronize();
}

bool CudaBackend::multiply(const DoubleProduct& product) {
  const Current current(*context_);
  try {
    const std::lock_guard lock(products_mutex_);
    double_product(*session_, *cublaslt(), product);
    return true;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unavailable) throw;
    return false;
  }
}

std::unique_ptr<Replay> CudaBackend::capture(
    int passes, const std::function<void(int pass, void* stream)>& enqueue) {
  const Current current(*context_);
  return cuda::capture(session_, passes, enqueue);
}

Limits CudaBackend::limits(DType dtype) {
  const Current current(*context_);
  const std::lock_guard lock(products_mutex_);
  const auto known = limits_.find(dtype);
  if (known != limits_.end()) return known->second;
  return limits_[dtype] = measure_limits(session_, facts_, dtype, [this] { return cublaslt(); });
}

}  // namespace fftune::cuda
