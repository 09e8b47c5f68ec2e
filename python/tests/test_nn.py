"""Modules, and the drop-ins for the Triton package's MaskedLinear and MaskedFFN."""
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fftune


def close(ours, theirs, tolerance=1e-5):
    return (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


class TwoExperts(nn.Module):
    """As people wrote it: both experts of all tokens, and a mask."""

    def __init__(self, hidden, intermediate):
        super().__init__()
        for name, (rows, columns) in {
                "w1": (hidden, intermediate), "w2": (intermediate, hidden),
                "w3": (hidden, intermediate), "u1": (hidden, intermediate),
                "u2": (intermediate, hidden), "u3": (hidden, intermediate)}.items():
            setattr(self, name, nn.Linear(rows, columns, bias=False))

    def forward(self, x, mask):
        mask = mask[..., None]
        true = self.w2(F.silu(self.w1(x)) * self.w3(x))
        false = self.u2(F.silu(self.u1(x)) * self.u3(x))
        return true * mask + false * ~mask


@pytest.fixture
def experts():
    return TwoExperts(24, 40), torch.randn(2, 9, 24), torch.rand(2, 9) < 0.3


def transposed(layer):
    return [getattr(layer, name).weight.T for name in ("w1", "w2", "w3", "u1", "u2", "u3")]


def test_masked_ffn_is_a_drop_in(experts):
    layer, x, mask = experts
    y = fftune.MaskedFFN.apply(x.flatten(0, 1), *transposed(layer), mask.flatten())
    right = layer(x, mask)
    assert close(y.unflatten(0, (2, -1)), right)
    ours = torch.autograd.grad(y.sum(), list(layer.parameters()))
    for mine, other in zip(ours, torch.autograd.grad(right.sum(), list(layer.parameters()))):
        assert close(mine, other)


def test_masked_linear_is_a_drop_in(experts):
    layer, x, mask = experts
    y = fftune.MaskedLinear.apply(x, layer.w1.weight.T, layer.u1.weight.T, mask)
    assert close(y, torch.where(mask[..., None], layer.w1(x), layer.u1(x)))


def test_transposed_weights_are_not_copied(experts, monkeypatch):
    layer, x, mask = experts
    seen = []
    plain = torch.Tensor.contiguous
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t, *a: seen.append(t) or plain(t, *a))
    with torch.no_grad():
        fftune.MaskedFFN.apply(x, *transposed(layer), mask)
    assert not seen


def test_masked_modules_take_the_state_dicts(experts):
    layer, x, mask = experts
    ours = fftune.nn.MaskedMLP(24, 40)
    ours.load_state_dict(layer.state_dict())
    assert close(ours(x, mask), layer(x, mask))
    linear = fftune.nn.MaskedLinear(24, 40)
    right = torch.where(mask[..., None], linear.linear_v(x), linear.linear_t(x))
    assert close(linear(x, mask), right)


def test_gated_mlp_takes_the_state_dict_of_llama():
    from models import make

    theirs = make("llama").model.layers[0].mlp
    ours = fftune.nn.GatedMLP(32, 48)
    ours.load_state_dict(theirs.state_dict())
    x, residual = torch.randn(3, 5, 32), torch.randn(3, 5, 32)
    assert close(ours(x, residual), theirs(x) + residual)


@pytest.mark.parametrize("static", [False, True])
def test_gated_mlp_in_fp8(static):
    layer = fftune.nn.GatedMLP(160, 272)
    x = torch.randn(33, 160)
    quantised = layer.to_fp8(x if static else None)
    assert quantised.gate_proj.dtype == torch.float8_e4m3fn
    y = quantised(x)
    assert y.dtype == torch.bfloat16 and close(y, layer(x), 0.08)
    again = layer.to_fp8(x if static else None)
    again.load_state_dict(quantised.state_dict())
    assert torch.equal(again(x), y)


def test_norm_and_bias_gelu():
    x = torch.randn(4, 24)
    norm = fftune.nn.RMSNorm(24, eps=1e-5, convention="t5")
    assert close(norm(x), F.rms_norm(x, (24,), norm.weight, 1e-5))
    y, total = norm(x, 2 * x)
    assert close(total, 3 * x) and close(y, norm(3 * x))
    gelu = fftune.nn.BiasGELU(24, approximate="tanh")
    nn.init.normal_(gelu.bias)
    assert close(gelu(x), F.gelu(x + gelu.bias, approximate="tanh"))


def test_rotary_embedding_counts_from_starts():
    rotary = fftune.nn.RotaryEmbedding(base=500.0)
    q = torch.randn(1, 6, 2, 16)
    whole = rotary(q)
    assert close(rotary(q[:, 4:], starts=torch.tensor([4])), whole[:, 4:])


def test_moe_refuses_what_no_router_does_when_it_is_made():
    for top_k in (0, 5):
        with pytest.raises(fftune.Error, match=f"top_k is {top_k} of 4 experts"):
            fftune.nn.MoE(24, 40, 4, top_k)
    with pytest.raises(TypeError, match="renormalize"):
        fftune.nn.MoE(24, 40, 4, 2, renormalize=True)


def test_moe_has_the_names_and_the_values_of_mixtrals():
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(hidden_size=24, intermediate_size=40, num_local_experts=6,
                                        num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)
    ours = fftune.nn.MoE(24, 40, 6, 2, renormalise=True)
    block.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 24)
    assert close(ours(x), block(x))
    seed = torch.randn(2, 5, 24)
    for mine, other in zip(torch.autograd.grad(ours(x), list(ours.parameters()), seed),
                           torch.autograd.grad(block(x), [block.get_parameter(name) for name, _ in
                                                          ours.named_parameters()], seed)):
        assert close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moe_has_the_names_and_the_values_of_deepseeks(dtype):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.DeepseekV3Config(
        hidden_size=32, moe_intermediate_size=48, n_routed_experts=8, num_local_experts=8,
        num_experts_per_tok=2, n_shared_experts=2, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5)
    config._experts_implementation = "eager"
    block = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config)
    ours = fftune.nn.MoE(32, 48, 8, 2, score="sigmoid", renormalise=True, groups=4, top_groups=2,
                         group_score="top2", scale=2.5, bias=True, shared=2)
    for module in (ours, block):
        module.to(dtype).gate.float()  # as DeepSeek's are kept
    nn.init.uniform_(ours.gate.e_score_correction_bias, -0.3, 0.3)
    block.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 32, dtype=dtype)
    assert close(ours(x), block(x), 1e-5 if dtype == torch.float32 else 2e-2)
    with pytest.raises(fftune.Error, match="shared is -1"):
        fftune.nn.MoE(24, 40, 4, 2, shared=-1)
