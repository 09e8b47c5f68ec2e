"""Experts behind vLLM's modular kernels: the adapter's numbers, and what it leaves to vLLM."""
import importlib
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch


HOME = "vllm.model_executor.layers.fused_moe"


@pytest.fixture
def triton(vllm):
    """The stand-in's module of TritonExperts, with the plugin loaded."""
    importlib.import_module("fftune.vllm").register()
    return importlib.import_module(f"{HOME}.experts.triton_moe")


def quant_config(**changes):
    return SimpleNamespace(**{**dict(quant_dtype=None, block_shape=None, w1_scale=None,
                                     w2_scale=None, w1_bias=None, w2_bias=None,
                                     gemm1_clamp_limit=None), **changes})


def ours(triton, **changes):
    oracle = importlib.import_module(f"{HOME}.oracle.unquantized")
    return oracle.backend_to_kernel_cls("TRITON")(quant_config(**changes))


def arguments(triton, tokens=9, d=64, h=48, experts=6, top_k=2, dtype=torch.bfloat16, **changes):
    """Those of apply(). The output is a part of the first workspace, as in vLLM."""
    workspace = torch.full((tokens * top_k * max(h, d),), torch.nan, dtype=torch.bfloat16)
    found = dict(
        output=workspace[:tokens * d].view(tokens, d),
        hidden_states=torch.randn(tokens, d).to(dtype),
        w1=(torch.randn(experts, 2 * h, d) * d**-0.5).to(dtype),
        w2=(torch.randn(experts, d, h) * h**-0.5).to(dtype),
        topk_weights=torch.rand(tokens, top_k),
        topk_ids=torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).int(),
        activation=triton.MoEActivation.SILU, global_num_experts=experts, expert_map=None,
        a1q_scale=None, a2_scale=None, workspace13=workspace, workspace2=torch.empty(0),
        expert_tokens_meta=None, apply_router_weight_on_input=False)
    return {**found, **changes}


def expect_same(triton, experts, given, tolerance):
    """That the subclass itself computes what TritonExperts does in float64, from the second call on."""
    experts.apply(**given)
    assert experts.calls == 1
    given["output"].fill_(torch.nan)
    assert experts.apply(**given) is None
    assert experts.calls == 1, "vLLM's ran"
    right = torch.empty(given["output"].shape, dtype=torch.float64)
    triton.TritonExperts(experts.quant_config).apply(**{**given, "output": right})
    error = (given["output"].double() - right).norm() / right.norm()
    assert right.norm() > 0 and error < tolerance


def test_classes(triton):
    unquantized, fp8 = (importlib.import_module(f"{HOME}.oracle.{name}")
                        for name in ("unquantized", "fp8"))
    cls = unquantized.backend_to_kernel_cls("TRITON")
    assert issubclass(cls, triton.TritonExperts) and cls is not triton.TritonExperts
    other = unquantized.backend_to_kernel_cls("OTHER")
    assert other.__name__ == "OtherExperts"
    assert fp8.backend_to_kernel_cls("TRITON") == [other, cls]
    assert fp8.backend_to_kernel_cls("OTHER") == [other]


@pytest.mark.parametrize("activation", ["SILU", "GELU", "GELU_TANH"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_numbers(triton, activation, tokens):
    given = arguments(triton, tokens, activation=triton.MoEActivation[activation])
    expect_same(triton, ours(triton), given, 1e-2)


def test_experts_of_other_ranks(triton):
    """Ids are of all experts; the map gives those that are here, and -1 for others."""
    given = arguments(triton, tokens=20)
    given["w1"], given["w2"] = given["w1"][:3].clone(), given["w2"][:3].clone()
    given["expert_map"] = torch.tensor([2, -1, -1, 0, 1, -1], dtype=torch.int32)
    given["topk_ids"][4] = -1  # of a token that is another rank's
    given["topk_ids"][5] = torch.tensor([1, 2])
    expect_same(triton, ours(triton), given, 1e-2)
    assert given["output"][4].eq(0).all() and given["output"][5].eq(0).all()


def test_inputs_that_are_weighed(triton):
    given = arguments(triton, top_k=1, apply_router_weight_on_input=True)
    expect_same(triton, ours(triton), given, 1e-2)


def fp8_arguments(triton, d=256, h=128, **changes):
    given = arguments(triton, d=d, h=h, **changes)

    def in_blocks(w):
        blocks = w.float().unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).abs().amax((-1, -3))
        scale = blocks / 448
        wide = scale.repeat_interleave(128, -1).repeat_interleave(128, -2)
        return (w.float() / wide).to(torch.float8_e4m3fn), scale.contiguous()

    given["w1"], w1_scale = in_blocks(given["w1"])
    given["w2"], w2_scale = in_blocks(given["w2"])
    x = given["hidden_states"].float()
    scale = x.unflatten(-1, (-1, 128)).abs().amax(-1) / 448
    given["hidden_states"] = (x / scale.repeat_interleave(128, -1)).to(torch.float8_e4m3fn)
    given["a1q_scale"] = scale
    return given, dict(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128], w1_scale=w1_scale,
                       w2_scale=w2_scale)


@pytest.mark.parametrize("tokens", [1, 40])
def test_fp8(triton, tokens):
    given, config = fp8_arguments(triton, tokens=tokens)
    # The product in the middle is quantised to three bits.
    expect_same(triton, ours(triton, **config), given, 4e-2)


def left_alone(triton, experts, given, reason, caplog):
    with caplog.at_level(logging.INFO):
        experts.apply(**given)
    assert experts.calls == 1
    assert f"stay vLLM's: {reason}" in caplog.text
    right = torch.empty(given["output"].shape, dtype=torch.float64)
    triton.TritonExperts(experts.quant_config).apply(**{**given, "output": right})
    assert torch.allclose(given["output"].double(), right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("config, changes, reason", [
    (dict(gemm1_clamp_limit=7.0), {}, "a clamped activation"),
    (dict(w1_bias=torch.zeros(6, 96)), {}, "biases"),
    (dict(quant_dtype=torch.int8), {}, "inputs quantised to torch.int8"),
    ({}, dict(activation="SWIGLUOAI"), "the activation swigluoai"),
    ({}, dict(dtype=torch.float16), "weights of torch.float16"),
    ({}, dict(w1=torch.randn(6, 96, 64)), "inputs of torch.bfloat16 for weights of torch.float32"),
    ({}, dict(w1=torch.randn(6, 64, 96).bfloat16().transpose(1, 2)), "weights that are not contiguous"),
])
def test_left_alone(triton, caplog, config, changes, reason):
    if "activation" in changes:
        changes = {"activation": triton.MoEActivation[changes["activation"]]}
    left_alone(triton, ours(triton, **config), arguments(triton, **changes), reason, caplog)


def test_lora_is_left_alone(triton, caplog):
    experts = ours(triton)
    experts._lora_context = object()
    left_alone(triton, experts, arguments(triton), "LoRA", caplog)


def test_fp8_of_other_kinds_is_left_alone(triton, caplog):
    given, config = fp8_arguments(triton)
    experts = ours(triton, **{**config, "block_shape": None})
    left_alone(triton, experts, given, "fp8 with scales of blocks None", caplog)
    given, config = fp8_arguments(triton)
    scale = given["a1q_scale"].T.contiguous().T
    left_alone(triton, ours(triton, **config), {**given, "a1q_scale": scale},
               "fp8 with scales of another kind", caplog)


def test_errors_are_left_to_vllm(triton, monkeypatch, caplog):
    """A problem that the library refuses runs by TritonExperts, and is not tried again."""
    from fftune import Error

    module = importlib.import_module("fftune.vllm.experts")
    tries = []

    def refuses(*arguments, **options):
        tries.append(1)
        raise Error("moe-ffn: no family can run it")

    monkeypatch.setattr(module, "moe_ffn_into", refuses)
    experts = ours(triton)
    left_alone(triton, experts, arguments(triton), "moe-ffn: no family can run it", caplog)
    ours(triton).apply(**arguments(triton))  # another layer
    assert len(tries) == 1


def test_wrong_results_are_left_to_vllm(triton, monkeypatch, caplog):
    """Those of the first call; nothing is computed twice after it."""
    module = importlib.import_module("fftune.vllm.experts")
    own, runs = module.moe_ffn_into, []

    def wrong(y, *arguments, **options):
        runs.append(1)
        own(y, *arguments, **options)
        y.mul_(1.5)

    monkeypatch.setattr(module, "moe_ffn_into", wrong)
    experts = ours(triton)
    left_alone(triton, experts, arguments(triton),
               "results differ from vLLM's by 0.5 of their norm", caplog)
    experts.apply(**arguments(triton))
    assert experts.calls == 2 and len(runs) == 1


def test_results_that_say_nothing(triton):
    """Inputs of zeros are no test."""
    experts, given = ours(triton), arguments(triton)
    for _ in range(2):
        experts.apply(**{**given, "hidden_states": torch.zeros(9, 64).bfloat16()})
    assert experts.calls == 2
    expect_same(triton, ours(triton), given, 1e-2)


def test_one_test_for_all_layers(triton, caplog):
    calls = 0
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            experts = ours(triton)
            experts.apply(**arguments(triton))
            calls += experts.calls
    assert calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        "fftune: experts of 6 x 48 x 64 in bfloat16 run by moe-ffn"]


def test_disabled(run_python):
    """With FFTUNE_DISABLE=1 the reference writes the output."""
    program = """
        import torch
        from fftune._ops.moe_ffn import moe_ffn_into
        from fftune.reference import moe_ffn
        x, w1, w2 = (torch.randn(*s).bfloat16() for s in ((5, 16), (3, 16, 16), (3, 16, 8)))
        ids, weights = torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
        y = torch.empty_like(x)
        moe_ffn_into(y, x, ids, weights, w1, w2)
        right = moe_ffn(x, ids, weights, w1, None, w2, None, None, "silu", "halves", "after", 0, "")
        print(torch.equal(y, right))
    """
    assert run_python(program, FFTUNE_DISABLE="1") == "True"


def test_many_tokens_wait_for_their_kernels(triton, monkeypatch):
    """Until a thread has made the plan for any number of tokens they are vLLM's; outside of requests, in the
    profile run, the engine waits."""
    from vllm.forward_context import set_forward_context

    running, plans = (importlib.import_module(f"fftune.{name}") for name in ("_run", "vllm.plans"))
    monkeypatch.setattr(plans, "EXACT", 16)
    go, own = threading.Event(), running.TokenPlan
    monkeypatch.setattr(running, "TokenPlan", lambda *given: go.wait(60) and own(*given))
    experts, given = ours(triton), arguments(triton, tokens=40, d=80)

    def calls_of(count):
        before = experts.calls
        experts.apply(**arguments(triton, tokens=count, d=80, w1=given["w1"], w2=given["w2"]))
        return experts.calls - before

    try:
        experts.apply(**given)
        assert calls_of(40) == 0
        with set_forward_context({}):
            assert calls_of(30) == 1 and calls_of(16) == 0 and calls_of(31) == 1
            go.set()
            with plans._making:
                pass
            deadline = time.monotonic() + 60
            while calls_of(32) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert calls_of(33) == 0
        assert running.PlanAt in map(type, running._plans.values())
    finally:
        go.set()
        running.forget_plans()
