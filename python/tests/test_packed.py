"""Packed weights of 4 and 8 bits: the layer, its state dict, and rounding to nearest."""
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import fftune
from fftune.nn import QuantLinear, quantise

FILES = Path(__file__).parents[2] / "tests" / "data" / "quantised"


def close(ours, theirs, tolerance=1e-5):
    return (ours.double() - theirs.double()).norm() <= tolerance * theirs.double().norm()


@pytest.mark.parametrize("group", (128, 64, 32, 0))
@pytest.mark.parametrize("zeros", (False, True))
def test_a_quantised_layer_is_near_the_dense_one_and_exact_for_its_own_weight(group, zeros):
    linear = nn.Linear(256, 72)
    layer = QuantLinear.from_linear(linear, group, zeros)
    x = torch.randn(5, 3, 256)
    dense = layer.packed_weight.dense()
    assert close(layer(x), x @ dense.T + linear.bias)
    limit = 0.5 * layer.packed_weight.unpack()[1].max() * (1 + 1e-5)
    assert (dense - linear.weight).abs().max() <= limit * (2 if zeros else 1)


# Half a step of the largest codes, beside the largest element of a group.
STEPS = {"mxfp4": 1 / 4, "nvfp4": 1 / 5, "fp8": 1 / 28, "int8": 1 / 254}


@pytest.mark.parametrize("format, group", [("mxfp4", 128), ("nvfp4", 128)] + [
    (format, group) for format in ("fp8", "int8") for group in (128, 64, 32, 0)])
def test_a_layer_of_another_format_is_near_the_dense_one_and_comes_back(format, group):
    linear = nn.Linear(256, 72)
    layer = QuantLinear.from_linear(linear, group, format=format)
    x = torch.randn(5, 3, 256)
    dense = layer.packed_weight.dense()
    assert close(layer(x), x @ dense.T + linear.bias)
    largest = linear.weight.detach().unflatten(1, (-1, layer.group or 256)).abs().amax(-1, True)
    off = (dense - linear.weight).detach().unflatten(1, (-1, layer.group or 256)).abs()
    assert bool((off <= largest * STEPS[format] * (1 + 1e-5)).all())
    again = QuantLinear.from_linear(nn.Linear(256, 72), group, format=format)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.packed_weight.dense(), dense)
    # Its own values are rounded to themselves, and another type of tokens leaves the weight alone.
    linear.weight = nn.Parameter(dense)
    assert close(QuantLinear.from_linear(linear, group, format=format).packed_weight.dense(), dense, 1e-6)
    half = layer.to(torch.bfloat16)
    assert torch.equal(half.packed_weight.dense(), dense) and half(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("format, name", (("mxfp4", "ct_mxfp4"), ("nvfp4", "ct_nvfp4"), ("fp8", "ct_fp8_channel"),
                                          ("int8", "ct_int8_channel")))
def test_tensors_of_other_formats_decode_as_they_should(format, name):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(FILES / f"{name}.safetensors")
    expected = tensors.pop("expected")
    layer = QuantLinear(expected.shape[1], expected.shape[0], False, 128 if format.endswith("fp4") else 0,
                        format=format)
    tensors = {key.rpartition(".")[2]: tensor for key, tensor in tensors.items()}
    codes_type = next(t.dtype for name, t in tensors.items() if name in ("weight", "weight_packed"))
    layer.load_state_dict(tensors)
    if format == "nvfp4":  # that package divides scales by the one of all first
        assert close(layer.packed_weight.dense(), expected, 2e-7)
    else:
        assert torch.equal(layer.packed_weight.dense(), expected)
    again = layer.state_dict()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name].float(), tensor.float()) for name, tensor in tensors.items())
    assert again["weight_packed" if format.endswith("fp4") else "weight"].dtype == codes_type


def test_tensors_of_modelopt_decode_as_they_should():
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(FILES / "nvfp4_modelopt.safetensors")
    packed = fftune.ops.pack_weight(tensors["weight"], (tensors["weight_scale"], tensors["weight_scale_2"]),
                                    group=16, format="nvfp4")
    assert torch.equal(packed.dense(), tensors["expected"])
    codes, (scale, rows), zero = packed.unpack()
    assert torch.equal(codes, tensors["weight"]) and zero is None
    assert torch.equal(scale.view(torch.uint8), tensors["weight_scale"].view(torch.uint8))
    assert bool((rows == tensors["weight_scale_2"]).all())


def test_weights_of_other_formats_that_cannot_be_are_refused_in_one_line():
    for words, make in (
            ("int8 has no zero points", lambda: QuantLinear(64, 16, zeros=True, format="int8", group=0)),
            ("nvfp4 has groups of 16", lambda: QuantLinear(64, 16, format="nvfp4", group=64)),
            ("nvfp4 has a pair", lambda: fftune.ops.pack_weight(
                torch.zeros(16, 32, dtype=torch.uint8), torch.ones(16, 4), group=16, format="nvfp4")),
            ("scales have NaN", lambda: fftune.ops.pack_weight(
                torch.zeros(16, 32, dtype=torch.uint8), (torch.full((16, 4), 255, dtype=torch.uint8),
                                                         torch.ones(1)), group=16, format="nvfp4")),
            ("mxfp4 has groups of 32", lambda: QuantLinear(64, 16, format="mxfp4", group=64)),
            ("format is 'fp4'", lambda: QuantLinear(64, 16, format="fp4")),
            ("codes have NaN", lambda: fftune.ops.pack_weight(
                torch.full((16, 64), float("nan")).to(torch.float8_e4m3fn), torch.ones(16, 1), group=0,
                format="fp8")),
            ("zero is", lambda: fftune.ops.pack_weight(
                torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 1), torch.zeros(16, 1), group=0,
                format="int8"))):
        with pytest.raises(fftune.Error, match=words):
            make()
    layer = QuantLinear(64, 16, bias=False, group=64, format="fp8")
    with pytest.raises(RuntimeError, match="weight is torch.int8, not torch.float8_e4m3fn"):
        layer.load_state_dict({**layer.state_dict(), "weight": torch.zeros(16, 64, dtype=torch.int8)})


def test_a_weight_of_codes_is_rounded_to_itself():
    scale = torch.tensor([[0.5], [0.25]])
    q = torch.tensor([[-7, 0, 3, 7], [7, 1, -2, 5]])
    linear = nn.Linear(4, 2, bias=False)
    linear.weight = nn.Parameter(q * scale)
    layer = QuantLinear.from_linear(linear, group=0)
    assert torch.equal(layer.packed_weight.dense(), q * scale)


@pytest.mark.parametrize("zeros", (False, True))
def test_the_state_dict_is_given_back_as_it_was(zeros):
    layer = QuantLinear(96, 37, group=32, zeros=zeros)
    saved = {"weight_packed": torch.randint(-2**31, 2**31, (37, 12), dtype=torch.int32),
             "weight_scale": torch.rand(37, 3), "weight_shape": torch.tensor([37, 96]),
             "bias": torch.randn(37)}
    if zeros:
        saved["weight_zero_point"] = torch.randint(0, 2**20, (5, 3), dtype=torch.int32)
    layer.load_state_dict(saved)
    again = layer.state_dict()
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize("name, group", (("sym_g128", 128), ("asym_g128", 128), ("asym_g32_n20", 32),
                                         ("sym_channel_k100", 0)))
def test_tensors_of_compressed_tensors_decode_as_they_should(name, group):
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = safetensors.load_file(FILES / f"ct_int4_{name}.safetensors")
    prefix = next(key for key in tensors if key.endswith("weight_packed"))[:-len("weight_packed")]
    expected = tensors["expected"]
    layer = QuantLinear(expected.shape[1], expected.shape[0], bias=False, group=group,
                        zeros=f"{prefix}weight_zero_point" in tensors, dtype=torch.float32)
    layer.load_state_dict({key.removeprefix(prefix): tensor for key, tensor in tensors.items()
                           if key.startswith(f"{prefix}weight_")})
    assert torch.equal(layer.packed_weight.dense(), expected)


def test_wrong_state_dicts_are_refused_in_one_line():
    layer = QuantLinear(64, 16, bias=False, group=64)
    good = layer.state_dict()
    for name, tensor, words in (
            ("weight_shape", torch.tensor([16, 128]), r"weight_shape is \[16, 128\], not \[16, 64\]"),
            ("weight_packed", torch.zeros(16, 7, dtype=torch.int32), "weight_packed is"),
            ("weight_scale", torch.full((16, 1), float("inf")), "weight_scale is not finite")):
        with pytest.raises(RuntimeError, match=words):
            layer.load_state_dict({**good, name: tensor})
    with pytest.raises(RuntimeError, match="Missing key.*weight_packed"):
        layer.load_state_dict({key: tensor for key, tensor in good.items() if key != "weight_packed"})
    with pytest.raises(RuntimeError, match="Unexpected key.*other"):
        layer.load_state_dict({**good, "other": torch.zeros(1)})


def test_quantise_replaces_the_linear_layers_of_a_module():
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 32, bias=False)))
    model.add_module("lm_head", nn.Linear(32, 8))
    x = torch.randn(4, 128)
    before = model(x)
    assert fftune.quantise(model, "int4", group=64) is model
    assert [type(m).__name__ for m in model] == ["QuantLinear", "ReLU", "Sequential", "Linear"]
    assert type(model[2][0]) is QuantLinear and model[2][0].bias is None
    assert close(model(x), before, 0.2) and not torch.equal(model(x), before)
    with pytest.raises(fftune.Error, match="groups of 64 do not divide in_features=96 of 0"):
        quantise(nn.Sequential(nn.Linear(96, 8)), group=64)
    with pytest.raises(fftune.Error, match="group is 100: give 128, 64, 32, or 0"):
        quantise(nn.Linear(96, 8), group=100)
    with pytest.raises(fftune.Error, match="format is 'int3': give one of int4, mxfp4"):
        quantise(nn.Linear(96, 8), "int3")
    for at in (0, 1):  # neither is changed
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        layers[at].register_forward_pre_hook(lambda module, arguments: None)
        with pytest.raises(fftune.Error, match=f"quantise: {at} has hooks, or a forward of its own"):
            quantise(layers, group=64)
        assert all(type(layer) is nn.Linear for layer in layers)


def test_a_layer_in_two_places_is_quantised_to_one():
    layer = nn.Linear(64, 64)
    model = fftune.quantise(nn.Sequential(layer, nn.ReLU(), layer), group=32)
    assert type(model[0]) is QuantLinear and model[2] is model[0]


def test_gradients_reach_what_is_in_front_of_a_packed_weight():
    layer = QuantLinear.from_linear(nn.Linear(64, 16), group=32)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert close(x.grad, torch.ones(3, 16) @ layer.packed_weight.dense())
    assert close(layer.bias.grad, torch.full((16,), 3.0))


def test_torch_compile_keeps_a_packed_product_whole():
    layer = QuantLinear.from_linear(nn.Linear(64, 16), group=32)
    x = torch.randn(3, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("format", ["int4", "mxfp4", "nvfp4", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_packed_weights_have_the_type_of_autocast(dtype, format):
    """Tensors of float32 and of bfloat16, with gradients to what was given."""
    group = {"mxfp4": {}, "nvfp4": {}}.get(format, dict(group=32))
    pack = lambda n, k: QuantLinear.from_linear(nn.Linear(k, n, bias=False).to(dtype), format=format,
                                                **group).packed_weight
    up, down, heads = pack(96, 64), pack(64, 96), pack(64, 64)
    x, ids, shares = torch.randn(5, 64, requires_grad=True), torch.zeros(5, 1).int(), torch.rand(5, 1)
    calls = {"linear": (up,), "ffn": (up, up, down), "mlp": (up, down), "qkv": (heads, 2, 1), "moe_ffn": (
        ids, shares, up, up, down)}
    for op, arguments in calls.items():
        run = getattr(fftune.ops, op)
        dense = [w.dense(torch.float32)[None if op == "moe_ffn" else ...] if isinstance(w, fftune.ops.PackedWeight)
                 else w for w in arguments]
        given = x.detach() if op in ("mlp", "moe_ffn") else x
        with torch.autocast("cpu", torch.bfloat16):
            got = run(given, *arguments)
        right = run(given, *dense)
        for y, r in zip(*((t if isinstance(t, tuple) else (t,)) for t in (got, right)), strict=True):
            assert y.dtype is torch.bfloat16 and close(y, r, 3e-2), (op, format)
        if given.requires_grad:
            first = lambda t: (t[0] if isinstance(t, tuple) else t).float().square().sum()
            mine, = torch.autograd.grad(first(got), x)
            theirs, = torch.autograd.grad(first(right), x)
            assert mine.dtype is torch.float32 and close(mine, theirs, 5e-2), (op, format)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu-tanh", "relu", "none"])
@pytest.mark.parametrize("group, zeros", ((32, False), (0, True)))
def test_a_gated_layer_with_packed_weights_and_its_gradients(group, zeros, act):
    gate, up, down = (QuantLinear.from_linear(nn.Linear(k, n, bias=False), group, zeros).packed_weight
                      for n, k in ((96, 64), (96, 64), (64, 96)))
    x, bias, residual = (torch.randn(*shape, requires_grad=True) for shape in ((3, 5, 64), (64,),
                                                                              (3, 5, 64)))
    results = []
    for weights in ((gate, up, down), (gate.dense(), up.dense(), down.dense())):
        y = fftune.ops.ffn(x, *weights, bias, residual, act=act)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, bias, residual))))
    assert all(map(close, *results))


def test_packed_weights_of_a_gated_layer_that_do_not_go_together():
    gate, up, down = (QuantLinear(k, n, False, 32).packed_weight
                      for n, k in ((96, 64), (96, 64), (64, 96)))
    x = torch.randn(2, 64)
    for weights, words in (((gate, up, down.dense()), "w_down is torch.float32.*three packed weights"),
                           ((gate, up, gate), r"w_down \[96, 64\]: give \[h, d\], \[h, d\] and"),
                           ((gate, QuantLinear(64, 96, False, 0).packed_weight, down),
                            "w_up has other groups than w_gate")):
        with pytest.raises(fftune.Error, match=words):
            fftune.ops.ffn(x, *weights)


@pytest.mark.parametrize("zeros", (False, True))
def test_heads_of_a_packed_weight_and_their_gradients(zeros):
    packed = QuantLinear.from_linear(nn.Linear(64, 128, bias=False), 32, zeros).packed_weight
    x, bias, norm = torch.randn(2, 5, 64, requires_grad=True), torch.randn(128), torch.rand(16) + 0.5
    options = dict(bias=bias, norms=(norm, norm), positions=torch.arange(10).view(2, 5))
    results = []
    for w in (packed, packed.dense()):
        with torch.no_grad():
            heads = fftune.ops.qkv(x, w, 4, 2, **options)
        by_parts = fftune.ops.qkv(x, w, 4, 2, **options)
        loss = sum(part.square().sum() for part in by_parts)
        results.append((*heads, *by_parts, *torch.autograd.grad(loss, x)))
    assert all(map(close, *results))
    with pytest.raises(fftune.Error, match=r"a packed weight \[128, 64\]: give rows of 10 heads"):
        fftune.ops.qkv(x, packed, 8, 1)
    with pytest.raises(fftune.Error, match="bias is of several parts"):
        fftune.ops.qkv(x, packed, 4, 2, bias=(bias, bias, bias))


def a_layer(group=32, zeros=False, dim=16, format="int4"):
    def pack(n, k):
        return QuantLinear.from_linear(nn.Linear(k, n, bias=False), group, zeros, format).packed_weight

    return {"attn_norm": torch.rand(64) + 0.5, "w_qkv": pack(8 * dim, 64), "w_o": pack(64, 4 * dim),
            "ffn_norm": torch.rand(64) + 0.5, "w_gate": pack(96, 64), "w_up": pack(96, 64),
            "w_down": pack(64, 96)}


@torch.no_grad()
@pytest.mark.parametrize("group, zeros, format", (
    (32, False, "int4"), (32, True, "int4"), (0, True, "int4"), (32, False, "mxfp4"), (32, False, "fp8"),
    (0, False, "int8")))
def test_layers_with_packed_weights(group, zeros, format, references):
    weights = [a_layer(group, zeros, format=format) for _ in range(2)]
    x, lengths = torch.randn(2, 3, 64), torch.tensor([7, 5], dtype=torch.int32)
    angles = torch.rand(20, 8).repeat(1, 2)
    results = []
    dense = [{name: w.dense() if isinstance(w, fftune.ops.PackedWeight) else w for name, w in one.items()}
             for one in weights]
    for own, by in ((weights, nullcontext()), (dense, nullcontext()), (weights, references())):
        torch.manual_seed(2)
        caches = [tuple(torch.randn(2, 12, 2, 16).transpose(1, 2) for _ in range(2)) for _ in range(2)]
        with by:
            y = fftune.ops.layer(x, own, caches, lengths, 4, 2, angles=angles)
        results.append((y, *(t for pair in caches for t in pair)))
    assert all(map(close, *results[:2])) and all(map(close, results[2], results[1]))


def of_fp8(w, kind):
    """A weight of float8_e4m3fn, and its scales of rows or of blocks."""
    if kind == "token":
        scale = w.abs().amax(-1) / 448
        return (w / scale[..., None]).to(torch.float8_e4m3fn), scale
    parts = [fftune.reference.quantise_weight(own, True) for own in w.reshape(-1, *w.shape[-2:])]
    return tuple(torch.stack(part).view(*w.shape[:-2], *part[0].shape) for part in zip(*parts))


@torch.no_grad()
@pytest.mark.parametrize("experts", (0, 4))
@pytest.mark.parametrize("attention", (True, False))
@pytest.mark.parametrize("kind", ("token", "block"))
def test_layers_that_quantise_their_tokens(kind, attention, experts, references):
    def layer():
        own = {"attn_norm": torch.rand(160) + 0.5, "ffn_norm": torch.rand(160) + 0.5,
               "w_qkv": torch.randn(8 * 16, 160) / 12, "w_o": torch.randn(160, 4 * 16) / 8}
        own |= {"w_router": torch.randn(4, 160), "w_gate_up": torch.randn(4, 256, 160) / 12,
                "w_down": torch.randn(4, 160, 128) / 12} if experts else {
                "w_gate": torch.randn(96, 160) / 12, "w_up": torch.randn(96, 160) / 12, "w_down": torch.randn(160, 96) / 12}
        for name in ("w_gate", "w_up", "w_gate_up", "w_down", *(("w_qkv", "w_o") if attention else ())):
            if name in own:
                own[name], own[f"{name}_scale"] = of_fp8(own[name], kind)
        return own

    weights = [layer() for _ in range(2)]
    x, lengths = torch.randn(2, 3, 160), torch.tensor([7, 5], dtype=torch.int32)
    results = []
    unscaled = [{name: w.float() if w.dtype == torch.float8_e4m3fn else w for name, w in one.items()
                 if not name.endswith("_scale")} for one in weights]
    for given, by in ((weights, nullcontext()), (weights, references()), (unscaled, references())):
        torch.manual_seed(2)
        caches = [tuple(torch.randn(2, 12, 2, 16).transpose(1, 2) for _ in range(2)) for _ in range(2)]
        with by:
            results.append(fftune.ops.layer(x, given, caches, lengths, 4, 2, angles=torch.zeros(20, 16),
                                            top_k=2 if experts else 0))
    assert (results[0] - results[1]).norm() < 3e-2 * (results[1] - x).norm()
    assert not close(*results[1:])
    for change, words in ((dict(w_down_scale=None), "w_down of float8_e4m3fn without w_down_scale"),
                          (dict(w_down_scale=weights[0]["w_down_scale"][..., :-1]), "w_down_scale of layer 0 is"),
                          (dict(w_o_scale=None if attention else torch.ones(160)), "w_o_scale is missing, or of")):
        wrong = {name: w for name, w in (weights[0] | change).items() if w is not None}
        with pytest.raises(fftune.Error, match=words):
            fftune.ops.layer(x, [wrong], caches[:1], lengths, 4, 2, top_k=2 if experts else 0)


@torch.no_grad()
@pytest.mark.parametrize("attention", (True, False))
@pytest.mark.parametrize("format, group, zeros, bias", (("int4", 32, True, False), ("mxfp4", 32, False, True)))
def test_layers_with_packed_experts(format, group, zeros, bias, attention, references):
    """gpt-oss has attention beside them in bf16."""
    def pack(n, k):
        return QuantLinear.from_linear(nn.Linear(k, n, bias=False), group, zeros, format).packed_weight

    def layer():
        own = {**a_layer(group, zeros, format=format), "w_router": torch.randn(4, 64), "w_gate": pack(4 * 32, 64),
               "w_up": pack(4 * 32, 64), "w_down": pack(4 * 64, 32)}
        if not attention:
            own |= {name: own[name].dense() for name in ("w_qkv", "w_o")}
        if bias:
            own |= {"b_gate": torch.randn(4, 32), "b_up": torch.randn(4, 32), "b_down": torch.randn(4, 64)}
        return own

    def dense(name, w):
        return w if isinstance(w, torch.Tensor) else w.dense() if name in ("w_qkv", "w_o") else w.dense().unflatten(
            0, (4, -1))

    weights = [layer() for _ in range(2)]
    options = dict(top_k=2, act="swiglu-oai" if bias else "silu", order="after", angles=torch.rand(20, 8).repeat(1, 2))
    x, lengths = torch.randn(2, 3, 64), torch.tensor([7, 5], dtype=torch.int32)
    results = []
    of_dense = [{n: dense(n, w) for n, w in one.items()} for one in weights]
    for own, by in ((weights, nullcontext()), (of_dense, nullcontext()), (weights, references())):
        torch.manual_seed(2)
        caches = [tuple(torch.randn(2, 12, 2, 16).transpose(1, 2) for _ in range(2)) for _ in range(2)]
        with by:
            y = fftune.ops.layer(x, own, caches, lengths, 4, 2, **options)
        results.append((y, *(t for pair in caches for t in pair)))
    assert all(map(close, *results[:2])) and all(map(close, results[2], results[1]))


def test_layers_whose_packed_weights_do_not_go_together():
    x, lengths = torch.randn(1, 1, 64), torch.tensor([3], dtype=torch.int32)
    caches = [tuple(torch.zeros(1, 8, 2, 16).transpose(1, 2) for _ in range(2))]

    def words(**changed):
        with pytest.raises(fftune.Error) as found:
            fftune.ops.layer(x, [{**a_layer(), **changed}], caches, lengths, 4, 2)
        return str(found.value)

    assert "w_o is not packed: packed weights are of w_qkv, w_o, w_gate" in words(
        w_o=torch.randn(64, 64))
    assert "w_gate has other groups than the first packed weight" in words(
        w_gate=a_layer(0)["w_gate"])
    assert "w_up of layer 0" in words(w_up=QuantLinear(64, 192, False, 32).packed_weight)


def test_experts_of_gpt_oss_from_their_checkpoint():
    """mxfp4 tensors of a checkpoint, rows of gate and up in turn, beside the dense experts."""
    safetensors = pytest.importorskip("safetensors.torch")
    packed, dense = {}, {}
    for name in ("gate_up", "down"):
        tensors = safetensors.load_file(FILES / f"mxfp4_gpt_oss_{name}.safetensors")
        dense[name] = tensors.pop("expected")
        found = {key.rpartition("_")[2]: tensor for key, tensor in tensors.items()}
        blocks, scales = found["blocks"].flatten(2), found["scales"]
        if name == "down":  # of other sizes than the file of gate and up
            continue
        for own, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
            packed[own] = fftune.ops.pack_weight(
                blocks[:, rows].flatten(0, 1).contiguous(), scales[:, rows].flatten(0, 1).contiguous(),
                group=32, format="mxfp4")
            dense[own] = dense[name][:, rows]
    experts, h, d = dense["gate"].shape
    down = torch.randn(experts * d, h) / h**0.5
    packed["down"] = QuantLinear.from_linear(_linear_of(down), format="mxfp4").packed_weight
    dense["down"] = packed["down"].dense().view(experts, d, h)
    x, biases = torch.randn(5, d), (torch.randn(experts, h), torch.randn(experts, h), torch.randn(experts, d))
    ids = torch.stack([torch.randperm(experts)[:1] for _ in range(5)])
    shares = torch.rand(5, 1)
    y = fftune.ops.moe_ffn(x, ids, shares, packed["gate"], packed["up"], packed["down"], biases=biases,
                           act="swiglu-oai")
    right = fftune.ops.moe_ffn(
        x, ids, shares, torch.cat((dense["gate"], dense["up"]), 1), None, dense["down"],
        biases=(torch.cat(biases[:2], 1), biases[2]), act="swiglu-oai")
    assert close(y, right)
    with pytest.raises(fftune.Error, match="w_up is torch.float32.*three packed weights"):
        fftune.ops.moe_ffn(x, ids, shares, packed["gate"], dense["up"], packed["down"])
    with pytest.raises(fftune.Error, match=r"give \[experts \* h, "):
        fftune.ops.moe_ffn(x, ids, shares, packed["down"], packed["up"], packed["gate"])


def _linear_of(weight):
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


@pytest.mark.parametrize("format", ("int4", "nvfp4"))
def test_a_head_with_a_packed_weight_chooses_as_with_the_dense_one(format):
    layer = QuantLinear.from_linear(nn.Linear(64, 50, bias=False), 32 if format == "int4" else 16, format=format)
    x, norm = torch.randn(7, 64), torch.rand(64) + 0.5
    packed = layer.packed_weight
    dense = packed.dense()
    ids, logit = fftune.ops.head(x, packed, norm)
    right, right_logit = fftune.ops.head(x, dense, norm)
    assert torch.equal(ids, right) and close(logit, right_logit)
    assert close(fftune.ops.head_logits(x, packed, norm), fftune.ops.head_logits(x, dense, norm))
    with pytest.raises(fftune.Error, match=r"head: w is a packed weight \[50, 64\]: give one of \[vocab, 32\]"):
        fftune.ops.head(x[:, :32], packed)


def test_an_mlp_with_packed_weights_computes_as_with_the_dense_ones():
    up, down = (QuantLinear.from_linear(nn.Linear(*sizes), 32).packed_weight for sizes in ((64, 96), (96, 64)))
    x, b_up, b_down = torch.randn(5, 64), torch.randn(96), torch.randn(64)
    y = fftune.ops.mlp(x, up, down, b_up, b_down)
    assert close(y, fftune.ops.mlp(x, up.dense(), down.dense(), b_up, b_down))
    with pytest.raises(fftune.Error, match="mlp: w_down is torch.float32.*give two packed weights"):
        fftune.ops.mlp(x, up, down.dense())
    with pytest.raises(fftune.Error, match=r"give \[h, d\] and \[d, h\]"):
        fftune.ops.mlp(x, up, up)
    with pytest.raises(fftune.Error, match="no gradients"):
        fftune.ops.mlp(x.requires_grad_(), up, down)


@pytest.mark.parametrize("seed", range(24))
@torch.no_grad()
def test_random_packed_weights_come_back_and_compute_what_they_say(seed):
    """Sizes are no multiples of tiles, and groups end in the middle of one."""
    draw = torch.Generator().manual_seed(seed)
    below = lambda most: int(torch.randint(most, (), generator=draw))
    format = ("int4", "int4", "mxfp4", "fp8", "int8", "nvfp4")[seed % 6]
    only = {"mxfp4": 32, "nvfp4": 16}.get(format)
    group = only or (128, 64, 32, 0)[below(4)]
    n, k = 1 + below(80), (group or 1) * (1 + below(6 if group else 200))
    groups = k // group if group else 1
    wide = format in ("fp8", "int8")
    codes = torch.randint(256, (n, k if wide else (k + 1) // 2), dtype=torch.uint8, generator=draw)
    if format == "fp8":
        codes[(codes & 127) == 127] = 0
    if not wide and k % 2:
        codes[:, -1] &= 15
    zero = torch.randint(16, (n, groups), dtype=torch.uint8, generator=draw) if seed % 12 == 1 else None
    scale = torch.rand(n, groups, generator=draw) + 0.5
    if format == "mxfp4":
        scale = torch.randint(120, 130, (n, groups), dtype=torch.uint8, generator=draw)
    elif format == "nvfp4":
        scale = (torch.randint(1, 126, (n, groups), dtype=torch.uint8, generator=draw).view(torch.float8_e4m3fn),
                 torch.rand(n, generator=draw) + 0.5)
    packed = fftune.ops.pack_weight(codes, scale, zero, k=k, group=group, format=format)
    back = packed.unpack()
    given = (codes, scale, zero)
    bytes_of = lambda t: t.contiguous().view(torch.uint8) if isinstance(t, torch.Tensor) else t
    for ours, theirs in zip(back, given):
        for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (ours, theirs))):
            assert a is b or torch.equal(bytes_of(a), bytes_of(b)), (format, n, k, group)
    x = torch.randn(3, k, generator=draw)
    assert close(fftune.ops.linear(x, packed), x.double() @ packed.dense().double().T, 1e-5), (format, n, k, group)
