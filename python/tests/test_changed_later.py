"""Settings of modules and configurations that a user changes after patch(): the model computes what it would
without patch()."""
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import fftune
from models import inputs, make

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5,
                                reason="transformers is older than 5")
OPTIONS = {"default": {}, "projections": dict(projections=True), "attention": dict(attention=True),
           "whole": dict(whole_layers=True), "graphs": dict(graphs=True), "recompute": dict(recompute=True)}


def of_config(name, value):
    def change(model):
        for config in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            setattr(config, name, value)
    return change


def of_modules(words, name, value, first=False):
    """Sets an attribute of all modules whose class has these words in its name, or of the first."""
    def change(model):
        found = [m for m in model.modules() if words in type(m).__name__ and hasattr(m, name)]
        assert found
        for module in found[:1] if first else found:
            setattr(module, name, value)
    return change


def in_training(model):
    """One attention, with a dropout of all, in a model that is not."""
    attention = next(m for m in model.modules() if hasattr(m, "is_causal"))
    attention.attention_dropout = 1.0
    attention.training = True


CHANGES = {
    "causal-module": ("llama", of_modules("Attention", "is_causal", False)),
    "causal-first": ("llama", of_modules("Attention", "is_causal", False, first=True)),
    "causal-config": ("llama", of_config("is_causal", False)),
    "causal-window": ("mistral-window", of_modules("Attention", "is_causal", False)),
    "bidirectional": ("gemma3", of_config("use_bidirectional_attention", True)),
    "scaling": ("llama", of_modules("Attention", "scaling", 0.7)),
    "window": ("mistral", of_config("sliding_window", 4)),
    "window-of-layers": ("qwen2-moe", of_config("layer_types", ["sliding_attention"] * 2)),
    "kinds-of-layers": ("gemma3", of_config("layer_types", ["full_attention"] * 3)),
    "softcap": ("gemma2", of_modules("Attention", "attn_logit_softcapping", 2.0)),
    "attention": ("gpt-oss", lambda model: model.set_attn_implementation("eager")),
    "training": ("llama", in_training),
    "angles": ("gemma3", of_modules("Rotary", "sliding_attention_attention_scaling", 1.5)),
    "layers": ("llama", of_config("num_hidden_layers", 1)),
    "router-logits": ("mixtral", of_config("output_router_logits", True)),
    "router": ("qwen2-moe", of_modules("Router", "norm_topk_prob", True)),
    "groups": ("dots1", of_modules("Router", "num_group", 4)),
    "experts": ("gpt-oss", of_modules("Experts", "alpha", 2.5)),
    "activation": ("gpt-neox", of_modules("GELU", "act", F.relu)),
    "activation-inline": ("mbart", of_modules("GELU", "act", F.relu)),
    "eps": ("llama", of_modules("RMSNorm", "variance_epsilon", 0.5)),
}


def close(ours, theirs):
    return theirs is None or ours is not None and (ours.double() - theirs.double()).norm() <= 1e-5 * theirs.double().norm()


@torch.no_grad()
def results(model, ids):
    """Logits of a call, and of a prompt and two tokens over a static cache."""
    cache, found = transformers.StaticCache(config=model.config, max_cache_len=24), []
    for options in (dict(input_ids=ids, use_cache=False), dict(input_ids=ids, past_key_values=cache),
                    dict(input_ids=ids[:, :2], past_key_values=cache)):
        torch.manual_seed(9)
        try:
            found.append(model(**options).logits)
        except RuntimeError:  # a static cache of another shape than the window's
            found.append(None)
    return found


@pytest.mark.parametrize("options", [{**OPTIONS["attention"], **OPTIONS["projections"]}, OPTIONS["whole"]],
                         ids=["attention", "whole"])
@pytest.mark.parametrize("name, change", CHANGES.values(), ids=CHANGES)
def test_calls(name, change, options):
    model, ids = make(name), inputs(name)["input_ids"]
    before = results(model, ids)
    ours = copy.deepcopy(model)
    fftune.patch(ours, **options)
    for each in (model, ours):
        change(each)
    right = results(model, ids)
    if name != "mixtral":  # which collects more
        assert change is CHANGES["attention"][1] or not all(map(close, right, before)), "it changes nothing"
    assert all(map(close, results(ours, ids), right))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", ["causal-module", "causal-config", "layers"])
@pytest.mark.parametrize("used", [False, True])
def test_generate(kind, options, used):
    model, ids = make("llama"), inputs("llama")["input_ids"]
    ours = copy.deepcopy(model)
    fftune.patch(ours, **options)
    draw = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    if used:  # graphs are captured by then
        ours.generate(ids, **draw)
    for each in (model, ours):
        CHANGES[kind][1](each)
    assert torch.equal(ours.generate(ids, **draw), model.generate(ids, **draw))
    if "whole_layers" in options:
        with pytest.raises(fftune.Error, match="was changed since patch"):
            fftune.generate(ours, ids, 6)


@pytest.mark.parametrize("options, words", [(OPTIONS["whole"], "not causal by its configuration"),
                                            (OPTIONS["graphs"], "not causal by its configuration"),
                                            (OPTIONS["default"], "uses its mask in a way")])
def test_a_configuration_that_was_not_causal_before(options, words):
    model, ids = make("llama"), inputs("llama")["input_ids"]
    of_config("is_causal", False)(model)
    ours = copy.deepcopy(model)
    report = fftune.patch(ours, **options)
    assert any(words in reason for _, reason in report.left), str(report)
    assert all(map(close, results(ours, ids), results(model, ids)))


def numbers_of(module):
    return [name for name, value in vars(module).items()
            if type(value) in (int, float) and name[0] != "_" and name not in ("layer_idx", "attention_dropout")]


@pytest.mark.parametrize("options", [OPTIONS["default"], OPTIONS["whole"]], ids=["default", "whole"])
@pytest.mark.parametrize("name", ["granite-plain", "llama", "gpt2", "t5", "t5-gated", "phi", "mixtral", "cohere",
                                  "gemma2", "dots1"])
def test_every_number_of_a_module_takes_effect(name, options):
    """Each number of a module whose forward patch() replaced, changed by itself."""
    model, given = make(name), inputs(name)
    ours = copy.deepcopy(model)
    fftune.patch(ours, **options)
    tried = 0

    @torch.no_grad()
    def logits(of):
        torch.manual_seed(9)
        try:
            return of(**given, use_cache=False).logits
        except Exception:
            return None

    kinds = set()
    for own, theirs in zip(ours.modules(), model.modules(), strict=True):
        if type(own) in kinds or not hasattr(own.__dict__.get("forward"), "_fftune"):
            continue
        kinds.add(type(own))
        for number in numbers_of(theirs):
            before = getattr(theirs, number)
            for module in (own, theirs):
                setattr(module, number, before * 2 if before else 1)
            right = logits(model)
            if right is not None:
                assert close(logits(ours), right), (type(theirs).__name__, number)
                tried += 1
            for module in (own, theirs):
                setattr(module, number, before)
    assert tried


class GatedMLP(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.act_fn = act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("act, change", [
    (nn.GELU(), lambda mlp: setattr(mlp.act_fn, "approximate", "tanh")),
    (nn.GELU(), lambda mlp: setattr(mlp, "act_fn", nn.GELU("tanh"))),
    (F.silu, lambda mlp: setattr(mlp, "act_fn", F.gelu))], ids=["setting", "same-class", "function"])
def test_an_activation_of_the_same_class(act, change):
    model, x = nn.ModuleList([GatedMLP(act)]), torch.randn(3, 16)
    assert any("by ffn" in words for _, words in fftune.patch(model).replaced)
    change(model[0])
    assert torch.equal(model[0](x), GatedMLP.forward(model[0], x))
