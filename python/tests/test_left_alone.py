"""patch() on models of which it knows a part only: they compute what they did."""
import copy

import pytest
import torch
import transformers
from torch import nn

import fftune

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
    """Of a few tokens over a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with torch.no_grad():
        return model(input_ids=ids(6), past_key_values=cache, **options).logits


def patched(model, **options):
    """A copy of it that is patched, and the report."""
    other = copy.deepcopy(model)
    return other, fftune.patch(other, **options)


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
    assert close(static_logits(ours), static_logits(model))
    fftune.unpatch(ours)
    assert ours.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(static_logits(ours), static_logits(model))


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
                            "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj",
                            "layers.0.mlp.down_proj", "layers.0.self_attn.q_proj",
                            "layers.0.self_attn.o_proj", "layers.0.self_attn"]),
    "MixtralConfig": (dict(SIZES, num_local_experts=4), ["layers.0.post_attention_layernorm"]),
    "PhiConfig": (SIZES, ["layers.0.mlp", "layers.0.mlp.fc1", "layers.0.mlp.fc2"]),
    "GPT2Config": (GPT2, ["h.0.mlp", "h.0.ln_2", "h.0.mlp.c_fc", "h.0.mlp.c_proj"]),
}


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, (_, names) in LATER.items()
                                        for name in names])
@pytest.mark.parametrize("hook", ["forward", "pre", "forward-replaced"])
def test_hooks_put_in_later_are_called(kind, name, hook):
    model, _ = patched(make(kind, **LATER[kind][0]))
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


def test_attention_over_a_cache_gives_what_can_be_viewed():
    model = make("JetMoeConfig", vocab_size=96, hidden_size=32, intermediate_size=48,
                 num_hidden_layers=2, num_key_value_heads=4, kv_channels=8, num_local_experts=4,
                 num_experts_per_tok=2, max_position_embeddings=128)
    ours, _ = patched(model, attention=True)
    assert close(static_logits(ours), static_logits(model))
