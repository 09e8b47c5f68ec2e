"""Whoever reads what a model's modules give each other has what the model makes, where patch() does not know them:
wrappers that take any arguments, hooks, adapters of peft, and callers of a part."""
import copy

import pytest
import torch
import transformers
from torch import nn

import fftune
from test_left_alone import SIZES, close, copy_of_patched, ids, make

SMALL = dict(SIZES, num_hidden_layers=3)
MODELS = {"LlamaConfig": SMALL, "Qwen3Config": dict(SMALL, head_dim=8), "PhiConfig": SMALL,
          "Qwen3MoeConfig": dict(SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)}


def number(value) -> torch.Tensor:
    """One that follows from all numbers of a value, and from what they are."""
    if isinstance(value, torch.Tensor):
        return (value.double().cos().sum() * 0.01 + value.dim() + value.numel() * 0.001).float()
    if isinstance(value, (tuple, list)):
        return sum(map(number, value), torch.tensor(len(value) * 0.1))
    return torch.tensor(0.0)


class Reader(nn.Module):
    """A wrapper that computes with all that it is given."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *given, **options):
        result = self.inner(*given, **options)
        read = number(given) + sum(number(options.get(name)) for name in ("position_embeddings", "attention_mask"))
        first = (result[0] if isinstance(result, tuple) else result) + read * 0.01
        return (first, *result[1:]) if isinstance(result, tuple) else first


def wrapped(model, at, name):
    layer = model.model.layers[at]
    if name:
        setattr(layer, name, Reader(getattr(layer, name)))
    else:
        model.model.layers[at] = Reader(layer)


def hooked(model, at, name):
    def hook(module, given, options, result):
        first = result[0] if isinstance(result, tuple) else result
        first = first + 0.01 * (number(options.get("position_embeddings")) + number(options.get("attention_mask")))
        return (first, *result[1:]) if isinstance(result, tuple) else first

    layer = model.model.layers[at]
    (getattr(layer, name) if name else layer).register_forward_hook(hook, with_kwargs=True)


def hooked_in_place(model, at, name):
    """Other cosines in the same memory."""
    def hook(module, given, options):
        for t in options["position_embeddings"]:
            t.mul_(1.25)

    layer = model.model.layers[at]
    (getattr(layer, name) if name else layer).register_forward_pre_hook(hook, with_kwargs=True)


@torch.no_grad()
def results(model) -> list[torch.Tensor]:
    """In evaluation, padded, and over a static cache, first a prompt and then a token."""
    given = ids()
    mask = torch.ones_like(given)
    mask[1, :4] = 0
    cache = transformers.StaticCache(config=model.config, max_cache_len=128)
    found = [model(input_ids=given, use_cache=False).logits,
             model(input_ids=given, attention_mask=mask, use_cache=False).logits[:, 4:]]
    prompt = given.repeat(1, 4)
    for tokens in (prompt, given[:, :1]):
        found.append(model(input_ids=tokens, past_key_values=cache).logits)
    with torch.inference_mode():
        found.append(model(input_ids=given, use_cache=False).logits)
    return found


@pytest.mark.parametrize("name", ["self_attn", ""])
@pytest.mark.parametrize("kind, change", [
    pytest.param(kind, change, marks=() if kind == "LlamaConfig" or change is wrapped else pytest.mark.further)
    for kind in MODELS for change in (wrapped, hooked, hooked_in_place)])
def test_readers_that_are_not_known(kind, name, change):
    model = make(kind, **MODELS[kind])
    right = copy.deepcopy(model)
    change(right, 1, name)
    expected = results(right)
    for before in (True, False):
        for options in ({}, dict(projections=True), dict(whole_layers=True)):
            if before:
                own = copy.deepcopy(model)
                change(own, 1, name)
                report = str(fftune.patch(own, **options))
            else:
                own, report = copy_of_patched(kind, MODELS[kind], **options)
                change(own, 1, name)
            for at, (ours, theirs) in enumerate(zip(results(own), expected)):
                assert close(ours, theirs), (at, before, options, report)


@pytest.mark.parametrize("before", [True, False])
def test_adaption_prompts(before):
    peft = pytest.importorskip("peft")
    model = make("LlamaConfig", **SIZES)

    def adapted(own):
        own = peft.get_peft_model(own, peft.AdaptionPromptConfig(
            adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"))
        torch.manual_seed(5)
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                if "adaption" in name:
                    parameter.copy_(torch.randn_like(parameter))
        return own.eval()

    right = adapted(copy.deepcopy(model))
    own = copy.deepcopy(model)
    if before:
        own = adapted(own)
    fftune.patch(own)
    own = own if before else adapted(own)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert close(own(input_ids=ids()).logits.detach(), right(input_ids=ids()).logits.detach())


def test_who_calls_a_rotary_embedding_alone():
    model = make("LlamaConfig", **SIZES)
    own = copy.deepcopy(model)
    fftune.patch(own)
    x, places = torch.randn(2, 5, 32), torch.arange(5)[None]
    for ours, theirs in zip(own.model.rotary_emb(x, places), model.model.rotary_emb(x, places)):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    with torch.no_grad():
        embeddings = own.model.rotary_emb(x, places)
        assert close(own.model.layers[0](x, position_embeddings=embeddings),
                     model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, places)))
        other = tuple(t * 0.5 for t in embeddings)
        assert close(own.model.layers[0](x, position_embeddings=other),
                     model.model.layers[0](x, position_embeddings=other))
    assert copy.deepcopy(embeddings[0]).equal(embeddings[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_of_routers_and_experts_are_given_their_types(dtype):
    model = make("Qwen3MoeConfig", **MODELS["Qwen3MoeConfig"]).to(dtype)
    own = copy.deepcopy(model)
    fftune.patch(own)
    found = []
    for each in (model, own):
        seen = []
        block = each.model.layers[0].mlp
        block.gate.register_forward_hook(lambda module, given, result, seen=seen: seen.append(
            [t.dtype for t in result]))
        block.experts.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(
            [t.dtype for t in given]))
        with torch.no_grad():
            each(input_ids=ids())
        found.append(seen)
    assert found[0] == found[1]
