"""Tests of patch() on layers of linear attention: their convolutions and gated norms."""
import copy
import inspect
import re
import sys
import types

import pytest
import torch
import transformers
from torch import nn

import fftune
from fftune.patching import mixers
from fftune.patching.host_forms import host_forms
from fftune.patching.recognise import Unfit
from test_left_alone import SIZES, close, ids, make, patched, words_of

_MAMBA = dict(mamba_n_heads=8, mamba_d_state=16, mamba_n_groups=2, mamba_expand=2)
MAMBA = {"Mamba2Config", "BambaConfig", "FalconH1Config", "GraniteMoeHybridConfig", "NemotronHConfig"}
KINDS = {
    "Qwen3NextConfig": dict(
        SIZES, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, decoder_sparse_step=1),
    "Qwen3_5TextConfig": dict(
        SIZES, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16),
    "Mamba2Config": dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, expand=2,
                         n_groups=2, state_size=16, chunk_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "BambaConfig": dict(SIZES, **_MAMBA, mamba_d_head=8, mamba_chunk_size=16, attn_layer_indices=[1]),
    "FalconH1Config": dict(SIZES, **_MAMBA, mamba_d_head=8, mamba_d_ssm=64, mamba_chunk_size=16),
    "GraniteMoeHybridConfig": dict(
        SIZES, **_MAMBA, mamba_d_head=8, mamba_chunk_size=16, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=24, layer_types=["mamba", "attention", "mamba", "mamba"], position_embedding_type="rope"),
    "NemotronHConfig": dict(
        SIZES, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=16, chunk_size=16,
        layers_block_type=["mamba", "attention", "mlp", "mamba"]),
    "Lfm2Config": dict(SIZES, layer_types=["conv", "full_attention", "conv", "conv"], conv_L_cache=3,
                       block_multiple_of=16),
}
GATED = {"Qwen3NextConfig": "silu after the norm, llama", "Qwen3_5TextConfig": "silu after the norm, llama",
         "Mamba2Config": "silu before the norm, llama"}
# Logits of several steps add up roundings of both.
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=KINDS, ids=KINDS)
def both(request):
    model = make(request.param, **KINDS[request.param])
    other, report = patched(model)
    return request.param, model, other, report


def test_what_is_replaced(both):
    kind, _, _, report = both
    core = "gated_delta_rule" if kind.startswith("Qwen3") else "ssd" if kind in MAMBA else None
    by = "causal_conv1d" if core is None else f"causal_conv1d and {core}"
    assert re.search(rf"functions of \w+ by {by}$", words_of(report.replaced), re.M), report
    if kind in GATED:
        assert f"by gated_rmsnorm ({GATED[kind]})" in words_of(report.replaced)


def test_logits(both):
    _, model, other, _ = both
    mask = torch.ones_like(ids())
    mask[1, :7] = 0  # padding on the left
    for given in (dict(input_ids=ids()), dict(input_ids=ids(1)), dict(input_ids=ids(), attention_mask=mask)):
        with torch.no_grad():
            assert close(other(**given, use_cache=False).logits, model(**given, use_cache=False).logits, TOLERANCE)


def test_a_cache_is_used_and_continued(both):
    """A prompt in two parts, and then one token after the other."""
    _, model, other, _ = both
    tokens, found = ids(14), []
    for own in (model, other):
        cache, logits, begin = None, [], 0
        with torch.no_grad():
            for end in (2, 9, *range(10, 15)):
                result = own(input_ids=tokens[:, begin:end], **_cache_of(cache), use_cache=True)
                cache = getattr(result, "past_key_values", None) or result.cache_params
                logits.append(result.logits)
                begin = end
        found.append(torch.cat(logits, 1))
    assert close(found[1], found[0], TOLERANCE)


def _cache_of(cache) -> dict:
    if cache is None:
        return {}
    return {"cache_params" if isinstance(cache, getattr(transformers.models.mamba2.modeling_mamba2, "Mamba2Cache", ()))
            else "past_key_values": cache}


def test_greedy_generation_is_the_same(both):
    _, model, other, _ = both
    mask = torch.ones_like(ids(6))
    mask[0, :2] = 0
    options = dict(attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(ids(6), **options), other.generate(ids(6), **options))


def test_gradients(both):
    _, model, other, _ = both
    gradients = []
    for own in (copy.deepcopy(model), other):
        own.train().zero_grad()
        own(input_ids=ids(), labels=ids(), use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in own.named_parameters() if p.grad is not None})
        own.eval().zero_grad()
    assert gradients[0].keys() == gradients[1].keys()
    for name, right in gradients[0].items():
        assert close(gradients[1][name], right, 1e-3) or right.norm() < 1e-6, name


def test_unpatch_takes_it_back(both):
    _, model, other, _ = both
    bare = fftune.unpatch(copy.deepcopy(other))
    assert not any(hasattr(m.__dict__.get("forward"), "_fftune") for m in bare.modules())


def test_packed_sequences_are_kept_apart():
    """Where transformers' own function raises without a package."""
    torch.manual_seed(1)
    x, w, b = torch.randn(1, 6, 12), torch.randn(6, 4), torch.randn(6)
    parts = (0, 5, 7, 12)

    def theirs(*_, **__):
        raise AssertionError("it is not to be called")

    convolve = mixers._convolve(theirs)
    indices = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 2, 5])).int()[None]
    right = torch.cat([convolve(x[..., a:e], w, b, activation="silu") for a, e in zip(parts, parts[1:])], -1)
    assert close(convolve(x, w, b, activation="silu", seq_idx=indices), right)
    ends = torch.tensor(parts, dtype=torch.int32)
    assert close(convolve(x, w, b, activation="silu", seq_idx=indices, cu_seq_lens_q=ends), right)
    # Rows of a batch are sequences of their own.
    rows = torch.cat((x, x.flip(-1)))
    both = convolve(rows, w, b, activation="silu", seq_idx=indices.expand(2, -1).contiguous())
    assert close(both[:1], right)


_KIMI = dict(SIZES, linear_head_dim=16, linear_num_heads=4, qk_head_dim=32, q_lora_rank=16, kv_lora_rank=16,
             qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, num_experts=4, num_experts_per_tok=2,
             num_expert_group=2, topk_group=1, moe_intermediate_size=24, first_k_dense_replace=1,
             layer_types=["linear_attention", "full_attention"] * 2, mlp_layer_types=["dense", "sparse"] * 2)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind, name", [("Qwen3NextConfig", "Qwen3NextGatedDeltaNet"), ("Mamba2Config", "Mamba2Mixer"),
                                        ("NemotronHConfig", "NemotronHMamba2Mixer"), ("KimiLinearConfig", "KimiLinear")])
def test_a_mixer_keeps_packed_sequences_apart(kind, name, training):
    model = make(kind, **KINDS.get(kind, _KIMI))
    fftune.patch(model)
    mixer = next(m for m in model.modules() if type(m).__name__.startswith(name) and hasattr(m, "conv1d")
                 or type(m).__name__.startswith(name) and hasattr(m, "A_log")).train(training)
    torch.manual_seed(2)
    x, parts = torch.randn(1, 12, 32), (0, 5, 7, 12)
    ends = torch.tensor(parts, dtype=torch.int32)
    indices = torch.repeat_interleave(torch.arange(3), ends.diff()).int()[None]
    right = torch.cat([mixer(x[:, a:e]) for a, e in zip(parts, parts[1:])], 1)
    given = [dict(seq_idx=indices, cu_seq_lens_q=ends), dict(seq_idx=indices)]
    if kind == "Qwen3NextConfig":  # which reads the ends itself
        given.append(dict(cu_seq_lens_q=ends))
    for options in given:
        y = mixer(x, **options)
        assert close(y, right), options
        gradients = [torch.autograd.grad(t.square().sum(), list(mixer.parameters()), retain_graph=True) for t in (y, right)]
        for own, theirs in zip(*gradients):
            assert close(own, theirs, 1e-4)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        mixer(x, seq_idx=indices[:, 1:])  # not of these tokens: the functions of transformers say what they do with it


def test_other_functions_are_left_alone():
    def flipped(x, weight, bias=None, activation=None, **_):
        return nn.functional.conv1d(x, weight.flip(-1).unsqueeze(1), bias, padding=weight.shape[-1] - 1,
                                    groups=weight.shape[0])[..., :x.shape[-1]]

    def without_state(x, state, weight, bias=None, activation=None):
        y = nn.functional.conv1d(torch.cat((state, x), -1), weight.unsqueeze(1), bias, groups=weight.shape[0])
        y = y[..., -x.shape[-1]:]
        return nn.functional.silu(y) if activation else y

    def without_erasing(query, key, value, g, beta, initial_state=None, output_final_state=False, **_):
        heads = value.shape[2] // query.shape[2]
        q, k = (nn.functional.normalize(t, dim=-1).repeat_interleave(heads, 2) for t in (query, key))
        state, out = initial_state, torch.zeros_like(value)
        for t in range(q.shape[1]):
            decay = g[:, t].exp()
            state = state * (decay[..., None, None] if g.dim() == 3 else decay[..., None])
            state = state + k[:, t, :, :, None] * (value * beta[..., None])[:, t, :, None]
            out[:, t] = (state * q[:, t, ..., None]).sum(-2) * q.shape[-1] ** -0.5
        return out, state

    def reads_first(x, dt, A, B, C, chunk_size, D=None, dt_bias=None, initial_states=None, dt_softplus=True,
                    dt_limit=(0.0, float("inf")), return_final_states=True):
        """A scan that reads the state before it is written."""
        dt = nn.functional.softplus(dt if dt_bias is None else dt + dt_bias).clamp(*dt_limit)
        heads, state, out = x.shape[2] // B.shape[2], initial_states, torch.zeros_like(x)
        B, C = (t.repeat_interleave(heads, 2) for t in (B, C))
        for t in range(x.shape[1]):
            out[:, t] = (state * C[:, t, :, None]).sum(-1) + (0 if D is None else D[:, None] * x[:, t])
            state = state * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[
                ..., None] * B[:, t, :, None]
        return out, state

    def without_d(state, x, dt, A, B, C, D=None, **options):
        return theirs(state, x, dt, A, B, C, None, **options)

    theirs = inspect.unwrap(transformers.models.mamba2.modeling_mamba2.mamba2_selective_state_update)
    with pytest.raises(Unfit, match="nothing that is known"):
        mixers._expect_core(without_erasing)
    with pytest.raises(Unfit, match="nothing that is known"):
        mixers._expect_scan(reads_first)
    with pytest.raises(Unfit, match="a scan without D"):
        mixers._expect_select(without_d)
    with pytest.raises(Unfit, match="last tap first"):
        mixers._expect_convolution(flipped)
    with pytest.raises(Unfit, match="a state that stays"):
        mixers._expect_update(without_state)


def test_what_kernels_do_not_serve_is_the_modules_own():
    """float64, and weights of another type than the input."""
    model = make("Lfm2Config", **KINDS["Lfm2Config"])
    other, _ = patched(model)
    with torch.no_grad():
        right = copy.deepcopy(model).double()(input_ids=ids(), use_cache=False).logits
        assert close(other.double()(input_ids=ids(), use_cache=False).logits, right, 1e-12)


def test_a_gated_norm_that_is_none():
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(24)), 1e-6

        def forward(self, hidden_states, gate):
            x = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)
            return x * self.weight * torch.tanh(gate)

    report = fftune.patch(nn.Sequential(Norm()))
    assert "computes nothing that is known" in words_of(report.left)


@pytest.mark.parametrize("kind, word, value", [("Qwen3NextConfig", "activation", "sigmoid"), ("Mamba2Config", "group_size", 16),
                                               ("Mamba2Config", "variance_epsilon", 0.3)])
def test_a_gated_norm_whose_settings_change(kind, word, value):
    model = make(kind, **KINDS[kind])
    norms = []
    for own in (model, patched(model)[0]):
        norm = next(m for m in own.modules() if type(m).__name__.endswith("RMSNormGated"))
        setattr(norm, word, value)
        norms.append(norm)
    x, gate = torch.randn(2, 3, 5, norms[0].weight.numel())
    assert close(norms[1](x, gate), norms[0](x, gate), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_packages_of_kernels_that_do_not_run_on_the_cpu(kind, monkeypatch):
    # As with flash-linear-attention on a machine with a GPU, whose modules are tried on the CPU too.
    model = make(kind, **KINDS[kind])
    space = vars(sys.modules[type(model).__module__])
    calls = []

    def theirs(*arguments, **options):
        calls.append(arguments)
        raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    replaced = 0
    for function in list(space.values()):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ())) \
            if isinstance(function, types.FunctionType) else {}
        if "implementation" in cells and "torch_function" in cells:
            for name, value in dict(implementation=theirs, is_new_implementation=True).items():
                monkeypatch.setattr(cells[name], "cell_contents", value)
            replaced += 1
    if not replaced:
        pytest.skip("these functions are chosen in another way")
    plain = words_of(patched(make(kind, **KINDS[kind]))[1].replaced)
    assert not calls
    assert re.search(r"functions of \w+ by ", plain)
    with pytest.raises(ValueError, match="cannot be accessed"):  # as before
        model(ids())
    assert calls


def test_functions_that_modules_keep_run_on_the_cpu_too():
    def theirs(x):
        raise ValueError("no kernel for the CPU")

    theirs.__module__ = "fla.ops"
    module = nn.Linear(2, 2)
    module.double = theirs
    space = vars(sys.modules["torch.nn.modules.linear"])
    space["torch_double"] = lambda x: 2 * x
    try:
        with host_forms(module):
            assert module.double(torch.ones(1)) == 2
    finally:
        del space["torch_double"]
    assert module.double is theirs
