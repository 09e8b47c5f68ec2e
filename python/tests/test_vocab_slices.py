"""cross_entropy and linear_cross_entropy of slices of the vocabulary, on processes of gloo."""
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import fftune
from fftune import ops
from ranks import start

ROWS, D, VOCAB = 33, 24, 70
SLICES = {1: [70], 2: [40, 30], 3: [1, 60, 9]}


def error(ours, theirs):
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / (theirs.norm() + 1e-30)).item()


def _inputs(dtype=torch.float32, device="cpu"):
    make = torch.Generator().manual_seed(3)
    labels = torch.randint(0, VOCAB, (3, ROWS // 3), generator=make)
    labels[:, ::4] = -100
    draw = lambda *shape: torch.randn(*shape, generator=make)
    x, w, bias = draw(3, ROWS // 3, D), draw(VOCAB, D) * 2 / D**0.5, draw(VOCAB)
    weights = torch.rand(VOCAB, generator=make) + 0.5
    return *(t.to(device, dtype) for t in (x, w, bias)), labels.to(device), weights.to(device)


def _leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


RULES = [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01, "softcap": 3.0},
         {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 5.0}, {"weighs": True}, {"items": 17}]


def _compare(rank, rules, reduction, dtype, device="cpu"):
    """Beside the same op with the whole vocabulary."""
    rules = dict(rules)
    x, w, bias, labels, weights = _inputs(dtype, device)
    if rules.pop("weighs", False):
        rules["class_weights"] = weights
    if reduction != "mean":
        rules.pop("items", None)
    rules |= {"reduction": reduction, "lse": True, "logprobs": True, "entropy": True}
    sizes = SLICES[dist.get_world_size()]
    first, ids = sum(sizes[:rank]), sizes[rank]
    within = slice(first, first + ids)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2

    whole = _leaves(x, w, bias)
    right = ops.linear_cross_entropy(*whole[:2], labels, whole[2], **rules)
    seed = torch.rand(right[0].shape, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
    dx, dw, dbias = torch.autograd.grad(right[0], whole, seed)
    own = _leaves(x, w[within], bias[within])
    found = ops.linear_cross_entropy(*own[:2], labels, own[2], vocab_slice=(first, VOCAB), **rules)
    for mine, other in zip(found, right, strict=True):
        assert mine.shape == other.shape and error(mine, other) < tolerance
    for mine, other in zip(torch.autograd.grad(found[0], own, seed), (dx, dw[within], dbias[within])):
        assert mine.dtype == dtype and error(mine, other) < tolerance

    logits = F.linear(x, w, bias)
    leaf, = _leaves(logits)
    right = ops.cross_entropy(leaf, labels, **rules)
    dlogits, = torch.autograd.grad(right[0], leaf, seed)
    part, = _leaves(logits[..., within])
    found = ops.cross_entropy(part, labels, vocab_slice=(first, VOCAB), **rules)
    for mine, other in zip(found, right, strict=True):
        assert error(mine, other) < tolerance
    assert error(torch.autograd.grad(found[0], part, seed)[0], dlogits[..., within]) < tolerance


def _labels_outside(rank):
    """All results of such a row are NaN, as those of the whole vocabulary are."""
    x, w, bias, labels, weights = _inputs()
    labels[0, 1], labels[1, 2], labels[2, 3] = VOCAB, -1, 2**40
    outside = (labels != -100) & ((labels < 0) | (labels >= VOCAB))
    sizes = SLICES[dist.get_world_size()]
    first, ids = sum(sizes[:rank]), sizes[rank]
    within = slice(first, first + ids)
    for rules in ({}, {"label_smoothing": 0.1, "z_loss": 0.01}, {"class_weights": weights}):
        rules |= {"reduction": "none", "lse": True, "logprobs": True, "entropy": True}
        logits = F.linear(x, w, bias)
        for right, found in (
                (ops.cross_entropy(logits, labels, **rules),
                 ops.cross_entropy(logits[..., within], labels, vocab_slice=(first, VOCAB), **rules)),
                (ops.linear_cross_entropy(x, w, labels, bias, **rules),
                 ops.linear_cross_entropy(x, w[within], labels, bias[within], vocab_slice=(first, VOCAB), **rules))):
            for mine, other in zip(found, right, strict=True):
                assert torch.equal(mine.isnan(), outside) and torch.equal(other.isnan(), outside)
                assert error(mine[~outside], other[~outside]) < 1e-5


def _other_cases(rank):
    x, w, bias, labels, _ = _inputs()
    sizes = SLICES[dist.get_world_size()]
    first = sum(sizes[:rank])
    part, ends = w[first:first + sizes[rank]], (first, VOCAB)
    right = F.cross_entropy((x @ w.T).flatten(0, 1), labels.flatten())
    for options in ({"skip_ignored": True}, {"workspace": 0.0}, {"recompute": True}):
        own = x.clone().requires_grad_()  # frozen weights
        loss = ops.linear_cross_entropy(own, part, labels, vocab_slice=ends, **options)
        loss.backward()
        leaf = x.clone().requires_grad_()
        expected, = torch.autograd.grad(F.cross_entropy((leaf @ w.T).flatten(0, 1), labels.flatten()), leaf)
        assert error(loss, right) < 1e-5 and error(own.grad, expected) < 1e-5
    # An accumulator takes the gradient of the slice; nothing goes on to w.
    into, leaf = torch.ones_like(part), part.clone().requires_grad_()
    ops.linear_cross_entropy(x, leaf, labels, vocab_slice=ends, into=into).backward()
    plain = part.clone().requires_grad_()
    ops.linear_cross_entropy(x, plain, labels, vocab_slice=ends).backward()
    assert leaf.grad is None and error(into, 1 + plain.grad) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        leaf = part.clone().requires_grad_()
        loss = ops.linear_cross_entropy(x, leaf, labels, vocab_slice=ends)
    loss.backward()
    assert leaf.grad.dtype == torch.float32 and error(leaf.grad, plain.grad) < 2e-2
    # Labels that are ids of no slice; and an ignore_index that is an id.
    wrong = labels.clone()
    wrong[0, 1] = VOCAB
    assert ops.linear_cross_entropy(x, part, wrong, vocab_slice=ends, reduction="none").isnan().sum() == 1
    ignoring = {"ignore_index": 5}
    kept = labels.masked_fill(labels == -100, 5)
    assert error(ops.linear_cross_entropy(x, part, kept, vocab_slice=ends, **ignoring),
                 ops.linear_cross_entropy(x, w, kept, **ignoring)) < 1e-6
    # A slice that is masked out has no share.
    logits = (x @ w.T)
    logits[..., :40] = -torch.inf
    kept = labels.masked_fill((labels >= 0) & (labels < 40), -100)
    found = ops.cross_entropy(logits[..., first:first + sizes[rank]], kept, vocab_slice=ends, entropy=True)
    for mine, other in zip(found, ops.cross_entropy(logits, kept, entropy=True)):
        assert error(mine, other) < 1e-6
    for ends in ((first, VOCAB - 40), (-1, VOCAB), 3, (first, 70.0)):
        with pytest.raises(fftune.Error, match="give its first id, and the number of ids of the vocabulary"):
            ops.linear_cross_entropy(x, part, labels, vocab_slice=ends)
    with pytest.raises(fftune.Error, match="class_weights, and label_smoothing or z_loss: leave one out"):
        ops.linear_cross_entropy(x, part, labels, vocab_slice=(first, VOCAB), z_loss=1.0,
                                 class_weights=torch.ones(VOCAB))


def _work(rank, ranks, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for rules in RULES if ranks == 2 else RULES[3:5]:
        for reduction in ("none", "sum", "mean"):
            _compare(rank, rules, reduction, torch.float32)
    _compare(rank, RULES[3], "mean", torch.bfloat16)
    _labels_outside(rank)
    if ranks == 2:
        _other_cases(rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_slices_are_the_whole_vocabulary(tmp_path, ranks):
    start(_work, ranks, ranks, str(tmp_path / "store"))


def _on_gpus(rank, ranks, store):
    torch.cuda.set_device(rank)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for rules in (RULES[3], RULES[4]):
        for dtype in (torch.float32, torch.bfloat16):
            _compare(rank, rules, "mean", dtype, "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no two GPUs")
def test_slices_on_two_gpus(tmp_path):
    start(_on_gpus, 2, 2, str(tmp_path / "store"))


def test_a_slice_without_processes_is_refused():
    x, w, _, labels, _ = _inputs()
    with pytest.raises(fftune.Error, match="call torch.distributed.init_process_group"):
        ops.linear_cross_entropy(x, w, labels, vocab_slice=(0, VOCAB))
