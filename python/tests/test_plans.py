"""Plans: threads, forks, and what is destroyed when."""
import gc
import os
import signal
import threading
import time
import traceback

import pytest
import torch

from fftune import _library, _run, ops, tuning


def fork(work, seconds: int = 30) -> int:
    """How a forked child that does the work ends: its wait status, SIGALRM if it hangs."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(seconds)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork() beside threads
def test_a_child_makes_plans_while_a_thread_of_its_parent_did():
    w, sizes, stops = torch.ones(8), iter(range(2, 10**6)), threading.Event()

    def makes_plans():
        while not stops.is_set():
            # Not by randn(), whose generator has a lock that a fork does not care for.
            ops.rmsnorm(torch.ones(next(sizes), 8), w)
            ops.attention(*[torch.ones(1, next(sizes) % 300 + 1, 1, 8)] * 3)

    threads = [threading.Thread(target=makes_plans) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(40):
            time.sleep(0.001 * (i % 7))
            assert fork(lambda: (ops.rmsnorm(torch.ones(1, 8 + i), torch.ones(8 + i)),
                                 _run.forget_plans(), ops.rmsnorm(torch.ones(2, 8), w))) == 0
    finally:
        stops.set()
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_of_a_child_makes_plans_too():
    def work():
        ops.rmsnorm(torch.randn(3, 16), torch.ones(16))
        assert fork(lambda: ops.rmsnorm(torch.randn(4, 16), torch.ones(16))) == 0
    assert fork(work) == 0


def test_plans_are_forgotten_while_others_run_them():
    x, w = torch.randn(64, 256), torch.randn(256, 256)
    right, wrong, stops = ops.linear(x, w), [], threading.Event()

    def runs():
        while not stops.is_set():
            if not torch.equal(ops.linear(x, w), right):
                wrong.append(1)

    threads = [threading.Thread(target=runs) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            _run.forget_plans()
            tuning.forget_plans()
    finally:
        stops.set()
        for thread in threads:
            thread.join()
    assert not wrong


class FakeLibrary:
    """Counts the plans that are destroyed."""

    def __init__(self):
        self.destroyed = []

    def fftune_plan_destroy(self, handle):
        self.destroyed.append(handle)


def fake_plan(handle, *streams):
    """A plan on a GPU that ran on these streams."""
    made = object.__new__(_library.Plan)
    made.handle, made.device, made.fork = handle, 0, _library._forks
    made.stream, made.streams = None, {}
    for stream in streams:
        made.runs_on(stream, f"stream {stream}")
    return made


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_leaves_plans_and_contexts_on_a_gpu_to_its_parent(monkeypatch):
    library = FakeLibrary()
    library.fftune_context_destroy = library.fftune_plan_destroy
    monkeypatch.setattr(_library, "_opened", library)
    owner = object.__new__(_library.Context)
    owner.handle, owner.fork = 1, _library._forks
    monkeypatch.setitem(_library._contexts, 0, owner)
    plans = [fake_plan(2), fake_plan(3, 7)]
    del owner

    def work():
        plans.clear()
        gc.collect()
        _library.destroy_idle(lambda device, stream: pytest.fail("the child asks for a stream"))
        assert not _library._contexts.get(0) and not library.destroyed
    assert fork(work) == 0
    assert _library._contexts[0].handle == 1
    plans.clear()
    assert library.destroyed == [2] and len(_library._retired) == 1
    _library._retired.clear()
    del _library._contexts[0]
    assert library.destroyed == [2, 1]
    monkeypatch.undo()


def test_plans_of_a_stream_wait_for_its_work(monkeypatch):
    """With streams that say when their work is done, as events on a GPU do."""
    library, done = FakeLibrary(), set()
    monkeypatch.setattr(_library, "_opened", library)
    monkeypatch.setattr(_library, "_dying", [])
    monkeypatch.setattr(_library, "_retired", [])
    marks = []

    def mark(device, owner):
        marks.append((device, owner))
        return lambda: owner in done

    fake_plan(1)  # never ran: nothing to wait for
    assert library.destroyed == [1]
    held = fake_plan(2, 7)
    del held
    both = fake_plan(3, 7, 8)
    del both
    gc.collect()
    assert library.destroyed == [1]
    _library.destroy_idle(mark)
    assert sorted(marks) == [(0, "stream 7"), (0, "stream 8")]  # once for each stream
    kept = fake_plan(4, 7)
    done.add("stream 7")
    _library.destroy_idle(mark)
    assert library.destroyed == [1]
    done.add("stream 8")
    _library.destroy_idle(mark)
    assert sorted(library.destroyed) == [1, 2, 3]
    assert not _library._dying and kept.handle == 4
    monkeypatch.setattr(_library.sys, "is_finalizing", lambda: True)
    del kept  # the end of the process destroys none
    assert not _library._retired and 4 not in library.destroyed
    monkeypatch.undo()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_still_runs_plans_that_are_forgotten():
    streams = [torch.cuda.Stream() for _ in range(3)]
    w = torch.ones(4096, device="cuda", dtype=torch.bfloat16)
    for step in range(30):
        results = []
        x = torch.randn(64 + step, 4096, device="cuda", dtype=torch.bfloat16)
        right = ops.rmsnorm(x, w)
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)  # the plans' kernels wait behind it
                results.append(ops.rmsnorm(x, w))
        _run.forget_plans()
        assert _library._dying or _library._retired
        ops.rmsnorm(x[:step + 1], w)
        torch.cuda.synchronize()
        assert all(torch.equal(y, right) for y in results)
    _run.forget_plans()
    torch.cuda.synchronize()
    _run.forget_plans()
    assert not _library._dying and not _library._retired


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_keeps_the_plans_that_it_was_captured_with():
    x, w = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((33, 512), (512,)))
    right = ops.rmsnorm(x, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.rmsnorm(x, w)
    _run.forget_plans()
    for rows in range(1, 20):
        ops.rmsnorm(x[:rows], w)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, right)


def test_the_process_ends_while_threads_run_plans(run_python):
    # PyTorch's own functions abort in threads that run on while the interpreter ends.
    assert run_python("""
        import threading, torch
        from fftune import _run, ops
        x, w = torch.randn(256, 256), torch.randn(256, 256)
        y = ops.linear(x, w)
        plan, = _run._plans.values()
        memory = torch.empty(plan.workspace_bytes + 256, dtype=torch.uint8)
        scratch = (memory.data_ptr() + 256) & -256
        addresses = plan.addresses(*(t.data_ptr() for t in (x, w, y)))
        def run():
            return _run._plan_run(plan.handle, addresses, plan.count, scratch, None)
        def runs():
            while True:
                run()
        threading.Thread(target=runs, daemon=True).start()
        for _ in range(50):
            assert run() == 0
        print("good")
    """) == "good"


def mixture(rows):
    """Results of a mixture behind its norm, and of what has two outputs and a residual."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
    own = torch.Generator().manual_seed(0)
    norm, router, up, down = (torch.randn(*shape, generator=own).bfloat16() / 8
                              for shape in ((64,), (8, 64), (8, 96, 64), (8, 64, 48)))
    ids, shares = ops.moe_route(ops.linear(x, router), 2)
    y = ops.moe_ffn(x, ids, shares, up, None, down)
    return [ids, shares, y, *ops.add_rmsnorm(y, x, norm)]


def served(rows):
    """The kinds of the plans that a call of so many rows takes, and its results."""
    _run._plans.clear()
    results = mixture(rows)
    return {type(plan) for plan in _run._plans.values()}, results


def test_problems_of_many_rows_share_plans():
    found = {}
    with _run.listening(found):
        mixture(100)
    try:
        for device, problem in found.values():
            _run.serve_any_rows(device, problem, least=64, most=300)
            assert _run.is_served(device, problem)
        for rows, kind in ((64, _library.Plan), (65, _library.PlanAt), (300, _library.PlanAt),
                           (301, _library.Plan)):
            kinds, results = served(rows)
            assert kinds == {kind}, rows
            _run._plans.clear()
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(_run, "_any_rows", {})
                assert all(torch.equal(a, b) for a, b in zip(results, mixture(rows))), rows
        before = [key for key in _run._any_rows]
        for device, problem in found.values():  # once more
            _run.serve_any_rows(device, {**problem, "m": 7}, least=1, most=2)
        assert before == list(_run._any_rows) and served(100)[0] == {_library.PlanAt}
    finally:
        _run.forget_plans()
    assert served(100)[0] == {_library.Plan}


def test_ops_without_such_plans_have_exact_ones():
    found, q = {}, torch.randn(1, 4, 2, 16)
    with _run.listening(found):
        ops.attention(q, q, q)
    (device, problem), = found.values()
    try:
        _run.serve_any_rows(device, problem, 0, 10)
        assert _run.is_served(device, problem)
        _run._plans.clear()
        ops.attention(q, q, q)
        assert {type(plan) for plan in _run._plans.values()} == {_library.Plan}
    finally:
        _run.forget_plans()
