/* fftune: tuned fused transformer kernels, for any language that can call C.
 *
 * A context is a device with its presets. A plan is a problem on it: the variants that the presets
 * name (or the defaults, where none does), compiled. Running a plan only enqueues kernels.
 *
 *   fftune_context* context;
 *   fftune_plan* plan;
 *   fftune_context_create(0, NULL, &context);
 *   fftune_plan_create(context,
 *       "{\"op\":\"ffn\",\"pass\":\"fwd\",\"dtype\":\"bf16\",\"m\":4096,\"d\":1024,\"h\":2048}",
 *       &plan);
 *   void* buffers[] = {x, w_gate, w_up, w_down, y};      inputs, then outputs; on the device
 *   fftune_plan_run(plan, buffers, 5, workspace, stream);
 *
 * fftune/ops.h lists the fields and the buffers of every op, with shapes and element types, as
 * `fftune ops` does. Tensors are row-major; weights are [out_features, in_features], as
 * torch.nn.Linear keeps them.
 *
 * Ownership. Contexts and plans belong to the caller, who destroys each once; what was destroyed
 * may not be used or destroyed again. A plan keeps what it needs of its context, which may go
 * first. Buffers and workspaces are the caller's and are never freed, kept or resized here. Strings
 * that are returned belong to the library, and live as long as is said there.
 *
 * Threads. Any function may be called from any thread. Several threads may use one context or one
 * plan at once; destroying must not meet another call on the same handle.
 *
 * Errors. A call that fails changes nothing but fftune_last_error(), and leaves NULL in *out. None
 * ends the process, and no C++ exception leaves the library.
 *
 * After fork() the child may use and destroy what was made for the CPU; what was made for a CUDA
 * device is refused there with FFTUNE_UNAVAILABLE: create its context in the child. */
#ifndef FFTUNE_FFTUNE_H
#define FFTUNE_FFTUNE_H

#include <stddef.h>

/* The version of this header. Before 1.0 another minor version may have another API: the library's
 * SONAME names it (libfftune.so.0.1), so a program cannot meet one that it was not built for. */
#define FFTUNE_VERSION_MAJOR 0
#define FFTUNE_VERSION_MINOR 1
#define FFTUNE_VERSION_PATCH 0
#define FFTUNE_VERSION_STRING "0.1.0"
/* For comparisons: #if FFTUNE_VERSION_NUMBER >= 100 is "0.1.0 or newer". */
#define FFTUNE_VERSION_NUMBER \
  (FFTUNE_VERSION_MAJOR * 10000 + FFTUNE_VERSION_MINOR * 100 + FFTUNE_VERSION_PATCH)

#if defined(__GNUC__)
#define FFTUNE_API __attribute__((visibility("default")))
#else
#define FFTUNE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fftune_status {
  FFTUNE_OK = 0,
  FFTUNE_INVALID_INPUT = 1, /* the caller's words are wrong: a NULL, a field, a size, a buffer */
  FFTUNE_UNAVAILABLE = 2,   /* the machine lacks something: a driver, a device, memory */
  FFTUNE_DEVICE_FAULT = 3,  /* the device refused or failed; its CUDA context may be lost */
  FFTUNE_IO_ERROR = 4,      /* a file could not be read or written */
  FFTUNE_INTERNAL_ERROR = 5 /* a defect of fftune */
} fftune_status;

typedef struct fftune_context fftune_context;
typedef struct fftune_plan fftune_plan;

/* The version of the library that is loaded: "0.1.0". Never NULL; lives as long as the process. */
FFTUNE_API const char* fftune_version(void);

/* What the last call that failed on this thread said: one line, what is wrong and what to do.
 * Empty if none failed, never NULL. Valid until the next failure on this thread. */
FFTUNE_API const char* fftune_last_error(void);

/* Opens a device: a CUDA ordinal, whose primary context is used, or -1 for the CPU. Presets are
 * read once, here: from the folder `preset_path` (<device>/<op>.json below it) before the usual
 * ones, which are $FFTUNE_PRESETS, the user's and the installed one; NULL for those alone.
 *
 * FFTUNE_INVALID_INPUT: `out` is NULL, there can be no such device, or `preset_path` is no folder.
 * FFTUNE_UNAVAILABLE: the driver, NVRTC or the device is missing. Preset files that cannot be read
 * are no error: fftune_plan_describe names them. */
FFTUNE_API fftune_status fftune_context_create(int device, const char* preset_path,
                                               fftune_context** out);

/* Plans made on it stay valid. NULL is allowed. No other call on the context may be in progress. */
FFTUNE_API void fftune_context_destroy(fftune_context* context);

/* Chooses and compiles, or takes from the cache, what runs the problem: a JSON object with "op",
 * "pass" (default "fwd"), "dtype" (default: the op's for this device), and the op's sizes as
 * integers and options as strings. `problem_json` is UTF-8 and only read; it ends with a NUL. May
 * take seconds, where kernels are compiled.
 *
 * FFTUNE_INVALID_INPUT: a NULL, no JSON, an unknown op or field, a value out of its range, or sizes
 * whose product has no end. FFTUNE_UNAVAILABLE: no memory, no compiler, or after fork().
 * FFTUNE_DEVICE_FAULT: the device refused a kernel. */
FFTUNE_API fftune_status fftune_plan_create(fftune_context* context, const char* problem_json,
                                            fftune_plan** out);

/* No run of the plan may be in flight: synchronise its streams first. NULL is allowed. */
FFTUNE_API void fftune_plan_destroy(fftune_plan* plan);

/* How many buffers fftune_plan_run takes, and the bytes of one of them. 0 for a NULL plan or an
 * index beyond the end. */
FFTUNE_API size_t fftune_plan_buffer_count(const fftune_plan* plan);
FFTUNE_API size_t fftune_plan_buffer_bytes(const fftune_plan* plan, size_t index);

/* Bytes of memory of the device (of the host, on the CPU) that one run uses besides its buffers.
 * The same for every run of the plan; what is in it before and after has no meaning. 0 for a NULL
 * plan. */
FFTUNE_API size_t fftune_plan_workspace_bytes(const fftune_plan* plan);

/* JSON: the problem, the variant of every stage, where they came from and by which rule, whether
 * that preset is stale or a fallback runs, and the buffers in order with dtype, shape, bytes and
 * alignment. Lives as long as the plan; NULL for a NULL plan. */
FFTUNE_API const char* fftune_plan_describe(const fftune_plan* plan);

/* Enqueues the plan on `stream`, a CUstream or cudaStream_t of the device's primary context (NULL
 * is the default stream; the CPU ignores it and is done on return). `buffers` are the inputs, among
 * them what is updated in place, then the outputs: device addresses, host addresses on the CPU,
 * aligned as fftune_plan_describe says (16 bytes at most). `workspace` is aligned to 256 bytes, and
 * NULL only if none is needed.
 *
 * Inputs are never written, so they may be constant memory; `void* const*` is for the outputs among
 * them. The array itself is read before the call returns; what it points to is in use until the
 * stream gets there. Outputs are written whole.
 *
 * FFTUNE_INVALID_INPUT: a NULL, another number of buffers, or one that is not aligned; nothing was
 * enqueued. FFTUNE_DEVICE_FAULT: the launch failed. A fault while the kernels run shows in the CUDA
 * runtime's own calls later, as for any kernel.
 *
 * Allocates nothing, never synchronises and may be captured in a CUDA graph. Runs of one plan may
 * be in flight at once if each has its own workspace and outputs. */
FFTUNE_API fftune_status fftune_plan_run(const fftune_plan* plan, void* const* buffers,
                                         size_t buffer_count, void* workspace, void* stream);

#ifdef __cplusplus
}
#endif

#endif
