"""NaN and infinities in each input of every custom op give what PyTorch gives."""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cases import BACKWARDS, CASES
from fftune import reference
from test_ops import each, listed, op_of

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NUMBERS = {"nan": (math.nan,), "inf": (math.inf, -math.inf)}
# Other numbers in some of these places: a result that is the same with all of them is independent
# of these places. The reference multiplies NaN by the weight 0 of a masked key; kernels need not.
SUBSTITUTES = ((0.9, -0.4), (-0.7, 1.1), (2.3, -1.9))
# gate and up of these are in other orders than the reference's.
FIRST_ONLY = ("masked_ffn_preact", "moe_ffn_preact")
# Scales, by op: kernels may multiply a sum by them, or each of its terms: infinite or NaN.
FACTORS = {"linear_packed": (2,), "ffn_packed": (4, 5, 6), "qkv_packed": (2,),
           "qkv_packed_cached": (2,)}
# Arguments that the reference does not read, or reads other elements of than the kernels.
UNREAD = {"moe_ffn_frozen_backward": (1, 4, 5, 6, 7),
          "moe_ffn_backward": (1, 4, 5, 6, 7), "moe_ffn_backward-oai": (1, 4, 5, 6, 9),
          "qkv-table": (10,), "qkv_packed-table": (8,), "mla_rope": (4,),
          # A sequence without keys has zeros, whatever the sinks are.
          "attention-pages-outside": (11,)}


def with_numbers(tensor: Tensor, numbers) -> Tensor:
    """The last element and another one are these."""
    changed = tensor.clone()
    flat = changed.view(-1)
    for i, number in enumerate(numbers):
        flat[max(0, flat.numel() - 1 - i * (flat.numel() // 2 + 5))] = number
    return changed


def results_of(function, case, arguments, device="cpu") -> list[Tensor]:
    own = tuple(a.clone().to(device) if isinstance(a, Tensor) else a for a in arguments)
    results = [*listed(function(*own)), *(own[i] for i in case.updated)]
    return [r.cpu() for r in (results[:1] if case.op in FIRST_ONLY else results)]


def compare(case, dtype, place, numbers, device):
    arguments = case.arguments(dtype)

    def given(own, wide):
        changed = [with_numbers(a, own) if i == place else a for i, a in enumerate(arguments)]
        return [a.double() if wide and isinstance(a, Tensor) and a.dtype == dtype else a
                for a in changed]

    wide = "quantised" not in case.op
    right = getattr(reference, case.op)
    ours = results_of(op_of(case), case, given(numbers, False), device)
    theirs = results_of(right, case, given(numbers, wide))
    replaced = [places for places in itertools.product((False, True), repeat=len(numbers))
                if any(places) and any(t.isnan().any() for t in theirs)]
    groups = [[results_of(right, case, given([other if swap else number for number, other, swap
                                              in zip(numbers, others, places)], wide))
               for others in SUBSTITUTES] for places in replaced]
    for n, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        got, expected = got.double(), expected.double()
        for group in groups:
            first, *others = (results[n].double() for results in group)
            same = torch.stack([first.isfinite(), *(first == other for other in others)]).all(0)
            expected = torch.where(expected.isnan() & same & ~got.isnan(), first, expected)
        finite = expected.isfinite()
        where = f"argument {place}, result {n}"
        assert torch.equal(got.isfinite(), finite), where
        # A gradient may multiply an infinity by a sum or by each of its terms: infinite or NaN.
        if not case.op.endswith(("_backward", "_into")) \
                and place not in FACTORS.get(case.op, ()):
            assert torch.equal(got.nan_to_num(7, 8, 9)[~finite],
                               expected.nan_to_num(7, 8, 9)[~finite]), where
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        assert torch.allclose(got[finite], expected[finite], rtol=tolerance, atol=tolerance), where


# NaN in one type and infinities in the other, in turn.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case, dtype, numbers", [
    pytest.param(case, dtype, numbers, marks=pytest.mark.further if (i + j + k) % 2 else ())
    for i, case in enumerate(CASES + BACKWARDS) for j, dtype in enumerate((torch.float32, torch.bfloat16))
    for k, numbers in enumerate(NUMBERS)], ids=str)
def test_special_values(case, dtype, numbers, device):
    torch.manual_seed(0)
    for place, argument in enumerate(case.arguments(dtype)):
        if not isinstance(argument, Tensor) or not argument.is_floating_point():
            continue
        if place in UNREAD.get(case.name, ()):
            continue
        if case.op == "qkv_packed_cached" and place in FACTORS[case.op] and numbers == "inf":
            continue  # a head's norm makes 0 of numbers beside an infinity, and NaN beside a NaN
        torch.manual_seed(0)
        compare(case, dtype, place, NUMBERS[numbers], device)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu-tanh", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations(act, dtype):
    """Beside PyTorch itself, in float64: in f32 its vectors give NaN for gelu(inf)."""
    gate = torch.tensor([math.nan, math.inf, -math.inf, 1e4, -1e4, 1e30, -1e30, 0.0, 1.0],
                        dtype=dtype).repeat(9)
    wide = gate.double().requires_grad_()
    expected = reference.ACTIVATIONS[act](wide)
    expected.backward(torch.ones_like(wide))
    got = torch.ops.fftune.act_mul(gate, torch.ones_like(gate), act)
    slope, _ = torch.ops.fftune.act_mul_backward(torch.ones_like(gate), gate,
                                                 torch.ones_like(gate), act)
    near = gate.isnan() | gate.isinf() | (gate.abs() < 1e10)  # x² overflows in f32 beyond
    for ours, theirs in ((got, expected.detach().to(dtype)), (slope, wide.grad.to(dtype))):
        assert torch.allclose(ours[near], theirs[near], rtol=1e-2, atol=1e-4, equal_nan=True)


def test_attention_is_that_of_pytorch():
    """A NaN and an infinity in q, k or v, none of them masked."""
    for place in range(3):
        for number in (math.nan, math.inf, -math.inf):
            torch.manual_seed(1)
            q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
            (q, k, v)[place][0, 3, 1, 5] = number
            ours = torch.ops.fftune.attention(q, k, v, *(None,) * 8, None, False, 0, 0.0, 0.0,
                                              False)[0]
            theirs = F.scaled_dot_product_attention(
                *(t.double().transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
            assert torch.allclose(ours.double(), theirs, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("mask", ["causal", "window", "bits"])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_pairs_do_not_exist(dtype, dim, mask, softcap, number, device):
    """A query changes no gradient of the keys that it does not see, nor the reverse."""
    torch.manual_seed(2)
    s, heads = 150, 2
    dy, q, k, v = (torch.randn(1, s, heads, dim).to(device, dtype) for _ in range(4))
    i, j = torch.arange(s)[:, None], torch.arange(s)
    seen = j <= i
    bits = flags = None
    window = 40 if mask == "window" else 0
    if window:
        seen &= j > i - window
    if mask == "bits":
        seen &= torch.rand(s, s) < 0.7
        bits, flags = (t.to(device) for t in torch.ops.fftune.pack_mask(seen[None, None]))
    rules = (None, bits, flags, None, None, None, None, None, mask != "bits", window, softcap, 0.0)
    y, lse = torch.ops.fftune.attention(q, k, v, None, *rules, True)
    arguments = (dy, q, k, v, y, lse)
    plain = torch.ops.fftune.attention_backward(*arguments, *rules, False)
    query, key = 77, 70
    # Arguments, their token with a NaN or an infinity, and results with the tokens in which neither
    # it nor a masked pair's weight of 0 times it occurs.
    for argument, token, results, others in ((0, query, (1,), ~seen[query]),
                                             (1, query, (0,), j != query),
                                             (1, query, (2,), ~seen[query]),
                                             (2, key, (2,), j != key),
                                             (3, key, (0,), ~seen[:, key]),
                                             (3, key, (1,), j != key),
                                             (4, query, (1,), ~seen[query]),
                                             (5, query, (1, 2), ~seen[query])):
        changed = [t.clone() for t in arguments]
        changed[argument][(0, slice(None), token) if argument == 5 else (0, token)] = number
        got = torch.ops.fftune.attention_backward(*changed, *rules, False)
        for result in results:
            ours, expected = got[result][0].cpu(), plain[result][0].cpu()
            assert torch.allclose(ours[others].float(), expected[others].float(), rtol=1e-2,
                                  atol=1e-2), (argument, result)
            if number != number:
                assert ours[~others].isnan().all(), (argument, result)


def test_the_router_puts_nan_first():
    logits = torch.randn(3, 12)
    logits[0, 7] = math.nan
    logits[1, 2], logits[1, 9] = math.nan, math.inf
    logits[2] = -math.inf
    for score, order in (("softmax", "before"), ("softmax", "after"), ("sigmoid", "before")):
        weights, ids = torch.ops.fftune.moe_route(logits, None, 3, score, order, 0, 0, "max",
                                                  False, 1.0)
        chosen = logits.topk(3, -1)[1]
        assert ids[0].tolist() == chosen[0].tolist() and ids[1].tolist() == chosen[1].tolist()
        assert ids[2].tolist() == [0, 1, 2]
        of_all = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
        expected = of_all.gather(-1, ids.long())
        if order == "after":
            expected = logits.gather(-1, ids.long()).softmax(-1)
        assert torch.allclose(weights, expected, equal_nan=True)
