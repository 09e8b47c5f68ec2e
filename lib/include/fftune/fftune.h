/* fftune: tuned fused transformer kernels, for any language that can call C.
 *
 * A context is a device with its presets. A plan is a problem on a context: the compiled variants
 * that the presets name, or the defaults without a preset. Running a plan only enqueues kernels.
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
 * Ownership. Contexts, plans and models belong to the caller, who destroys each once. A destroyed
 * handle may not be used or destroyed again: a build with assertions aborts with a line that names
 * the call; in other builds the behaviour is undefined. A plan keeps the parts of its context that
 * it needs, so the context may be destroyed first. Buffers and workspaces belong to the caller; the
 * library never frees, keeps or resizes them. Returned strings belong to the library and live as
 * long as their function documents.
 *
 * Threads. Any function may be called from any thread. Several threads may use one context or one
 * plan at once; destroying must not meet another call on the same handle.
 *
 * Errors. A call that fails changes nothing but fftune_last_error(), and sets *out to NULL. No
 * call ends the process, and no C++ exception leaves the library.
 *
 * A fork() waits for contexts and plans that other threads are making, so the child may make its
 * own. After fork() the child may use and destroy what was made for the CPU; what was made for a
 * CUDA device is refused there with FFTUNE_UNAVAILABLE: create its context in the child. */
#ifndef FFTUNE_FFTUNE_H
#define FFTUNE_FFTUNE_H

#include <stddef.h>
#include <stdint.h>

/* The version of this header. Before 1.0 a minor version may change the API. The library's SONAME
 * names the minor version (libfftune.so.0.1), so a program never loads another one. */
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
 * do. Empty if no call failed, never NULL. Valid until the next failure on this thread. */
FFTUNE_API const char* fftune_last_error(void);

/* Opens a device: a CUDA ordinal (its primary context is used), or -1 for the CPU.
 *
 * Presets are read once, in this call. The folder `preset_path`, with files <device>/<op>.json, is
 * searched before the usual folders: $FFTUNE_PRESETS, the user's and the installed one. NULL: the
 * usual folders alone. Preset files that cannot be read are no error: fftune_plan_describe names
 * them.
 *
 * FFTUNE_INVALID_INPUT: `out` is NULL, there can be no such device, or `preset_path` is no folder.
 * FFTUNE_UNAVAILABLE: the driver, NVRTC or the device is missing. */
FFTUNE_API fftune_status fftune_context_create(int device, const char* preset_path,
                                               fftune_context** out);

/* Calls task(state, i) once for each i in [0, tasks), on any threads, and returns when all calls
 * have returned. While it waits it may not run other work that calls fftune. */
typedef void (*fftune_parallel_for)(void* pool, int tasks, void (*task)(void* state, int index),
                                    void* state);

/* How a context is opened. Set struct_size to sizeof(fftune_context_options) and unused fields to
 * zero: later versions add fields at the end. */
typedef struct fftune_context_options {
  size_t struct_size;
  const char* preset_path; /* as fftune_context_create takes it */
  /* CUDA: a file of compiled kernels that `fftune bundle` made. NULL: $FFTUNE_BUNDLE, or none. With
   * a bundle, NVRTC is opened only for kernels that the bundle lacks. The call fails if the file
   * cannot be read whole, or if it is for other architectures and nothing can be compiled. All
   * other problems are among the "warnings" of fftune_plan_describe. */
  const char* bundle_path;
  /* CUDA: not 0: compile nothing. A kernel that is neither in the bundle nor in the cache is an
   * error (FFTUNE_UNAVAILABLE). $FFTUNE_NO_JIT=1 does the same. */
  int no_jit;
  /* CPU: most threads of a plan, the caller's included, whatever its preset was tuned with.
   * 0: $FFTUNE_THREADS, or one for each core. OpenBLAS runs on no more threads than it was set to.
   */
  int threads;
  /* CPU: runs the tasks of plans in place of the library's threads. The thread that runs a plan
   * calls it, with at most `threads` tasks and with `pool`. NULL: the library's threads. */
  fftune_parallel_for parallel_for;
  void* pool;
} fftune_context_options;

/* fftune_context_create with options; NULL for none. */
FFTUNE_API fftune_status fftune_context_create_with(int device,
                                                    const fftune_context_options* options,
                                                    fftune_context** out);

/* Where the kernels of a context's plans came from since its creation, and the time spent. Set
 * struct_size to sizeof(fftune_counters); the call writes no more bytes than that. */
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

/* Destroys a context; its plans stay valid. NULL is allowed. No other call on the context may be in
 * progress. */
FFTUNE_API void fftune_context_destroy(fftune_context* context);

/* Chooses the kernels that run a problem, and compiles them or takes them from the cache. A problem
 * is a JSON object with "op", "pass" (default "fwd"), "dtype" (default: the op's for this device),
 * and the op's sizes as integers (a string such as "1" is refused) and options as strings.
 * `problem_json` is UTF-8 and only read; it ends with a NUL. May take seconds if kernels are
 * compiled.
 *
 * Any number of tokens. The size that counts tokens ("m" of most ops, as `fftune ops` says) may be
 * {"max": 8192}. The plan then serves every number up to the maximum; each fftune_plan_launch
 * gives its number. This call compiles the variants that presets record for some numbers, and the
 * defaults of the other ranges; the cost model chooses between them. In masked-softmax and
 * pack-mask, whose vectors must divide a row, each number without a record has its own default. An
 * op with more than 64 kernels for single numbers is refused.
 *
 * FFTUNE_INVALID_INPUT: a NULL, no JSON, an unknown op or field, a value out of its range, or sizes
 * whose product overflows. FFTUNE_UNAVAILABLE: no memory, no compiler, or after fork().
 * FFTUNE_DEVICE_FAULT: the device refused a kernel. */
FFTUNE_API fftune_status fftune_plan_create(fftune_context* context, const char* problem_json,
                                            fftune_plan** out);

/* Destroys a plan. No run of it may be in flight: synchronise its streams first. NULL is allowed.
 */
FFTUNE_API void fftune_plan_destroy(fftune_plan* plan);

/* Number of buffers that fftune_plan_run takes, and the bytes of one of them. Returns 0 for a NULL
 * plan or an index beyond the end. A plan for any number of tokens reports the bytes for its
 * maximum. */
FFTUNE_API size_t fftune_plan_buffer_count(const fftune_plan* plan);
FFTUNE_API size_t fftune_plan_buffer_bytes(const fftune_plan* plan, size_t index);

/* Bytes of workspace: device memory (on the CPU, host memory) that one run uses besides its
 * buffers, the same for every run of the plan. The contents need not be initialised, and are
 * undefined after a run. 0 for a NULL plan. */
FFTUNE_API size_t fftune_plan_workspace_bytes(const fftune_plan* plan);

/* The most tokens of a plan for any number of them; 0 for another plan, and for NULL. */
FFTUNE_API int64_t fftune_plan_max_tokens(const fftune_plan* plan);

/* Returns JSON, which lives as long as the plan; NULL for a NULL plan:
 *   - the problem;
 *   - the variant of every stage, its source and the rule that chose it;
 *   - whether the preset is stale or far from the problem, and whether a fallback runs;
 *   - "slower_fallback": stages that run by fallbacks and should take longer than PyTorch's
 * kernels, with both times in microseconds; else null;
 *   - the buffers in order, with dtype, shape, bytes and alignment.
 * A plan for any number of tokens describes its maximum. Its "segments" lists the variants of each
 * range of tokens; "each" means that every number has its own default instead. */
FFTUNE_API const char* fftune_plan_describe(const fftune_plan* plan);

/* Enqueues the plan on `stream`, a CUstream or cudaStream_t of the device's primary context. NULL
 * is the default stream; the CPU ignores the stream and is done on return. `buffers` are the
 * inputs, including those updated in place, then the outputs: device addresses, host addresses on
 * the CPU, aligned as fftune_plan_describe says (16 bytes at most). `workspace` is aligned to 256
 * bytes, and NULL only if none is needed.
 *
 * Inputs of role "input" are never written and may be constant memory, although the array's type
 * is not const. The array itself is read before the call returns; the buffers are in use until the
 * run is complete on the stream. Outputs are written whole.
 *
 * Overlap. A buffer of role "updated" is an input and an output in one: such ops work in place. A
 * buffer of role "output" must not overlap another buffer of the run, with two exceptions: with
 * accumulate=yes the gradient "dw" and its input "dw_before" may be one buffer, and the input
 * "residual" may be the output "sum". Inputs may overlap each other; the workspace may overlap no
 * buffer. A view with strides, such as rows of q within those of q, k and v, counts from its first
 * element to the end of its last one.
 *
 * FFTUNE_INVALID_INPUT: a NULL, another number of buffers, one that is not aligned, or an output or
 * a workspace that overlaps another buffer; nothing was enqueued. FFTUNE_DEVICE_FAULT: the launch
 * failed. A fault while the kernels run shows in the CUDA runtime's own calls later, as for any
 * kernel.
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

/* fftune_plan_run with const inputs, and for any number of tokens. Each buffer has the packed shape
 * that a plan for this number of tokens alone would take.
 *
 * The first launch of a number of tokens lays out its parameters. That takes some 10 us, allocates
 * host memory and compiles nothing; fftune_plan_prepare does it ahead of time. Later launches find
 * the parameters in less than 0.2 us. Those of numbers above 16,384 may be displaced by other
 * numbers. */
FFTUNE_API fftune_status fftune_plan_launch(const fftune_plan* plan, const fftune_run* run);

/* Makes the first launch of `tokens` as fast as later ones: before a capture, or ahead of a
 * service's steps. */
FFTUNE_API fftune_status fftune_plan_prepare(const fftune_plan* plan, int64_t tokens);

/* A saved model: the tensors of its safetensors files, with the config.json beside them. A weight
 * of a quantised checkpoint has the name of the dense one; ops with packed weights take its codes.
 * docs/saved-models.md lists the names and the formats that are known.
 *
 *   fftune_model* model;
 *   const char* problem;
 *   fftune_model_open("DIR", &model);
 *   fftune_model_problem(model, context, 3, NULL, "{\"op\":\"ffn\",\"m\":16}", &problem);
 *   fftune_plan_create(context, problem, &plan);
 *   fftune_model_input(model, 3, NULL, plan, 1, w_gate, fftune_plan_buffer_bytes(plan, 1));
 *
 * Files are read where values are asked for. They may be replaced, but not changed, meanwhile. */
typedef struct fftune_model fftune_model;

/* Opens a folder, an index (*.safetensors.index.json) or one .safetensors file, and checks all
 * headers.
 *
 * FFTUNE_IO_ERROR: a file is missing or cannot be read. FFTUNE_INVALID_INPUT: a file contradicts
 * itself or the index, or the checkpoint is quantised in a format that is not known. */
FFTUNE_API fftune_status fftune_model_open(const char* path, fftune_model** out);

/* NULL is allowed. Plans stay valid. No other call on the model may be in progress. */
FFTUNE_API void fftune_model_close(fftune_model* model);

/* Returns JSON, which lives as long as the model; NULL for a NULL model:
 *   - "layers": the number of layers by names that are known;
 *   - "vocab", "d" and "dtype" of the embedding, if its name is known;
 *   - "learned_positions": whether positions are added to the embedding;
 *   - "tensors": their "name", "shape", "dtype" as safetensors has it, and whether they are
 *     "quantised". One that is "unreadable", which is the reason, has no shape;
 *   - "config": config.json, if there is one. */
FFTUNE_API const char* fftune_model_describe(const fftune_model* model);

/* Reads `count` elements of a tensor from `first` on, row-major, as numbers of `dtype` ("f32"). A
 * quantised weight is decoded in float64 and rounded once. */
FFTUNE_API fftune_status fftune_model_read(const fftune_model* model, const char* tensor,
                                           const char* dtype, size_t first, size_t count,
                                           void* out);

/* The rows [count, d] that the first layer takes for these tokens, the first of them at `position`:
 * rows of the embedding, with the factor or the positions that the model has. `bytes` is the size
 * of `out`. FFTUNE_INVALID_INPUT also for an id or a position that the model does not have. */
FFTUNE_API fftune_status fftune_model_embed(const fftune_model* model, const int32_t* ids,
                                            size_t count, int64_t position, const char* dtype,
                                            void* out, size_t bytes);

/* Completes a problem by the sizes, options and formats of a layer, or, for the ops head and
 * decode, of the model around its layers too. `problem_json` is as fftune_plan_create takes it,
 * without those fields; what it has counts. `*out` is such JSON, and lives as long as the model.
 *
 * `map` names the tensors of inputs whose names are not known, or of a linear:
 * "w=mlp.up_proj.weight,bias=mlp.up_proj.bias", each a whole name or the part behind the layer's
 * number, with "^T" if it is saved as [in, out]. NULL: the known names alone. The same `layer` and
 * `map` belong to the plan's fftune_model_input().
 *
 * FFTUNE_INVALID_INPUT: the model lacks a weight, a weight has another shape, config.json has a key
 * that the op does not compute, or, for the ops layer and decode, a layer has a tensor that the op
 * does not take. */
FFTUNE_API fftune_status fftune_model_problem(const fftune_model* model,
                                              const fftune_context* context, int64_t layer,
                                              const char* map, const char* problem_json,
                                              const char** out);

/* Names the saved tensors of a plan's buffer and the form in which it has them; buffers with equal
 * texts have equal contents. `*out` lives as long as the model, and is NULL where the model does
 * not have the buffer: x, a cache, an output. */
FFTUNE_API fftune_status fftune_model_source(const fftune_model* model, int64_t layer,
                                             const char* map, const fftune_plan* plan, size_t index,
                                             const char** out);

/* Writes a plan's buffer, `bytes` long, to host memory: a weight in the plan's dtype and layout, or
 * the codes, scales or zero points of a packed weight. */
FFTUNE_API fftune_status fftune_model_input(const fftune_model* model, int64_t layer,
                                            const char* map, const fftune_plan* plan, size_t index,
                                            void* out, size_t bytes);

/* A group: ranks of one host that reach each other's memory, each with a device. Ranks are
 * processes, or threads of one process, each with its own context and, on CUDA, its own GPU.
 * Collectives such as the op all-reduce are ordinary plans; their buffer "group" is
 * fftune_group_memory(). The memory is shared pages on a CPU, and CUDA IPC handles over NVLink or
 * PCIe on GPUs. All ranks run the same collectives in the same order, on one stream each. */
typedef struct fftune_group fftune_group;

/* Set struct_size to sizeof(fftune_group_options) and unused fields to zero. */
typedef struct fftune_group_options {
  size_t struct_size;
  /* The same on all ranks, and unique on the host; 90 bytes at most. Ranks meet at a socket of that
   * name. A name that begins with a slash is the path of the socket's file, for ranks in several
   * containers.
   * For ranks on several hosts: "tcp://host:port/word", 127 bytes at most. Rank 0 listens there,
   * and connections with another word are ignored. Such a group shares no memory and has nccl. */
  const char* name;
  int rank; /* 0 to ranks - 1 */
  /* Number of ranks, 8 at most. 0: rank and ranks of this host's processes are read from the
   * environment of mpirun, torchrun or srun; the name must then be unique within that job. */
  int ranks;
  size_t max_bytes; /* of the largest message, the same on all ranks */
  /* Limit of the meeting and of each wait for a peer; choose it longer than ranks may be apart.
   * 0: 60,000. A year at most. */
  int64_t timeout_milliseconds;
  /* Not 0: the group also serves plans of link=nccl, which NCCL sums. The devices are GPUs. */
  int nccl;
} fftune_group_options;

/* Makes this rank's group, and waits until all ranks have made theirs. The context may be destroyed
 * before the group.
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

/* FFTUNE_DEVICE_FAULT if a rank died or a collective failed, because a peer did not come in time or
 * came with another problem. Results of that collective and of all later ones are undefined; the
 * group does nothing more, so make a new one. The call waits for nothing: on CUDA it covers the
 * collectives that are complete. On a CPU fftune_plan_run fails itself. */
FFTUNE_API fftune_status fftune_group_check(const fftune_group* group);

/* Searches a problem with link=peers on all ranks at once. All ranks call it with the same problem
 * and budget. Plans of this problem, also with more layers, that the group's context makes from
 * now on have the winning recipe. Each candidate runs on all ranks together, and its time is the
 * slowest rank's, so all ranks choose the same one. At least one candidate is tried, even if the
 * first recipe takes all of the budget. The search allocates memory for the problem's tensors.
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
  /* NULL: no file. Otherwise rank 0 merges a record of the problem into
   * <preset_path>/<device>/<op>.json, which later processes load as any preset. All ranks give a
   * path, or none does. */
  const char* preset_path;
} fftune_group_tune_options;

/* fftune_group_tune() with options. With preset_path all devices must be of one model, and all
 * ranks return when the record is written.
 *
 * FFTUNE_IO_ERROR on rank 0, and FFTUNE_UNAVAILABLE on the others: the record cannot be written.
 * This is checked before the search begins. */
FFTUNE_API fftune_status fftune_group_tune_with(fftune_group* group, const char* problem_json,
                                                const fftune_group_tune_options* options);

/* Ends this rank's part of a group, and tells the other ranks. No collective may be in flight. NULL
 * is allowed. */
FFTUNE_API void fftune_group_destroy(fftune_group* group);

#ifdef __cplusplus
}
#endif

#endif
