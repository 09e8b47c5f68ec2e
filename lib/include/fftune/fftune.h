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
 * Ownership. Contexts and plans belong to the caller, who destroys each once. A destroyed handle
 * may not be used or destroyed again: a build with assertions aborts with a line that names the
 * offending call; in other builds the behaviour is undefined. A plan keeps the parts of its context
 * that it needs, so the context may be destroyed first. Buffers and workspaces belong to the caller
 * and are never freed, kept or resized here. Returned strings belong to the library and live as
 * long as their function documents.
 *
 * Threads. Any function may be called from any thread. Several threads may use one context or one
 * plan at once; destroying must not meet another call on the same handle.
 *
 * Errors. A call that fails changes nothing but fftune_last_error(), and leaves NULL in *out. None
 * ends the process, and no C++ exception leaves the library.
 *
 * A fork() waits for contexts and plans that other threads are making, so the child may make its
 * own. After fork() the child may use and destroy what was made for the CPU; what was made for a
 * CUDA device is refused there with FFTUNE_UNAVAILABLE: create its context in the child. */
#ifndef FFTUNE_FFTUNE_H
#define FFTUNE_FFTUNE_H

#include <stddef.h>
#include <stdint.h>

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
  FFTUNE_INVALID_INPUT = 1, /* an argument is wrong: a NULL, a field, a size, a buffer */
  FFTUNE_UNAVAILABLE = 2,   /* the machine lacks something: a driver, a device, memory */
  FFTUNE_DEVICE_FAULT = 3,  /* the device refused or failed; its CUDA context may be lost */
  FFTUNE_IO_ERROR = 4,      /* a file could not be read or written */
  FFTUNE_INTERNAL_ERROR = 5 /* a defect of fftune */
} fftune_status;

typedef struct fftune_context fftune_context;
typedef struct fftune_plan fftune_plan;

/* The version of the library that is loaded: "0.1.0". Never NULL; lives as long as the process. */
FFTUNE_API const char* fftune_version(void);

/* The message of the last failed call on this thread: one line that says what is wrong and what to
 * do. Empty if none failed, never NULL. Valid until the next failure on this thread. */
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

/* Calls task(state, i) once for each i in [0, tasks), on any threads, and returns when all are
 * done. While it waits it may not run other work that calls fftune. */
typedef void (*fftune_parallel_for)(void* pool, int tasks, void (*task)(void* state, int index),
                                    void* state);

/* How a context is opened. Set struct_size to sizeof(fftune_context_options) and unused fields to
 * zero: later versions add fields at the end. */
typedef struct fftune_context_options {
  size_t struct_size;
  const char* preset_path; /* as fftune_context_create takes it */
  /* CUDA: compiled kernels, a file that `fftune bundle` made; NULL: $FFTUNE_BUNDLE, or none. With
   * one, NVRTC is opened only for a kernel that is not in it. A file that cannot be read whole, and
   * one of other architectures where nothing can be compiled, fail the call; other complaints are
   * among the "warnings" of fftune_plan_describe. */
  const char* bundle_path;
  /* CUDA: not 0: compile nothing. A kernel that is neither in the bundle nor in the cache is an
   * error (FFTUNE_UNAVAILABLE). Set too by $FFTUNE_NO_JIT=1. */
  int no_jit;
  /* CPU: use at most this number of threads, the caller's included, whatever a preset was tuned
   * with; 0: $FFTUNE_THREADS, or one for each core. OpenBLAS runs on no more than it was set to. */
  int threads;
  /* CPU: runs the tasks of plans instead of threads of our own, called by the thread that runs a
   * plan with at most `threads` tasks; NULL: none. `pool` is passed through. */
  fftune_parallel_for parallel_for;
  void* pool;
} fftune_context_options;

/* fftune_context_create with options; NULL for none. */
FFTUNE_API fftune_status fftune_context_create_with(int device,
                                                    const fftune_context_options* options,
                                                    fftune_context** out);

/* Where the kernels of a context's plans came from since it was created, and the time spent. Set
 * struct_size to sizeof(fftune_counters): no more is written. */
typedef struct fftune_counters {
  size_t struct_size;
  uint64_t compilations;        /* by NVRTC */
  uint64_t compile_nanoseconds; /* in NVRTC, added up over threads */
  uint64_t kernels_from_cache;  /* compiled before, by this or another process */
  uint64_t kernels_from_bundle;
  uint64_t plans;            /* made */
  uint64_t plan_nanoseconds; /* in fftune_plan_create */
} fftune_counters;
FFTUNE_API fftune_status fftune_context_counters(const fftune_context* context,
                                                 fftune_counters* counters);

/* Plans made on it stay valid. NULL is allowed. No other call on the context may be in progress. */
FFTUNE_API void fftune_context_destroy(fftune_context* context);

/* Chooses the kernels that run a problem, and compiles them or takes them from the cache. A problem
 * is a JSON object with "op", "pass" (default "fwd"), "dtype" (default: the op's for this device),
 * and the op's sizes as integers (a string such as "1" is refused) and options as strings.
 * `problem_json` is UTF-8 and only read; it ends with a NUL. May take seconds if kernels are
 * compiled.
 *
 * The size that counts tokens ("m" of most ops, as `fftune ops` says) may be {"max": 8192}: the
 * plan is then for any number of tokens up to that, which each fftune_plan_launch gives. The
 * variants of the token counts that presets record, and for other ranges the defaults, are
 * compiled here, and the cost model decides between them. Where rows are as long as there are
 * tokens (masked-softmax and pack-mask, whose vectors have to divide a row), each number without a
 * record has its default. An op that has more than 64 kernels for single numbers refuses.
 *
 * FFTUNE_INVALID_INPUT: a NULL, no JSON, an unknown op or field, a value out of its range, or sizes
 * whose product has no end. FFTUNE_UNAVAILABLE: no memory, no compiler, or after fork().
 * FFTUNE_DEVICE_FAULT: the device refused a kernel. */
FFTUNE_API fftune_status fftune_plan_create(fftune_context* context, const char* problem_json,
                                            fftune_plan** out);

/* No run of the plan may be in flight: synchronise its streams first. NULL is allowed. */
FFTUNE_API void fftune_plan_destroy(fftune_plan* plan);

/* Number of buffers that fftune_plan_run takes, and the bytes of one of them. Returns 0 for a NULL
 * plan or an index beyond the end. A plan for any number of tokens reports the bytes for its
 * maximum. */
FFTUNE_API size_t fftune_plan_buffer_count(const fftune_plan* plan);
FFTUNE_API size_t fftune_plan_buffer_bytes(const fftune_plan* plan, size_t index);

/* Bytes of device memory (host memory, on the CPU) that one run uses besides its buffers, the same
 * for every run of the plan. Its contents need not be initialised, and are undefined after a run. 0
 * for a NULL plan. */
FFTUNE_API size_t fftune_plan_workspace_bytes(const fftune_plan* plan);

/* The most tokens of a plan for any number of them; 0 for another plan, and for NULL. */
FFTUNE_API int64_t fftune_plan_max_tokens(const fftune_plan* plan);

/* Returns JSON: the problem; the variant of every stage, with its source and the rule that chose
 * it. Then whether that preset is stale or far from the problem, or a fallback runs, and the
 * buffers in order with dtype, shape, bytes and alignment. A plan for any number of tokens
 * describes its maximum, and "segments" lists which variants serve which range of tokens ("each":
 * every number has the default of its own, not these). Lives as long as the plan; NULL for a NULL
 * plan. */
FFTUNE_API const char* fftune_plan_describe(const fftune_plan* plan);

/* Enqueues the plan on `stream`, a CUstream or cudaStream_t of the device's primary context. NULL
 * is the default stream; the CPU ignores the stream and is done on return. `buffers` are the
 * inputs, including those updated in place, then the outputs: device addresses, host addresses on
 * the CPU, aligned as fftune_plan_describe says (16 bytes at most). `workspace` is aligned to 256
 * bytes, and NULL only if none is needed.
 *
 * Inputs of role "input" are never written and may be constant memory; `void* const*` is for the
 * others. The array itself is read before the call returns; the buffers are in use until the run is
 * complete on the stream. Outputs are written whole.
 *
 * FFTUNE_INVALID_INPUT: a NULL, another number of buffers, or one that is not aligned; nothing was
 * enqueued. FFTUNE_DEVICE_FAULT: the launch failed. A fault while the kernels run shows in the CUDA
 * runtime's own calls later, as for any kernel.
 *
 * Allocates nothing, never synchronises and may be captured in a CUDA graph. Runs of one plan may
 * be in flight at once if each has its own workspace and outputs. */
FFTUNE_API fftune_status fftune_plan_run(const fftune_plan* plan, void* const* buffers,
                                         size_t buffer_count, void* workspace, void* stream);

/* One run of a plan. Set struct_size to sizeof(fftune_run) and unused fields to zero: later
 * versions add fields at the end. The buffers are those of fftune_plan_run in two arrays, the
 * read-only ones and the written ones. */
typedef struct fftune_run {
  size_t struct_size;
  const void* const* inputs; /* of role "input", in fftune_plan_describe's order; only read */
  size_t input_count;
  void* const* outputs; /* of role "updated", then those of role "output" */
  size_t output_count;
  void* workspace;
  void* stream;
  /* Number of tokens of this run, for a plan for any number of tokens; otherwise 0 or the plan's
   * own number. */
  int64_t tokens;
} fftune_run;

/* fftune_plan_run with const inputs, and for any number of tokens. Each buffer is as a plan for
 * this number of tokens alone would take it, packed.
 *
 * The first launch of a number of tokens lays out its parameters: that takes some 10 us, allocates
 * host memory and compiles nothing. fftune_plan_prepare does so beforehand. Later ones find it in
 * less than 0.2 us; of numbers beyond 16,384, one that is used may displace another. */
FFTUNE_API fftune_status fftune_plan_launch(const fftune_plan* plan, const fftune_run* run);

/* Makes the first launch of `tokens` as fast as later ones: before a capture, or ahead of a
 * service's steps. */
FFTUNE_API fftune_status fftune_plan_prepare(const fftune_plan* plan, int64_t tokens);

/* A group: ranks of one host that reach each other's memory, each with a device. They are
 * processes, or threads of one process with a context each, and on CUDA with a GPU each.
 * Collectives such as the op all-reduce are plans as others are; their buffer "group" is
 * fftune_group_memory(). On a CPU the memory is shared pages, on CUDA handles of inter-process
 * communication over NVLink or PCIe. All ranks run the same collectives in the same order, on one
 * stream each. */
typedef struct fftune_group fftune_group;

/* Set struct_size to sizeof(fftune_group_options) and unused fields to zero. */
typedef struct fftune_group_options {
  size_t struct_size;
  /* The same on all ranks, and unique on the host; 90 bytes at most. Ranks meet at a socket of that
   * name. A name that begins with a slash is the path of the socket's file, for ranks in several
   * containers.
   * Ranks on several hosts have "tcp://host:port/word", 127 bytes at most: rank 0 listens there,
   * and ranks with another word are not heard. Such a group shares no memory and has nccl. */
  const char* name;
  int rank; /* 0 to ranks - 1 */
  /* 8 at most. 0: rank and ranks are those of this host's processes, from the environment of
   * mpirun, torchrun or srun, and the name must be unique within that job. */
  int ranks;
  size_t max_bytes; /* of the largest message, the same on all ranks */
  /* Limit of the meeting and of each wait for a peer, longer than ranks may be apart; 0: 60,000. A
   * year at most. */
  int64_t timeout_milliseconds;
  /* Not 0: plans of link=nccl serve the group too, whose sums are NCCL's. The devices are GPUs. */
  int nccl;
} fftune_group_options;

/* Waits until all ranks have made theirs. The context may be destroyed before the group.
 *
 * FFTUNE_INVALID_INPUT: options that are wrong, or differ between ranks. FFTUNE_UNAVAILABLE: a rank
 * did not come in time or died, or the devices cannot reach each other. All ranks get the error. */
FFTUNE_API fftune_status fftune_group_create(fftune_context* context,
                                             const fftune_group_options* options,
                                             fftune_group** out);

/* The buffer "group" of collectives: memory of the device, owned by the group. NULL for NULL. */
FFTUNE_API void* fftune_group_memory(const fftune_group* group);

/* The rank and the number of ranks, where these are not NULL. */
FFTUNE_API fftune_status fftune_group_place(const fftune_group* group, int* rank, int* ranks);

/* FFTUNE_DEVICE_FAULT if a rank died or a collective failed: a peer did not come in time, or came
 * with another problem. Results of that collective and of those behind it are undefined; the group
 * does nothing more, and a new one is needed. Waits for nothing, so on CUDA it tells of collectives
 * that are complete. On a CPU fftune_plan_run fails itself. */
FFTUNE_API fftune_status fftune_group_check(const fftune_group* group);

/* Searches a problem with link=peers on all ranks at once. Plans of this problem that the group's
 * context makes from now on have the winning recipe, also those of more layers. All ranks call it
 * with the same problem and budget. Each candidate runs on all of them together, and its time is
 * the slowest rank's, so all ranks choose the same one. At least one candidate is tried, even if
 * the first recipe takes all of the budget. Memory for the problem's tensors is allocated
 * meanwhile.
 *
 * Results are compared with a float64 reference: a variant that is wrong on a rank is not chosen.
 *
 * FFTUNE_INVALID_INPUT: problem_json is wrong or has another link, or the ranks' problems or
 * budgets differ. FFTUNE_UNAVAILABLE: the tensors do not fit on a rank, or the recipe that the
 * search begins with is wrong. FFTUNE_DEVICE_FAULT: a rank is gone. */
FFTUNE_API fftune_status fftune_group_tune(fftune_group* group, const char* problem_json,
                                           int64_t budget_milliseconds);

/* Set struct_size to sizeof(fftune_group_tune_options) and unused fields to zero. */
typedef struct fftune_group_tune_options {
  size_t struct_size;
  int64_t budget_milliseconds;
  /* NULL: no file. Else rank 0 merges a record of the problem into
   * <preset_path>/<device>/<op>.json, which ranks of later processes load as any preset. All ranks
   * give one, or none. */
  const char* preset_path;
} fftune_group_tune_options;

/* fftune_group_tune() with options. With preset_path the devices have to be equal, and all ranks
 * return when the record is written.
 *
 * FFTUNE_IO_ERROR on rank 0, and FFTUNE_UNAVAILABLE on the others: it cannot be written, which the
 * search finds before it begins. */
FFTUNE_API fftune_status fftune_group_tune_with(fftune_group* group, const char* problem_json,
                                                const fftune_group_tune_options* options);

/* No collective may be in flight. The other ranks are told. NULL is allowed. */
FFTUNE_API void fftune_group_destroy(fftune_group* group);

#ifdef __cplusplus
}
#endif

#endif
