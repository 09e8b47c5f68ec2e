// rmsnorm by libfftune as an op in C++: what a call costs the host beside the package's ctypes.
//
// With FFTUNE_STABLE it is built on PyTorch's stable ABI: one binary for all versions of PyTorch,
// but no autograd, which stays in Python. Without, torch::autograd::Function derives it in C++.
// host_overhead.py builds and times both.
#include <fftune/fftune.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#ifdef FFTUNE_STABLE
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;
#else
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
#include <torch/types.h>
using at::Tensor;
#endif

// In libtorch_cuda, which a CPU's PyTorch has not.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    std::int32_t device, void** stream);

namespace {

void check(fftune_status status) {
  if (status != FFTUNE_OK) throw std::runtime_error(fftune_last_error());
}

fftune_plan* make_plan(int device, const char* pass, std::int64_t m, std::int64_t d) {
  static std::map<int, fftune_context*> contexts;
  fftune_context*& context = contexts[device];
  if (context == nullptr) check(fftune_context_create(device, nullptr, &context));
  char problem[256];
  std::snprintf(problem, sizeof problem,
                R"({"op": "rmsnorm", "pass": "%s", "dtype": "f32", "m": %lld, "d": %lld})", pass,
                static_cast<long long>(m), static_cast<long long>(d));
  fftune_plan* plan = nullptr;
  check(fftune_plan_create(context, problem, &plan));
  return plan;
}

/// Runs rmsnorm of f32 on the current stream; the op's buffers in the library's order.
template <std::size_t count>
void run(const Tensor& x, bool backward, const std::array<void*, count>& buffers) {
  static std::map<std::tuple<int, bool, std::int64_t, std::int64_t>, fftune_plan*> plans;
  static std::mutex mutex;
  const int device = x.is_cuda() ? static_cast<int>(x.get_device()) : -1;
  const std::int64_t d = x.size(-1), m = x.numel() / d;
  fftune_plan* plan = nullptr;
  {
    const std::lock_guard lock(mutex);
    fftune_plan*& known = plans[{device, backward, m, d}];
    if (known == nullptr) known = make_plan(device, backward ? "bwd" : "fwd", m, d);
    plan = known;
  }
  void* workspace = nullptr;
  Tensor memory;
  if (const auto bytes = static_cast<std::int64_t>(fftune_plan_workspace_bytes(plan)); bytes > 0) {
#ifdef FFTUNE_STABLE
    memory = torch::stable::new_empty(x, {bytes / 4 + 64});
#else
    memory = x.new_empty({bytes / 4 + 64});
#endif
    workspace = reinterpret_cast<void*>(
        (reinterpret_cast<std::uintptr_t>(memory.data_ptr()) + 255) & ~std::uintptr_t{255});
  }
  void* stream = nullptr;
  if (device >= 0) {
    aoti_torch_get_current_cuda_stream(device, &stream);
  }
  check(fftune_plan_run(plan, buffers.data(), count, workspace, stream));
}

Tensor like(const Tensor& x) {
#ifdef FFTUNE_STABLE
  return torch::stable::empty_like(x);
#else
  return at::empty_like(x);
#endif
}

Tensor rmsnorm(const Tensor& x, const Tensor& w) {
  Tensor y = like(x);
  run<3>(x, false, {x.data_ptr(), w.data_ptr(), y.data_ptr()});
  return y;
}

std::tuple<Tensor, Tensor> rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& w) {
  Tensor dx = like(x), dw = like(w);
  run<5>(x, true, {x.data_ptr(), w.data_ptr(), dy.data_ptr(), dx.data_ptr(), dw.data_ptr()});
  return {dx, dw};
}

}  // namespace

#ifdef FFTUNE_STABLE
STABLE_TORCH_LIBRARY(fftune_stable, m) {
  m.def("rmsnorm(Tensor x, Tensor w) -> Tensor");
  m.def("rmsnorm_backward(Tensor dy, Tensor x, Tensor w) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(fftune_stable, CompositeExplicitAutograd, m) {
  m.impl("rmsnorm", TORCH_BOX(&rmsnorm));
  m.impl("rmsnorm_backward", TORCH_BOX(&rmsnorm_backward));
}
#else
namespace {

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    ctx->save_for_backward({x, w});
    return rmsnorm(x, w);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list dy) {
    const auto saved = ctx->get_saved_variables();
    auto [dx, dw] = rmsnorm_backward(dy[0], saved[0], saved[1]);
    return {dx, dw};
  }
};

}  // namespace

TORCH_LIBRARY(fftune_cpp, m) {
  m.def("rmsnorm(Tensor x, Tensor w) -> Tensor");
}
TORCH_LIBRARY_IMPL(fftune_cpp, CompositeExplicitAutograd, m) {
  m.impl("rmsnorm", &rmsnorm);
}
TORCH_LIBRARY_IMPL(fftune_cpp, Autograd, m) {
  m.impl("rmsnorm", [](const Tensor& x, const Tensor& w) {
    return at::GradMode::is_enabled() ? RmsNorm::apply(x, w) : rmsnorm(x, w);
  });
}
#endif
