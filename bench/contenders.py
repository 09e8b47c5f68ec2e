"""Common parts of the scripts that compare fftune with PyTorch: fftune's C API, CUDA graphs of
many passes, and contenders with interleaved timings."""
import ctypes
import json
import statistics
import sys

import torch

ROUNDS = 15
DEVICE = "cuda"  # of the tensors; tests compare results on a CPU


class Fftune:
    """The few calls of fftune.h that a run needs."""

    def __init__(self, library, presets, device=0):
        self.lib = ctypes.CDLL(library)
        self.lib.fftune_last_error.restype = ctypes.c_char_p
        self.lib.fftune_plan_describe.restype = ctypes.c_char_p
        self.lib.fftune_plan_workspace_bytes.restype = ctypes.c_size_t
        self.context = ctypes.c_void_p()
        self.check(self.lib.fftune_context_create(device, presets.encode(), ctypes.byref(self.context)))

    def check(self, status):
        if status != 0:
            sys.exit(f"{sys.argv[0]}: {self.lib.fftune_last_error().decode()}")

    def plan(self, problem):
        plan = ctypes.c_void_p()
        self.check(self.lib.fftune_plan_create(self.context, json.dumps(problem).encode(),
                                               ctypes.byref(plan)))
        return plan

    def destroy(self, plan):
        self.lib.fftune_plan_destroy(plan)

    def workspace(self, plan):
        size = self.lib.fftune_plan_workspace_bytes(plan)
        space = torch.empty(size + 256, device=DEVICE, dtype=torch.uint8)
        return space[-space.data_ptr() % 256:]

    def run(self, plan, tensors, workspace):
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream if DEVICE == "cuda" else None)
        self.check(self.lib.fftune_plan_run(plan, pointers, ctypes.c_size_t(len(tensors)),
                                            ctypes.c_void_p(workspace.data_ptr()), stream))


def random(*shape, scale=1.0):
    return (torch.randn(shape, device=DEVICE) * scale).to(torch.bfloat16)


def sets_of(make, bytes_of_set, most):
    """Sets of inputs enough to overflow the L2 three times, at most `most`."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return [make() for _ in range(max(2, min(most, 3 * l2 // bytes_of_set + 1)))]


def graph_of(passes):
    """A CUDA graph of all passes, one after the other."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in passes[:2]:
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for run in passes:
                run()
    except Exception:
        # A capture that ends in an error leaves the generator in it, and every later one fails.
        fresh = torch.Generator(device="cuda").graphsafe_get_state()
        torch.cuda.default_generators[torch.cuda.current_device()].graphsafe_set_state(fresh)
        raise
    return graph


def seconds(graph, repeats):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def microseconds(contenders, sets, left_out=None):
    """By name, what a pass of each contender takes: call(set, index) for every set is a CUDA graph,
    the graphs are replayed round-robin, and the median of the rounds counts. With `left_out`, a
    contender that cannot be captured is named there, with the reason."""
    graphs = {}
    for name, call in contenders.items():
        try:
            graphs[name] = graph_of([lambda s=s, i=i, call=call: call(s, i) for i, s in enumerate(sets)])
        except Exception as error:
            if left_out is None:
                raise
            left_out[name] = f"its capture failed: {str(error).partition(chr(10))[0][:120]}"
    repeats = {name: max(1, int(0.01 / seconds(graph, 2))) for name, graph in graphs.items()}
    samples = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            samples[name].append(seconds(graph, repeats[name]) / len(sets) * 1e6)
    return {name: statistics.median(times) for name, times in samples.items()}


def arguments_of(words, usage, least):
    """The words without `--json OUT`, and OUT; ends where there are fewer than `least`."""
    out = None
    if "--json" in words:
        place = words.index("--json")
        out = words[place + 1]
        words = words[:place] + words[place + 2:]
    if len(words) < least:
        sys.exit(usage)
    return words, out
