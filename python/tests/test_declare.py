"""A call of a declared op runs the problem that the registry means: problems written by hand."""
import json
from pathlib import Path

import pytest
import torch

import fftune
from fftune import _derived_form, _description, _run, ops
from fftune._custom import OPS

X, W, D, V = torch.randn(3, 8), torch.randn(6, 8), torch.randn(8, 6), torch.randn(8)
EXPERTS = torch.randn(4, 12, 8), torch.randn(4, 8, 6)
IDS, SHARES = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
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
])
def test_a_call_says_which_problem_it_is(problems, call, problem):
    call()
    assert problems == [problem]


def test_tensors_that_no_form_of_an_op_has_are_an_error():
    with pytest.raises(fftune.Error, match="ffn: .*x_scale.* do not go together"):
        fp8 = torch.float8_e4m3fn
        one = torch.ones(1)
        form = _derived_form.DerivedForm("ffn", *_declared("ffn", "x, w_up, x_scale, act", "y"),
                                    None, {}, ())
        form.problem((("silu",), (0,)), (X.to(fp8), W.to(fp8), one))


def _declared(of: str, arguments: str, results: str) -> tuple:
    about = _description.Description(of, False, {"dtype": "fp8"})
    found = _description.arguments_of(arguments, about, {})
    return about, found, _description.results_of(results, found)


def test_the_table_has_every_op_that_is_declared():
    table = json.loads((Path(_description.__file__).parent / "_op_table.json").read_text())
    assert len(vars(OPS)) == 64
    assert {op.label for op in vars(OPS).values()} - {"layer", "mlp"} == set(table)
