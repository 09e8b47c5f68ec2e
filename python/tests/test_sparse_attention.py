"""Sparse attention of transformers' DeepSeek-V3.2 and GLM-5 (DSA) by `indexer` and `mla`, and patch() of them."""
import collections
import copy
import importlib
import types

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

import fftune
from fftune import ops
from fftune.patching import graphs, sparse_attention
from fftune.patching.recognise import Unfit
from whole_layers import error

# With few heads many scores are 0, and topk chooses any of them.
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
             q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
             index_n_heads=16, index_head_dim=16, index_topk=5, attn_implementation="eager")
MODELS = {"DeepseekV32": "deepseek_v32", "GlmMoeDsa": "glm_moe_dsa"}


def config_of(name, **sizes):
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    return kind(**sizes)


def make(name):
    config = config_of(name, **SIZES)
    module = importlib.import_module(f"transformers.models.{MODELS[name]}.modeling_{MODELS[name]}")
    torch.manual_seed(5)
    attention = getattr(module, f"{name}Attention")(config, 0).eval()
    for p in attention.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module, attention


def rows_of(module, attention, x, angles):
    """The results of the products in front: queries and rows of the cache, of the indexer and of attention."""
    own, rope = attention.indexer, attention.qk_rope_head_dim
    resid = attention.q_a_layernorm(attention.q_a_proj(x))
    q = attention.q_b_proj(resid).unflatten(-1, (-1, attention.qk_head_dim)).transpose(1, 2)
    latent, key = attention.kv_a_proj_with_mqa(x).split((attention.kv_lora_rank, rope), -1)
    q_rope, key = module.apply_rotary_pos_emb_interleave(q[..., -rope:], key[:, None], *angles)
    cache = torch.cat((attention.kv_a_layernorm(latent), key[:, 0]), -1)
    rotate = module.apply_rotary_pos_emb if module.__name__.endswith("v32") else module.apply_rotary_pos_emb_interleave
    index_q, index_k = own.wq_b(resid).unflatten(-1, (own.n_heads, -1)), own.k_norm(own.wk(x))[..., None, :]
    turned = rotate(index_q[..., :rope], index_k[..., :rope], *angles, unsqueeze_dim=2)
    index_q, index_k = (torch.cat((t, all[..., rope:]), -1) for t, all in zip(turned, (index_q, index_k)))
    return q[..., :-rope].transpose(1, 2), q_rope.transpose(1, 2), cache, index_q, own.weights_proj(x), index_k[:, :, 0]


@pytest.mark.parametrize("queries", [20, 3, 1])
@pytest.mark.parametrize("name", MODELS)
def test_attention_to_the_chosen_keys_is_that_of_the_model(name, queries):
    module, attention = make(name)
    x, positions = torch.randn(2, 20, 32), torch.arange(20)[None]
    angles = getattr(module, f"{name}RotaryEmbedding")(attention.config)(x, positions)
    mask = torch.zeros(2, 1, 20, 20).masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    with torch.no_grad():
        right = attention(x, angles, mask, position_ids=positions)[0][:, -queries:]
        q, q_rope, cache, index_q, weights, index_k = rows_of(module, attention, x, angles)
        own = slice(-queries, None)
        chosen = ops.indexer(index_q[:, own], weights[:, own], index_k, top=attention.indexer.index_topk)
        nope = attention.qk_nope_head_dim
        kv_b = attention.kv_b_proj.weight.unflatten(0, (-1, nope + attention.v_head_dim))
        latent = ops.head_linear(q[:, own].contiguous(), kv_b[:, :nope], transposed=True)
        out = ops.mla(latent, q_rope[:, own].contiguous(), cache, chosen=chosen, scale=attention.scaling)
        y = attention.o_proj(ops.head_linear(out, kv_b[:, nope:]).flatten(-2))
        # All keys would give something else.
        dense = ops.mla(latent, q_rope[:, own].contiguous(), cache, scale=attention.scaling)
    assert torch.allclose(y, right, atol=1e-5)
    assert (out - dense)[:, -1].abs().max() > 0.01


# patch()

TOP = 5
MODEL = SIZES | dict(num_hidden_layers=3, intermediate_size=64, moe_intermediate_size=16, n_routed_experts=4,
                     num_experts_per_tok=2, n_group=1, topk_group=1, max_position_embeddings=128, pad_token_id=0,
                     eos_token_id=None, bos_token_id=None, attn_implementation="sdpa")
# Some layers of GLM-5 take the keys that another one chose.
CHANGES = {"DeepseekV32": {}, "GlmMoeDsa": dict(indexer_types=["full", "shared", "full"])}


def make_model(name: str, **changes):
    config = config_of(name, **copy.deepcopy(MODEL | CHANGES[name] | changes))
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


def patched_copy(model, **options):
    other = copy.deepcopy(model)
    other.zero_grad()
    return other, fftune.patch(other, **options)


@pytest.fixture
def calls(monkeypatch):
    """How often each op was called since a model was patched."""
    found = collections.Counter()
    for name in ("indexer", "mla"):
        def counted(*arguments, own=getattr(ops, name), name=name, **options):
            found[name] += 1
            return own(*arguments, **options)
        monkeypatch.setattr(ops, name, counted)
    return found


def ids_of(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, 64, (batch, tokens), generator=torch.Generator().manual_seed(3))


def generated(model, ids, count=8, **options):
    with torch.no_grad():
        return model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, output_logits=True,
                              return_dict_in_generate=True, **options)


def expect_same_tokens(ours, right, tolerance=1e-4):
    assert torch.equal(ours.sequences, right.sequences)
    assert error(torch.stack(ours.logits), torch.stack(right.logits)) < tolerance


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("top", [TOP, 18, 2048])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_patched_models_are_as_before(name, top, cache, calls):
    model, ids = make_model(name, index_topk=top), ids_of(2, 14)
    options = {} if cache is None else dict(cache_implementation=cache)
    right = generated(model, ids, **options)
    patched, report = patched_copy(model, attention=True)
    lines = {words.replace(name, "") for _, words in report.replaced}
    assert {"Indexer by indexer",
            "attention of Attention to chosen keys by mla, where that takes fewer products"} <= lines
    calls.clear()
    expect_same_tokens(generated(patched, ids, **options), right)
    indexers = 3 if name == "DeepseekV32" else 2
    # The prompt is 14 tokens, and behind it come 7 steps, of 15 to 21 keys; in a static cache of 21 ones.
    assert calls["indexer"] == indexers * {TOP: 8, 18: 3 if cache is None else 7, 2048: 0}[top]
    assert calls["mla"] >= 3 * 7
    fftune.unpatch(patched)
    assert torch.equal(generated(patched, ids, **options).sequences, right.sequences)


@pytest.mark.parametrize("name", MODELS)
def test_choice_alone_is_replaced_by_default(name, calls):
    model, ids = make_model(name, index_topk=TOP), ids_of(2, 14)
    patched, _ = patched_copy(model)
    calls.clear()
    expect_same_tokens(generated(patched, ids), generated(model, ids))
    assert calls["indexer"] and not calls["mla"]


@pytest.mark.parametrize("name", MODELS)
def test_prompts_of_many_keys_attend_to_the_chosen_ones(name, calls, monkeypatch):
    model, ids = make_model(name, index_topk=TOP), ids_of(2, 60)
    patched, _ = patched_copy(model, attention=True)
    monkeypatch.setattr(sparse_attention, "_SCORES", 60 * 2 * 7)  # the op has seven queries a call
    calls.clear()
    with torch.no_grad():
        assert error(patched(ids).logits, model(ids).logits) < 1e-4
    assert calls["mla"] == 3 and calls["indexer"] == -(-60 // 7) * (3 if name == "DeepseekV32" else 2)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_with_padding_on_the_left(name, cache, calls):
    """A prompt of more than a few tokens runs by the model itself: it has rows that see no key."""
    model, ids = make_model(name, index_topk=TOP), ids_of(3, 14)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :11] = 0  # it sees fewer keys than are chosen
    given = dict(attention_mask=mask) | ({} if cache is None else dict(cache_implementation=cache))
    right = generated(model, ids.where(mask.bool(), 0), **given)
    patched, _ = patched_copy(model, attention=True)
    calls.clear()
    expect_same_tokens(generated(patched, ids.where(mask.bool(), 0), **given), right)
    assert calls["mla"] == 3 * 7 and calls["indexer"] == 7 * (3 if name == "DeepseekV32" else 2)


class NoHostReads(TorchDispatchMode):
    """Refuses what waits for a device: the operations whose results depend on values of tensors."""

    OPERATIONS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select", "unique"}

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        assert function.overloadpacket.__name__ not in self.OPERATIONS, function
        return function(*arguments, **options or {})


def one_attention(name, patched, tokens, past, batch=3):
    """A layer's attention, and its call of some tokens behind others in a static cache with random holes."""
    model = make_model(name, index_topk=TOP)
    if patched:
        fftune.patch(model, attention=True)
    attention = model.model.layers[0].self_attn
    cache = transformers.StaticCache(config=model.config, max_cache_len=24)
    keys = torch.Generator().manual_seed(tokens)
    mask = torch.rand(batch, 1, tokens, 24, generator=keys) < 0.6
    mask[..., past:] &= torch.ones(tokens, 24 - past, dtype=torch.bool).tril()
    mask[0, :, 0, 2:] = False  # fewer keys than are chosen
    mask[0, :, 0, 1] = True

    def call(first, count, own_mask):
        x = torch.randn(batch, count, 32, generator=keys)
        angles = model.model.rotary_emb(x, torch.arange(first, first + count)[None])
        return lambda: attention(hidden_states=x, position_embeddings=angles, attention_mask=own_mask,
                                 past_key_values=cache, position_ids=None)[0]

    before = torch.ones(past, 24, dtype=torch.bool).tril()[None, None].expand(batch, -1, -1, -1)
    call(0, past, before)()
    return call(past, tokens, mask)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_few_tokens_with_any_mask_read_nothing_on_the_host(name, tokens, calls):
    with torch.no_grad():
        right = one_attention(name, False, tokens, 12)()
        ours = one_attention(name, True, tokens, 12)
        calls.clear()
        with NoHostReads():
            y = ours()
    assert calls == {"indexer": 1, "mla": 1}
    assert error(y, right) < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_many_tokens_are_looked_at(name):
    """So that the test above can fail."""
    with torch.no_grad():
        call = one_attention(name, True, 9, 12)
        with NoHostReads(), pytest.raises(AssertionError):
            call()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_steps_as_graphs(name, padded, calls, monkeypatch):
    """Without a GPU a stand-in runs the captured step again on the same memory."""
    model, ids = make_model(name, index_topk=TOP), ids_of(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :6 * padded] = 0
    given, ids = dict(attention_mask=mask, count=12), ids.where(mask.bool(), 0)
    right = generated(model, ids, **given)
    patched, _ = patched_copy(model, attention=True, graphs=True)
    compiled = transformers.CompileConfig()
    compiled._compile_all_devices = True
    replay, replays = graphs._Again.replay, []
    monkeypatch.setattr(graphs._Again, "replay", lambda step: (replays.append(1), replay(step)))
    calls.clear()
    for _ in range(2):
        expect_same_tokens(generated(patched, ids, compile_config=compiled, **given), right)
    assert len(replays) == 2 * 11 - 1 and calls["mla"] and calls["indexer"]


@pytest.mark.parametrize("how", [dict(num_beams=3), dict(prompt_lookup_num_tokens=3)], ids=["beams", "drafts"])
@pytest.mark.parametrize("name", MODELS)
def test_caches_that_are_reordered_or_cut(name, how, calls):
    model, ids = make_model(name, index_topk=TOP), ids_of(1, 14)
    right = generated(model, ids, **how)
    patched, _ = patched_copy(model, attention=True)
    calls.clear()
    assert torch.equal(generated(copy.deepcopy(patched), ids, **how).sequences, right.sequences)
    assert calls["indexer"] and calls["mla"]


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_parts(name, calls):
    model, ids = make_model(name, index_topk=TOP), ids_of(2, 50)
    patched, _ = patched_copy(model, attention=True)
    results = []
    calls.clear()
    for own in (model, patched):
        cache = transformers.DynamicCache(config=own.config)
        with torch.no_grad():
            parts = ids.split((20, 17, 13), 1)
            results.append(torch.cat([own(part, past_key_values=cache).logits for part in parts], 1))
    assert error(*results) < 1e-4
    assert calls["mla"] == 9


@pytest.mark.parametrize("change", ["a hole", "a bias", "padding on the right"])
def test_other_masks_are_the_models(change, calls):
    model, ids = make_model("DeepseekV32", index_topk=TOP), ids_of(2, 40)
    mask = torch.zeros(2, 1, 40, 40).masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), torch.finfo().min)
    if change == "a hole":
        mask[1, 0, 20:, 6] = torch.finfo().min
    elif change == "a bias":
        mask[0, 0, 30, 3] = 0.25
    else:
        mask[0, 0, :, 35:] = torch.finfo().min
    patched, _ = patched_copy(model, attention=True)
    calls.clear()
    with torch.no_grad():
        right = model(ids, attention_mask=mask).logits
        assert error(patched(ids, attention_mask=mask).logits, right) < 1e-4
    assert not calls


@pytest.mark.parametrize("top", [TOP, 2048])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(name, top, calls):
    model, ids = make_model(name, index_topk=top).train(), ids_of(2, 20)
    right = model(ids, labels=ids).loss
    right.backward()
    patched, _ = patched_copy(model, attention=True)
    calls.clear()
    ours = patched(ids, labels=ids).loss
    ours.backward()
    assert error(ours, right) < 1e-5
    for (weight, p), q in zip(model.named_parameters(), patched.parameters()):
        assert (p.grad is None) == (q.grad is None), weight
        if p.grad is not None and p.grad.norm() > 0:
            assert error(q.grad, p.grad) < 1e-3, weight
    assert not calls["mla"] and bool(calls["indexer"]) == (top == TOP)


def test_where_all_keys_are_chosen_no_score_is_computed():
    """Whatever the mask is."""
    model, ids = make_model("DeepseekV32", index_topk=40), ids_of(2, 40)
    mask = torch.ones_like(ids)
    mask[1, 7:9] = 0
    right = model(ids, attention_mask=mask).logits
    patched, _ = patched_copy(model)
    for layer in patched.model.layers:
        layer.self_attn.indexer.wq_b.weight.data.fill_(torch.nan)
        layer.self_attn.indexer.weights_proj.weight.data.fill_(torch.nan)
    assert error(patched(ids, attention_mask=mask).logits, right) < 1e-4


@pytest.mark.parametrize("part", ["indexer.wq_b", "indexer.weights_proj", "kv_b_proj", "indexer"])
@pytest.mark.parametrize("top", [TOP, 2048])
def test_hooks_are_called(part, top):
    model, ids = make_model("DeepseekV32", index_topk=top), ids_of(1, 40)
    patched, _ = patched_copy(model, attention=True)
    seen = []
    patched.get_submodule(f"model.layers.1.self_attn.{part}").register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        assert error(patched(ids).logits, model(ids).logits) < 1e-4
    assert seen


@pytest.mark.parametrize("part", ["indexer.wq_b", "kv_b_proj"])
def test_an_exchanged_part_is_called(part):
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * -2

    model, ids = make_model("DeepseekV32", index_topk=TOP), ids_of(1, 40)
    patched, _ = patched_copy(model, attention=True)
    for own in (model, patched):
        attention, old = own.model.layers[1].self_attn, own.get_submodule(f"model.layers.1.self_attn.{part}")
        new = Doubled(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        holder, _, name = part.rpartition(".")
        setattr(attention.get_submodule(holder), name, new)
    with torch.no_grad():
        assert error(patched(ids).logits, model(ids).logits) < 1e-4


def test_a_number_of_chosen_keys_that_was_changed_counts():
    model, ids = make_model("DeepseekV32", index_topk=TOP), ids_of(1, 40)
    patched, _ = patched_copy(model, attention=True)
    for own in (model, patched):
        for layer in own.model.layers:
            layer.self_attn.indexer.index_topk = 3
    with torch.no_grad():
        assert error(patched(ids).logits, model(ids).logits) < 1e-4


def test_eager_attention_stays_the_models(calls):
    model, ids = make_model("DeepseekV32", index_topk=TOP, attn_implementation="eager"), ids_of(1, 40)
    patched, _ = patched_copy(model, attention=True)
    calls.clear()
    with torch.no_grad():
        ours, right = (own(ids, output_attentions=True) for own in (patched, model))
    assert error(ours.logits, right.logits) < 1e-4 and error(ours.attentions[1], right.attentions[1]) < 1e-4
    assert calls["indexer"] == 3 and not calls["mla"]


@pytest.mark.parametrize("name", MODELS)
def test_sparse_attention_in_bfloat16(name, calls):
    model, ids = make_model(name, index_topk=TOP), ids_of(1, 40)
    with torch.no_grad():
        exact = model(ids).logits
        narrow = model.bfloat16()
        patched, _ = patched_copy(narrow, attention=True)
        calls.clear()
        ours, right = patched(ids).logits, narrow(ids).logits
    # A rounding chooses another key at times, in both models.
    assert error(ours, exact) < 1.5 * error(right, exact) + 0.01
    assert calls["mla"] == 3


def test_compiled_models_choose_by_themselves(calls):
    model, ids = make_model("DeepseekV32", index_topk=TOP), ids_of(1, 40)
    patched, _ = patched_copy(model, attention=True)
    calls.clear()
    torch._dynamo.reset()  # a function that was compiled too often before runs as it is
    with torch.no_grad():
        assert error(torch.compile(patched, backend="eager")(ids).logits, model(ids).logits) < 1e-4
    assert not calls


def test_sparse_attention_of_a_gpu_stays_the_models():
    """Its times there are not known."""
    module = types.SimpleNamespace(parameters=lambda: [types.SimpleNamespace(device=torch.device("cuda"))])
    with pytest.raises(Unfit, match="stays the model's on a GPU: indexer, and mla with lists of keys, have not been "):
        sparse_attention._expect_no_gpu(module)


def test_an_indexer_of_another_rule_is_left_alone():
    model = make_model("DeepseekV32", index_topk=TOP)
    theirs = type(model.model.layers[0].self_attn.indexer)

    class Other(theirs):
        def forward(self, *arguments, **options):
            ids = super().forward(*arguments, **options)
            return ids.flip(-1)[..., :1].expand_as(ids)

    for layer in model.model.layers:
        layer.self_attn.indexer.__class__ = Other
    right = model(ids_of(1, 20)).logits
    patched, report = patched_copy(model, attention=True)
    assert error(patched(ids_of(1, 20)).logits, right) < 1e-4
    assert any("Other" in reason for _, reason in report.left)
