"""Groups of processes on the CPU, and their collectives."""
import copy
import math
import os
import pickle
import re
import resource
import subprocess
import time

import pytest
import torch
import torch.multiprocessing as mp

import fftune
from fftune import distributed, ops
from fftune.__main__ import tool_environment
from fftune._library import tool_path
from cases import trusted
from ranks import START, start
from test_layers import FORMS, make_layers


def _start(work, ranks: int, *arguments) -> None:
    """Runs work(rank, ranks, name, *arguments) in a process for each rank; raises what one raises."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    mp.start_processes(work, (ranks, name, *arguments), nprocs=ranks, start_method=START)


def _tensors(ranks: int, dtype, *shape):
    """x of each rank, a residual and a weight: the same on all ranks."""
    make = torch.Generator().manual_seed(5)
    xs = [torch.randn(*shape, generator=make).to(dtype) for _ in range(ranks)]
    return xs, torch.randn(*shape, generator=make).to(dtype), torch.randn(
        shape[-1], generator=make).to(dtype)


def _add_and_norm(rank: int, ranks: int, name: str) -> None:
    with distributed.Group(name, rank, ranks, max_bytes=1 << 16, timeout=60) as group:
        for dtype in (torch.float32, torch.bfloat16):
            xs, residual, w = _tensors(ranks, dtype, 3, 5, 48)
            total = sum((x.float() for x in xs[1:]), xs[0].float())
            assert torch.equal(ops.all_reduce(xs[rank], group=group), total.to(dtype))
            total = (total + residual.float()).to(dtype)
            y, added = ops.all_reduce_norm(xs[rank], w, residual=residual, group=group, eps=1e-5)
            assert torch.equal(added, total)
            expected = ops.rmsnorm(total, w, eps=1e-5)
            torch.testing.assert_close(y, expected)
            # In fp8, with a scale of each row, and with a given one.
            q, scale, added = ops.all_reduce_norm_quantised(xs[rank], w, residual=residual,
                                                            group=group, eps=1e-5)
            q_alone, scale_alone = ops.rmsnorm_quantised(total, w, eps=1e-5)
            assert torch.equal(added, total) and torch.equal(q.float(), q_alone.float())
            torch.testing.assert_close(scale, scale_alone)
            given = torch.tensor([0.25])
            q, same, added = ops.all_reduce_norm_quantised(xs[rank], w, residual=residual, scale=given,
                                                           group=group, eps=1e-5)
            assert same is given and torch.equal(added, total)
            torch.testing.assert_close(q.float() * given, expected.float(), rtol=0.07, atol=1e-3)
            assert len(ops.all_reduce_norm_quantised(xs[rank], w, group=group)) == 2
            # Views, and a compiled call.
            turned = xs[rank].transpose(0, 1)
            assert torch.equal(ops.all_reduce(turned, group=group),
                               sum((x.float() for x in xs[1:]), xs[0].float()).to(dtype)
                               .transpose(0, 1))
        assert ops.all_reduce(torch.empty(0, 48), group=group).shape == (0, 48)
        group.check()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_have_the_sum_and_its_norm(ranks):
    _start(_add_and_norm, ranks)


def _launched(rank: int, ranks: int, name: str) -> None:
    os.environ.update({"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "PMIX_NAMESPACE": name,
                       "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks)})
    with distributed.Group("sums", max_bytes=1 << 10, timeout=60) as group:
        assert (group.rank, group.ranks) == (rank, ranks)
        total = ops.all_reduce(torch.full((4,), 1.0 + rank), group=group)
        assert torch.equal(total, torch.full((4,), ranks * (ranks + 1) / 2))


def test_a_launcher_says_which_rank_a_process_is():
    _start(_launched, 3)


def _without_memory(rank: int, ranks: int, name: str, failing: int) -> None:
    if rank == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
    start = time.monotonic()
    with pytest.raises(fftune.Error, match=f"rank {failing}: .* bytes of shared memory cannot be had"):
        distributed.Group(name, rank, ranks, max_bytes=1 << 16, timeout=300)
    assert time.monotonic() - start < 100


@pytest.mark.parametrize("failing", [0, 1])
def test_no_rank_waits_for_one_that_has_no_memory(failing):
    _start(_without_memory, 3, failing)


def test_a_rank_is_given_whole():
    with pytest.raises(fftune.Error, match="rank is 0 and its ranks are None"):
        distributed.Group("a", 0)
    with pytest.raises(fftune.Error, match="mpirun, torchrun or srun"):
        distributed.Group("a")


def _compiled(rank: int, ranks: int, name: str) -> None:
    with distributed.Group(name, rank, ranks, max_bytes=1 << 16, timeout=60) as group:
        xs, residual, w = _tensors(ranks, torch.float32, 4, 48)

        def twice(x):
            one, _ = torch.ops.fftune.all_reduce_norm(x, residual, w, group.memory, ranks, "peers", 1e-6, "t5")
            two, _ = torch.ops.fftune.all_reduce_norm(x, residual, w, group.memory, ranks, "peers", 1e-6, "t5")
            return one + two

        expected = twice(xs[rank])
        got = torch.compile(twice, backend="aot_eager", fullgraph=True)(xs[rank])
        assert torch.equal(got, expected)
        # A compiler may hand over a copy of the memory's head.
        copy = torch.ops.fftune.all_reduce(xs[rank], None, group.memory.clone(), ranks, "peers")
        assert torch.equal(copy, xs[0] + xs[1])
        assert torch.equal(ops.all_reduce(xs[rank], group=group), copy)
        group.check()


def test_compiled_calls_are_kept():
    _start(_compiled, 2)


SLICED = ("llama", "biased", "phi", "gemma3", "mixtral", "qwen2-moe", "gpt-oss", "cohere")


def _slices(rank: int, ranks: int, name: str) -> None:
    with distributed.Group(name, rank, ranks, max_bytes=1 << 14, timeout=60) as group:
        for form in SLICED:
            torch.manual_seed(7)  # the same on all ranks
            (x, weights, caches, lengths, heads, kv_heads), options = make_layers(
                s=1 if form == "llama" else 2, **FORMS[form])
            packing = {n: options[n] for n in ("grouped", "packing") if n in options}
            own = [distributed.slice_layer(w, rank, ranks, heads, kv_heads, **packing) for w in weights]
            caches_of = [tuple(c.chunk(ranks, 1)[rank].transpose(1, 2).contiguous().transpose(1, 2)
                               for c in pair) for pair in caches]
            expected = ops.layer(x, weights, caches, lengths, heads, kv_heads, **options)
            got = ops.layer(x, own, caches_of, lengths, heads // ranks, kv_heads // ranks, group=group,
                            **options)
            torch.testing.assert_close(got, expected, rtol=3e-5, atol=3e-5)
            for pair, whole in zip(caches_of, caches):
                for part, cache in zip(pair, whole):
                    torch.testing.assert_close(part, cache.chunk(ranks, 1)[rank], rtol=3e-5, atol=3e-5)
        group.check()


def test_slices_of_layers_are_the_whole_layers():
    _start(_slices, 2)


def _whole_experts(rank: int, ranks: int, name: str) -> None:
    with distributed.Group(name, rank, ranks, max_bytes=1 << 14, timeout=60) as group:
        for at, (form, experts) in enumerate((("mixtral", 4 * ranks), ("gpt-oss", 2 * ranks), ("qwen2-moe", ranks))):
            torch.manual_seed(7)  # the same on all ranks
            sizes = FORMS[form] | {"heads": ranks * 2, "kv_heads": ranks, "experts": experts}
            if "shared" in sizes:
                sizes["shared"] = 8 * ranks
            (x, weights, caches, lengths, heads, kv_heads), options = make_layers(s=1 + at, **sizes)
            for w in weights:  # uneven, and experts that nobody chooses
                w["w_router"][experts // 2:] -= 4 * x.mean((0, 1))
            packing = {n: options[n] for n in ("grouped", "packing") if n in options}
            own = [distributed.slice_layer(w, rank, ranks, heads, kv_heads, whole_experts=True, **packing)
                   for w in weights]
            assert own[0]["w_down"].shape[0] == experts // ranks
            own_caches = [tuple(c.chunk(ranks, 1)[rank].transpose(1, 2).contiguous().transpose(1, 2)
                                for c in pair) for pair in caches]
            expected = ops.layer(x, weights, caches, lengths, heads, kv_heads, **options)
            got = ops.layer(x, own, own_caches, lengths, heads // ranks, kv_heads // ranks, group=group,
                            **options)
            torch.testing.assert_close(got, expected, rtol=3e-5, atol=3e-5)
        _expect_mixture(rank, ranks, group)
        wrong = [w | {"w_down": w["w_down"].repeat(ranks + 1, 1, 1)} for w in own]
        with pytest.raises(fftune.Error, match=f"experts of {experts} on each of {ranks} ranks"):
            ops.layer(x, wrong, own_caches, lengths, heads // ranks, kv_heads // ranks, group=group, **options)
        group.check()


def _expect_mixture(rank: int, ranks: int, group) -> None:
    """The op itself, whose results all_reduce sums; more choices than experts of a rank."""
    torch.manual_seed(8)
    experts, d, h = 3 * ranks, 16, 24
    x, shares = torch.randn(5, d), torch.rand(5, 4)
    ids = torch.rand(5, experts).argsort(-1)[:, :4]
    ids[0] = -1  # nobody's
    ids[1] = torch.arange(4)
    w_gate_up, w_down = torch.randn(experts, 2 * h, d) * 0.2, torch.randn(experts, d, h) * 0.2
    expected = ops.moe_ffn(x, ids, shares, w_gate_up, None, w_down)
    mine = (w_gate_up.chunk(ranks)[rank], None, w_down.chunk(ranks)[rank])
    place = {"experts": experts, "first_expert": 3 * rank}
    y = ops.moe_ffn(x, ids, shares, *mine, **place)
    torch.testing.assert_close(ops.all_reduce(y, group=group), expected, rtol=1e-5, atol=1e-5)
    # With a gradient, where a token has no more choices than a rank has experts.
    down = mine[2].clone().requires_grad_()
    few = ops.moe_ffn(x, ids[:, :3], shares[:, :3], *mine[:2], down, **place)
    plain = ops.moe_ffn(x, ids[:, :3], shares[:, :3], *mine, **place)
    torch.testing.assert_close(few.detach(), plain, rtol=1e-5, atol=1e-5)
    few.sum().backward()
    assert down.grad.isfinite().all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_with_whole_experts_are_the_whole_mixture(ranks):
    _start(_whole_experts, ranks)


def test_wrong_experts_of_a_rank_are_one_line():
    x, ids, shares = torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    weights = torch.randn(2, 8, 8), None, torch.randn(2, 8, 4)
    for options, words in (({"experts": 3, "first_expert": 2}, "experts 2 to 3 of the weights"),
                           ({"experts": 4, "first_expert": -1}, "experts -1 to 0 of the weights"),
                           ({"first_expert": 2}, "first_expert is 2 without experts"),
                           ({"experts": 4.5}, "experts is"),
                           ({"experts": 4, "shared": 1}, "every rank would add")):
        with pytest.raises(fftune.Error, match=words) as error:
            ops.moe_ffn(x, ids, shares, *weights, **options)
        assert "\n" not in str(error.value)
    with pytest.raises(fftune.Error, match="no mixture of experts"):
        distributed.slice_layer({"w_o": x}, 0, 2, 2, 2, whole_experts=True)


@pytest.mark.parametrize("change, words", [
    (dict(ranks=0), "ranks is 0: give"), (dict(rank=2), "rank is 2: give an integer from 0 to 1"),
    (dict(rank=-1), "rank is -1: give"), (dict(heads=0), "heads is 0: give"),
    (dict(kv_heads=-2), "kv_heads is -2: give"), (dict(packing="thirds"), "packing is 'thirds': give"),
    (dict(heads=6, kv_heads=6), "6 heads of q and 6 of k and of v do not divide"),
    (dict(weights=None), "weights is None"), (dict(weights={"w_o": None}), "w_o is None"),
    (dict(weights={"w_o": torch.tensor(1.0)}), r"w_o is \[\]: give"),
    (dict(weights={"w_qkv": torch.tensor(1.0)}), r"w_qkv is \[\], which")])
def test_slices_take_no_wrong_value(change, words):
    given = dict(weights={"w_qkv": torch.ones(24, 8)}, rank=0, ranks=2, heads=4, kv_heads=4)
    assert distributed.slice_layer(**given)["w_qkv"].shape == (12, 8)
    with pytest.raises(fftune.Error, match=words) as error:
        distributed.slice_layer(**{**given, **change})
    assert "\n" not in str(error.value)


def _tokens(rank: int, ranks: int, name: str) -> None:
    """Three tokens of a model on slices, with the whole head and with slices of it."""
    with distributed.Group(name, rank, ranks, max_bytes=1 << 14, timeout=60) as group:
        ids, logit = torch.tensor([3, 4, 5]), torch.tensor([[1.0, 2.0, -1.0], [1.0, 3.0, -2.0]])
        best, logits = ops.all_argmax(ids.int(), logit[rank], 10, group=group)
        assert best.tolist() == [3, 14, 5] and logits.tolist() == [1, 3, -1]
        for sliced in (False, True):
            torch.manual_seed(7)  # the same on all ranks
            # The second model is a mixture, whose ranks have whole experts.
            (x, weights, caches, lengths, heads, kv_heads), options = make_layers(
                **({"experts": 4, "top_k": 2} if sliced else {}))
            d, angles = x.shape[-1], options.pop("angles")
            embedding, head, norm = torch.randn(40, d), torch.randn(40, d), torch.ones(d)
            own = [distributed.slice_layer(w, rank, ranks, heads, kv_heads, whole_experts=sliced) for w in weights]
            own_caches = [tuple(c.chunk(ranks, 1)[rank].transpose(1, 2).contiguous().transpose(1, 2)
                                for c in pair) for pair in caches]
            found = []
            for of, of_caches, parts, given in (
                    (weights, caches, 1, {}), (own, own_caches, ranks, {"group": group})):
                state = [torch.tensor([5, 6]), torch.tensor([3, 9]), *torch.zeros(2, 2)]
                state = [t.int() for t in state] + [torch.zeros(2, 4, dtype=torch.int32)]
                rows = head.chunk(ranks)[rank] if parts > 1 and sliced else head
                for _ in range(3):
                    ops.decode(*state, embedding, of, of_caches, norm, rows, heads // parts,
                               kv_heads // parts, angles=angles, options=options, **given)
                found.append(state[4])
            assert torch.equal(*found)
            assert len(set(found[0].flatten().tolist())) > 3
        with pytest.raises(fftune.Error, match="w_head is"):
            ops.decode(*state, embedding, own, own_caches, norm, head[:7], heads // ranks,
                       kv_heads // ranks, angles=angles, options=options, group=group)
        group.check()


def test_slices_of_a_model_and_its_head_choose_the_same_ids():
    _start(_tokens, 2)


def _tuned(rank: int, ranks: int, name: str) -> None:
    with distributed.Group(name, rank, ranks, max_bytes=1 << 16, timeout=60) as group:
        xs, residual, w = _tensors(ranks, torch.float32, 3, 48)
        found = []

        def call():
            found.append(ops.all_reduce_norm(xs[rank], w, residual=residual, group=group)[0])
            ops.rmsnorm(xs[rank], w)  # needs no group

        problems = group.tune(call, budget=0.2)
        assert [problem["op"] for problem in problems] == ["all-reduce"]
        assert fftune.explain(problems[0], "cpu")["reason"] == "a search on the ranks of a group"
        call()
        torch.testing.assert_close(*found)
        group.check()


def test_a_search_on_all_ranks():
    _start(_tuned, 2)


def _tuned_layers(rank: int, ranks: int, name: str, presets: str) -> None:
    """The search of a layer's slices also divides what one family covers among several. Rank 0 writes
    its record, which a context that is made afterwards loads on every rank."""
    with distributed.Group(name, rank, ranks, max_bytes=1 << 14, timeout=60) as group:
        torch.manual_seed(7)
        (x, weights, caches, lengths, heads, kv_heads), options = make_layers()
        own = [distributed.slice_layer(w, rank, ranks, heads, kv_heads) for w in weights]
        own_caches = [tuple(c.chunk(ranks, 1)[rank].transpose(1, 2).contiguous().transpose(1, 2)
                            for c in pair) for pair in caches]
        expected = ops.layer(x, weights, caches, lengths, heads, kv_heads, **options)

        def call():
            return ops.layer(x, own, own_caches, lengths, heads // ranks, kv_heads // ranks, group=group,
                             **options)

        problems = group.tune(call, budget=2, presets=presets)
        assert [problem["op"] for problem in problems] == ["layer"]
        found = fftune.explain(problems[0], "cpu")
        assert found["reason"] == "a search on the ranks of a group"
        torch.testing.assert_close(call(), expected, rtol=3e-5, atol=3e-5)
        group.check()

        os.environ["FFTUNE_PRESETS"] = trusted(presets)
        fftune.tuning.forget_plans()
        loaded = fftune.explain(problems[0], "cpu")
        assert loaded["preset"]["path"] == f"{presets}/{os.listdir(presets)[0]}/layer.json"
        assert loaded["preset"]["exact_shape"] and not loaded["preset"]["stale"]
        assert loaded["variants"] == found["variants"]
        torch.testing.assert_close(call(), expected, rtol=3e-5, atol=3e-5)
        group.check()


def _tool(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(tool_path()), *words], env=tool_environment(), text=True,
                          capture_output=True)


def test_a_search_of_slices_on_all_ranks_is_a_preset(tmp_path):
    presets = str(tmp_path)
    _start(_tuned_layers, 2, presets)
    assert _tool("presets", "validate", presets).stdout.endswith(" 1 readable record, 0 faults, 0 notes\n")
    assert "link=peers" in _tool("presets", "show", presets).stdout
    # One rank plays all.
    checked = _tool("check", "--device", "cpu", "--presets", presets, "--seeds", "1", "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "checked by one rank that plays all" in checked.stdout
    # The tool has no ranks to search with, and leaves the record as it is.
    before = _tool("presets", "show", presets).stdout
    refreshed = _tool("refresh", "--device", "cpu", "--out", presets, "--all")
    assert refreshed.returncode == 1 and "peers needs the ranks of a group" in refreshed.stdout
    again = _tool("tune-presets", presets, "--device", "cpu", "--again", "--out", presets)
    assert "peers needs the ranks of a group" in again.stderr
    assert _tool("presets", "show", presets).stdout == before


def _from_torch(rank: int, ranks: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank,
                                         world_size=ranks)
    group = distributed.init_group(device="cpu", max_bytes=4096, timeout=60)
    assert (group.rank, group.ranks) == (rank, ranks)
    x = torch.full((2, 8), float(rank + 1))
    assert torch.equal(ops.all_reduce(x, group=group), torch.full((2, 8), 3.0))
    group.close()
    host = distributed.host()
    distributed.host = lambda: host if rank == 0 else "another"
    with pytest.raises(fftune.Error, match="rank 1 is on another host than rank 0"):
        distributed.init_group(device="cpu", max_bytes=4096, timeout=60)
    # On GPUs they have one place to meet, or all are told why there is none.
    distributed.Group = lambda name, *_, **__: name
    for master, given, expected in (("127.0.0.1", None, r"tcp://127\.0\.0\.1:\d+/[0-9a-f]{32}"),
                                    ("no.such.host.invalid", None, "rank 0 found no address .*: give address="),
                                    ("", "tcp://10.0.0.1:99", r"tcp://10\.0\.0\.1:99/[0-9a-f]{32}")):
        os.environ["MASTER_ADDR"] = master
        try:
            name = distributed.init_group(device="cuda", address=given)
        except fftune.Error as error:
            name = str(error)
        assert re.search(expected, name)
        names = [None] * ranks
        torch.distributed.all_gather_object(names, name)
        assert names == [name] * ranks
    # A process without a part in it, and one that ends before the others have met.
    one = torch.distributed.new_group([0])
    if rank == 1:
        with pytest.raises(fftune.Error, match="of which this process is a rank"):
            distributed.init_group(one, device="cpu")
        os._exit(0)
    with pytest.raises(fftune.Error, match="init_group: a rank died, or does not call it") as error:
        distributed.init_group(device="cpu")
    assert "\n" not in str(error.value)


def test_a_group_from_a_process_group(tmp_path):
    start(_from_torch, 2, 2, str(tmp_path / "store"))


def _die(rank: int, ranks: int, name: str, leaves_a_child: bool) -> None:
    group = distributed.Group(name, rank, ranks, max_bytes=4096, timeout=60)
    x = torch.ones(1, 8)
    ops.all_reduce(x, group=group)
    if rank == 1:
        if leaves_a_child and os.fork() == 0:  # as a data loader's worker
            time.sleep(20)
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(fftune.Error, match="rank 1 died"):
        for _ in range(2):
            ops.all_reduce(x, group=group)
    with pytest.raises(fftune.Error, match="rank 1 died"):
        group.check()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("leaves_a_child", [False, True])
def test_a_rank_that_dies_is_an_error(leaves_a_child):
    _start(_die, 2, leaves_a_child)


def _other_options(rank: int, ranks: int, name: str) -> None:
    group = distributed.Group(name, rank, ranks, max_bytes=4096, timeout=60)
    with pytest.raises(fftune.Error, match="another problem|has left"):
        ops.all_reduce_norm(torch.ones(1, 8), torch.ones(8), group=group, eps=1e-5 * (rank + 1))


def test_ranks_that_call_different_collectives_get_an_error():
    _start(_other_options, 2)


def test_wrong_arguments_are_one_line():
    with distributed.Group("wrong", 0, 1, max_bytes=64) as group:
        for call, words in (
                (lambda: ops.all_reduce(torch.ones(1, 17), group=group), "68 bytes are more than"),
                (lambda: ops.all_reduce(torch.ones(1, 16, requires_grad=True), group=group), "it has no gradient"),
                (lambda: ops.all_reduce_norm(torch.ones(1, 16), torch.ones(3), group=group), "w"),
                (lambda: ops.all_reduce_norm(torch.ones(1, 16), torch.ones(16), group=group,
                                             convention="other"), "convention"),
                (lambda: distributed.Group("wrong", 3, 2), "rank is 3: give an integer from 0 to 1"),
                (lambda: distributed.Group("wrong", 1 << 40, 2), "rank is 1099511627776: give"),
                (lambda: distributed.Group("wrong", True, 2), "rank is True: give an integer"),
                (lambda: distributed.Group("wrong", 0, 9), "number of ranks is 9: give"),
                (lambda: distributed.Group("wrong", 0, 1, max_bytes=1 << 70), "max_bytes is .*: give"),
                (lambda: distributed.Group("wrong", 0, 1, max_bytes=1.5), "max_bytes is 1.5: give"),
                (lambda: distributed.Group("wrong", 0, 1, timeout=-1), "timeout is -1: give"),
                (lambda: distributed.Group("wrong", 0, 1, timeout=math.nan), "timeout is nan: give"),
                (lambda: distributed.Group("\ud800", 0, 1), "name is '.ud800': give a text"),
                (lambda: group.tune(lambda: None, budget=math.inf), "budget is inf: give"),
                (lambda: group.tune(None), "call is None: give a function"),
                (lambda: pickle.dumps(group), "a group cannot be pickled"),
                (lambda: distributed.Group("wrong", 0, 1, device="meta"), "device is 'meta'")):
            with pytest.raises(fftune.Error, match=words) as error:
                call()
            assert "\n" not in str(error.value)
        assert copy.deepcopy(group) is copy.copy(group) is group
    x, ids = torch.ones(1, 16), torch.zeros(1, dtype=torch.int32)
    for call in (group.check, lambda: group.tune(lambda: None),
                 lambda: ops.all_reduce(x, group=group), lambda: ops.all_reduce_norm(x, x[0], group=group),
                 lambda: ops.all_argmax(ids, x[0, :1], 4, group=group)):
        with pytest.raises(fftune.Error, match="the group is closed"):
            call()
    with pytest.raises(fftune.Error, match="init_process_group"):
        distributed.init_group()


def test_nccl_needs_gpus():
    for name in ("nccl", "tcp://127.0.0.1:1/nccl"):
        with pytest.raises(fftune.Error, match="is no device of NCCL: it needs GPUs"):
            distributed.Group(f"{name}-{os.getpid()}", 0, 1, max_bytes=4096, nccl=True)


def test_links_are_chosen_by_size():
    with distributed.Group(f"links-{os.getpid()}", 0, 1, max_bytes=64) as group:
        assert group.link("an op", 64) == "peers"
        with pytest.raises(fftune.Error, match="an op: 65 bytes .* with more, or with nccl=True"):
            group.link("an op", 65)
        # As if it had a communicator: the plans are those of NCCL, which the CPU refuses.
        group.nccl = True
        assert group.link("an op", 65) == "nccl"
        x = torch.ones(3, 8)
        with pytest.raises(fftune.Error, match="link=nccl: NCCL is for GPUs"):
            ops.all_reduce(x, group=group)
        with pytest.raises(fftune.Error, match="all-argmax: .* choose from whole logits"):
            ops.all_argmax(torch.ones(9, dtype=torch.int32), torch.ones(9), 100, group=group)
        group.across_hosts = True
        assert group.link("an op", 1) == "nccl"
