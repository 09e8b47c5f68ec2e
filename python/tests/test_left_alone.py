"""Tests of patch() on models that it knows only in part: they compute the same as before."""
import copy
import functools
import re

import pytest
import torch
import transformers
from torch import nn

import fftune
from models import RELEASE

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1)


def make(kind: str, **settings):
    """A tiny model of the configuration of that name; skips where transformers has it not."""
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    config = getattr(transformers, kind)(**settings)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # initial weights are too small and too much alike to show mistakes
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1)
    return model.eval()


def ids(tokens: int = 20):
    torch.manual_seed(7)
    return torch.randint(3, 96, (2, tokens))


def close(ours, theirs, tolerance=1e-5):
    ours, theirs = ours.double(), theirs.double()
    return (ours - theirs).norm() <= tolerance * theirs.norm()


def logits(model, **options):
    with torch.no_grad():
        return model(input_ids=ids(), use_cache=False, **options).logits


def static_logits(model, **options):
    """Logits of a few tokens over a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        return model(input_ids=ids(6), past_key_values=cache, **options).logits


def patched(model, **options):
    """A copy of it that is patched, and the report."""
    other = copy.deepcopy(model)
    return other, fftune.patch(other, **options)


@functools.lru_cache(4)
def _patched_once(kind: str, settings: tuple, options: tuple):
    model = make(kind, **dict(settings))
    return model, str(fftune.patch(model, **dict(options)))


def copy_of_patched(kind: str, settings: dict, **options):
    """A copy of the model of that configuration, which is patched once for all tests, and the report's text."""
    model, report = _patched_once(kind, tuple(settings.items()), tuple(options.items()))
    return copy.deepcopy(model), report


def words_of(entries) -> str:
    return "\n".join(words for _, words in entries)


@pytest.mark.parametrize("kind, settings", [
    ("SmolLM3Config", SIZES),
    ("ExaoneMoeConfig", dict(SIZES, **EXPERTS, num_hidden_layers=5, head_dim=8, sliding_window=8,
                             num_experts=4, num_shared_experts=1))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_do_not_rotate(kind, settings, dtype):
    model = make(kind, **settings).to(dtype)
    ours, report = patched(model, projections=True)
    assert "does not rotate" in words_of(report.left)
    assert "projections of" in words_of(report.replaced)
    assert close(logits(ours), logits(model), 1e-5 if dtype == torch.float32 else 0.05)


def test_whole_layers_that_do_not_rotate():
    model = make("SmolLM3Config", **SIZES)
    ours, _ = patched(model, whole_layers=True)
    assert close(static_logits(ours), static_logits(model))


def several_axes(kind: str):
    """The text part of a model of pictures and films, and positions [axes, sequences, tokens]."""
    config = getattr(transformers, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {kind}")
    rope = dict(rope_type="default", rope_theta=100.0, mrope_section=[1, 1, 2])
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}Model")(config(**SIZES, head_dim=8, rope_parameters=rope)).eval()
    return model, torch.arange(6) * torch.tensor([1, 1, 2, 3])[:, None, None].expand(-1, 2, -1)


@pytest.mark.parametrize("kind", ["Qwen3VLText", "Glm4vText", "PaddleOCRText"])
@pytest.mark.parametrize("options", [dict(), dict(projections=True), dict(whole_layers=True)])
def test_positions_of_several_axes(kind, options):
    model, axes = several_axes(kind)
    ours, report = patched(model, **options)
    assert "positions of several axes" in words_of(report.left)
    for position_ids in (None, axes[0], axes[1:], axes):
        def states(m):
            cache = transformers.StaticCache(config=m.config, max_cache_len=32)
            with torch.no_grad():
                return m(input_ids=ids(6), position_ids=position_ids, past_key_values=cache).last_hidden_state
        try:
            theirs = states(model)
        except Exception:
            continue  # a model that takes three axes, or four
        assert close(states(ours), theirs)


def test_states_that_a_call_adds_between_layers():
    model, _ = several_axes("Qwen3VLText")
    ours, report = patched(model, whole_layers=True)
    assert "by layer" in words_of(report.replaced)

    def states(m, **more):
        cache = transformers.StaticCache(config=m.config, max_cache_len=32)
        with torch.no_grad():
            return m(input_ids=ids(6), past_key_values=cache, **more).last_hidden_state
    picture = torch.zeros(2, 6, dtype=torch.bool)
    picture[:, 2:4] = True
    more = dict(visual_pos_masks=picture, deepstack_visual_embeds=[torch.ones(4, 32)])
    assert not close(states(model, **more), states(model))
    assert close(states(ours), states(model))
    assert close(states(ours, **more), states(model, **more))


def test_projections_beside_an_attention_that_is_not_known():
    model = make("LlamaConfig", **SIZES)
    model.set_attn_implementation("eager")
    before = model(ids(5)).logits
    report = str(fftune.patch(model))
    assert "projections: they run beside the attention sdpa or fftune, not beside eager" in report
    assert "could not be tried" not in report
    assert close(model(ids(5)).logits, before)


def test_reasons_are_sentences_and_no_errors_of_python():
    class Odd(nn.Module):  # a gated MLP by its parts, which takes something else
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
            self.act_fn = nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x.gate)) * self.up_proj(x.up))

    bert = {**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, "is_decoder": True}
    models = [Odd(), make("BertConfig", **bert), make("OpenAIGPTConfig", **GPT2),
              make("BartConfig", d_model=32, encoder_layers=1, decoder_layers=1, decoder_ffn_dim=48,
                   encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, vocab_size=96),
              make("RecurrentGemmaConfig", **dict(SIZES, num_hidden_layers=3, head_dim=8)),
              make("GPTNeoXJapaneseConfig", **{**SIZES, "intermediate_multiple_size": 2})]
    for model in models:
        left = fftune.patch(model, whole_layers=True).left
        assert left, type(model).__name__
        for _, reason in left:
            assert not re.search(r"[A-Z]\w*(Error|Exception)\b|object|attribute '|argument", reason), reason
    report = fftune.patch(make("StableLmConfig", **SIZES), projections=True)
    assert any("norms around StableLmAttention are not fused" in reason for _, reason in report.left)
    assert not any("projections" in words for _, words in report.replaced)
    assert any("Odd does not take what such modules are given" in reason
               for _, reason in fftune.patch(models[0]).left)


@pytest.mark.parametrize("kind, settings", [
    ("Llama4TextConfig", dict(SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=1,
                              intermediate_size_mlp=48, attention_chunk_size=8)),
    ("MiniMaxConfig", dict(SIZES, head_dim=8, num_local_experts=4, sliding_window=8))])
@pytest.mark.parametrize("attention", [False, True])
def test_masks_of_chunks_and_windows_are_kept(kind, settings, attention):
    model = make(kind, **settings)
    ours, _ = patched(model, attention=attention)
    assert close(logits(ours), logits(model))


GPT2 = dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1,
            eos_token_id=2)


@pytest.mark.parametrize("kind, settings", [
    ("LlamaConfig", SIZES), ("Qwen3Config", dict(SIZES, head_dim=8)), ("GPT2Config", GPT2)])
@pytest.mark.parametrize("attention", [False, True])
def test_a_call_that_is_not_causal(kind, settings, attention):
    model = make(kind, **settings)
    ours, _ = patched(model, attention=attention)
    assert close(logits(ours, is_causal=False), logits(model, is_causal=False))
    assert close(logits(ours, is_causal=True), logits(model))
    for config in (model.config, ours.config):
        config.is_causal = False
    for module in (*model.modules(), *ours.modules()):
        if hasattr(module, "config"):
            module.config.is_causal = False
    assert close(logits(ours), logits(model))


FALCON = {name: value for name, value in SIZES.items()
          if name not in ("intermediate_size", "num_key_value_heads")}


@pytest.mark.parametrize("kind, settings", [
    ("FalconConfig", FALCON),
    ("BloomConfig", dict(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)),
    ("GPTJConfig", dict(GPT2, rotary_dim=8, n_inner=48))])
def test_attention_that_is_not_known_keeps_its_masks(kind, settings):
    model = make(kind, **settings)
    ours, report = patched(model, whole_layers=True)
    assert "layers of" not in words_of(report.replaced)
    with torch.no_grad():
        assert close(ours(ids()).logits, model(ids()).logits)
    try:
        right = static_logits(model)
    except RuntimeError:
        # Bloom's attention in transformers 5.17 takes no static cache.
        assert RELEASE < (5, 20) and kind == "BloomConfig"
        right = None
    if right is not None:
        assert close(static_logits(ours), right)
    fftune.unpatch(ours)
    assert ours.config._attn_implementation == model.config._attn_implementation
    if right is not None:
        assert torch.equal(static_logits(ours), right)


@pytest.mark.parametrize("kind, settings", [
    ("GPTNeoXConfig", FALCON), ("NemotronConfig", SIZES),
    ("Glm4MoeConfig", dict(SIZES, **EXPERTS, head_dim=8, n_routed_experts=4))])
def test_a_part_of_a_head_is_rotated(kind, settings):
    model = make(kind, **settings)
    ours, report = patched(model)
    assert "by rope" in words_of(report.replaced)
    assert close(logits(ours), logits(model))
    places = torch.arange(20) + torch.tensor([[0], [3]])  # of every sequence its own
    assert close(logits(ours, position_ids=places), logits(model, position_ids=places))
    for each in (ours, model):
        each(input_ids=ids(), labels=ids()).loss.backward()
    for (name, mine), other in zip(ours.named_parameters(), model.parameters()):
        if other.grad is not None and other.grad.norm() > 1e-6:
            assert close(mine.grad, other.grad, 2e-4), name


@pytest.mark.parametrize("kind", ["GPTBigCodeConfig", "GPT2Config"])
@pytest.mark.parametrize("training", [False, True])
def test_blocks_with_gradients(kind, training):
    model = make(kind, **GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).train(training)
    ours, _ = patched(model)
    assert close(logits(ours), logits(model))
    for each in (ours, model):
        each(input_ids=ids(), labels=ids()).loss.backward()
    for mine, other in zip(ours.parameters(), model.parameters()):
        assert close(mine.grad, other.grad, 2e-4)
    assert torch.equal(*(each.eval().generate(ids(), max_new_tokens=4, do_sample=False)
                         for each in (ours, model)))


def test_norms_that_take_a_gate():
    model = make("Mamba2Config", vocab_size=96, hidden_size=32, num_heads=4, head_dim=16, state_size=8,
                 n_groups=1, num_hidden_layers=2, chunk_size=8)
    ours, report = patched(model)
    assert "MambaRMSNormGated by gated_rmsnorm (silu before the norm, llama)" in words_of(report.replaced)
    assert "Mamba2RMSNorm by rmsnorm" in words_of(report.replaced)
    assert close(logits(ours), logits(model))


LATENT = dict(SIZES, **EXPERTS, num_hidden_layers=2, q_lora_rank=16, kv_lora_rank=16,
              qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
              n_shared_experts=1, first_k_dense_replace=1, index_n_heads=4, index_head_dim=16)


@pytest.mark.parametrize("kind", ["DeepseekV32Config", "HYV4Config"])
def test_other_rotations_are_left_alone(kind):
    model = make(kind, **dict(LATENT, num_key_value_heads=4))
    ours, report = patched(model)
    assert "by rope" not in words_of(report.replaced)
    assert close(logits(ours), logits(model))


@pytest.mark.parametrize("kind, settings", [
    ("SeedOssConfig", dict(SIZES, head_dim=8, attention_dropout=0.0)),
    ("Starcoder2Config", dict(SIZES))])
@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("gradients", [False, True])
def test_dropout_by_a_function(kind, settings, rate, gradients):
    model = make(kind, **settings, residual_dropout=rate)
    ours, _ = patched(model, projections=True)
    for training in (True, False):
        found = []
        for each in (ours.train(training), model.train(training)):
            torch.manual_seed(5)
            with torch.set_grad_enabled(gradients):
                found.append(each(ids(), use_cache=False).logits.detach())
        assert close(*found)
    fftune.unpatch(ours)
    assert not any("_fftune_drops" in vars(module) for module in ours.modules())


LATER = {
    "LlamaConfig": (SIZES, ["layers.0.mlp", "layers.0.post_attention_layernorm",
                            "layers.0.mlp.act_fn",
                            "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj",
                            "layers.0.mlp.down_proj", "layers.0.self_attn.q_proj",
                            "layers.0.self_attn.o_proj", "layers.0.self_attn"]),
    "MixtralConfig": (dict(SIZES, num_local_experts=4), ["layers.0.post_attention_layernorm",
                                                         "layers.0.mlp.experts"]),
    "PhiConfig": (SIZES, ["layers.0.mlp", "layers.0.mlp.fc1", "layers.0.mlp.fc2",
                          "layers.0.mlp.activation_fn"]),
    "GPT2Config": (GPT2, ["h.0.mlp", "h.0.ln_2", "h.0.mlp.c_fc", "h.0.mlp.c_proj",
                          "h.0.mlp.act", "h.0.mlp.dropout"]),
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, (_, names) in LATER.items()
                                        for name in names])
@pytest.mark.parametrize("hook", ["forward", "pre", "forward-replaced"])
def test_hooks_put_in_later_are_called(kind, name, hook):
    model, _ = copy_of_patched(kind, LATER[kind][0])
    module, called = model.base_model.get_submodule(name), []
    if hook == "forward":
        module.register_forward_hook(lambda *_: called.append(1))
    elif hook == "pre":
        module.register_forward_pre_hook(lambda *_: called.append(1))
    else:
        inner = module.forward
        module.forward = lambda *given, **options: (called.append(1), inner(*given, **options))[1]
    logits(model)
    assert called == [1]
    model(input_ids=ids())  # with gradients
    assert called == [1, 1]


@pytest.mark.parametrize("before", [False, True])
def test_hooks_on_the_activation_of_experts_are_called(before):
    model, calls = make("MixtralConfig", **SIZES, num_local_experts=4), []
    experts = model.model.layers[0].mlp.experts
    if not before:
        fftune.patch(model)
    experts.act_fn.register_forward_hook(lambda *_: calls.append(1))
    if before:
        report = fftune.patch(model)
        assert "SiLUActivation has hooks" in words_of(report.left)
        calls.clear()
    ours, count = logits(model), len(calls)
    fftune.unpatch(model)
    calls.clear()
    assert close(ours, logits(model)) and count == len(calls) > 0


def test_attention_over_a_cache_gives_what_can_be_viewed():
    model = make("JetMoeConfig", vocab_size=96, hidden_size=32, intermediate_size=48,
                 num_hidden_layers=2, num_key_value_heads=4, kv_channels=8, num_local_experts=4,
                 num_experts_per_tok=2, max_position_embeddings=128)
    ours, _ = patched(model, attention=True)
    assert close(static_logits(ours), static_logits(model))


class Experts(nn.Module):
    """As transformers 5 has them, with what differs: a limit, identities behind the experts."""

    def __init__(self, limit: float = float("inf"), identities: int = 0):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4 + identities, 48, 32) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(4, 32, 24) * 0.1)
        self.limit = limit
        self.act_fn = nn.SiLU()

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for token, choice in torch.ones_like(ids).nonzero().tolist():
            expert, out = int(ids[token, choice]), x[token]
            if expert < 4:
                gate, up = (self.gate_up_proj[expert] @ out).chunk(2)
                hidden = (self.act_fn(gate.clamp(max=self.limit))
                          * up.clamp(min=-self.limit, max=self.limit))
                out = self.down_proj[expert] @ hidden
            y[token] += weights[token, choice] * out
        return y


class Router(nn.Module):
    def __init__(self, experts: int = 8, scale: float = 1.0, left_out: float = float("-inf"),
                 uncast: bool = False):
        super().__init__()
        self.uncast = uncast
        self.weight = nn.Parameter(torch.randn(experts, 32) * 0.2)
        self.top_k, self.n_group, self.topk_group = 3, 4, 2
        self.routed_scaling_factor, self.left_out = scale, left_out
        self.register_buffer("balance", torch.zeros(experts))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16,
                            enabled=torch.is_autocast_enabled("cpu") and not self.uncast):
            logits = x.float() @ self.weight.float().T
        by = (logits.sigmoid() + self.balance).view(len(x), self.n_group, -1)
        best = by.topk(2)[0].sum(-1).topk(self.topk_group)[1]
        kept = torch.zeros(by.shape[:2]).scatter(1, best, 1.0)[..., None] > 0
        ids = by.masked_fill(~kept, self.left_out).flatten(1).topk(self.top_k)[1]
        return logits, self.routed_scaling_factor * logits.sigmoid().gather(1, ids), ids


class Mixture(nn.Module):
    def __init__(self, experts, router):
        super().__init__()
        self.experts, self.gate = experts, router


CHOICES = torch.tensor([[0, 1], [2, 3], [3, 0]]), torch.rand(3, 2)


@pytest.mark.parametrize("limits", [[10.0], [16.0], [float("inf"), 7.0]])
def test_experts_with_a_limit(limits):
    layers = nn.ModuleList(map(Experts, limits))
    report = fftune.patch(layers)
    assert len(report.replaced) == limits.count(float("inf"))
    x = torch.randn(3, 32) * 100
    for layer in layers:
        assert close(layer(x, *CHOICES), type(layer).forward(layer, x, *CHOICES))


@pytest.mark.parametrize("name, value", [("swiglu_limit", 9.0), ("swiglu_alpha", 1.5)])
def test_gates_of_gpt_oss_with_other_numbers(name, value):
    model = make("GptOssConfig", **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=8)
    experts = model.model.layers[0].mlp.experts
    setattr(experts, name.removeprefix("swiglu_"), value)
    x = torch.randn(3, 32) * 30
    right = experts(x, *CHOICES)
    report = fftune.patch(model)
    assert sum("moe-ffn" in words for _, words in report.replaced) == 3
    assert close(experts(x, *CHOICES), right)


def test_an_mlp_with_a_limit():
    class Limited(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(32, 48, False), nn.Linear(32, 48, False)
            self.down_proj, self.act_fn = nn.Linear(48, 32, False), nn.SiLU()

        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=10.0)) * self.up_proj(x))

    model, x = nn.ModuleList([Limited()]), torch.randn(5, 32) * 100
    right = model[0](x)
    assert not fftune.patch(model).replaced
    assert torch.equal(model[0](x), right)


def test_experts_behind_which_are_identities():
    experts = Experts(identities=2)
    report = fftune.patch(nn.ModuleList([experts]))
    assert not report.replaced and "no weighted sum" in words_of(report.left)


@pytest.mark.parametrize("value", [0.0, 1e30, float("nan")])
@pytest.mark.parametrize("kind, op", [("MixtralConfig", "moe-ffn"), ("MixtralConfig", "moe-route"),
                                      ("LlamaConfig", "by ffn"), ("GPT2Config", "by bias-gelu")])
def test_modules_are_recognised_whatever_their_weights_are(kind, op, value):
    model = make(kind, **(GPT2 if kind == "GPT2Config" else SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    assert op in words_of(fftune.patch(model).replaced)
    assert all(torch.equal(parameter.nan_to_num(7.0), torch.full_like(parameter, value).nan_to_num(7.0))
               for parameter in model.parameters())


def test_routers_that_differ_in_their_numbers():
    layers = nn.ModuleList([Mixture(Experts(), Router(8 * n, n)) for n in (2, 1, 3)])
    report = fftune.patch(layers)
    assert sum("moe-route" in words for _, words in report.replaced) == 3
    x = torch.randn(9, 32)
    for layer in layers:
        mine, other = layer.gate(x), Router.forward(layer.gate, x)
        for each in zip(mine, other):
            assert close(*(t.sort()[0] for t in each))


def test_a_router_is_known_by_what_it_does_with_a_bias_that_is_still_zero():
    layers = nn.ModuleList([Mixture(Experts(), Router(left_out=left_out))
                            for left_out in (float("-inf"), 0.0)])
    kept = copy.deepcopy(layers.state_dict())
    report = fftune.patch(layers)
    assert [name for name, words in report.replaced if "moe-route" in words] == ["0"]
    assert all(torch.equal(t, kept[name]) for name, t in layers.state_dict().items())
    x = torch.randn(99, 32)
    for layer in layers:
        layer.gate.balance.normal_().sub_(2)
        mine, other = layer.gate(x), Router.forward(layer.gate, x)
        for each in zip(mine, other):
            assert close(*(t.sort()[0] for t in each))


def test_a_router_of_logits_of_which_many_are_equal():
    model = make("GptOssConfig", **SIZES, num_local_experts=128, num_experts_per_tok=4, head_dim=8)
    _, report = patched(model.bfloat16())
    assert sum("moe-route" in words for _, words in report.replaced) == 4


@pytest.mark.parametrize("uncast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_a_router_have_its_type_under_autocast(uncast, dtype):
    model = Mixture(Experts(), Router(uncast=uncast))
    other, report = patched(model)
    assert "moe-route" in words_of(report.replaced)
    x = torch.randn(9, 32).to(dtype)  # what is ahead of it may have given bf16
    with torch.autocast("cpu", torch.bfloat16):
        ours, right = other.gate(x)[0], model.gate(x)[0]
    assert ours.dtype is right.dtype and torch.equal(ours, right)


TWO = dict(SIZES, num_hidden_layers=2)
NEXT = dict(TWO, head_dim=8, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)


@pytest.mark.parametrize("kind, settings, words", [
    ("Qwen3NextConfig", dict(NEXT, layer_types=["linear_attention", "full_attention"], num_experts_per_tok=8),
     "a mixture of experts, gate, shared_expert, shared_expert_gate has a router that was not replaced"),
    ("NemotronHConfig", dict(TWO, hybrid_override_pattern="M*", mamba_num_heads=8, mamba_head_dim=8, ssm_state_size=8,
                             n_groups=1, head_dim=8, use_bias=True),
     "NemotronHMamba2Mixer has a bias of its projection, for which there is no kernel"),
    ("AfmoeConfig", dict(TWO, head_dim=8, num_dense_layers=1, num_experts=4),
     "a mixture of experts, router, shared_experts has a router that was not replaced"),
    ("BitNetConfig", TWO, "BitNetAttention has other parts than q, k, v and an output: attn_sub_norm"),
    ("ArceeConfig", dict(TWO, mlp_bias=True), "ArceeMLP is no MLP that was replaced"),
    ("DeepseekV32Config", dict(LATENT, num_key_value_heads=4),
     "DeepseekV32Indexer chooses the keys that a token sees, for which the op has no kernel: nothing tells in advance "
     "that sequences stay so short that it chooses all"),
    ("BertGenerationConfig", dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                  num_attention_heads=4, is_decoder=True),
     "no decoder in it makes its mask by transformers' create_causal_mask alone")], ids=lambda value: value
    if isinstance(value, str) and value.endswith("Config") else "")
def test_reasons_of_layers_that_are_not_run_whole(kind, settings, words):
    report = fftune.patch(make(kind, **settings), whole_layers=True)
    assert [reason for _, reason in report.left if reason.startswith("layers: ")] == [f"layers: {words}"]
