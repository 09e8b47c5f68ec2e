"""ops.decode: n calls beside n steps in plain PyTorch, for sequences that end at different steps."""
import copy
from contextlib import nullcontext

import pytest
import torch

import fftune
from fftune import ops, reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, CACHE, VOCAB, D, HEADS, KV_HEADS, DIM, H, LAYERS = 4, 32, 60, 64, 4, 2, 16, 96, 2


def state(lengths=(3, 0, 7, 5), room=12):
    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)
    return dict(ids=ints(1, 2, 3, 4), lengths=ints(*lengths), steps=ints(0, 0, 0, 0),
                ended=ints(0, 0, 0, 0),
                out=torch.full((BATCH, room), -1, dtype=torch.int32, device=DEVICE))


def model(seed=0, paged=False):
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: (torch.randn(*shape, generator=random) / shape[-1] ** 0.5).to(DEVICE)
    one = lambda: {"attn_norm": 1 + draw(D), "w_q": draw(HEADS * DIM, D),
                   "w_k": draw(KV_HEADS * DIM, D), "w_v": draw(KV_HEADS * DIM, D),
                   "w_o": draw(D, HEADS * DIM), "ffn_norm": 1 + draw(D), "w_gate": draw(H, D),
                   "w_up": draw(H, D), "w_down": draw(D, H)}
    cache = lambda: draw(8, 16, KV_HEADS, DIM) if paged else draw(
        BATCH, CACHE, KV_HEADS, DIM).transpose(1, 2)
    angles = torch.arange(CACHE).float()[:, None] / 10.0 ** torch.arange(DIM // 2)
    table = torch.tensor([[0, 5], [2, 1], [7, 3], [4, 6]], dtype=torch.int32, device=DEVICE)
    return dict(embedding=draw(VOCAB, D) * 8, weights=[one() for _ in range(LAYERS)],
                caches=[(cache(), cache()) for _ in range(LAYERS)], final_norm=1 + draw(D),
                w_head=draw(VOCAB, D) * 6, heads=HEADS, kv_heads=KV_HEADS,
                angles=torch.cat((angles, angles), -1).to(DEVICE), pages=table if paged else None)


def in_pytorch(own, parts, stop, limits, draw, logprobs=False, pad=0, softcap=0.0, scale=1.0):
    """A step by the functions of fftune.reference, a sequence after the other on the host."""
    alive = [e == 0 and n < CACHE for e, n in zip(own["ended"].tolist(), own["lengths"].tolist())]
    rows = torch.tensor([i for i in range(BATCH) if alive[i]], device=DEVICE)
    x = (parts["embedding"][own["ids"].long().clamp(0)] * scale)[:, None]
    keys = own["lengths"].clone()
    keys[rows] += 1
    keys.clamp_(min=1)
    places = keys - 1
    if parts["pages"] is None:
        slots = torch.arange(BATCH, device=DEVICE) * CACHE + places
    else:
        slots = parts["pages"].gather(1, places[:, None].long() // 16)[:, 0] * 16 + places % 16
    before = [t.clone() for pair in parts["caches"] for t in pair]
    x = ops.layer(x, parts["weights"], parts["caches"], keys, HEADS, KV_HEADS,
                  slots=slots[:, None].int(), positions=places[:, None], angles=parts["angles"],
                  pages=parts["pages"])[:, 0]
    for tensor, old in zip((t for pair in parts["caches"] for t in pair), before):
        flat = lambda t: (t if parts["pages"] is not None else t.transpose(1, 2)).flatten(0, 1)
        for i in set(range(BATCH)) - set(rows.tolist()):
            flat(tensor)[slots[i]] = flat(old)[slots[i]]
    draw = {**draw, "steps": own["steps"]} if draw else {}
    chosen, *others = ops.head(x, parts["w_head"], parts["final_norm"], softcap=softcap,
                               logprobs=logprobs, **draw)
    for i in range(BATCH):
        if not alive[i]:
            own["ids"][i] = pad
            continue
        own["ids"][i] = own["out"][i, own["steps"][i]] = chosen[i]
        own["steps"][i] += 1
        own["lengths"][i] += 1
        full = int(own["lengths"][i]) + 1 >= int(limits[i]) or int(own["lengths"][i]) >= CACHE
        own["ended"][i] = 1 if int(chosen[i]) in stop else 2 if full else 0
    return chosen, *others


DRAWS = {"argmax": {}, "sample": dict(temperature=1.5, seeds=7),
         "filtered": dict(temperature=torch.tensor([1.0, 2.0, 0.0, 1.5]),
                          seeds=torch.tensor([3, 4, 5, 6]), top_k=20, top_p=0.95)}


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("draw", list(DRAWS))
def test_calls_are_steps(draw, paged):
    draw = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in DRAWS[draw].items()}
    parts = model(paged=paged)
    limits = torch.tensor([100, 6, 100, 100], dtype=torch.int32, device=DEVICE)
    free = state()
    for _ in range(10):
        ops.decode(**free, **copy.deepcopy(parts), limits=limits, **draw)
    stop = torch.tensor([int(free["out"][0, 2]), 59], dtype=torch.int32, device=DEVICE)
    options = dict(logprobs=True, pad=9, logit_softcap=20.0, embed_scale=1.25)
    ours, theirs = state(), state()
    own, other = copy.deepcopy(parts), copy.deepcopy(parts)
    for _ in range(10):
        results = ops.decode(**ours, **own, limits=limits, stop=stop, **draw, **options)
        right = in_pytorch(theirs, other, stop.tolist(), limits, draw, True, 9, 20.0, 1.25)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
        alive = ours["ids"] == results[0]
        for mine, wanted in zip(results, right):
            assert torch.allclose(mine[alive].float(), wanted[alive].float(), atol=1e-4)
        for mine, wanted in zip(own["caches"], other["caches"]):
            for a, b in zip(mine, wanted):
                assert torch.allclose(a, b, atol=1e-4)
    assert int(ours["ended"][1]) == 2 and int(ours["steps"][1]) == 5
    assert len(set(ours["steps"].tolist())) > 1


def test_the_reference_is_the_op():
    parts, limits = model(), torch.full((BATCH,), 9, dtype=torch.int32, device=DEVICE)
    ours, theirs = state(), state()
    own, other = copy.deepcopy(parts), copy.deepcopy(parts)
    stop = torch.tensor([5, 50], dtype=torch.int32, device=DEVICE)
    form, weights, caches = fftune._ops.layer.given_layers(
        other["embedding"], other["weights"], other["caches"], HEADS, KV_HEADS, other["angles"])
    for _ in range(6):
        ops.decode(**ours, **own, limits=limits, stop=stop)
        reference.decode(*theirs.values(), limits, stop, other["embedding"], other["angles"], None,
                         weights, caches, other["final_norm"], None, other["w_head"], None, None,
                         None, None, None, None, form, 1.0, 0.0, 0, False, 0)
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
    assert set(ours["ended"].tolist()) >= {2}


@pytest.mark.parametrize("format, group, zeros", (("int4", 32, True), ("int4", 0, False), ("mxfp4", 32, False),
                                                  ("fp8", 64, False), ("nvfp4", 16, False)))
@pytest.mark.parametrize("draw", ("argmax", "sample"))
def test_a_packed_head_chooses_as_the_dense_one(format, group, zeros, draw, references):
    from fftune.nn import QuantLinear

    parts = model()
    linear = torch.nn.Linear(D, VOCAB, bias=False, device=DEVICE)
    linear.weight.data = parts["w_head"]
    packed = QuantLinear.from_linear(linear, group, zeros, format).packed_weight
    runs = []
    for w_head, by in ((packed, nullcontext()), (packed.dense(torch.float32), nullcontext()),
                       (packed, references())):
        own, given = state(), {**copy.deepcopy({**parts, "w_head": None}), "w_head": w_head}
        with by:
            for _ in range(6):
                results = ops.decode(**own, **given, **DRAWS[draw])
        runs.append((own, results))
    for own, (_, logit) in runs[1:]:
        assert torch.allclose(logit, runs[0][1][1], atol=1e-4)
        assert all(torch.equal(own[name], runs[0][0][name]) for name in own)
    with pytest.raises(fftune.Error, match=r"w_head is a packed weight \[60, 64\]: give one of \[61, 64\]"):
        ops.decode(**state(), **{**parts, "w_head": packed, "embedding": torch.zeros(VOCAB + 1, D, device=DEVICE)})


def test_the_best_ids_and_their_log_probabilities():
    parts = model()
    chosen, logit, logprob, best_ids, best_logprobs = ops.decode(**state(), **copy.deepcopy(parts),
                                                                 logprobs=True, best=3)
    assert torch.equal(best_ids[:, 0], chosen) and torch.equal(best_logprobs[:, 0], logprob)
    assert (best_logprobs.diff(dim=-1) <= 0).all()
    assert len(ops.decode(**state(), **copy.deepcopy(parts), best=2)) == 4


def test_a_whole_graph_of_torch_compile():
    torch._dynamo.reset()  # whatever other tests have compiled
    parts = model()
    ours, theirs = state(), state()
    own, other = copy.deepcopy(parts), copy.deepcopy(parts)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(own, parts):
        return ops.decode(**own, **parts)

    for _ in range(3):
        assert torch.equal(step(ours, own)[0], ops.decode(**theirs, **other)[0])
    assert torch.equal(ours["out"], theirs["out"])


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_steps_are_replays_of_one_graph():
    parts, ours, theirs = model(), state(), state()
    own, other = copy.deepcopy(parts), copy.deepcopy(parts)
    limits = torch.tensor([100, 6, 100, 100], dtype=torch.int32, device=DEVICE)
    for _ in range(9):
        ops.decode(**theirs, **other, limits=limits)
    ops.decode(**ours, **own, limits=limits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.decode(**ours, **own, limits=limits)
    for _ in range(8):
        graph.replay()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_what_does_not_fit_is_an_error_of_one_line():
    def refused(**changes):
        given = {**state(), **model(), **changes}
        with pytest.raises(fftune.Error) as caught:
            ops.decode(**given)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "ids" in refused(ids=torch.zeros(BATCH, device=DEVICE))
    assert "lengths" in refused(lengths=state()["lengths"][:2].clone())
    assert "updated in place" in refused(out=state()["out"].t().contiguous().t())
    assert "w_head" in refused(w_head=torch.zeros(VOCAB, D + 8, device=DEVICE))
    assert "give temperature" in refused(top_k=4)
    assert "options" in refused(options={"colour": 3})
    assert "pad" in refused(pad=-1)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tokens", [1, 3])
def test_keys_without_a_place_in_their_sequence_are_written_to_no_other(paged, tokens):
    """Sequences that have no keys, fewer than there are tokens, or more than the cache has rows."""
    parts = model(paged=paged)
    lengths = torch.tensor([20, 0, CACHE + 1, 2], dtype=torch.int32, device=DEVICE)
    rows = lambda t: (t if paged else t.transpose(1, 2)).flatten(0, 1)
    at = lambda i, place: (int(parts["pages"][i, place // 16]) * 16 + place % 16) if paged else i * CACHE + place
    before = [rows(t).clone() for pair in parts["caches"] for t in pair]
    ops.layer(torch.randn(BATCH, tokens, D, device=DEVICE), parts["weights"], parts["caches"], lengths, HEADS, KV_HEADS,
              angles=parts["angles"], pages=parts["pages"])
    written = {at(i, n - tokens + t) for i, n in enumerate(lengths.tolist()) for t in range(tokens)
               if 0 <= n - tokens + t < CACHE}
    for old, new in zip(before, (rows(t) for pair in parts["caches"] for t in pair), strict=True):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) == written
