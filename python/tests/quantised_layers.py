"""Layers with weights of 4 and 8 bits that have the tensors and attributes of GPTQModel's, AutoAWQ's,
compressed-tensors' and transformers' to the bit, and compute by PyTorch."""
import copy
import json
import types
from pathlib import Path

import torch
from torch import nn

FILES = Path(__file__).parents[2] / "tests" / "data" / "quantised"
CONFIGS = json.loads((FILES / "index.json").read_text())
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def unpacked(words, dim):
    shifts = torch.arange(0, 32, 4, device=words.device)
    shape = [1, 1, 1]
    shape[dim + 1] = 8
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & 15).flatten(dim, dim + 1)


def packed(codes, dim):
    words = codes.long().unflatten(dim, (-1, 8))
    shape = [1, 1, 1]
    shape[dim + 1] = 8
    words = (words << torch.arange(0, 32, 4, device=codes.device).view(shape)).sum(dim + 1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


class TorchLinear(nn.Module):
    """GPTQModel's."""

    def __init__(self, qweight, qzeros, scales, g_idx, bias=None, *, group_size, desc_act, version=1):
        super().__init__()
        self.bits, self.group_size, self.desc_act, self.adapter = 4, group_size, desc_act, None
        self.in_features, self.out_features = g_idx.numel(), scales.shape[1]
        self.version = version
        for name, tensor in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales),
                             ("g_idx", g_idx), ("bias", bias)):
            self.register_buffer(name, tensor)

    def qzero_format(self):
        return self.version

    def dense(self):
        words = self.qzeros + (0x11111111 if self.version == 1 else 0)
        zeros = unpacked(words, 1)[:, :self.out_features]
        at = self.g_idx.long()
        codes = unpacked(self.qweight, 0)[:self.in_features]
        return self.scales[at] * (codes - zeros[at])

    def forward(self, x):
        y = x @ self.dense().to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


class WQLinear_GEMM(nn.Module):
    """AutoAWQ's."""

    def __init__(self, qweight, qzeros, scales, bias=None, *, group_size):
        super().__init__()
        self.w_bit, self.group_size, self.training = 4, group_size, False
        self.in_features, self.out_features = qweight.shape[0], scales.shape[1]
        for name, tensor in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales),
                             ("bias", bias)):
            self.register_buffer(name, tensor)

    def forward(self, x):
        def outputs(words):
            y = unpacked(words, 1)
            own = torch.empty_like(y)
            for place, output in enumerate(AWQ_ORDER):
                own[:, output::8] = y[:, place::8]
            return own

        size = self.group_size if self.group_size > 0 else self.in_features
        codes, zeros = outputs(self.qweight), outputs(self.qzeros)
        w = (codes - zeros.repeat_interleave(size, 0)) * self.scales.repeat_interleave(size, 0)
        y = x @ w.to(x.dtype)
        return y if self.bias is None else y + self.bias


def compressed(tensors, *, symmetric, group_size=None, activations=None, bits=4, kind="int", strategy="group",
               block=None):
    """nn.Linear as compressed-tensors leaves it on loading."""
    if "weight_shape" in tensors:
        n, k = tensors["weight_shape"].tolist()
    elif "weight" in tensors:
        n, k = tensors["weight"].shape
    else:
        n, k = tensors["weight_packed"].shape[0], 2 * tensors["weight_packed"].shape[1]
    layer = nn.Linear(k, n, bias=False)
    del layer.weight
    for name, tensor in tensors.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    layer.quantization_scheme = types.SimpleNamespace(
        weights=types.SimpleNamespace(num_bits=bits, type=kind, symmetric=symmetric,
                                      group_size=group_size, strategy=strategy, block_structure=block),
        input_activations=activations,
        output_activations=None)
    layer.quantization_status = "compressed"
    return layer


def quantise_by_compressed_tensors(model, skip=("lm_head",), group=32):
    """All linear layers of a model but those of a name, in int4; the layers' dense weights beside them."""
    dense = copy.deepcopy(model)
    for name, child in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(child) is nn.Linear and own not in skip:
            w = child.weight.detach().float().unflatten(1, (-1, group))
            scale = (w.abs().amax(-1, keepdim=True) / 7).to(child.weight.dtype)
            q = (w / scale.float() + 8).round().clamp(0, 15)
            layer = compressed({"weight_packed": packed(q.flatten(1), 1), "weight_scale": scale.squeeze(-1),
                                "weight_shape": torch.tensor(child.weight.shape)}, symmetric=True, group_size=group)
            layer.bias = child.bias
            setattr(model.get_submodule(parent), own, layer)
            dense.get_submodule(name).weight.data = ((q - 8) * scale.float()).flatten(1).to(child.weight.dtype)
    return model, dense


def forward_quantize(module, value, base_name, args):
    """compressed-tensors': values rounded to a type of 8 bits by a scale of each token, of groups of a
    token, or one that the module has."""
    assert base_name == "input" and module.quantization_status == "compressed"
    least, most = (-448.0, 448.0) if args.type == "float" else (-128.0, 127.0)
    own = value.unflatten(-1, (-1, args.group_size)) if args.strategy == "group" else value
    scale = own.abs().amax(-1, keepdim=True) / ((most - least) / 2) if args.dynamic else module.input_scale
    q = (own / scale).clamp(least, most)
    q = q.to(torch.float8_e4m3fn).to(value.dtype) if args.type == "float" else q.round()
    return (q * scale).to(value.dtype).view(value.shape)


class Expert(nn.Module):
    def __init__(self, gate_up, down):
        super().__init__()
        for name, w in zip(("gate_proj", "up_proj", "down_proj"), (*gate_up.chunk(2), down)):
            layer = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
            layer.weight.data.copy_(w)
            setattr(self, name, layer)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Sequential):
    """Experts with layers of their own, as checkpoints name them and packages that quantise need them."""

    def forward(self, x, ids, shares):
        y = torch.zeros_like(x)
        for number, expert in enumerate(self):
            token, place = torch.where(ids == number)
            y = y.index_add(0, token, expert(x[token]) * shares[token, place, None])
        return y


def with_expert_modules(model):
    """The model with a layer for each weight of an expert, where transformers has one tensor of all."""
    for module in model.modules():
        stacked = getattr(module, "experts", None)
        if hasattr(stacked, "gate_up_proj"):
            module.experts = Experts(*(Expert(*weights) for weights in zip(stacked.gate_up_proj.detach(),
                                                                          stacked.down_proj.detach())))
    return model


def product_of_fp8(x, weight, scale, block_size, dtype, activation_scale=None):
    """C = A B^T as Triton's kernels of transformers' FP8Linear compute it, summed up in float64. Each token,
    or each block of its elements, has a scale, by which it is rounded to e4m3."""
    (n, k), x = weight.shape, x.float()
    rows, size = (n, k) if block_size is None else block_size
    parts = nn.functional.pad(x, (0, -k % size)).unflatten(-1, (-1, size))
    own = parts.abs().amax(-1, keepdim=True) / 448 if activation_scale is None else activation_scale
    rounded = (parts / own.clamp_min(1e-12)).clamp(-448, 448).to(torch.float8_e4m3fn).double() * own
    wide = scale.double().reshape(-(-n // rows), -1).repeat_interleave(rows, 0).repeat_interleave(size, 1)
    return (rounded.flatten(-2)[..., :k] @ (weight.double() * wide[:n, :k]).T).to(dtype)


def fp8_linear(weight, weight_scale_inv, bias=None, block_size=(128, 128), scheme="dynamic"):
    """transformers' own."""
    from transformers.integrations.finegrained_fp8 import FP8Linear

    with torch.device("meta"):
        layer = FP8Linear(weight.shape[1], weight.shape[0], block_size, scheme)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(weight_scale_inv, requires_grad=False)
    layer.bias = bias
    return layer


def rounded_to_fp8(w, block):
    """Codes, and scales of blocks; a scale of all where `block` is None."""
    rows, columns = w.shape if block is None else (block, block)
    padded = nn.functional.pad(w.detach().float(), (0, -w.shape[1] % columns, 0, -w.shape[0] % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:w.shape[0], :w.shape[1]]
    return codes.contiguous().to(torch.float8_e4m3fn), scale


def quantise_to_fp8(model, block=128, skip=("lm_head",)):
    """All linear layers of a model but those of a name, as transformers' FP8Linear."""
    for name, child in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(child) is nn.Linear and own not in skip:
            setattr(model.get_submodule(parent), own, fp8_linear(
                *rounded_to_fp8(child.weight, block), child.bias, block_size=(block, block)))
    return model


def fp8_experts(experts, block=128, scheme="dynamic"):
    """transformers' FP8Experts, as it loads them, of experts with dense weights; run by their loop."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = copy.deepcopy(experts.config)
    config._experts_implementation = "eager"
    # The decorator changes the class, and transformers gives it the same one for each layer.
    kind = FP8Experts if hasattr(FP8Experts.forward, "__wrapped__") else use_experts_implementation(
        experts_class=FP8Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    with torch.device("meta"):
        other = kind(config, block_size=block and (block, block), activation_scheme=scheme)
    for name in ("gate_up_proj", "down_proj"):
        codes, scales = map(torch.stack, zip(*(rounded_to_fp8(w, block) for w in getattr(experts, name))))
        setattr(other, name, nn.Parameter(codes, requires_grad=False))
        setattr(other, f"{name}_scale_inv", nn.Parameter(scales, requires_grad=False))
    return other


def of_file(name, bias=None):
    """(layer, the weight [n, k] that it stands for, in float32)"""
    from safetensors.torch import load_file

    tensors = load_file(FILES / f"{name}.safetensors")
    expected = tensors.pop("expected")
    prefixes = {key.rpartition(".")[0] for key in tensors}
    (prefix,) = prefixes
    tensors = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
    config = CONFIGS[f"{name}.safetensors"]["quantization_config"]
    if config["quant_method"] == "gptq":
        layer = TorchLinear(tensors["qweight"], tensors["qzeros"], tensors["scales"],
                            tensors["g_idx"], bias, group_size=config["group_size"],
                            desc_act=config["desc_act"],
                            version=2 if config["checkpoint_format"] == "gptq_v2" else 1)
    elif config["quant_method"] == "awq":
        layer = WQLinear_GEMM(tensors["qweight"], tensors["qzeros"], tensors["scales"], bias,
                              group_size=config["group_size"])
    elif config["quant_method"] == "fp8":
        layer = fp8_linear(tensors["weight"], tensors["weight_scale_inv"], bias)
    else:
        weights = next(iter(config["config_groups"].values()))["weights"]
        layer = compressed(tensors, symmetric=weights["symmetric"], group_size=weights["group_size"],
                           bits=weights["num_bits"], kind=weights["type"], strategy=weights["strategy"],
                           block=weights.get("block_structure"))
    return layer, expected


def gptq_of(linear, group=32, desc_act=False, version=1, dtype=None):
    """A linear layer's weight rounded to 4 bits, as GPTQModel's layer."""
    w = linear.weight.detach().t().float()  # [k, n]
    k = w.shape[0]
    index = torch.arange(k, dtype=torch.int32, device=w.device) // group
    if desc_act:
        index = index[torch.randperm(k, generator=torch.Generator().manual_seed(5)).to(w.device)]
    scales = torch.stack([w[index == g].abs().amax(0) / 7 for g in range(k // group)])
    scales = scales.to(dtype or linear.weight.dtype)
    codes = (w / scales.float()[index.long()] + 8).round().clamp(0, 15)
    zeros = torch.full((k // group, w.shape[1]), 8 if version == 2 else 7, device=w.device)
    return TorchLinear(packed(codes, 0), packed(zeros, 1), scales, index,
                       None if linear.bias is None else linear.bias.detach(), group_size=group,
                       desc_act=desc_act, version=version)


def quantise_by_gptq(model, skip=("lm_head",), **options):
    """All linear layers of a model but those of a name."""
    for name, child in list(model.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(child) is nn.Linear and own not in skip:
            setattr(model.get_submodule(parent), own, gptq_of(child, **options))
    return model
