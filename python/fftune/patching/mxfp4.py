"""patch() of gpt-oss' experts in mxfp4 as transformers loads them: moe-ffn with packed weights.

Mxfp4GptOssExperts has the codes and scales in the layout of Triton's kernels, in objects that know the
way back, and Mxfp4GptOssMLP computes with them. Their bytes go to the host while the packed weights
are in their place, so save_pretrained() has them, and unpatch() brings them back.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops, reference
from .._library import Error
from .experts import (ExpertsFound, RouterFound, experts_forward, router_forward)
from .recognise import (Numbers, Options, Unfit, expect_no_hooks, has_kernels, is_close, is_patched,
                        parts_of, parts_watched, reason_of, set_forward, undoable)
from .trial import Trial, replace_forward

_NAMES = ("gate", "up", "down")
_OWN = tuple(f"_fftune_{name}_{part}" for name in _NAMES for part in ("w", "scale"))
_BIASES = tuple(f"_fftune_{name}_bias" for name in _NAMES)


def _storages(experts: nn.Module) -> list:
    """The storages of the codes and scales of both products."""
    return [tensor.storage for name in ("gate_up_proj", "down_proj")
            for tensor in (getattr(experts, name), getattr(experts, f"{name}_precision_config").weight_scale)]


def _rows(storage) -> Tensor:
    """[experts, rows, bytes of a row]"""
    return storage.layout.unswizzle_data(storage.data).transpose(-1, -2).contiguous()


def _packed(experts: nn.Module) -> tuple[list[ops.PackedWeight], list[Tensor]]:
    """Weights and biases of gate, up and down."""
    count, h, d = experts.num_experts, experts.intermediate_size, experts.hidden_size
    gate_up, gate_up_scale, down, down_scale = map(_rows, _storages(experts))
    for name, tensor, shape in (("gate_up_proj", gate_up, (count, 2 * h, d // 2)),
                                ("scales of gate_up_proj", gate_up_scale, (count, 2 * h, d // 32)),
                                ("down_proj", down, (count, d, h // 2)),
                                ("scales of down_proj", down_scale, (count, d, h // 32))):
        if tuple(tensor.shape) != shape or tensor.dtype != torch.uint8:
            raise Unfit(f"{name} is {tensor.dtype} {[*tensor.shape]}, not bytes {[*shape]}")
    pack = lambda codes, scale: ops.pack_weight(codes.flatten(0, 1), scale.flatten(0, 1).contiguous(),
                                                group=32, format="mxfp4")
    weights = [pack(gate_up[:, i::2].contiguous(), gate_up_scale[:, i::2]) for i in range(2)]
    both = experts.gate_up_proj_bias
    return [*weights, pack(down, down_scale)], [both[:, 0::2], both[:, 1::2], experts.down_proj_bias]


def patch_mxfp4_experts(module: nn.Module, known: dict, options: Options) -> str | None:
    experts, router = getattr(module, "experts", None), getattr(module, "router", None)
    names = [kind.__name__ for kind in (type(module), type(experts))]
    if names != ["Mxfp4GptOssMLP", "Mxfp4GptOssExperts"]:
        return None
    # Its kernels are called past PyTorch's dispatcher.
    if not all(kind.__module__.startswith("transformers.") for kind in (type(module), type(experts))):
        raise Unfit(f"{names[0]} is not transformers' own")
    if "forward" in module.__dict__ or "forward" in experts.__dict__:
        raise Unfit("its forward was replaced already")
    expect_no_hooks(*parts_of(module))
    if getattr(experts, "_is_hooked", False):
        raise Unfit("its experts are on several devices")
    if (experts.alpha, experts.limit) != (1.702, 7.0):
        raise Unfit(f"its activation has alpha {experts.alpha} and limit {experts.limit}, for which there is no "
                    "kernel")
    if getattr(experts, "gate_up_proj_precision_config", None) is None:
        raise Unfit("its weights are not loaded")
    with torch.no_grad():
        weights, biases = _packed(experts)
        x = Numbers(0)(5, experts.hidden_size).to(router.weight.device, router.weight.dtype)
        try:
            theirs, _ = type(module).forward(module, x.unsqueeze(0))
        except Exception as error:
            raise Unfit(f"its forward cannot be compared: {reason_of(error)}") from None
        for name, tensor in zip(_OWN, (t for w in weights for t in (w.w, w.scale))):
            experts.register_buffer(name, tensor, persistent=False)
        for name, bias in zip(_BIASES, biases):
            experts.register_buffer(name, bias.to(x.dtype).contiguous(), persistent=False)
        ours, _ = _run(module, x.unsqueeze(0))
        # Its kernels round the intermediate in another place.
        if not is_close(ours, theirs, 16 * torch.finfo(x.dtype).eps):
            _drop(experts)
            raise Unfit(f"{type(module).__name__} computes something else")
    experts.__dict__["_fftune_devices"] = [storage.data.device for storage in _storages(experts)]
    for storage in _storages(experts):
        storage.data = storage.data.cpu()
    try:
        replace_forward(module, _mxfp4_forward, (), Trial(
            lambda numbers, like: (numbers(1, 5, experts.hidden_size),), dtype=router.weight.dtype), known)
    except Unfit:
        restore_mxfp4_experts(module)
        raise
    return "Mxfp4GptOssMLP by moe-ffn with packed weights (mxfp4, swiglu-oai)"


def _drop(experts: nn.Module) -> None:
    for name in (*_OWN, *_BIASES):
        experts._buffers.pop(name, None)
        experts._non_persistent_buffers_set.discard(name)


def restore_mxfp4_experts(module: nn.Module) -> None:
    """Takes back what patch_mxfp4_experts() did to the experts."""
    experts = getattr(module, "experts", None)
    devices = getattr(experts, "__dict__", {}).pop("_fftune_devices", None)
    if devices is None:
        return
    for storage, device in zip(_storages(experts), devices):
        storage.data = storage.data.to(device)
    _drop(experts)


def _run(module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    experts, router = module.experts, module.router
    d, h, count = experts.hidden_size, experts.intermediate_size, experts.num_experts
    x = hidden_states.reshape(-1, d)
    logits = F.linear(x, router.weight, router.bias)
    ids, shares = ops.moe_route(logits, router.top_k, order="after")
    weights = [ops.PackedWeight(getattr(experts, w), getattr(experts, scale), None, count * n, k, 32, "mxfp4")
               for w, scale, n, k in zip(_OWN[0::2], _OWN[1::2], (h, h, d), (d, d, h))]
    biases = [getattr(experts, name).to(x.dtype) for name in _BIASES]
    if torch.is_grad_enabled() and (x.requires_grad or shares.requires_grad):  # packed weights have none
        gate, up, down = (w.dense(x.dtype).unflatten(0, (count, -1)) for w in weights)
        y = ops.moe_ffn(x, ids, shares, torch.cat((gate, up), 1), None, down,
                        biases=(torch.cat(biases[:2], 1), biases[2]), act="swiglu-oai")
    else:
        y = ops.moe_ffn(x, ids, shares, *weights, biases=biases, act="swiglu-oai")
    return y.reshape(hidden_states.shape[0], -1, d), logits


class _DenseRouter(nn.Module):
    def __init__(self, router: nn.Module):
        super().__init__()
        self.weight, self.bias, self.top_k = router.weight, router.bias, router.top_k

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight, self.bias)
        best = logits.topk(self.top_k, -1)
        return logits, best.values.softmax(-1), best.indices


class DenseExperts(nn.Module):
    """Replaced experts with dense weights [experts, d, h] of down, which have shapes and no numbers."""

    def __init__(self, shape: tuple[int, int, int], like: Tensor, found: ExpertsFound):
        super().__init__()
        count, d, h = shape
        shapes = dict(gate_up_proj=(count, 2 * h, d), down_proj=shape)
        if found.biased:
            shapes |= dict(gate_up_proj_bias=(count, 2 * h), down_proj_bias=(count, d))
        for name, own in shapes.items():
            setattr(self, name, nn.Parameter(like.new_zeros(()).expand(own), requires_grad=False))
        self.found = found  # which stand-ins keep
        set_forward(self, experts_forward, (found,))

    def forward(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        biases = (getattr(self, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj"))
        return reference.moe_ffn(x, ids, shares, self.gate_up_proj, None, self.down_proj, *biases,
                                 self.found.act, self.found.packing, "after", 0, "")


class DenseMixture(nn.Module):
    """A replaced block with dense weights, which have shapes and no numbers."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.router = _DenseRouter(block.router)
        experts = block.experts
        self.experts = DenseExperts((experts.num_experts, experts.hidden_size, experts.intermediate_size),
                                    block.router.weight,
                                    ExpertsFound("swiglu-oai", "interleaved", transposed=False, biased=True))
        set_forward(self.router, router_forward, (
            RouterFound("softmax", "after", False, 0, 0, "max", 1.0, None), False, False))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.flatten(0, -2)
        logits, shares, ids = self.router(x)
        return self.experts(x, ids, shares).view(hidden_states.shape), logits


def is_packed_mixture(module: nn.Module) -> bool:
    return is_patched(module, _mxfp4_forward)


# The tensors of a replaced block's experts, by their names in the op `layer`.
LAYER_WEIGHTS = {**{f"w_{name}": f"_fftune_{name}_w" for name in _NAMES},
                 **{f"w_{name}_scale": f"_fftune_{name}_scale" for name in _NAMES},
                 **{f"b_{name}": f"_fftune_{name}_bias" for name in _NAMES}}


@undoable
def _mxfp4_forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    if not has_kernels(hidden_states) or parts_watched(self):
        raise Error("moe-ffn: the experts' packed weights serve a CPU or GPU, and no hooks: call "
                        "fftune.unpatch(model) first")
    return _run(self, hidden_states)
