"""A call of a declared op runs the problem that the registry means: problems written by hand."""
import inspect
import json
import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fftune
from cases import BACKWARDS, CASES
from fftune import _declare, _derived_form, _description, _run, ops
from fftune._checks import TORCH_DTYPES
from fftune._custom import OPS

X, W, D, V = torch.randn(3, 8), torch.randn(6, 8), torch.randn(8, 6), torch.randn(8)
EXPERTS = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
IDS, SHARES = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
Q, K, ROW = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 8, 16)
OFFSETS = torch.tensor([0, 2, 5])
ATTENTION = {"op": "attention", "pass": "fwd", "dtype": "f32", "s": 5, "b": 2, "heads": 4, "dim": 16,
             "kv-heads": 2}
FFN = {"op": "ffn", "dtype": "f32", "m": 3, "d": 8, "h": 6}


@pytest.fixture
def problems():
    """Those that calls run."""
    seen = []
    listen = lambda _, problem: seen.append(problem)
    _run._listeners.append(listen)
    yield seen
    _run._listeners.remove(listen)


@pytest.mark.parametrize("call, problem", [
    (lambda: ops.ffn(X, W, W, D), FFN | {"pass": "fwd", "act": "silu"}),
    (lambda: ops.ffn(X, W, W, D, bias=V, residual=X, act="relu"),
     FFN | {"pass": "fwd", "act": "relu", "bias": "down", "residual": "yes"}),
    (lambda: ops.mlp(X, W, D, W[:, 0].clone(), V, act="gelu"),
     FFN | {"pass": "fwd", "act": "gelu", "gate": "no", "bias": "both"}),
    (lambda: ops.ffn_backward(X, X, None, None, W, W, D),
     FFN | {"pass": "bwd", "act": "silu", "save": "input"}),
    (lambda: ops.ffn_backward(X, X, X[:, :6], X[:, :6], W, W, D,
                              into=[torch.zeros_like(t) for t in (W, W, D)]),
     FFN | {"pass": "bwd", "act": "silu", "accumulate": "yes"}),
    (lambda: ops.rmsnorm(X.bfloat16(), V), {
        "op": "rmsnorm", "pass": "fwd", "dtype": "bf16", "m": 3, "d": 8, "eps": "1e-06",
        "convention": "llama", "weights": "f32"}),
    (lambda: ops.rmsnorm_quantised(X, V, X, dtype=torch.int8), {
        "op": "rmsnorm", "pass": "fwd", "dtype": "f32", "m": 3, "d": 8, "eps": "1e-06",
        "convention": "llama", "output": "i8", "residual": "yes"}),
    (lambda: ops.moe_ffn(X, IDS, SHARES, EXPERTS[0], None, EXPERTS[1], shared=1,
                         packing="interleaved", biases=(EXPERTS[0][..., 0], EXPERTS[1][..., 0])), {
        "op": "moe-ffn", "pass": "fwd", "dtype": "f32", "m": 3, "d": 8, "h": 6, "top-k": 1,
        "experts": 3, "shared": 1, "act": "silu", "weigh": "after", "gate-up": "interleaved",
        "bias": "all"}),
    (lambda: ops.ffn_block(X, X, V, W, W, D), FFN | {
        "pass": "fwd", "act": "silu", "convention": "llama", "eps": "1e-06", "norm": "add-rms",
        "residual": "yes"}),
    (lambda: ops.attention(Q, K, K, causal=True, window=3), ATTENTION | {"window": 3, "mask": "causal"}),
    (lambda: ops.attention(ROW[:, :, :4], ROW[:, :, 4:6], ROW[:, :, 6:], torch.ones(2, 4, 5, 5).bool()),
     ATTENTION | {"q-row": 128, "k-row": 128, "v-row": 128, "mask": "bool", "mask-heads": "each"}),
    (lambda: ops.attention(Q, torch.cat((K, K), 1), torch.cat((K, K), 1), bias=torch.ones(2, 1, 5, 10)),
     ATTENTION | {"kv": 10, "bias": "yes", "bias-heads": "one", "bias-sequences": "each"}),
    (lambda: ops.attention(Q, *[torch.randn(3, 16, 2, 16)] * 2, lengths=torch.tensor([20, 5]),
                           pages=torch.tensor([[0, 1], [2, -1]])),
     ATTENTION | {"kv": 32, "page": 16, "pages": 3, "lengths": "yes"}),
    (lambda: ops.attention(Q, *torch.randn(3, 16, 2, 32).split(16, -1),
                           pages=torch.tensor([[0, 1], [2, -1]])),
     ATTENTION | {"kv": 32, "page": 16, "pages": 3, "kv-head": 32}),
    (lambda: ops.attention(Q[0], K[0], K[0], offsets=OFFSETS, sinks=torch.ones(4)),
     ATTENTION | {"layout": "thd", "sinks": "yes"}),
    (lambda: ops.pack_mask(torch.ones(2, 1, 3, 9).bool()),
     {"op": "pack-mask", "pass": "fwd", "dtype": "f32", "s": 3, "b": 2, "kv": 9, "heads": 1}),
    (lambda: ops.masked_softmax(Q, torch.ones(2, 5, 4, 16).bool()), {
        "op": "masked-softmax", "pass": "fwd", "dtype": "f32", "s": 4, "b": 2, "heads": 5, "n": 16,
        "mask": "bool", "mask-heads": "each", "scale": "1"}),
    (lambda: ops.rope(ROW[0, :, :4], K[0], offsets=OFFSETS, rule="llama3"), {
        "op": "rope", "pass": "fwd", "dtype": "f32", "s": 5, "b": 2, "heads": 4, "dim": 16,
        "kv-heads": 2, "q-row": 128, "q-head": 16, "layout": "thd", "rotation": "halves",
        "angles": "llama3", "base": "10000", "factor": "1", "context": "8192", "low": "1",
        "high": "4", "scale": "0"}),
    (lambda: ops.qkv(X, torch.randn(32, 8), 2, 1, positions=torch.arange(3), norms=(V, V),
                     caches=[torch.zeros(2, 7, 1, 8) for _ in range(2)], slots=torch.arange(3)), {
        "op": "qkv", "pass": "fwd", "dtype": "f32", "m": 3, "d": 8, "heads": 2, "dim": 8,
        "kv-heads": 1, "cache-slots": 14, "weights": "packed", "norm": "yes", "eps": "1e-06",
        "rotation": "halves", "angles": "base", "base": "10000", "factor": "1", "scale": "0",
        "cache": "yes", "slots": "i64"}),
    (lambda: ops.qkv(X, torch.randn(32, 8), 2, 1, positions=torch.arange(3), rotary=8,
                     caches=torch.zeros(2, 7, 1, 16).split(8, -1), slots=torch.arange(3).int()), {
        "op": "qkv", "pass": "fwd", "dtype": "f32", "m": 3, "d": 8, "heads": 2, "dim": 8,
        "kv-heads": 1, "cache-slots": 14, "cache-head": 16, "weights": "packed",
        "rotation": "halves", "angles": "base", "base": "10000", "factor": "1", "scale": "0",
        "cache": "yes"}),
    (lambda: ops.ngram_block(IDS.expand(4, 3, 1)[..., 0], torch.zeros(4, 7), 2,
                             prefix=torch.ones(2, 5).long()), {
        "op": "ngram-block", "pass": "fwd", "dtype": "f32", "b": 4, "len": 3, "vocab": 7,
        "prefix": 5, "beams": 2, "ids": "i64", "n": "2"}),
])
def test_a_call_says_which_problem_it_is(problems, call, problem):
    call()
    usual = {"softcap": "0", "scale": "0"} if problem["op"] == "attention" else {}
    assert problems == [usual | problem]


def _with_each_word(op: str, arguments: tuple):
    """The arguments, and these with each other word of each option."""
    yield arguments
    form, declared = _declare.FORMS[op], OPS.__dict__[op].overload._schema.arguments
    for i, argument in enumerate(declared):
        own = next(a for a in form.arguments if a.name == argument.name)
        if own.type in ("str", "bool"):
            for word in (False, True) if own.type == "bool" else form.about.domain(own.library[0]):
                if word != arguments[i]:
                    yield *arguments[:i], word, *arguments[i + 1:]


def test_results_are_as_large_as_the_buffers_that_the_library_writes(problems):
    """Whichever words the options have: the library sees addresses alone."""
    types = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    compared = set()
    for case in (case for case in CASES + BACKWARDS if case.op in _declare.FORMS):
        form = _declare.FORMS[case.op]
        for arguments in _with_each_word(case.op, case.arguments(torch.bfloat16)):
            problems.clear()
            try:
                results = getattr(torch.ops.fftune, case.op)(*arguments)
            except fftune.Error:  # words that do not go together
                continue
            buffers = {b["name"]: b for b in fftune.explain(problems[-1], "cpu")["buffers"]}
            named = {a.name: value for a, value in zip(OPS.__dict__[case.op].overload._schema.arguments, arguments)}
            there = [r for r in form.results if not r.hidden and (
                not isinstance(results, list) or r.given is None
                or named[form.arguments[r.given].name] is not None)]
            results = [results] if isinstance(results, Tensor) else list(results or ())
            for result, got in zip(there, results, strict=True):
                buffer = next((buffers[name] for name in result.library if name in buffers), None)
                if buffer is None:  # a result that was not asked for
                    assert not got.numel(), (case.name, result.name)
                    continue
                assert (types[got.dtype], got.nbytes) == (buffer["dtype"], buffer["bytes"]), (
                    case.name, result.name, problems[-1])
                compared.add((case.op, result.name, got.dtype))
    assert len(compared) > 200 and ("head_logits", "y", torch.float32) in compared, len(compared)


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_an_op_is_checked_before_its_results_are_allocated(on):
    for top_k in (-1, 0):
        with pytest.raises(fftune.Error, match=f"moe-route: top_k is {top_k}: give 1 or more"):
            ops.moe_route(X.to(on), top_k)


def test_type_checkers_see_the_types_of_the_table():
    """The package has py.typed: annotations are all that a checker reads of a function."""
    words = {"Tensor": Tensor, "str": str, "bool": bool, "int": int, "float": float}
    assert (Path(fftune.__file__).parent / "py.typed").exists()
    compared = 0
    for name in filter(lambda name: inspect.isfunction(getattr(ops, name)), ops.__all__):
        seen = {n: set(typing.get_args(t)) or {t}
                for n, t in typing.get_type_hints(getattr(ops, name)).items()}
        parameters = inspect.signature(getattr(ops, name)).parameters
        assert set(seen) == {*parameters, "return"}, name
        op = getattr(OPS, name, None)
        for argument in op.overload._schema.arguments if op else ():
            word = str(argument.type).removeprefix("Optional[").rstrip("]")
            if argument.name not in seen or word not in words:
                continue
            if (name, argument.name) == ("gated_delta_rule", "qk_norm"):
                continue  # a flag, which is the word "l2" of the op
            compared += 1
            assert words[word] in seen[argument.name], (name, argument.name)
            required = parameters[argument.name].default is inspect.Parameter.empty
            # Without x_scale another op runs, which quantises the tokens.
            if required and not str(argument.type).startswith("Optional") and argument.name != "x_scale":
                assert type(None) not in seen[argument.name], (name, argument.name)
    assert compared > 100, compared


def test_tensors_that_no_form_of_an_op_has_are_an_error():
    with pytest.raises(fftune.Error, match="ffn: .*x_scale.* do not go together"):
        fp8 = torch.float8_e4m3fn
        one = torch.ones(1)
        form = _derived_form.DerivedForm("ffn", *_declared("ffn", "x, w_up, x_scale, act", "y"))
        form.problem((("silu",), (0,)), (X.to(fp8), W.to(fp8), one))


def test_codes_in_the_place_of_numbers_need_an_option_that_is_fixed_or_an_argument():
    of = lambda arguments, **fixed: _description.Description("linear", False, fixed, arguments).buffers["w"]
    assert [v.dtype for v in of("x, w")] == ["T"]
    assert [v.dtype for v in of("x, w", weights="int4")] == ["u8"]
    assert [v.dtype for v in of("x, w, w_scale", quantise="block")] == ["fp8"]
    assert {v.dtype for v in of("x, w, weights")} == {"T", "u8"}


def _declared(of: str, arguments: str, results: str) -> tuple:
    about = _description.Description(of, False, {"dtype": "fp8"}, arguments)
    found = _description.arguments_of(arguments, about)
    return about, found, _description.results_of(results, found)


def test_the_table_has_every_op_that_is_declared():
    assert vars(OPS).keys() == {*_declare.FORMS, "layer", "network", "decode"}
    forms = {"layer", "decode", "mlp", "linear_fp8", "ffn_fp8", "moe_ffn_fp8"}  # laid out or named apart
    assert {op.label for op in vars(OPS).values()} - forms == set(_description._TABLE)
