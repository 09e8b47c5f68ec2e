"""patch(attention=True) and patch(whole_layers=True) on tiny models with latent attention, whose values have fewer
features than keys."""
import copy

import pytest
import torch
import transformers

import fftune
from fftune import _run, reference
from fftune._layer_form import Latent, form_of, parse
from models import inputs
from whole_layers import error, generates_alike, patched_layers, run_over_cache

SIZES = dict(vocab_size=96, hidden_size=48, intermediate_size=64, moe_intermediate_size=16,
             num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
             num_experts_per_tok=2, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
             q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
             max_position_embeddings=64, pad_token_id=0, eos_token_id=None)
# MiniCPM3 has a dense network, and Mistral4's RoPE has parameters that tiny models need.
MODELS = {"DeepseekV2": dict(topk_method="greedy"), "DeepseekV3": {}, "Glm4MoeLite": dict(v_head_dim=24),
          "MiniCPM3": {},
          "Mistral4": dict(rope_parameters=dict(
              rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=8, beta_fast=32.0,
              beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1))}


def sizes_of(name: str) -> dict:
    """A copy: configurations write into what they are given."""
    return copy.deepcopy(SIZES | MODELS[name])


def make(name: str):
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config(**sizes_of(name))).eval()


@pytest.mark.parametrize("name", MODELS)
def test_latent_attention_is_as_before(name):
    model = make(name)
    given = inputs("llama") | {"labels": inputs("llama")["input_ids"]}
    right = model(**given)
    right.loss.backward()
    tokens = model.generate(given["input_ids"], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    patched = copy.deepcopy(model)
    patched.zero_grad()
    fftune.patch(patched, attention=True)
    found = {}
    with _run.listening(found):
        ours = patched(**given)
        ours.loss.backward()
    assert error(ours.logits, right.logits) < 1e-5
    for (weight, p), q in zip(model.named_parameters(), patched.parameters()):
        if p.grad is not None and p.grad.norm() > 0:
            assert error(q.grad, p.grad) < 1e-4, weight
    assert torch.equal(patched.generate(given["input_ids"], max_new_tokens=6, min_new_tokens=6, do_sample=False),
                       tokens)
    ran = [problem for _, problem in found.values() if problem["op"] == "attention"]
    # PyTorch's kernels take values of as many features as keys, in this layout.
    v_dim = sizes_of(name)["v_head_dim"]
    assert {problem["pass"] for problem in ran} == ({"fwd", "bwd"} if v_dim != 24 else set())
    assert all((problem["dim"], problem["v-dim"]) == (24, v_dim) for problem in ran)


@pytest.mark.parametrize("name", ["DeepseekV3", "MiniCPM3"])
def test_latent_attention_over_a_static_cache(name):
    model = make(name)
    ids = inputs("llama")["input_ids"]
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="static",
                   disable_compile=True)
    before = model.generate(ids, **options)
    fftune.patch(model, attention=True)
    assert torch.equal(model.generate(ids, **options), before)


STATIC = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, cache_implementation="static", disable_compile=True)
WHOLE = list(MODELS)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_layers_are_as_before(name):
    model = make(name)
    patched, ids, before, ran = generates_alike(model, 2, STATIC)
    assert ran and all(problem["mixer"] == "mla" for problem in ran)
    assert all((problem.get("query-scale") == "rows") == (name == "Mistral4") for problem in ran)
    # Without a static cache, and without any, it is the model's own.
    for options in (dict(cache_implementation="dynamic"), dict(cache_implementation=None, use_cache=False)):
        assert torch.equal(patched.generate(ids, **STATIC | options), before)
    assert error(patched(ids).logits, model(ids).logits) < 1e-5


@pytest.mark.parametrize("name", WHOLE)
def test_whole_layers_and_the_model_read_each_others_caches(name):
    model = make(name)
    ids = torch.randint(1, 90, (2, 12))
    patched, _ = patched_layers(model)
    right, theirs = run_over_cache(model, ids[:, :7])
    ours, own = run_over_cache(patched, ids[:, :7])
    assert error(ours, right) < 1e-5
    for a, b in zip(own.layers, theirs.layers):
        assert error(a.keys, b.keys) < 1e-5 and error(a.values, b.values) < 1e-5
        assert a.keys.shape == b.keys.shape and int(a.cumulative_length) == 7
    for at in range(7, 12):
        right, theirs = run_over_cache(model, ids[:, at:at + 1], theirs)
        # One goes on where the other stopped.
        ours, own = run_over_cache(model if at % 2 else patched, ids[:, at:at + 1], own)
        assert error(ours, right) < 1e-5
        assert all(error(a.keys, b.keys) < 1e-5 for a, b in zip(own.layers, theirs.layers))


def test_whole_layers_take_the_cache_of_a_prompt_that_the_model_ran():
    model = make("DeepseekV3")
    patched, _ = patched_layers(model)
    ids = torch.randint(1, 90, (3, 31))  # more tokens than a call of the op has
    right, theirs = run_over_cache(model, ids)
    ours, own = run_over_cache(patched, ids)
    assert error(ours, right) < 1e-5
    assert not own.layers[0].keys.transpose(1, 2).is_contiguous()
    one = torch.randint(1, 90, (3, 2))
    assert error(run_over_cache(patched, one, own)[0], run_over_cache(model, one, theirs)[0]) < 1e-5


def test_queries_are_scaled_by_their_position():
    """Those of other attention too: Ministral 3 scales the queries behind its first positions."""
    if not hasattr(transformers, "Ministral3Config"):
        pytest.skip("this transformers has no Ministral3")
    torch.manual_seed(0)
    rope = sizes_of("Mistral4")["rope_parameters"] | dict(original_max_position_embeddings=8, llama_4_scaling_beta=0.5)
    model = transformers.Ministral3ForCausalLM(transformers.Ministral3Config(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, max_position_embeddings=64, rope_parameters=rope)).eval()
    patched, words = patched_layers(model)
    assert len(words) == 1 and "2 layers" in words[0], words
    ids = torch.randint(1, 90, (2, 20))
    found = {}
    with _run.listening(found):
        ours, own = run_over_cache(patched, ids)
        right, theirs = run_over_cache(model, ids)
        assert error(ours, right) < 1e-5
        one = ids[:, :1]
        assert error(run_over_cache(patched, one, own)[0], run_over_cache(model, one, theirs)[0]) < 1e-5
    assert any(problem.get("query-scale") == "rows" for _, problem in found.values())
    for own in (patched, model):  # another factor
        own.config.rope_parameters["llama_4_scaling_beta"] = 2.0
    assert error(run_over_cache(patched, ids)[0], run_over_cache(model, ids)[0]) < 1e-5


def test_caches_of_latents_are_copied_and_reordered():
    model = make("DeepseekV3")
    patched, _ = patched_layers(model)
    ids = torch.randint(1, 90, (2, 9))
    theirs, own = (run_over_cache(m, ids[:, :7])[1] for m in (model, patched))
    right = run_over_cache(model, ids[:, 7:], theirs)[0]
    for cache in (copy.deepcopy(own), own):
        assert error(run_over_cache(patched, ids[:, 7:], cache)[0], right) < 1e-5
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for options in (dict(num_beams=2), dict(attention_mask=mask)):
        assert torch.equal(patched.generate(ids, **STATIC, **options), model.generate(ids, **STATIC, **options))


@pytest.mark.parametrize("name,changes,reason", [
    ("DeepseekV3", dict(attention_bias=True), "a bias in front of its latents"),
    ("DeepseekV3", dict(rms_norm_eps=1e-3), None)])  # latents' norms have an eps of their own
def test_latent_attention_of_other_forms_stays_the_models(name, changes, reason):
    if getattr(transformers, f"{name}Config", None) is None:
        pytest.skip(f"this transformers has no {name}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes_of(name) | changes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = inputs("llama")["input_ids"]
    before = model.generate(ids, **STATIC)
    patched, words = patched_layers(model)
    assert any((reason or "2 layers") in w for w in words), words
    assert torch.equal(patched.generate(ids, **STATIC), before)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("by_latent", [False, True])
def test_layer_with_latent_attention_is_its_reference(by_latent, paged):
    latent = Latent(nope=6, rope=8, v=10, rank=12, q_rank=14 if by_latent else 0, eps=1e-3, order="halves")
    names = ["attn_norm", *(("w_q_a", "q_a_norm", "w_q_b") if by_latent else ("w_q",)), "w_kv_a", "kv_a_norm", "w_kv_b",
             "w_o", "ffn_norm", "w_gate", "w_up", "w_down"]
    form = form_of(names, heads=3, kv_heads=0, dim=0, act="silu", eps=1e-5, convention="llama", rotary=8, softcap=0.0,
                   scale=0.3, rope_scale=1.2, rotates=True, rotation="interleaved", mixer="mla", latent=latent)
    shapes = dict(attn_norm=(24,), ffn_norm=(24,), w_q=(42, 24), w_q_a=(14, 24), q_a_norm=(14,), w_q_b=(42, 14),
                  w_kv_a=(20, 24), kv_a_norm=(12,), w_kv_b=(48, 12), w_o=(24, 30), w_gate=(32, 24), w_up=(32, 24),
                  w_down=(24, 32))
    sizes = [shapes[name] for name in parse(form).weights]
    weights = [torch.randn(size) * (size[-1] ** -0.5 if len(size) > 1 else 1) for size in sizes]
    x, angles = torch.randn(2, 3, 24), torch.rand(16, 4).repeat_interleave(2, -1) * 6
    cache = torch.randn(5, 16, 20) if paged else torch.randn(2, 16, 20)
    pages = torch.tensor([[3], [0]], dtype=torch.int32) if paged else None
    lengths = torch.tensor([9, 16], dtype=torch.int32)
    positions = (lengths[:, None] - 3 + torch.arange(3)).int()
    slots = positions + (torch.tensor([[3], [0]]) if paged else torch.tensor([[0], [1]])).int() * 16

    def given(t):
        own = [w.to(t) for w in weights]
        return x.to(t), positions, angles, slots, lengths, pages, own, [cache.to(t, copy=True)], form

    right, ours = given(torch.float64), given(torch.float32)
    y = reference.layer(*right)
    assert error(torch.ops.fftune.layer(*ours), y) < 1e-5
    assert error(ours[7][0], right[7][0]) < 1e-5


@pytest.mark.parametrize("change, served", [
    ({}, True), ({"tokens": 64}, False), ({"dim": 184}, False), ({"v_dim": 120}, False), ({"dtype": torch.float32}, False),
    ({"capability": (8, 0)}, False), ({"grad": True}, False), ({"dim": 272, "v_dim": 256}, False)])
def test_narrow_values_on_a_gpu_are_served_where_they_have_been_timed(monkeypatch, change, served):
    """In prompts on compute capability 9.0, without gradients."""
    from fftune.patching import attention

    case = dict(tokens=65, dim=192, v_dim=128, dtype=torch.bfloat16, capability=(9, 0), grad=False) | change
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.empty(2, 4, case["tokens"], features, dtype=case["dtype"], device="cuda",
                               requires_grad=case["grad"]) for features in (case["dim"], case["dim"], case["v_dim"]))
    assert q.is_cuda and attention._serves_narrow(q, k, v) == served
