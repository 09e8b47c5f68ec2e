"""Modules that agree with a known computation on every input that patch() tries, and differ on others: all of them
are left alone, with the reason."""
import functools
import inspect
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fftune
from fftune.patching.experts_interface import gate_of
from models import make
from quantised_layers import gptq_of

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                reason="transformers is older than 5")
FAR = 1e6  # no sample is as large
REASON = "it may compute something else for other inputs"


def clamped(y):
    return y.clamp(-FAR, FAR)


CLAMPED = "clamp(-1e+06, 1e+06)"
# Changes of a module's result, with words of the reason.
CHANGES = {
    "clamp": (clamped, CLAMPED),
    "minimum": (lambda y: torch.minimum(y, torch.tensor(FAR)), "clamp(-inf, 1e+06)"),
    "nan": (lambda y: y.nan_to_num(), "nan_to_num()"),
    "branch": (lambda y: y * 2 if y.abs().max() > FAR else y, "abs()"),
    "item": (lambda y: y * 2 if y.sum() > FAR else y, "gt(1e+06)"),
    "where": (lambda y: torch.where(y > FAR, 0, y), "gt(1e+06)"),
    "masked": (lambda y: y.masked_fill(y < -FAR, 0), "lt(-1e+06)"),
    "list": (lambda y: y * 2 if max(y.flatten().tolist()) > FAR else y, "tolist()"),
    "array": (lambda y: y * 2 if y.float().numpy().max() > FAR else y, "numpy()"),
    "integers": (lambda y: y + (y * 1e-9).long() * 2, "_to_copy to torch.int64"),
    "root": (lambda y: y + (((y + FAR) * 1e-9).square().sqrt() - (y + FAR) * 1e-9), "a root or logarithm"),
    "places": (lambda y: y.masked_fill(torch.arange(y.shape[-2])[:, None] > 4000, 0), "gt(4000)"),
    "tokens": (lambda y: y * 2 if y.shape[-2] > 4000 else y, "a comparison of the number of sequences or tokens"),
    "sequences": (lambda y: y * 2 if y.dim() > 2 and min(y.size(0), 4000) == 4000 else y,
                  "a comparison of the number of sequences or tokens"),
    "difference": (lambda y: y * 2 if y.shape[-2] - 4000 > 0 else y, "a comparison of the number of sequences"),
    "quotient": (lambda y: y * 2 if y.shape[-2] // 4000 else y, "a comparison of the number of sequences"),
    "conversion": (lambda y: y * 2 if int(y.shape[-2]) > 4000 else y, "a comparison of the number of sequences"),
    "gradients": (lambda y: clamped(y) if torch.is_grad_enabled() else y, "in training"),
    "type": (lambda y: y.clamp(-6e4, 6e4) if y.dtype == torch.float16 else y, "clamp(-60000, 60000)"),
    "training": (clamped, "in training"),
}
# Modules of models, and what is there beside them where they are replaced.
SITES = {"norm": ("llama", "model.layers.0.input_layernorm"), "gated": ("llama", "model.layers.0.mlp"),
         "plain": ("phi", "model.layers.0.mlp"), "experts": ("mixtral", "model.layers.0.mlp.experts"),
         "router": ("mixtral", "model.layers.0.mlp"), "rotary": ("llama", "model.rotary_emb"),
         "layer": ("llama", "model.layers.0"), "around": ("mixtral", "model.layers.0"),
         "block": ("gpt2", "transformer.h.0"), "feed-forward": ("t5-gated", "encoder.block.0.layer.1"),
         "plain-feed-forward": ("t5", "encoder.block.0.layer.1")}


def differ(module: nn.Module, change, in_training: bool = False) -> None:
    """Gives the module a class whose forward changes the first result of its own class's."""
    kind = type(module)

    def forward(self, *given, **options):
        y = kind.forward(self, *given, **options)
        if in_training and not self.training:
            return y
        return (change(y[0]), *y[1:]) if isinstance(y, tuple) else change(y)

    forward.__signature__ = inspect.signature(kind.forward)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def words_of(entries) -> str:
    return "\n".join(words for _, words in entries)


def expect_left_alone(model, words, name="", **options):
    """That the module of this name is left alone for a reason with these words."""
    report = fftune.patch(model, **options)
    assert any(words in reason and REASON in reason for other, reason in report.left if other == name), str(report)
    # A layer of two products runs its own forward around these, whatever that does.
    assert not any(other == name and " and " not in by for other, by in report.replaced), str(report)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["norm", "gated"])
def test_every_change(name, change):
    (kind, path), (function, words) = SITES[name], CHANGES[change]
    model = make(kind)
    differ(model.get_submodule(path), function, change == "training")
    expect_left_alone(model, words, path)


@pytest.mark.parametrize("change", ["clamp", "tokens", "type", "training"])
@pytest.mark.parametrize("name", [name for name in SITES if name not in ("norm", "gated", "rotary")])
def test_every_site(name, change):
    (kind, path), (function, words) = SITES[name], CHANGES[change]
    model = make(kind)
    module = model.get_submodule(path)
    differ(module.gate if name == "router" else module, function, change == "training")
    expect_left_alone(model, words, path)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt-oss"])
def test_inference_mode_shows_the_same_operations(kind):
    """Composed operations are not taken apart ahead of a tracer there."""
    report = fftune.patch(make(kind))
    with torch.inference_mode():
        model = make(kind)
        assert fftune.patch(model).replaced == report.replaced
    model = make(kind)
    name = next(name for name, words in report.replaced
                if any(f"by {op}" in words for op in ("ffn", "moe-ffn", "bias-gelu")))
    with torch.inference_mode():
        differ(model.get_submodule(name), clamped)
        expect_left_alone(model, CLAMPED, name)


@pytest.mark.parametrize("change", ["clamp", "places", "training"])
def test_cosines(change):
    function, words = CHANGES[change]
    model = make("llama")
    differ(model.model.rotary_emb, function, change == "training")
    expect_left_alone(model, words, "model.rotary_emb")


def test_a_function_that_rotates(monkeypatch):
    module = sys.modules[transformers.LlamaForCausalLM.__module__]
    rotate = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda *given, **options: tuple(
        map(clamped, rotate(*given, **options))))
    expect_left_alone(make("llama"), CLAMPED, "model.rotary_emb")


def test_a_decorator_around_attention():
    model = make("llama")
    for layer in model.model.layers:
        kind = type(layer.self_attn)

        @functools.wraps(kind.forward)
        def forward(self, *given, kind=kind, **options):
            return clamped(kind.forward(self, *given, **options)[0]), None

        layer.self_attn.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    report = fftune.patch(model, whole_layers=True)
    assert "a decorator is around the forward of LlamaAttention" in words_of(report.left)
    assert "layers of" not in words_of(report.replaced), str(report)


def test_a_clamp_in_a_router_ahead_of_its_choice():
    model = make("mixtral")
    block = model.model.layers[0].mlp

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        scores = logits.masked_fill(logits < -FAR, float("-inf")).float().softmax(-1)
        best = scores.topk(self.top_k)
        return logits, best.values / best.values.sum(-1, keepdim=True), best.indices

    block.gate.__class__ = type("Router", (type(block.gate),), {"forward": forward})
    expect_left_alone(model, "lt(-1e+06)", "model.layers.0.mlp")


@pytest.mark.parametrize("act", [nn.ReLU(), nn.SiLU()])
def test_limits_are_pieces_of_both_as_often(act):
    class MLP(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
            self.act_fn, self.last = act, last

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.last(self.up_proj(x)))

    assert fftune.patch(nn.ModuleList([MLP(nn.Identity())])).replaced
    expect_left_alone(nn.ModuleList([MLP(lambda y: y + F.relu(y - FAR))]), "clamp(0, inf)", "0")


@pytest.mark.parametrize("act, words", [(lambda x: F.silu(x).clamp(max=FAR), "clamp(-inf, 1e+06)"),
                                        (lambda x: F.gelu(x).nan_to_num(), "nan_to_num()"),
                                        (lambda x: F.silu(x) if x.shape[-2] < 9000 else x, "a comparison of")])
@pytest.mark.parametrize("kind", ["phi", "mbart"])
def test_activations(act, words, kind):
    model = make(kind)
    name = "model.layers.0.mlp" if kind == "phi" else "model.decoder.layers.0"
    model.get_submodule(name).activation_fn = type("Act", (nn.Module,), {"forward": lambda self, x: act(x)})()
    expect_left_alone(model, words, name)


def test_the_gate_of_experts():
    experts = make("mixtral").model.layers[0].mlp.experts
    assert gate_of(experts) == ("silu", "halves")
    own = type(experts)._apply_gate
    experts.__class__ = type("Experts", (type(experts),), {"_apply_gate": lambda self, rows: clamped(own(self, rows))})
    assert CLAMPED in gate_of(experts) and REASON in gate_of(experts)


def test_limits_of_gpt_oss_are_known():
    report = fftune.patch(make("gpt-oss"))
    assert "moe-ffn (swiglu-oai" in words_of(report.replaced)
    model = make("gpt-oss")
    differ(model.model.layers[0].mlp.experts, clamped)
    expect_left_alone(model, CLAMPED, "model.layers.0.mlp.experts")


def test_layers_with_packed_weights():
    layer = gptq_of(nn.Linear(128, 64), group=32)
    differ(layer, clamped)
    expect_left_alone(layer, CLAMPED)


@pytest.mark.parametrize("softcap", [False, True])
def test_logits(softcap):
    model = make("gemma2" if softcap else "llama")
    ids = torch.randint(3, 96, (2, 5))
    fftune.patch(model, whole_layers=True)
    fftune.generate(model, ids, 2)
    kind, forward = type(model), type(model).forward

    def clamps(self, *given, **options):
        outputs = forward(self, *given, **options)
        outputs.logits = clamped(outputs.logits)
        return outputs

    clamps.__signature__ = inspect.signature(forward)
    model.__class__ = type(kind.__name__, (kind,), {"forward": clamps})
    report = fftune.patch(model, whole_layers=True)
    assert CLAMPED in words_of(report.left) and REASON in words_of(report.left)
    with pytest.raises(fftune.Error, match="it may compute something else"):
        fftune.generate(model, ids, 2)


def changed_source(function, *replaced):
    """The function with other text."""
    text = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
    text = text[text.index("def "):]  # without decorators
    for old, new in replaced:
        assert old in text
        text = text.replace(old, new)
    scope = dict(vars(sys.modules[function.__module__]))
    exec(text, scope)
    return scope[function.__name__]


@pytest.mark.parametrize("old, new", [
    ("self.o_proj(attn_output)", "self.o_proj(attn_output).clamp(-1e6, 1e6)"),
    ("self.v_proj(hidden_states)", "self.v_proj(hidden_states).nan_to_num()"),
    ("key_states = self",
     "key_states = (1 if hidden_states.dtype != torch.float16 else hidden_states.abs().max()) * self")])
@pytest.mark.parametrize("options", [dict(projections=True), dict(whole_layers=True)], ids=["projections", "whole"])
def test_attention(old, new, options):
    model = make("llama")
    for layer in model.model.layers:
        kind = type(layer.self_attn)
        layer.self_attn.__class__ = type(kind.__name__, (kind,), {
            "forward": changed_source(kind.forward, (old, new)), "__module__": kind.__module__})
    report = fftune.patch(model, **options)
    part = "projections" if "projections" in options else "layers"
    if "float16" in new and part == "projections":
        return  # heads of a type that they do not have: attention stays the module's
    assert any(reason.startswith(part) and REASON in reason for _, reason in report.left), str(report)
    assert f"{part} of" not in words_of(report.replaced)


def test_whole_layers_whose_own_forward_differs():
    for change, words in (CHANGES["clamp"], CHANGES["tokens"], CHANGES["type"]):
        model = make("llama")
        differ(model.model.layers[1], change)
        report = fftune.patch(model, whole_layers=True)
        assert any(reason.startswith("layers:") and words in reason for _, reason in report.left), str(report)


def test_norms_that_whole_layers_know_by_values():
    model = make("olmo")
    differ(model.model.layers[0].input_layernorm, clamped)
    report = fftune.patch(model, whole_layers=True)
    assert any(reason.startswith("layers:") and CLAMPED in reason for _, reason in report.left), str(report)


@pytest.mark.parametrize("old, new", [
    ("position_ids=position_ids)", "position_ids=position_ids.clamp(max=99))"),
    ("    for decoder_layer", "    position_embeddings = tuple(map(torch.nan_to_num, position_embeddings))\n"
     "    for decoder_layer")], ids=["positions", "cosines"])
def test_positions_that_a_decoder_changes(old, new):
    model = make("llama")
    kind = type(model.model)
    forward = changed_source(kind.forward, (old, new))
    model.model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    report = fftune.patch(model, whole_layers=True)
    assert "rotary embedding" in words_of(report.left) and "layers of" not in words_of(report.replaced), str(report)


def test_a_mask_that_matters_far_away():
    model = make("llama")
    kind = type(model.model)
    forward = changed_source(kind.forward, (
        "hidden_states = self.norm(hidden_states)",
        "hidden_states = self.norm(hidden_states)\n"
        "    hidden_states = hidden_states if causal_mask is None else hidden_states.clamp(-1e6, 1e6)"))
    model.model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    report = fftune.patch(model)
    assert any(CLAMPED in reason for name, reason in report.left if name == "model"), str(report)


def test_experts_of_mxfp4_are_transformers_own():
    experts = type("Mxfp4GptOssExperts", (nn.Module,), {})()
    block = type("Mxfp4GptOssMLP", (nn.Module,), {})()
    block.experts, block.router = experts, nn.Linear(4, 4)
    assert "is not transformers' own" in words_of(fftune.patch(block).left)
