"""The next ids beside PyTorch's and transformers', and what calls refuse."""
import pytest
import torch

import fftune
from fftune import ops, reference


def test_argmax_is_pytorchs():
    logits = torch.randn(7, 1000).bfloat16()
    logits[0, 5] = logits[0, 900] = 50
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    ids, logit, logprob = ops.sample(logits, logprobs=True)
    assert torch.equal(ids.long(), logits.argmax(-1))
    assert torch.equal(logit.nan_to_num(7.0), logits.amax(-1).float().nan_to_num(7.0))
    right = logits.float().log_softmax(-1).gather(-1, ids.long()[:, None])[:, 0]
    assert torch.allclose(logprob, right, atol=1e-5, equal_nan=True)


def test_head_is_norm_product_and_argmax():
    x, w, norm = torch.randn(4, 3, 64), torch.randn(500, 64), torch.randn(64)
    logits = torch.nn.functional.rms_norm(x, (64,), norm, 1e-5) @ w.T
    ids, logit = ops.head(x, w, norm, eps=1e-5)
    assert ids.dtype is torch.int32 and torch.equal(ids.long(), logits.argmax(-1))
    assert torch.allclose(logit, logits.amax(-1), rtol=1e-5, atol=1e-4)
    assert torch.allclose(ops.head_logits(x, w, norm, eps=1e-5), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("logits, dtype", [("same", torch.bfloat16), ("f32", torch.float32)])
def test_logits_have_the_type_that_is_asked_for(logits, dtype):
    x, w = torch.randn(17, 64).bfloat16(), torch.randn(50, 64).bfloat16()
    packed = ops.pack_weight(torch.randint(0, 256, (50, 32), dtype=torch.uint8), torch.rand(50, 1).bfloat16() / 64,
                             group=64)
    for weight, dense in ((w, w), (packed, packed.dense())):
        right = x.double() @ dense.double().T
        got = ops.head_logits(x, weight, logits=logits)
        assert got.dtype is dtype and ops.head_logits(x.to("meta"), w.to("meta"), logits=logits).dtype is dtype
        assert (got - right).abs().max() < right.abs().max() * (1e-6 if logits == "f32" else 1e-2)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_best_ids_are_those_of_topk(softcap):
    logits = torch.randn(3, 4, 1000)
    logits[0, 0, 5] = logits[0, 0, 900] = 50
    wide = softcap * (logits / softcap).tanh() if softcap else logits
    values, right = wide.log_softmax(-1).topk(7)
    ids, logit, best_ids, best_logprobs = ops.sample(logits, softcap=softcap, best=7)
    assert best_ids.dtype is torch.int32 and torch.equal(best_ids[..., 0], ids)
    assert best_ids[0, 0, :2].tolist() == [5, 900]
    assert torch.equal(best_ids[1:].long(), right[1:])
    assert torch.allclose(best_logprobs, values, atol=1e-5)
    drawn = ops.sample(logits, 0.7, top_k=3, softcap=softcap, logprobs=True, best=7)
    assert len(drawn) == 5 and torch.equal(drawn[3], best_ids)
    x, w = torch.randn(4, 64), torch.randn(500, 64)
    values, right = (x @ w.T).log_softmax(-1).topk(3)
    *_, best_ids, best_logprobs = ops.head(x, w, best=3)
    assert torch.equal(best_ids.long(), right) and torch.allclose(best_logprobs, values, atol=1e-4)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1},
                                     {"top_k": 12, "top_p": 0.9, "min_p": 0.05}])
def test_draws_are_among_the_ids_that_transformers_keeps(filters):
    warpers = pytest.importorskip("transformers.generation.logits_process")
    logits, temperature = torch.randn(40, 60) * 2, 0.8
    kept = warpers.TemperatureLogitsWarper(temperature)(None, logits)
    for name, warper in (("top_k", "TopKLogitsWarper"), ("top_p", "TopPLogitsWarper"),
                         ("min_p", "MinPLogitsWarper")):
        if name in filters:
            kept = getattr(warpers, warper)(filters[name])(None, kept)
    counts = torch.zeros_like(logits)
    for step in range(300):
        ids, _ = ops.sample(logits, temperature, seeds=torch.arange(40), steps=step, **filters)
        counts.scatter_add_(-1, ids.long()[:, None], torch.ones(40, 1))
    wanted = kept.softmax(-1)
    assert not counts[wanted == 0].any()
    # All rows together, by the rank of the id: 12,000 draws.
    order = wanted.argsort(-1, descending=True)
    drawn, right = counts.gather(-1, order).sum(0), wanted.gather(-1, order).sum(0) * 300
    assert ((drawn - right).abs() < 5 * right.sqrt() + 5).all()


def test_seeds_and_steps_decide():
    logits = torch.zeros(100, 50)
    draw = lambda **of: ops.sample(logits, 1.0, **of)[0]
    assert torch.equal(draw(seeds=1, steps=2), draw(seeds=1, steps=2))
    assert (draw(seeds=1)[0] == draw(seeds=1)).all()  # rows of one seed and step
    assert not torch.equal(draw(seeds=torch.arange(100)), draw(seeds=torch.arange(100), steps=1))
    # The definition, which no version changes: seeds in users' hands are to give the same ids.
    ids = draw(seeds=torch.arange(100), steps=3)
    assert torch.equal(ids, reference.sample(
        logits, torch.ones(100), torch.arange(100), torch.full((100,), 3), None, None, None, 0.0,
        False, 0)[0])
    assert ids[:8].tolist() == IDS


IDS = [28, 3, 13, 25, 32, 17, 12, 39]


@pytest.mark.parametrize("call, words", [
    (lambda x, w: ops.head(x, w, top_k=5), "head: top_k without temperature: give temperature"),
    (lambda x, w: ops.sample(x, "hot"), "sample: temperature is 'hot': give a number"),
    (lambda x, w: ops.sample(x, 1.0, seeds=torch.zeros(3)), "sample: seeds is torch.float32: give"),
    (lambda x, w: ops.sample(x, torch.ones(2)), "sample: temperature is [2], not [3]"),
    (lambda x, w: ops.head(x, w[:, :5]), "head: w is [9, 5], not [9, 8]"),
    (lambda x, w: ops.head(x, w, logits="f16"), "logits"),
    (lambda x, w: ops.sample(x, softcap=-1.0), "softcap"),
    (lambda x, w: ops.sample(x, best=9), "best=9 exceeds vocab=8"),
    (lambda x, w: ops.head(x, w, best=-1), "best"),
])
def test_wrong_calls_have_one_line(call, words):
    with pytest.raises(fftune.Error) as caught:
        call(torch.randn(3, 8), torch.randn(9, 8))
    assert words in str(caught.value) and "\n" not in str(caught.value)
