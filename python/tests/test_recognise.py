"""How patch() recognises what modules compute: no other computation may be taken for one."""
import functools
import glob
import importlib
import inspect
import itertools
import math
import os
import random
import re
import threading
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.activations import ACT2FN

import fftune
from fftune.patching import experts, masks, norms
from fftune.patching.recognise import (Foreign, Numbers, Options, PatchReport, Unfit, activation_name, identify,
                                       on_one_thread, stand_in, try_to)
from models import RELEASE, make
from test_left_alone import Experts

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                reason="transformers is older than 5")


def test_recognition_takes_threads_from_no_one_else():
    """PyTorch in a thread that begins in the meantime keeps all of its threads, as does the caller's behind
    it, also where an exception left it."""
    seen = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), on_one_thread():
            seen.append(torch.get_num_threads())
            thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            raise KeyError
        seen.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 3, 3]


# identification

def test_what_inputs_cannot_tell_apart_is_refused():
    functions = {"relu": F.relu, "relu of large ones": lambda x: F.relu(x).clamp(max=1e30)}
    with pytest.raises(Unfit, match="nothing tells them apart"):
        identify(F.relu, functions, lambda numbers: numbers(8), subject="it")
    assert identify(F.relu, functions, lambda numbers: numbers(8), subject="it",
                    canonical=lambda key: key[:4]) == "relu"


def test_what_is_known_but_has_no_kernel_is_named():
    with pytest.raises(Unfit, match="computes its square"):
        identify(torch.square, {Foreign("its square"): torch.square, "relu": F.relu},
                 lambda numbers: numbers(8), subject="it")


def test_numbers_are_independent():
    numbers = Numbers(0)
    first, second = numbers(1000), numbers(1000)
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 0.1
    assert torch.equal(first, Numbers(0)(1000)) and not torch.equal(first, Numbers(1)(1000))


def test_a_stand_in_has_nothing_of_the_module():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module.to("meta")
    module[1].weight = module[0].weight
    module.log, module.parent = [1], [module]
    module.register_forward_hook(lambda *_: pytest.fail("it was run"))
    other = stand_in(module, {4: 3})
    Numbers(0).fill(other)
    assert other[0].weight is other[1].weight and other[0].weight.shape == (3, 3)
    assert other.parent[0] is other and other.log is not module.log
    assert other(torch.ones(2, 3)).isfinite().all() and module[0].weight.is_meta


ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_fast": "gelu-tanh", "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh", "gelu_python_tanh": "gelu-tanh", "gelu_accurate": "gelu-tanh",
    "linear": "none", "relu": "relu", "silu": "silu", "swish": "silu"}
OTHERS = {
    "clamped": lambda x: F.silu(x).clamp(max=50), "clamped far": lambda x: F.silu(x.clamp(max=200)),
    "shifted": lambda x: F.gelu(x - 1e-3), "scaled": lambda x: x * torch.sigmoid(1.001 * x),
    "noisy": lambda x: F.silu(x) + 1e-4 * torch.randn_like(x), "rrelu": nn.RReLU(0.0, 1e-3),
    "dropping": nn.Sequential(nn.SiLU(), nn.Dropout(0.01)),
    "threshold": nn.Threshold(0.01, 0.0), "two": nn.Sequential(nn.ReLU(), nn.Hardtanh(0.0, 100.0))}


@pytest.mark.parametrize("name", ACT2FN)
def test_activations_of_transformers(name):
    if name in ACTIVATIONS:
        assert activation_name(ACT2FN[name], {}) == ACTIVATIONS[name]
    else:
        with pytest.raises(Unfit):
            activation_name(ACT2FN[name], {})


@pytest.mark.parametrize("name", OTHERS)
def test_activations_that_differ_somewhere(name):
    with pytest.raises(Unfit):
        activation_name(OTHERS[name], {})


# norms

def classes(pattern: str):
    """Those of transformers' models whose names match."""
    for path in sorted(glob.glob(os.path.dirname(transformers.__file__) + "/models/*/modeling_*.py")):
        with open(path) as file:
            names = re.findall(rf"^class (\w*{pattern})\(", file.read(), re.M)
        if names:
            kind = path.split("/")[-2]
            try:
                module = importlib.import_module(
                    f"transformers.models.{kind}.{os.path.basename(path)[:-3]}")
            except Exception:  # needs a package that is not there
                continue
            yield from (getattr(module, name) for name in names)


def code_of(function, scope):
    """A key of a function: its code, and the globals that it reads."""
    code = function if inspect.iscode(function) else function.__code__
    return (code.co_code, code.co_names, code.co_varnames, getattr(function, "__defaults__", None),
            tuple(code_of(c, scope) if inspect.iscode(c) else repr(c) for c in code.co_consts
                  if not (isinstance(c, str) and " " in c)),  # a docstring
            tuple(id(scope[name]) for name in code.co_names if name in scope))


def alike(found):
    """Classes in groups of the same code: most of transformers' are copies, so one of each is tried."""
    groups = {}
    for cls in found:
        own = [kind for kind in cls.__mro__ if not kind.__module__.startswith(("torch.", "builtins"))]
        key = tuple((name, code_of(inspect.unwrap(f), inspect.unwrap(f).__globals__)) for kind in own
                    for name, f in vars(kind).items() if inspect.isfunction(f))
        groups.setdefault((key, own[-1].__mro__[1]), []).append(cls)
    return list(groups.values())


def test_norms_of_transformers():
    replaced = 0
    for group, size in itertools.product(alike(classes("Norm")), (48, 200)):
        cls = group[0]
        for dtype in (torch.float32, torch.bfloat16):
            try:
                norm = cls(size).to(dtype)
                Numbers(1).fill(norm)
                with torch.no_grad():
                    norm(torch.ones(2, 3, size, dtype=dtype))
            except Exception:
                continue
            try:
                if norms.patch_norm(norm, {}, Options(False, False, False)) is None:
                    continue
            except Unfit:
                continue
            replaced += len(group)
            for scale in (1.0, 1e-3, 30.0):
                x = (Numbers(2)(7, size) * scale).to(dtype)
                with torch.no_grad():
                    ours, right = norm(x), cls.forward(norm, x)
                    error = (ours.double() - right.double()).norm() / right.double().norm()
                assert error < (1e-6 if dtype == torch.float32 else 1e-3), (cls.__name__, dtype, scale)
    assert replaced > 300


class Norm(nn.Module):
    """That of Llama, with one thing that differs."""

    def __init__(self, differs: str = "", eps: float = 1e-6):
        super().__init__()
        self.weight, self.variance_epsilon, self.differs = nn.Parameter(torch.ones(32)), eps, differs

    def forward(self, x):
        if self.differs == "mean":
            x = x - x.mean(-1, keepdim=True)
        square = x.float().square().mean(-1, keepdim=True)
        eps = 2 * self.variance_epsilon if self.differs == "eps" else self.variance_epsilon
        if self.differs == "root":
            return x / (square.sqrt() + eps) * self.weight
        if self.differs == "limit":
            x = x.clamp(-50, 50)
        y = self.weight * (x.float() * torch.rsqrt(square + eps)).to(x.dtype)
        if self.differs == "training":
            y = F.dropout(y, 0.1, self.training)
        return y * 1.0001 if self.differs == "scale" else y


@pytest.mark.parametrize("differs", ["mean", "eps", "root", "limit", "training", "scale"])
def test_norms_that_differ(differs):
    report = fftune.patch(nn.ModuleList([Norm(differs), Norm()]))
    assert [name for name, _ in report.replaced] == ["1"]


@pytest.mark.parametrize("kind", [Norm, nn.LayerNorm])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.5, 2.0, 1e3])
def test_norms_run_with_any_eps(kind, eps):
    norm = kind(eps=eps) if kind is Norm else kind(32, eps=eps)
    x = Numbers(0)(5, 32)
    right = norm(x)
    fftune.patch(norm)
    with torch.no_grad():
        assert torch.allclose(norm(x), right, atol=1e-5)


# routers

SEED = 20261126


def settings(**changes):
    """A configuration for any mixture of experts."""
    values = dict(
        hidden_size=32, experts=16, n_group=4, topk_group=2, top_k=2, routed_scaling_factor=2.5,
        norm_topk_prob=True, topk_method="group_limited_greedy", scoring_func="sigmoid",
        moe_norm_min=1e-12, expert_selection_fn="softmax", moe_router_logit_softcapping=0.0,
        use_expert_bias=True, router_jitter_noise=0.01, input_jitter_noise=0.01,
        output_multiplier=0.5, n_shared_experts=1) | changes
    number, top_k = values.pop("experts"), values.pop("top_k")
    scale = values["routed_scaling_factor"]
    return types.SimpleNamespace(
        num_experts=number, num_local_experts=number, n_routed_experts=number, moe_num_experts=number,
        num_experts_per_tok=top_k, moe_topk=top_k, route_scale=scale, router_scaling_factor=scale,
        **values)


def routers():
    """Those of transformers that are made from such settings and look like one."""
    for cls in classes("(?:Router|Gate|Gating)"):
        try:
            if experts._looks_like_router(cls(settings())):
                yield cls
        except Exception:
            continue


def route(router, x):
    """The weight of each expert for each token."""
    _, weights, ids = router(x)
    return torch.zeros(len(x), router.weight.shape[0]).scatter_add(1, ids.long(), weights.float())


def new_weights(router, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*router.named_parameters(), *router.named_buffers()):
            size = 2 * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.3 if name == "bias" else 1.0
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * size)
        return torch.randn(128, router.weight.shape[1], generator=generator) * (1.0, 0.2, 1.5)[seed % 3]


class _Plain:
    """A router as it was before patch()."""

    def __init__(self, module):
        self.module, self.weight = module, module.weight

    def __call__(self, x):
        return type(self.module).forward(self.module, x)


@functools.cache
def replaced_experts():
    """Beside which a router is tried."""
    layer = nn.ModuleList([Experts()])
    assert fftune.patch(layer).replaced
    return layer[0]


def check(cls, config) -> bool:
    """Whether a router is replaced; then it chooses and weighs as before."""
    mixture, report = nn.Module(), PatchReport()
    mixture.experts, mixture.gate = replaced_experts(), cls(config)
    try_to(report, "", lambda: experts.patch_router(mixture, {}, Options(False, False, False)))
    mixture.eval()  # Phimoe's router adds noise in training
    for seed in range(4):
        x = new_weights(mixture.gate, SEED + seed)
        with torch.no_grad():
            try:
                right = route(_Plain(mixture.gate), x)
            except ValueError:  # it gives more or less than logits, weights and ids
                assert not any("moe-route" in words for _, words in report.replaced), cls.__name__
                return False
            except (RuntimeError, TypeError):  # sizes that it cannot have, or more than hidden states
                return False
            ours = route(mixture.gate, x)
        assert (ours - right).norm() <= 1e-4 * right.norm(), (cls.__name__, vars(config), report)
    return any("moe-route" in words for _, words in report.replaced)


def test_all_routers_of_transformers():
    replaced = {cls.__name__ for group in alike(routers()) if check(group[0], settings())
                | check(group[0], settings(norm_topk_prob=False)) for cls in group}
    there = {cls.__name__ for cls in routers()}
    if RELEASE < (5, 20):
        there.discard("GraniteMoeTopKRouter")  # gave ids, weights and logits in another order
    assert len(replaced) >= (40 if RELEASE >= (5, 20) else 39)
    assert there & {"DeepseekV3TopkRouter", "DeepseekV2TopkRouter", "MixtralTopKRouter",
                    "Qwen3MoeTopKRouter", "GptOssTopKRouter", "GraniteMoeTopKRouter",
                    "LagunaTopKRouter", "FlintTopKRouter", "Mistral4TopkRouter",
                    "ExaoneMoeTopkRouter", "Glm4MoeTopkRouter"} <= replaced
    # They mask with 0, weigh by other scores, or choose by other ones.
    assert not replaced & {"AXK2TopkRouter", "PhimoeTopKRouter", "Kolibri1TopKRouter",
                           "InklingTopkRouter", "Lfm2MoeTopKRouter", "Llama4Router"}


GROUPED = [(number, groups, kept, top_k) for number in (6, 8, 12, 16, 64)
           for groups in (1, 2, 3, 4, 8) if number % groups == 0
           for kept in range(1, groups + 1) for top_k in (1, 2, 3, 6)
           if top_k <= number and number // groups > 1]


def test_routers_with_groups():
    """Some of the combinations; the seed of the choice changes them."""
    kinds = [cls for cls in routers() if cls.__name__ in (
        "DeepseekV3TopkRouter", "Dots1TopkRouter", "Glm4MoeTopkRouter", "ExaoneMoeTopkRouter",
        "DeepseekV2TopkRouter", "MistralLarge4TextTopkRouter", "AXK2TopkRouter")]
    choose = random.Random(SEED)
    replaced = sum(check(choose.choice(kinds[:-1] if i % 8 else kinds), settings(
        experts=number, n_group=groups, topk_group=kept, top_k=top_k,
        hidden_size=choose.choice((16, 32, 48)), norm_topk_prob=choose.random() < 0.7))
        for i, (number, groups, kept, top_k) in enumerate(choose.sample(GROUPED, 60)))
    assert replaced >= 35


@pytest.mark.parametrize("number, groups, kept, top_k", [
    (16, 4, 1, 2), (6, 2, 1, 2), (8, 4, 2, 1), (8, 4, 3, 1), (64, 8, 7, 8)])
@pytest.mark.parametrize("name", ["Dots1TopkRouter", "DeepseekV3TopkRouter", "Glm4MoeTopkRouter",
                                  "ExaoneMoeTopkRouter"])
def test_groups_that_one_sample_does_not_tell(name, number, groups, kept, top_k):
    cls, = (cls for cls in classes(name))
    assert check(cls, settings(experts=number, n_group=groups, topk_group=kept, top_k=top_k))


@pytest.mark.parametrize("name, number, top_k", [("Qwen3MoeTopKRouter", 128, 8),
                                                 ("Qwen2MoeTopKRouter", 60, 4),
                                                 ("OlmoeTopKRouter", 64, 8),
                                                 ("DeepseekV3TopkRouter", 256, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_of_full_size(name, number, top_k, dtype):
    mixture = nn.Module()
    cls, = (cls for cls in classes(name))
    mixture.experts = Experts()
    mixture.gate = cls(settings(hidden_size=2048, experts=number, top_k=top_k, n_group=8, topk_group=4))
    report = fftune.patch(mixture.to(dtype))
    assert any("moe-route" in words for _, words in report.replaced)


def test_a_router_that_does_not_do_what_it_says():
    class Lying(next(classes("Qwen3MoeTopKRouter"))):
        def forward(self, x):
            logits, weights, ids = super().forward(x)
            return logits, weights / weights.sum(-1, keepdim=True), ids

    mixture = nn.Module()
    mixture.experts, mixture.gate = Experts(), Lying(settings(norm_topk_prob=False))
    assert any("says norm_topk_prob = False" in words for _, words in fftune.patch(mixture).left)


def test_weights_without_values_are_left_alone():
    with torch.device("meta"):
        norm = nn.Module()
        norm.norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(32)
    reason, = (words for _, words in fftune.patch(norm).left)
    assert "weight has no values yet: it is on the meta device" in reason


def test_experts_are_not_filled_to_try_a_mask(monkeypatch):
    """Those of Qwen3-30B-A3B have 600 million numbers a layer."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=384)
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    drawn, draw = [], Numbers.__call__
    monkeypatch.setattr(Numbers, "__call__", lambda self, *shape, **options: drawn.append(
        math.prod(shape)) or draw(self, *shape, **options))
    report = fftune.patch(model.to_empty(device="cpu"))
    assert any("without the causal mask" in words for _, words in report.replaced), report
    assert max(drawn) < 1 << 18


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3-moe"])
@pytest.mark.parametrize("fits", [True, False])
def test_parts_that_see_no_mask_are_passed_over_or_run(name, fits, monkeypatch):
    monkeypatch.setattr(masks, "_LARGE", 0)
    if not fits:  # as where a part gives more than hidden states
        monkeypatch.setattr(masks._Passing, "forward", lambda self, x: None)
    report = fftune.patch(make(name))
    assert any("without the causal mask" in words for _, words in report.replaced), report
