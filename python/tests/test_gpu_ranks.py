"""On two GPUs: collectives and slices of layers between processes. With FFTUNE_DRY_RUN=1 and without
GPUs, on the CPU."""
import os
import socket
import subprocess
import time

import pytest
import torch

import fftune
from fftune import distributed, ops
from fftune.__main__ import tool_environment
from fftune._library import tool_path
from cases import trusted
from gpu import GPU, on_gpu
from ranks import Team, start
from test_ops import error

pytestmark = [on_gpu, pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU")]
RANKS = 2
DTYPE = torch.bfloat16


def _device(rank: int) -> str:
    return f"cuda:{rank}" if GPU else "cpu"


@pytest.fixture(scope="module")
def team():
    processes = Team(RANKS)
    yield processes
    processes.close()


def _name() -> str:
    return f"gpus-{os.getpid()}-{time.monotonic_ns()}"


def _group(rank: int, name: str, max_bytes: int = 1 << 23, nccl: bool = False) -> distributed.Group:
    if GPU:
        torch.cuda.set_device(rank)
    return distributed.Group(name, rank, RANKS, device=_device(rank), max_bytes=max_bytes, timeout=60,
                             nccl=nccl)


def _sums(rank: int, name: str, max_bytes: int = 1 << 23, nccl: bool = False) -> None:
    with _group(rank, name, max_bytes, nccl) as group, torch.device(_device(rank)):
        for m, d in ((1, 4096), (6, 6144), (64, 4096), (138, 6144), (300, 1000)):
            make = torch.Generator(_device(rank)).manual_seed(5)
            xs, (residual, w) = [[torch.randn(*shape, generator=make).to(DTYPE) for shape in shapes]
                                 for shapes in ([(m, d)] * RANKS, [(m, d), (d,)])]
            total = sum((x.float() for x in xs[1:]), xs[0].float())
            assert torch.equal(ops.all_reduce(xs[rank], group=group), total.to(DTYPE))
            if nccl:  # rounds before the residual is added
                total = total.to(DTYPE).float()
            total = (total + residual.float()).to(DTYPE)
            y, added = ops.all_reduce_norm(xs[rank], w, residual=residual, group=group)
            assert torch.equal(added, total)
            torch.testing.assert_close(y, ops.rmsnorm(total, w), rtol=1e-2, atol=1e-3)
            q, scale, added = ops.all_reduce_norm_quantised(xs[rank], w, residual=residual, group=group)
            scale_alone = ops.rmsnorm_quantised(total, w)[1]
            assert torch.equal(added, total)
            torch.testing.assert_close(scale, scale_alone)
            torch.testing.assert_close(q.float() * scale.view(m, 1), y.float(), rtol=0.07, atol=0.02)
            given = torch.tensor([0.0625])
            q, same, added = ops.all_reduce_norm_quantised(xs[rank], w, residual=residual, scale=given,
                                                           group=group)
            assert same is given and torch.equal(added, total)
            torch.testing.assert_close(q.float() * given, y.float(), rtol=0.07, atol=0.02)
            # NaNs and infinities are those of a sum, also where a word of them is all ones.
            special = torch.tensor([-1, -1, 0x7f80, -128, -32768, 0], dtype=torch.int16).view(DTYPE)
            xs[0].view(-1)[:6], xs[1].view(-1)[:6] = special, special
            expected = (xs[0].float() + xs[1].float()).to(DTYPE)
            got = ops.all_reduce(xs[rank], group=group)
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
        group.check()


def test_sums_norms_and_fp8(team):
    team.run(_sums, _name())


@pytest.mark.skipif(not GPU, reason="no GPU")
@pytest.mark.parametrize("meeting", ["one host", "tcp"])
def test_sums_norms_and_fp8_by_nccl(team, meeting):
    team.run(_sums, *((_place(), 1 << 23) if meeting == "tcp" else (_name(), 1)), True)


def _place() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}/{os.getpid()}"


def _nccl_in_graphs(rank: int, name: str) -> None:
    with _group(rank, name, 1, True) as group, torch.device(_device(rank)):
        x, w = torch.full((64, 4096), rank + 1.0, dtype=DTYPE), torch.ones(4096, dtype=DTYPE)
        for _ in range(2):
            ops.all_reduce_norm(x, w, residual=x, group=group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            totals = [ops.all_reduce_norm(x, w, residual=x * 0, group=group)[1] for _ in range(3)]
        for factor in (1, 2, 3):
            x.fill_((rank + 1) * factor)
            graph.replay()
            for total in totals:
                assert (total == 3 * factor).all()
        group.check()
        graph.reset()


def _dies_in_nccl(rank: int, name: str) -> None:
    group = _group(rank, name, nccl=True)
    x = torch.ones(1024, 4096, dtype=DTYPE, device=_device(rank))
    begin = time.monotonic()
    with pytest.raises(fftune.Error, match="rank 1 died|rank of the group is gone"):
        for i in range(1 << 30):
            if rank == 1 and i == 20:
                os._exit(0)
            ops.all_reduce(x, group=group)
            torch.cuda.synchronize()
            group.check()
    assert time.monotonic() - begin < 30
    group.close()


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_nccl_in_graphs(team):
    team.run(_nccl_in_graphs, _place())


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_a_rank_that_dies_in_nccl_is_an_error():
    start(_dies_in_nccl, RANKS, _place())


def _model(batch: int, device: str):
    """Whole layers that both ranks draw alike, and a rank's slices of them."""
    torch.manual_seed(3)
    d, h, heads, kv_heads, dim, keys = 512, 1024, 8, 4, 64, 48

    def random(*shape):
        return (torch.randn(*shape, device=device) / shape[-1] ** 0.5).to(DTYPE)

    ones = torch.ones(d, device=device, dtype=DTYPE)
    weights = [{"attn_norm": ones, "w_q": random(heads * dim, d), "w_k": random(kv_heads * dim, d),
                "w_v": random(kv_heads * dim, d), "w_o": random(d, heads * dim), "ffn_norm": ones,
                "w_gate": random(h, d), "w_up": random(h, d), "w_down": random(d, h)} for _ in range(2)]
    caches = [tuple(torch.randn(batch, keys, kv_heads, dim, device=device, dtype=DTYPE).transpose(1, 2)
                    for _ in "kv") for _ in weights]
    lengths = torch.full((batch,), 40, dtype=torch.int32, device=device)
    angles = torch.rand(keys, dim // 2, device=device).repeat(1, 2)
    return weights, caches, lengths, heads, kv_heads, angles


def _own(rank: int, weights, caches, heads: int, kv_heads: int):
    return ([distributed.slice_layer(w, rank, RANKS, heads, kv_heads) for w in weights],
            [tuple(c.chunk(RANKS, 1)[rank].transpose(1, 2).contiguous().transpose(1, 2) for c in pair)
             for pair in caches])


def _slices(rank: int, name: str, nccl: bool = False) -> None:
    device = _device(rank)
    with _group(rank, name, nccl=nccl) as group:
        for batch, s in ((1, 1), (16, 1), (1, 40)) if nccl else ((1, 1), (2, 1), (5, 1), (16, 1), (64, 1), (1, 40)):
            weights, caches, lengths, heads, kv_heads, angles = _model(batch, device)
            if s > 1:
                lengths.fill_(s)
            own, own_caches = _own(rank, weights, caches, heads, kv_heads)
            x = torch.randn(batch, s, 512, device=device).to(DTYPE)
            whole = ops.layer(x, weights, caches, lengths, heads, kv_heads, angles=angles)

            def call():
                return ops.layer(x, own, own_caches, lengths, heads // RANKS, kv_heads // RANKS,
                                 angles=angles, group=group)

            got = call()
            assert error(got, whole) < 1e-2, (batch, s, error(got, whole))
            assert torch.equal(call(), got)
            # The same bits on both ranks.
            bits = got.view(torch.int16).long().sum().float().view(1, 1)
            assert torch.equal(ops.all_reduce(bits, group=group), RANKS * bits)
            if GPU:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    captured = call()
                for _ in range(3):
                    graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(captured, got)
        group.check()


def test_slices_are_the_whole_layers(team):
    team.run(_slices, _name())


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_slices_across_hosts_are_the_whole_layers(team):
    team.run(_slices, _place(), True)


def _tokens(rank: int, name: str) -> None:
    """Tokens of a model on slices, with the whole head and with slices of it."""
    device = _device(rank)
    with _group(rank, name) as group:
        for batch in (1, 3):
            weights, caches, _, heads, kv_heads, angles = _model(batch, device)
            own, own_caches = _own(rank, weights, caches, heads, kv_heads)
            # A token's logit of the seventh id behind it is by far the largest.
            embedding = torch.randn(640, 512, device=device).to(DTYPE)
            head = embedding.roll(7, 0)
            norm = torch.ones(512, device=device, dtype=DTYPE)
            found = []
            for of, of_caches, parts, rows, given in (
                    (weights, caches, 1, head, {}), (own, own_caches, RANKS, head, {"group": group}),
                    (own, own_caches, RANKS, head.chunk(RANKS)[rank], {"group": group})):
                state = [torch.full((batch,), value, dtype=torch.int32, device=device)
                         for value in (5, 40, 0, 0)]
                state.append(torch.zeros(batch, 4, dtype=torch.int32, device=device))
                for _ in range(3):
                    ops.decode(*state, embedding, of, of_caches, norm, rows, heads // parts,
                               kv_heads // parts, angles=angles, **given)
                found.append(state[4])
            assert found[0].tolist() == found[1].tolist() == found[2].tolist()
            assert found[0][:, :3].tolist() == [[12, 19, 26]] * batch
        group.check()


def test_tokens_with_a_whole_head_and_with_slices(team):
    team.run(_tokens, _name())


def _tuned(rank: int, name: str, presets: str) -> None:
    device = _device(rank)
    with _group(rank, name) as group:
        weights, caches, lengths, heads, kv_heads, angles = _model(16, device)
        own, own_caches = _own(rank, weights, caches, heads, kv_heads)
        x = torch.randn(16, 1, 512, device=device).to(DTYPE)

        def call():
            return ops.layer(x, own, own_caches, lengths, heads // RANKS, kv_heads // RANKS,
                             angles=angles, group=group)

        before = call()
        problems = group.tune(call, budget=8 if GPU else 0.5, presets=presets)
        spec = device if GPU else "cpu"
        found = fftune.explain(problems[0], spec)
        assert found["reason"] == "a search on the ranks of a group"
        assert error(call(), before) < 1e-2
        os.environ["FFTUNE_PRESETS"] = trusted(presets)
        fftune.tuning.forget_plans()
        loaded = fftune.explain(problems[0], spec)
        assert loaded["preset"]["exact_shape"] and not loaded["preset"]["stale"]
        assert loaded["variants"] == found["variants"]
        assert error(call(), before) < 1e-2
        group.check()


def test_a_search_is_a_preset_that_check_verifies(tmp_path):
    presets = str(tmp_path)
    start(_tuned, RANKS, _name(), presets)  # chooses by these presets from then on
    checked = subprocess.run([str(tool_path()), "check", "--device", _device(0), "--presets", presets, "--seeds",
                              "1", "--json"], env=tool_environment(), text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "checked by one rank that plays all" in checked.stdout
