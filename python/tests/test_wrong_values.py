"""Every kind of wrong value at every argument of every public function: one line, and no crash."""
import functools
import inspect
import math
import os

import numpy
import pytest
import torch
from torch import Tensor

import fftune
from fftune import nn, ops

X, W, D, V = torch.randn(3, 8), torch.randn(6, 8), torch.randn(8, 6), torch.randn(8)
MASK, H = torch.tensor([True, False, True]), torch.randn(3, 6)
Q, K = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
IDS, SHARES = torch.tensor([[0], [1], [1]], dtype=torch.int32), torch.rand(3, 1)
EXPERTS = torch.randn(2, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 8, 6)
FP8, ONE = torch.float8_e4m3fn, torch.ones(1)
WEIGHTS = {"attn_norm": V, "w_q": torch.randn(8, 8), "w_k": torch.randn(8, 8),
           "w_v": torch.randn(8, 8), "w_o": torch.randn(8, 8), "ffn_norm": V, "w_gate": W,
           "w_up": W, "w_down": D}


def caches():
    return [tuple(torch.zeros(1, 5, 1, 8).transpose(1, 2) for _ in range(2))]


# A good call of each function of fftune.ops: its arguments by name.
GOOD = {
    "ffn": dict(x=X, w_gate=W, w_up=W, w_down=D, bias=V, residual=X, act="silu", recompute=False),
    "ffn_backward": dict(dy=X, x=X, gate=H, up=H, w_gate=W, w_up=W, w_down=D, act="silu", into=None),
    "ffn_block": dict(x=X, residual=X, w_norm=V, w_gate=W, w_up=W, w_down=D, act="silu",
                      convention="llama", eps=1e-6, recompute=False),
    "ffn_fp8": dict(x=X.to(FP8), w_gate=W.to(FP8), w_up=W.to(FP8), w_down=D.to(FP8), x_scale=ONE,
                    w_gate_scale=ONE, w_up_scale=ONE, w_down_scale=ONE, hidden_scale=ONE,
                    bias=None, residual=None, act="silu"),
    "mlp": dict(x=X, w_up=W, w_down=D, b_up=torch.randn(6), b_down=V, residual=X, act="gelu"),
    "linear": dict(x=X, w=W, bias=torch.randn(6), residual=H),
    "linear_fp8": dict(x=X, w=W.to(FP8), w_scale=torch.ones(6), bias=torch.randn(6), residual=H),
    "linear_backward": dict(dy=H, x=X, w=W, bias=True, into=None),
    "masked_ffn": dict(x=X, mask=MASK, w_gate_true=W, w_up_true=W, w_down_true=D, w_gate_false=W,
                       w_up_false=W, w_down_false=D, act="silu", recompute=False,
                       pattern="block:0.33"),
    "masked_linear": dict(x=X, mask=MASK, w_true=W, w_false=W, pattern=None),
    "masked_linear_backward": dict(dy=H, x=X, mask=MASK, w_true=W, w_false=W, into=None,
                                   pattern=None),
    "rmsnorm": dict(x=X, w=V, eps=1e-6, convention="llama", save_rstd=False),
    "add_rmsnorm": dict(x=X, residual=X, w=V, eps=1e-6, convention="llama", save_rstd=False),
    "rmsnorm_quantised": dict(x=X, w=V, residual=X, eps=1e-6, convention="llama", dtype=torch.int8),
    "bias_gelu": dict(x=X, bias=V, approximate="none"),
    "scale_": dict(x=X.clone(), factor=torch.ones(1)),
    "act_mul": dict(gate=X, up=X, act="silu"),
    "rope": dict(q=Q, k=K, angles=None, starts=torch.tensor([0, 3]), offsets=None,
                 rotation="halves", rotary=0, rule="base", base=1e4, factor=1.0, context=64.0,
                 low=1.0, high=4.0, beta_fast=32.0, beta_slow=1.0, scale=0.0),
    "causal_conv1d": dict(x=torch.randn(2, 3, 8), w=torch.randn(8, 4), bias=V, act="silu", offsets=None,
                          initial=torch.randn(2, 3, 8), final=True, state_order="entries"),
    "causal_conv1d_update": dict(
        x=X, w=torch.randn(8, 4), bias=V, state=torch.randn(4, 5, 8), act="silu",
        offsets=torch.tensor([0, 2, 3]), indices=torch.tensor([2, 0]), first_slot=0,
        has_state=torch.tensor([True, False]), accepted=torch.tensor([1, 2]), state_order="entries"),
    "gated_rmsnorm": dict(x=X, z=X, w=V, eps=1e-6, order="after", gate="silu", convention="t5", groups=2),
    "gated_delta_rule": dict(
        q=torch.randn(2, 3, 2, 8), k=torch.randn(2, 3, 2, 8), v=torch.randn(2, 3, 4, 6), g=None, beta=None,
        a=torch.randn(2, 3, 4), A_log=torch.randn(4), dt_bias=torch.randn(4), b=torch.randn(2, 3, 4),
        gate="softplus", gate_bound=-5.0, beta_scale=1.0, qk_norm=True, scale=0.5,
        initial_state=torch.randn(2, 4, 6, 8), states=None, state_indices=None, null_index=0, has_state=None,
        offsets=None, accepted=None, state_layout="vk", return_state=True),
    "ssd": dict(
        x=torch.randn(2, 3, 4, 8), dt=torch.randn(2, 3, 4), A=None, B=torch.randn(2, 3, 2, 6),
        C=torch.randn(2, 3, 2, 6), D=torch.randn(4), A_log=torch.randn(4), dt_bias=torch.randn(4), softplus=True,
        dt_limit=(0.0, 0.1), initial_state=torch.randn(2, 4, 8, 6), states=None, state_indices=None,
        null_index=0, has_state=None, offsets=None, accepted=None, return_state=True),
    "ngram_block": dict(ids=torch.randint(0, 5, (3, 9)), logits=torch.randn(3, 5), n=2, padding=-1,
                        lengths=torch.tensor([9, 4, 2]), prefix=torch.randint(0, 5, (1, 4)),
                        prefix_lengths=torch.tensor([4])),
    "attention": dict(q=Q, k=K, v=K, mask=torch.ones(2, 1, 3, 3, dtype=torch.bool), causal=False,
                      window=0, bias=torch.randn(1, 4, 3, 3), offsets=None, kv_offsets=None,
                      lengths=torch.tensor([3, 2]), sinks=torch.randn(4), pages=None, softcap=2.0,
                      scale=0.5, return_lse=True, k_scale=None, v_scale=None),
    "indexer": dict(q=torch.randn(2, 3, 4, 8), weights=torch.randn(2, 3, 4), k=torch.randn(2, 9, 8), top=5, pages=None,
                    lengths=torch.tensor([9, 4]), k_scale=None),
    "mla": dict(q_latent=torch.randn(2, 1, 4, 8), q_rope=torch.randn(2, 1, 4, 2), cache=torch.randn(5, 3, 10),
                pages=torch.tensor([[4, 0], [1, 3]]), lengths=torch.tensor([6, 2]),
                chosen=torch.tensor([[[4, 0, -1]], [[1, 0, 5]]]), scale=0.5, return_lse=True),
    "mla_rope": dict(q=torch.randn(3, 4, 8), kv=torch.randn(3, 10), norm=torch.randn(6), cache=torch.zeros(5, 10),
                     slots=torch.tensor([4, 0, 1]), positions=torch.tensor([2, 0, 1]), angles=torch.randn(3, 4),
                     rotation="interleaved", rope_order="halves", eps=1e-5, rule="table", base=1e4, factor=1.0,
                     context=8192.0, low=1.0, high=4.0, beta_fast=32.0, beta_slow=1.0, scale=1.0),
    "head_linear": dict(x=torch.randn(3, 4, 8), w=torch.randn(4, 5, 8), transposed=False),
    "masked_softmax": dict(x=Q, mask=torch.ones(2, 1, 4, 8, dtype=torch.bool), causal=False,
                           scale=1.0),
    "cross_entropy": dict(logits=X, labels=torch.zeros(X.shape[:-1], dtype=torch.int64),
                          reduction="mean", items=3.0, class_weights=torch.ones(X.shape[-1]),
                          ignore_index=-100, label_smoothing=0.1, z_loss=0.1, softcap=2.0, lse=True,
                          logprobs=True, entropy=True, vocab_slice=None, group=None),
    "linear_cross_entropy": dict(x=X, w=W, labels=torch.zeros(X.shape[:-1], dtype=torch.int64),
                                 bias=torch.randn(len(W)), reduction="mean", items=3.0,
                                 class_weights=torch.ones(len(W)), ignore_index=-100,
                                 label_smoothing=0.1, z_loss=0.1, softcap=2.0, lse=False,
                                 logprobs=False, entropy=False, workspace=1.0, recompute=False,
                                 skip_ignored=False, into=torch.zeros_like(W), vocab_slice=None,
                                 group=None),
    "pack_weight": dict(codes=torch.randint(0, 256, (6, 32), dtype=torch.uint8),
                        scale=torch.rand(6, 2), zero=torch.zeros(6, 2, dtype=torch.uint8), k=64,
                        group=32, format="int4"),
    "unpack_weight": dict(packed=ops.pack_weight(torch.zeros(6, 4, dtype=torch.uint8),
                                                 torch.ones(6, 1), group=0)),
    "pack_mask": dict(mask=torch.ones(2, 1, 3, 3, dtype=torch.bool)),
    "moe_ffn": dict(x=X, ids=IDS, weights=SHARES, w_gate=torch.randn(2, 12, 8), w_up=None,
                    w_down=EXPERTS[2], biases=(torch.randn(2, 12), torch.randn(2, 8)), act="silu",
                    packing="halves", weigh="after", shared=0, recompute=False, routing=None,
                    experts=None, first_expert=0),
    "moe_ffn_backward": dict(dy=X, x=X, ids=IDS, weights=SHARES, gate=None, up=None,
                             w_gate=EXPERTS[0], w_up=EXPERTS[1], w_down=EXPERTS[2], act="silu",
                             into=None, routing=None),
    "moe_ffn_fp8": dict(x=X.to(FP8), ids=IDS, weights=SHARES,
                        **{name: w.to(FP8) for name, w in zip(("w_gate", "w_up", "w_down"), EXPERTS)},
                        x_scale=ONE, w_gate_scale=torch.ones(2), w_up_scale=torch.ones(2),
                        w_down_scale=torch.ones(2), hidden_scale=ONE, act="silu", packing="halves",
                        shared=0, routing=None),
    "moe_route": dict(logits=X, top_k=2, bias=V, score="softmax", order="before", groups=0,
                      top_groups=0, group_score="max", renormalise=False, scale=1.0),
    "qkv": dict(x=X, w=torch.randn(32, 8), heads=2, kv_heads=1, bias=torch.randn(32),
                norms=(V, V), eps=1e-6, positions=torch.arange(3), angles=None, rotation="halves",
                rotary=0, rule="base", base=1e4, factor=1.0, context=64.0, low=1.0, high=4.0,
                beta_fast=32.0, beta_slow=1.0, scale=0.0, caches=None, slots=None, w_scale=None, k_scale=None,
                v_scale=None),
    "layernorm": dict(x=X, w=V, b=V, eps=1e-5),
    "add_layernorm": dict(x=X, residual=X, w=V, b=V, eps=1e-5),
    "layer": dict(x=torch.randn(1, 1, 8), weights=[WEIGHTS], caches=caches(),
                  lengths=torch.tensor([2], dtype=torch.int32), heads=1, kv_heads=1, slots=None,
                  pages=None, positions=None, angles=None, act="silu", convention="llama", eps=1e-6, softcap=0.0,
                  scale=0.0, rope_scale=0.0, top_k=0, score="softmax", order="before",
                  renormalise=False, packing="halves", groups=0, top_groups=0, group_score="max",
                  route_scale=1.0, parallel=False, rotation="halves", constants=(), grouped=False,
                  norm_last=False, multiplier=1.0, wide_logits=False, group=None, window=0, v_norm=False,
                  gated_rows=False),
}
DRAW = dict(temperature=torch.ones(3), seeds=torch.arange(3), steps=torch.zeros(3).int(),
            top_k=torch.tensor([0, 2, 3]).int(), top_p=torch.full((3,), 0.9), min_p=torch.zeros(3))
NORMED = dict(x=X, w=W, norm=V, norm_bias=V, bias=W[:, 0].clone(), eps=1e-6, convention="llama",
              logits="same")
GOOD |= {"sample": dict(logits=X, **DRAW, softcap=0.0, logprobs=True, best=2),
         "head": dict(NORMED, **DRAW, softcap=0.0, logprobs=True, best=2), "head_logits": NORMED}
GOOD["decode"] = dict(
    **{name: torch.zeros(1, dtype=torch.int32) for name in ("ids", "lengths", "steps", "ended")},
    out=torch.zeros(1, 4, dtype=torch.int32), embedding=torch.randn(6, 8), weights=[WEIGHTS],
    caches=caches(), final_norm=V, w_head=torch.randn(6, 8), heads=1, kv_heads=1, limits=None,
    stop=None, pages=None, angles=None, final_norm_bias=None, head_bias=None, temperature=None,
    seeds=None, top_k=None, top_p=None, min_p=None, embed_scale=1.0, logit_softcap=0.0, pad=0,
    logprobs=False, best=2, options=None, group=None)
GROUP = fftune.distributed.Group(f"wrong values {os.getpid()}", 0, 1)
GOOD |= {"all_reduce": dict(x=X, group=GROUP, residual=X),
         "all_argmax": dict(ids=torch.zeros(3, dtype=torch.int32), logit=torch.randn(3), vocab=8,
                            group=GROUP),
         "all_reduce_norm": dict(x=X, w=V, group=GROUP, residual=X, eps=1e-6, convention="llama"),
         "all_reduce_norm_quantised": dict(x=X, w=V, group=GROUP, residual=X,
                                           scale=torch.tensor([0.1]), eps=1e-6, convention="llama")}
for name in ("layer", "decode"):
    GOOD[name]["group"] = GROUP
MASKED = dict(dy=X, x=X, mask=MASK, gate=None, up=None, act="silu", into=None, pattern=None)
WRONG_TENSORS = {
    **{str(t).removeprefix("torch."): (lambda t: lambda a: a.to(t))(dtype) for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
        torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
        torch.float8_e5m2) for t in (dtype,)},
    "0-dim": lambda a: a.flatten()[0], "empty": lambda a: a[:0],
    "more dims": lambda a: a[None], "more rows": lambda a: torch.cat((a, a)),
    "narrower": lambda a: a[..., :-1], "transposed": lambda a: a.mT if a.dim() > 1 else a,
    "expanded": lambda a: a.flatten()[:1].expand(a.shape),
    "sparse": lambda a: a.to_sparse(), "csr": lambda a: a.to_sparse_csr(),
    "mkldnn": lambda a: a.float().to_mkldnn(), "meta": lambda a: a.to("meta"),
    "nested": lambda a: torch.nested.nested_tensor([a, a]),
    "quantised": lambda a: torch.quantize_per_tensor(a.float(), 0.1, 0, torch.quint8),
    "gradient": lambda a: a.float().clone().requires_grad_(),
    "numpy": lambda a: a.float().numpy(), "list": lambda a: a.tolist(), "parameter":
    lambda a: torch.nn.Parameter(a.float()), "NaN": lambda a: torch.full(a.shape, math.nan),
}
WRONG_VALUES = (None, True, -1, 0, 3, 2**40, 2**70, 0.5, -1.0, math.nan, math.inf, "", "foo",
                "a b\nc", b"x", [], [1], [None], (), (X,), (X, X), {}, {"a": 1}, object(), X, IDS,
                numpy.ones(3), numpy.float32(1), numpy.int64(1), torch.float32, [X, None], [object()],
                ("a", "b"), [{"w_q": X}], torch.tensor(2), int)


def accepts(call) -> None:
    """That the call returns, or raises fftune.Error with one line."""
    try:
        call()
    except fftune.Error as error:
        assert "\n" not in str(error) and ": " in str(error), str(error)


def wrong_values(value):
    if isinstance(value, Tensor):
        for change in WRONG_TENSORS.values():
            try:
                yield change(value)
            except (RuntimeError, TypeError, IndexError):
                continue  # there is no such tensor
    yield from WRONG_VALUES


def fuzz(function, good: dict, positional=()) -> None:
    copied = lambda value: value.clone() if type(value) is Tensor else value
    function(*positional, **{name: copied(value) for name, value in good.items()})
    for name, value in good.items():
        for wrong in wrong_values(value):
            given = {**{n: copied(v) for n, v in good.items()}, name: copied(wrong)}
            accepts(lambda: function(*positional, **given))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOOD)
def test_ops_take_no_wrong_value(name):
    good = GOOD[name]
    assert set(good) == set(inspect.signature(getattr(ops, name)).parameters)
    fuzz(getattr(ops, name), good)


@pytest.mark.filterwarnings("ignore")
def test_whole_experts_of_a_rank_take_no_wrong_value():
    fuzz(ops.moe_ffn, {**GOOD["moe_ffn"], "experts": 4, "first_expert": 1})


I32 = functools.partial(torch.tensor, dtype=torch.int32)
# Further good calls of ops whose other arguments are in another call: name, its changed arguments, and those to change.
OTHER_CALLS = [
    ("gated_delta_rule", dict(initial_state=None, return_state=False, states=torch.randn(5, 4, 6, 8),
                              state_indices=I32([3, 1])), ("states", "state_indices", "null_index", "has_state")),
    ("ssd", dict(initial_state=None, return_state=False, states=torch.randn(5, 4, 8, 6), state_indices=I32([3, 1])),
     ("states", "state_indices", "null_index", "has_state")),
    ("causal_conv1d", dict(initial=None), ("x", "w", "final", "state_order")),
    ("causal_conv1d_update", dict(x=torch.randn(2, 3, 8), offsets=None), ("x", "w", "state", "accepted", "indices")),
    ("indexer", dict(k=torch.randn(2, 9, 8).to(FP8), k_scale=torch.rand(2, 9)), ("k", "k_scale", "weights")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, others, changed", OTHER_CALLS, ids=[name for name, _, _ in OTHER_CALLS])
def test_ops_take_no_wrong_value_in_another_call(name, others, changed):
    good = {**GOOD[name], **others}
    own = {n: v for n, v in good.items() if n not in changed}
    fuzz(lambda **given: getattr(ops, name)(**own, **given), {n: good[n] for n in changed})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["layer", "decode"])
def test_weights_and_caches_of_a_layer_are_no_wrong_values(name):
    good = {**GOOD[name], "group": None}

    def run(weights=WEIGHTS, cache=None):
        kept = {n: v.clone() if type(v) is Tensor else v for n, v in good.items()}
        keys, values = caches()[0]
        getattr(ops, name)(**{**kept, "weights": [weights], "caches": [(keys if cache is None else cache, values)]})

    run()
    for weight, value in WEIGHTS.items():
        for wrong in wrong_values(value):
            accepts(lambda: run({**WEIGHTS, weight: wrong}))
        accepts(lambda: run({n: w for n, w in WEIGHTS.items() if n != weight}))
    for wrong in wrong_values(caches()[0][0]):
        accepts(lambda: run(cache=object() if wrong is None else wrong))


@pytest.mark.parametrize("name", ["layer", "decode"])
def test_caches_have_whole_heads(name):
    """The library would write behind the view of some of their features."""
    pages, table = torch.zeros(3, 16, 1, 8), torch.tensor([[2, 0]], dtype=torch.int32)
    for keys, others in ((caches()[0][0], {}), (pages, {"pages": table})):
        good = {**GOOD[name], "group": None, **others}
        values = keys.clone() if others else keys.transpose(1, 2).clone().transpose(1, 2)
        getattr(ops, name)(**{**good, "caches": [(keys, values)]})
        for pair in ((keys[..., :1], values), (keys, values[..., :1]), (keys[..., :4], values[..., :4])):
            with pytest.raises(fftune.Error):
                getattr(ops, name)(**{**good, "caches": [pair]})


@pytest.mark.parametrize("name, state", [("gated_delta_rule", "states"), ("ssd", "states"),
                                         ("causal_conv1d_update", "state"), ("mla_rope", "cache")])
def test_what_is_written_shares_no_memory(name, state):
    others = next((others for of, others, _ in OTHER_CALLS if of == name), {})
    good = {**GOOD[name], **others}
    with pytest.raises(fftune.Error, match=f"{state} is written in place, and its elements share memory: clone it"):
        getattr(ops, name)(**{**good, state: good[state][:1].expand(good[state].shape)})


@pytest.mark.filterwarnings("ignore")
def test_caches_of_float8_take_no_wrong_value():
    scales = {"k_scale": torch.rand(2) + 0.5, "v_scale": torch.rand(2) + 0.5}
    pages = torch.randn(2, 3, 2, 8).to(FP8)
    fuzz(ops.attention, {**GOOD["attention"], "k": pages, "v": pages, **scales})
    written = {"caches": (torch.zeros(6, 1, 8).to(FP8), torch.zeros(6, 1, 8).to(FP8)), "slots": torch.arange(3),
               "k_scale": ONE, "v_scale": ONE}
    fuzz(ops.qkv, {**GOOD["qkv"], **written})


def test_every_public_op_has_a_good_call():
    assert set(ops.__all__) == {*GOOD, "masked_ffn_backward", "PackedWeight"}


@pytest.mark.filterwarnings("ignore")
def test_the_gradients_of_masked_ffn_take_no_wrong_value():
    weights = (W, W, D, W, W, D)
    name = "masked_ffn_backward"
    backward = lambda dy, x, mask, gate, up, **options: getattr(ops, name)(
        dy, x, mask, gate, up, *weights, **options)
    fuzz(backward, MASKED)
    for count in (0, 1, 5, 7):
        accepts(lambda: ops.masked_ffn_backward(X, X, MASK, None, None, *([W] * count)))
    for wrong in wrong_values(W):
        accepts(lambda: ops.masked_ffn_backward(X, X, MASK, None, None, wrong, *weights[1:]))


INTO = [("ffn_backward", 3), ("linear_backward", 2), ("masked_linear_backward", 2),
        ("moe_ffn_backward", 3)]


@pytest.mark.parametrize("name, count", INTO)
def test_gradients_to_add_to_are_checked(name, count):
    like = {"ffn_backward": (W, W, D), "linear_backward": (W, W[:, 0]),
            "masked_linear_backward": (W, W), "moe_ffn_backward": EXPERTS}[name]
    for at in range(count):
        for wrong in wrong_values(like[at]):
            into = [t.clone() for t in like]
            into[at] = wrong
            accepts(lambda: getattr(ops, name)(**{**GOOD[name], "into": into}))
    accepts(lambda: getattr(ops, name)(**{**GOOD[name], "into": []}))


# Tensors whose element types are not the op's: never a result.
_BYTES = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64, FP8,
          torch.float8_e5m2, torch.float64)


@pytest.mark.parametrize("on", ["cpu", "meta", "fake", "compiled"])
@pytest.mark.parametrize("name", GOOD)
def test_element_types_come_from_no_fallback(name, on):
    """With one tensor of floating point of another type, and with all of them."""
    good = GOOD[name]
    floats = [n for n, v in good.items() if isinstance(v, Tensor) and v.is_floating_point()
              and v.dtype != FP8]
    for dtype in _BYTES if on != "compiled" else (torch.uint8,):
        for changed in ([n] for n in floats) if on != "compiled" else ():
            refuses_type(name, good, changed, dtype, on)
        if floats:
            refuses_type(name, good, floats, dtype, on)


# Weights, and numbers of each row, that any type of floating point serves.
ANY_FLOAT = {("rmsnorm", "w"), ("add_rmsnorm", "w"), ("rmsnorm_quantised", "w"),
             ("bias_gelu", "bias"), ("moe_ffn", "weights"), ("moe_ffn_backward", "weights"),
             ("moe_ffn_fp8", "weights"), ("moe_route", "bias"), ("attention", "sinks"), ("gated_rmsnorm", "w"),
             ("indexer", "weights"),
             ("gated_delta_rule", "A_log"), ("gated_delta_rule", "dt_bias"),
             *(("ssd", name) for name in ("A_log", "dt_bias", "D")),
             *((op, name) for op in ("causal_conv1d", "causal_conv1d_update") for name in ("w", "bias")),
             *((op, name) for op in ("sample", "head") for name in ("temperature", "top_p", "min_p"))}


def refuses_type(name, good, changed, dtype, on) -> None:
    if dtype == torch.float64 and all((name, n) in ANY_FLOAT for n in changed):
        return
    given = {n: v.clone().to(dtype) if n in changed else v for n, v in good.items()}
    function = getattr(ops, name)
    if on == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(lambda **a: function(**a), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=str(dtype)):
            compiled(**given)
        return
    if on == "meta":
        given = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), given)
    with pytest.raises(fftune.Error, match=f"{dtype}"):
        if on == "fake":
            with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                function(**torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, given))
        else:
            function(**given)


# Arguments of a module, and the number of tensors that it is called with.
MODULES = {
    "GatedMLP": (dict(hidden=8, intermediate=6, act="silu", bias=False, recompute=False), 1),
    "RMSNorm": (dict(features=8, eps=1e-6, convention="llama"), 1),
    "BiasGELU": (dict(features=8, approximate="none"), 1),
    "MaskedLinear": (dict(in_features=8, out_features=6, pattern=None), 2),
    "MaskedMLP": (dict(hidden=8, intermediate=6, act="silu", pattern=None), 2),
    "MoE": (dict(hidden=8, intermediate=6, experts=4, top_k=2, act="silu", recompute=False,
                 score="softmax", order="before", renormalise=False, groups=0, top_groups=0,
                 group_score="max", scale=1.0, bias=False, shared=0), 1)}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore")
def test_modules_take_no_wrong_value(name):
    kind, (good, calls) = getattr(nn, name), MODULES[name]
    inputs = (X, MASK)[:calls]
    module = kind(**good)
    module(*inputs)
    for at in range(calls):
        for wrong in wrong_values(inputs[at]):
            accepts(lambda: module(*inputs[:at], wrong, *inputs[at + 1:]))
    for option, value in good.items():
        for wrong in WRONG_VALUES:
            if isinstance(wrong, int) and wrong > 2**30:
                continue  # so much memory is there, or not
            accepts(lambda: kind(**{**good, option: wrong})(*inputs))


LINEAR = torch.nn.Linear(64, 32)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=20, max_position_embeddings=32)).eval()


def group(**options):
    return fftune.distributed.Group(**{**dict(name="wrong-values", rank=0, ranks=1, max_bytes=64, timeout=0.01), **options})


def in_group(call):
    with group(name="wrong-calls") as own:
        call(own)


def options_of(function, good: dict, **others) -> list:
    """Calls with a wrong value for each of the options, and for none that is PyTorch's own."""
    return [lambda wrong, name=name: function(**{**good, **others, name: wrong}) for name in good]


def generated(model, **options):
    fftune.patch(model, whole_layers=True)
    return lambda: options_of(functools.partial(fftune.generate, model), options)


# Calls of all other public functions with a wrong value, by the name in their module. PyTorch checks a
# module's `device` and `dtype`, and a model its own example.
CALLS = {
    "patch": lambda: [fftune.patch, *options_of(fftune.patch, dict(
        recompute=False, memory="fast", projections=False, attention=False, graphs=False,
        whole_layers=False, loss=True), model=torch.nn.Sequential(LINEAR))],
    "unpatch": lambda: [fftune.unpatch],
    "quantise": lambda: [fftune.quantise, *options_of(
        lambda **options: fftune.quantise(torch.nn.Sequential(LINEAR), **options),
        dict(format="int4", group=32, zeros=False, skip=()))],
    "QuantLinear": lambda: [*options_of(nn.QuantLinear.from_linear, dict(
        linear=LINEAR, group=32, zeros=False, format="int4")), *options_of(nn.QuantLinear, dict(
            in_features=64, out_features=32, bias=True, group=32, zeros=False, format="int4"))],
    "GatedMLPFp8": lambda: [nn.GatedMLP(8, 6).to_fp8, nn.GatedMLP(8, 6).to_fp8(X), nn.GatedMLP(8, 6).to_fp8()],
    "RotaryEmbedding": lambda: [lambda wrong: nn.RotaryEmbedding(rule=wrong)(Q, K), nn.RotaryEmbedding(),
                                lambda wrong: nn.RotaryEmbedding(base=wrong)(Q)],
    "LinearCrossEntropy": lambda: [*options_of(nn.LinearCrossEntropy, dict(features=8, vocab=6, bias=False)),
                                   *options_of(nn.LinearCrossEntropy(8, 6), dict(
                                       x=X, labels=torch.zeros(3, dtype=torch.int64), reduction="sum"))],
    "tune": lambda: [lambda wrong: fftune.tune(wrong, X), *options_of(
        fftune.tune, dict(budget=1, train=False, presets="/nowhere", keep_undecided=False), model=LINEAR, example=torch.randn(1, 64))],
    "check": lambda: [lambda wrong: fftune.check(1 if wrong is None else wrong, X)],
    "explain": lambda: [
        fftune.explain, lambda wrong: fftune.explain({"op": wrong}),
        lambda wrong: fftune.explain({"op": "rmsnorm", "m": wrong, "d": 8}, "cpu"),
        lambda wrong: fftune.explain({"op": "rmsnorm", "m": 1, "d": 8, "pass": wrong, "dtype": wrong}, "cpu"),
        lambda wrong: fftune.explain({"op": "rmsnorm", "m": 1, "d": 8}, wrong)],
    "Float8StaticCache": lambda: options_of(fftune.Float8StaticCache, dict(
        config=llama().config, max_cache_len=8, scales=[(0.5, torch.ones(1))])) + [
            lambda wrong: fftune.Float8StaticCache(llama().config, 8, [wrong]),
            lambda wrong: fftune.Float8StaticCache(llama().config, 8, [(wrong, 1.0)])],
    "graphed": lambda: [fftune.graphed, lambda wrong: fftune.graphed(LINEAR, wrong)],
    "generate": lambda: [lambda wrong: fftune.generate(wrong, IDS, 2), *generated(
        llama(), ids=IDS.long(), max_new_tokens=2, stop=[3], pad=0, temperature=1.0, top_k=2, top_p=0.5,
        min_p=0.0, seeds=1, cache=None)()],
    "Group": lambda: [*options_of(lambda **options: group(**options).close(), dict(
        name="wrong-values", rank=0, ranks=1, device="cpu", max_bytes=64, timeout=0.01, nccl=False)), *(
            lambda wrong, name=name: in_group(lambda own: own.tune(**{"call": int, name: wrong}))
            for name in ("call", "budget", "presets"))],
    "slice_layer": lambda: options_of(fftune.distributed.slice_layer, dict(
        weights=WEIGHTS, rank=0, ranks=2, heads=2, kv_heads=2, grouped=False, packing="halves",
        whole_experts=False)) + [lambda wrong: fftune.distributed.slice_layer({**WEIGHTS, "w_q": wrong}, 0, 2, 2, 2)],
    "init_group": lambda: [fftune.distributed.init_group],
    "MaskedLinear": lambda: [lambda wrong: fftune.MaskedLinear.apply(wrong, W.T, W.T, MASK),
                             lambda wrong: fftune.MaskedLinear.apply(X, wrong, W.T, MASK)],
    "MaskedFFN": lambda: [lambda wrong: fftune.MaskedFFN.apply(X, W.T, D.T, wrong, W.T, D.T, W.T, MASK)],
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_other_functions_take_no_wrong_value(name):
    torch.manual_seed(0)
    for call in CALLS[name]():
        for wrong in wrong_values(X):
            if not (type(wrong) is int and 2**30 < wrong < 2**60):  # so much memory is there, or not
                accepts(lambda: call(wrong))


def test_every_public_function_is_called():
    without_arguments = {"register_attention", "register_experts"}
    others = {"Error", "PatchReport", "ops", "nn", "reference", "distributed"}
    assert set(fftune.__all__) - set(CALLS) == others | without_arguments
    assert {*nn.__all__, *fftune.distributed.__all__} <= {*CALLS, *MODULES}


@pytest.mark.parametrize("format", ["int4", "mxfp4", "nvfp4", "fp8", "int8"])
@pytest.mark.filterwarnings("ignore")
def test_state_dicts_of_quantised_layers_have_no_wrong_value(format):
    layer = nn.QuantLinear.from_linear(LINEAR, 32 if format != "nvfp4" else 16, format=format)
    saved = layer.state_dict()
    for name in saved.keys() - {"bias"}:
        for wrong in wrong_values(saved[name]):
            try:
                layer.load_state_dict({**saved, name: wrong})
            except RuntimeError as error:
                assert "Error(s) in loading" in str(error), error


def test_examples_of_zeros_calibrate_a_layer():
    layer = nn.GatedMLP(8, 6).to_fp8(torch.zeros(3, 8))
    assert layer(X).isfinite().all()


def test_another_library_is_one_error(run_python):
    for library in ("libc.so.6", "/dev/null", "/", "/nowhere/libfftune.so"):
        assert run_python("""
            try:
                import fftune
            except RuntimeError as error:
                assert type(error).__name__ == "Error", error
                print(str(error).count(chr(10)), "FFTUNE_LIBRARY" in str(error))
        """, FFTUNE_LIBRARY=library) == "0 True", library
