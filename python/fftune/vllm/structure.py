"""The parts of a model of vLLM: the classes, options and tensors for which fftune's ops compute the
same as its layers, and the caches of its attention as the ops take them."""
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor, nn

from .._layer_form import Choice
from ..distributed import Group
from ..ops import PackedWeight
from . import linear_cores
from .deployment import offloads_weights, returns_routed_experts
from .logs import Unfit
from .networks import fuse
from .products import PACKED, Halves

_MODELS = "vllm.model_executor.models."
@dataclass(frozen=True)
class _Known:
    """The classes of a decoder layer, of its attention and of its network, and the names of its parts."""

    layer: str
    attention: str
    networks: tuple[str, ...]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # before attention and the network
    behind: tuple[str, ...] = ()  # norms of what both add
    norm: str = "RMSNorm"
    home: str = "self_attn"
    delta: str = ""  # the class of linear attention in the place of attention, where layers have that: linear_attn


_GEMMA = dict(norms=("input_layernorm", "pre_feedforward_layernorm"), norm="GemmaRMSNorm",
              behind=("post_attention_layernorm", "post_feedforward_layernorm"))
_QWEN3_NEXT = dict(attention="qwen3_next.Qwen3NextAttention", norm="GemmaRMSNorm",
                   networks=("qwen2_moe.Qwen2MoeMLP", "qwen3_next.Qwen3NextSparseMoeBlock"),
                   delta="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention")
# By the class of the model.
_CLASSES = {
    "LlamaModel": _Known("llama.LlamaDecoderLayer", "llama.LlamaAttention", ("llama.LlamaMLP",)),
    "MistralModel": _Known("mistral.MistralDecoderLayer", "mistral.MistralAttention", ("llama.LlamaMLP",)),
    "Qwen2Model": _Known("qwen2.Qwen2DecoderLayer", "qwen2.Qwen2Attention", ("qwen2.Qwen2MLP",)),
    "Qwen3Model": _Known("qwen3.Qwen3DecoderLayer", "qwen3.Qwen3Attention", ("qwen2.Qwen2MLP",)),
    "Qwen3MoeModel": _Known("qwen3_moe.Qwen3MoeDecoderLayer", "qwen3_moe.Qwen3MoeAttention",
                            ("qwen3_moe.Qwen3MoeMLP", "qwen3_moe.Qwen3MoeSparseMoeBlock")),
    "GptOssModel": _Known("gpt_oss.TransformerBlock", "gpt_oss.OAIAttention", ("gpt_oss.MLPBlock",), home="attn"),
    "Gemma2Model": _Known("gemma2.Gemma2DecoderLayer", "gemma2.Gemma2Attention", ("gemma2.Gemma2MLP",), **_GEMMA),
    "Gemma3Model": _Known("gemma3.Gemma3DecoderLayer", "gemma3.Gemma3Attention", ("gemma3.Gemma3MLP",), **_GEMMA),
    "Qwen3NextModel": _Known("qwen3_next.Qwen3NextDecoderLayer", **_QWEN3_NEXT),
    "Qwen3_5Model": _Known("qwen3_5.Qwen3_5DecoderLayer", **_QWEN3_NEXT),
}
# The names of routers, by the class of a mixture.
_MIXTURES = {"Qwen3MoeSparseMoeBlock": "gate", "MLPBlock": "router", "Qwen3NextSparseMoeBlock": "gate"}
# Rotary embeddings that differ only in their table. The positions of text are the same on all axes of the last one.
_ROTARY = ("RotaryEmbedding", "LinearScalingRotaryEmbedding", "DynamicNTKScalingRotaryEmbedding",
           "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding", "MRotaryEmbedding")
_DTYPE = torch.bfloat16
# vLLM's words for caches of float8_e4m3fn, which it keeps as bytes, and for those of the model's type.
E4M3 = torch.float8_e4m3fn
_FLOAT8, _PLAIN = ("fp8", "fp8_e4m3"), ("auto", "bfloat16")


@dataclass
class Experts:
    """A mixture that the op `layer` computes: a softmax of all logits, or of the chosen ones, and the best experts'
    networks."""

    gate: nn.Module
    # w13_weight [experts, 2h, d], per expert gate rows first, or gate and up in turn, and w2_weight [experts, d, h]; or
    # packed weights
    routed: nn.Module
    top_k: int
    renormalise: bool
    act: str
    order: str
    shared: nn.Module | None = None  # a network beside the experts, for every token, with a gate for all of it

    @property
    def packed(self):
        return getattr(self.routed, PACKED, None)

    @property
    def packing(self) -> str:
        return "interleaved" if self.act == "swiglu-oai" else "halves"

    @property
    def biases(self) -> tuple[Tensor, ...] | None:
        """Those of gate and up, in the order of the weights, and of down."""
        if self.packed is not None:
            return None if self.packed.biases is None else tuple(self.packed.biases)
        own = getattr(self.routed, "w13_bias", None)
        return None if own is None else (own.data, self.routed.w2_bias.data)

    def weights(self) -> dict[str, Tensor | PackedWeight | None]:
        found = dict(w_router=self.gate.weight.data, b_router=None if self.gate.bias is None else self.gate.bias.data)
        if self.shared is not None:
            gate, up = self.shared.gate_up_proj.weight.data.chunk(2)
            found |= dict(w_shared_router=self.shared.expert_gate.weight.data, w_shared_gate=gate, w_shared_up=up,
                          w_shared_down=self.shared.down_proj.weight.data)
        if self.packed is not None:
            return found | dict(zip(("w_gate", "w_up", "w_down"), self.packed.weights)) | dict(
                zip(("b_gate", "b_up", "b_down"), self.biases or ()))
        return found | dict(w_gate_up=self.routed.w13_weight.data, w_down=self.routed.w2_weight.data) | dict(
            zip(("b_gate_up", "b_down"), self.biases or ()))

    def options(self) -> dict:
        return dict(top_k=self.top_k, renormalise=self.renormalise, packing=self.packing, order=self.order, act=self.act)


@dataclass
class Block:
    """A decoder layer but for its attention: its modules, and options of the ops. Weights are looked up at each use:
    vLLM may load others."""

    name: str  # of its attention, in vLLM's metadata
    attention: nn.Module  # vLLM's Attention, which has the cache, or its linear attention, which has the states
    out: nn.Module
    attn_norm: nn.Module
    ffn_norm: nn.Module
    behind: tuple[nn.Module, nn.Module] | None  # norms of what attention and the network add
    gate_up: nn.Module | None
    down: nn.Module | None
    mixture: Callable[[Tensor], Tensor] | None  # vLLM's block
    experts: Experts | None  # what is known of it
    act: str  # of the network
    convention: str  # of the norms

    # Those of layers without keys and values.
    window, sinks, cache_scales = 0, None, None

    @property
    def w_o(self) -> Tensor | PackedWeight:
        return _weight_of(self.out)

    @property
    def _gate_and_up(self) -> tuple[Tensor, Tensor] | Halves:
        return getattr(self.gate_up, PACKED, None) or self.gate_up.weight.data.chunk(2)

    @property
    def w_gate(self) -> Tensor | PackedWeight:
        return self._gate_and_up[0]

    @property
    def w_up(self) -> Tensor | PackedWeight:
        return self._gate_and_up[1]

    @property
    def w_down(self) -> Tensor | PackedWeight:
        return _weight_of(self.down)

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        return self.attn_norm, self.ffn_norm, *(self.behind or ())

    @property
    def packable(self) -> tuple[nn.Module | None, ...]:
        """Modules whose weights may be packed."""
        return self.out, self.gate_up, self.down, self.experts and self.experts.routed

    def network_weights(self) -> dict[str, Tensor | PackedWeight | None]:
        found = dict(attn_norm=self.attn_norm.weight.data, ffn_norm=self.ffn_norm.weight.data)
        if self.behind is not None:
            found |= dict(zip(("attn_post_norm", "ffn_post_norm"), (norm.weight.data for norm in self.behind)))
        return found | (dict(w_gate=self.w_gate, w_up=self.w_up, w_down=self.w_down) if self.mixture is None else
                        self.experts.weights())

    @property
    def is_one_op(self) -> bool:
        """Whether the op `layer` computes it: its network, or a mixture that is known, and norms of one epsilon."""
        return (self.mixture is None or self.experts is not None) and len(
            {norm.variance_epsilon for norm in self.norms}) == 1


@dataclass(kw_only=True)
class Layer(Block):
    """One with attention. Sinks are in float32, as the ops read them: see Model.refresh()."""

    qkv: nn.Module
    head_norm_modules: tuple[nn.Module, nn.Module] | None
    gated: bool  # behind the rows of each head of q are those of its gate
    heads: int
    kv_heads: int
    dim: int
    scale: float
    angles: Tensor
    rope_scale: float
    rotary: int
    rotation: str
    window: int
    softcap: float
    sinks: Tensor | None

    @property
    def w_qkv(self) -> Tensor | PackedWeight:
        return _weight_of(self.qkv)

    @property
    def b_qkv(self) -> Tensor | None:
        return None if self.qkv.bias is None else self.qkv.bias.data

    @property
    def b_o(self) -> Tensor | None:
        """The bias on the first rank, None on others: the ranks' products are summed."""
        return None if self.out.bias is None or self.out.tp_rank > 0 else self.out.bias.data

    @property
    def cache_scales(self) -> tuple[Tensor, Tensor] | None:
        """The scales of keys and values of float8_e4m3fn, float32 [1] or [kv heads]; None for a cache of bfloat16.
        vLLM may exchange the tensors until it has loaded a checkpoint."""
        own = self.attention
        return None if own.kv_cache_dtype in _PLAIN else (own._k_scale.reshape(-1), own._v_scale.reshape(-1))

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        return self.head_norm_modules and tuple(n.weight.data for n in self.head_norm_modules)

    @property
    def head_eps(self) -> float:
        return self.head_norm_modules[0].variance_epsilon if self.head_norm_modules else 1e-6

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        return *super().norms, *(self.head_norm_modules or ())

    @property
    def packable(self) -> tuple[nn.Module | None, ...]:
        return self.qkv, *super().packable

    @functools.cached_property
    def _no_bias(self) -> Tensor | None:
        return None if self.out.bias is None else torch.zeros_like(self.out.bias.data)

    def weights(self) -> dict[str, Tensor | PackedWeight]:
        """As the op `layer` calls them: all ranks have the same names."""
        q_norm, k_norm = self.head_norms or (None, None)
        k_scale, v_scale = self.cache_scales or (None, None)
        found = dict(b_qkv=self.b_qkv, q_norm=q_norm, k_norm=k_norm, k_scale=k_scale, v_scale=v_scale, sinks=self.sinks,
                     w_o=self.w_o, b_o=self._no_bias if self.b_o is None else self.b_o) | self.network_weights()
        if self.gated:
            sizes = [2 * self.heads * self.dim] + [self.kv_heads * self.dim] * 2
            found |= dict(zip(("w_q", "w_k", "w_v"), self.w_qkv.split(sizes)))
        else:
            found["w_qkv"] = self.w_qkv
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def options(self) -> dict:
        """Those of the op `layer`, which takes them once for all layers of a call."""
        of_network = self.experts.options() if self.experts else dict(act=self.act)
        return dict(heads=self.heads, kv_heads=self.kv_heads, angles=self.angles, eps=self.attn_norm.variance_epsilon,
                    scale=self.scale, rope_scale=self.rope_scale, rotation=self.rotation, convention=self.convention,
                    window=self.window, softcap=self.softcap, gated_rows=self.gated, **of_network)


@dataclass(kw_only=True)
class DeltaLayer(Block):
    """One with the gated delta rule in the place of attention."""

    core: linear_cores.Layer

    @property
    def packable(self) -> tuple[nn.Module | None, ...]:
        return self.attention.in_proj_qkvz, self.attention.in_proj_ba, *super().packable

    def states_of(self) -> linear_cores.States:
        """The views of vLLM's caches of states."""
        inputs, states = self.attention.kv_cache
        return linear_cores.states_of(self.core, inputs.data, states.data)

    def weights(self) -> dict[str, Tensor]:
        """As the op `layer` calls them."""
        own = self.attention
        qkvz, ba = own.in_proj_qkvz.weight.data, own.in_proj_ba.weight.data
        found = dict(w_conv=self.core.taps, A_log=self.core.wide["A_log"].detach(),
                     dt_bias=self.core.wide["dt_bias"].detach(), mixer_norm=own.norm.weight.data, w_o=self.w_o)
        if own.gqa_interleaved_layout:
            found |= dict(w_qkvz=qkvz, w_ba=ba)
        else:
            channels = self.core.channels
            found |= dict(w_qkv=qkvz[:channels], w_z=qkvz[channels:]) | dict(zip(("w_b", "w_a"), ba.chunk(2)))
        found |= self.network_weights()
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def options(self) -> dict:
        """Those of delta_layers(), which takes them once for all layers of a call."""
        own, choice = self.attention, None
        if self.experts is not None:
            choice = Choice(self.experts.gate.weight.shape[0], self.experts.top_k, order=self.experts.order,
                            renormalise=self.experts.renormalise, packing=self.experts.packing)
        return dict(heads=own.num_k_heads // own.tp_size, v_heads=own.num_v_heads // own.tp_size, act=self.act,
                    convention=self.convention, eps=self.attn_norm.variance_epsilon, mixer_eps=own.norm.eps,
                    null_index=linear_cores.NULL, state_layout="vk", choice=choice)


@dataclass
class Model:
    layers: list[Layer | DeltaLayer]
    reduce: Callable[[Tensor], Tensor] | None  # vLLM's all-reduce under tensor parallelism
    group: Group | None = None  # of the ranks of tensor parallelism, where their devices make one

    def refresh(self) -> None:
        """Takes over sinks and parameters of states, which vLLM may have loaded again."""
        found = [(layer.sinks, layer.attention.impl.sinks.data) for layer in self.layers if layer.sinks is not None]
        for layer in self.layers:
            if isinstance(layer, DeltaLayer):
                found += layer.core.loaded()
        if found:
            torch._foreach_copy_(*map(list, zip(*found)))

    @functools.cached_property
    def is_packed(self) -> bool:
        """Whether the layers have weights of 4 or 8 bits: the op `layer` runs them, and no other."""
        return any(getattr(module, PACKED, None) is not None for layer in self.layers for module in layer.packable)

    @functools.cached_property
    def has_states(self) -> bool:
        """Whether layers have states in the place of keys and values: a step changes what it reads."""
        return any(isinstance(layer, DeltaLayer) for layer in self.layers)

    @functools.cached_property
    def first_attention(self) -> Layer:
        return next(layer for layer in self.layers if isinstance(layer, Layer))

    @functools.cached_property
    def is_one_op(self) -> bool:
        """Whether the op `layer` computes every layer."""
        return all(layer.is_one_op for layer in self.layers)

    @functools.cached_property
    def has_ops(self) -> bool:
        """Whether single ops compute the layers."""
        return not self.is_packed and not self.has_states and all(
            layer.behind is None and layer.convention == "llama" and not layer.gated for layer in self.layers)

    @functools.cached_property
    def has_float8_cache(self) -> bool:
        """Whether a layer's keys and values are float8_e4m3fn."""
        return any(layer.cache_scales is not None for layer in self.layers)

    @functools.cached_property
    def runs(self) -> list[range]:
        """Layers that follow each other and have one kind: a call of `layer` each, if their caches are of one group."""
        def kind(place: int) -> tuple:
            layer = self.layers[place]
            options = layer.options()
            return type(layer), id(options.pop("angles", None)), tuple(options.items()), tuple(layer.weights())

        return [range(own[0], own[-1] + 1) for own in (list(places) for _, places in itertools.groupby(
            range(len(self.layers)), kind))]


_LEAST_PAGE, _MOST_PAGE = 16, 256  # tokens; powers of two


@dataclass
class Pages:
    """Keys and values of one layer as the ops take them, without a copy.

    vLLM 0.24 keeps [blocks, 2, block, kv heads, features], of each block the keys, then the values.
    That is a cache of 2 * blocks blocks, in which the values are those of the keys' next block.
    vLLM 0.33 keeps [blocks, block, kv heads, 2 * features], of each head the keys, then the values.
    Beside layers with states blocks have as many tokens as a state has room for: they are several pages.
    """

    rows: tuple[Tensor, Tensor]   # [rows, kv heads, features], for qkv
    pages: tuple[Tensor, Tensor]  # [pages, page, kv heads, features], for attention
    block: int
    page: int
    apart: bool  # the values of a block are a block of their own: heads have no gaps between them

    def slots(self, slots: Tensor) -> Tensor:
        """vLLM's slots as rows; those of padded tokens stay negative."""
        if not self.apart:
            return slots
        return slots + torch.div(slots, self.block, rounding_mode="floor") * self.block

    def table(self, blocks: Tensor) -> Tensor:
        """vLLM's blocks of each sequence as pages."""
        several, blocks = self.block // self.page, blocks * 2 if self.apart else blocks
        if several == 1:
            return blocks
        within = torch.arange(several, dtype=blocks.dtype, device=blocks.device)
        return (blocks[:, :, None] * several + within).flatten(1)


def pages_of(cache: Tensor, kv_heads: int, dim: int, dtype: torch.dtype = _DTYPE) -> Pages:
    """The views of a layer's cache of this type. Unfit if it lies in memory in another way."""
    if dtype is E4M3 and cache.dtype is torch.uint8:
        cache = cache.view(E4M3)
    shape = tuple(cache.shape)
    apart = cache.dim() == 5
    # Both have the tokens of a block in the same place.
    if len(shape) < 4 or shape != ((shape[0], 2, shape[2], kv_heads, dim) if apart else
                                   (shape[0], kv_heads, shape[2], 2 * dim)):
        raise Unfit(f"a cache of {list(shape)}")
    if cache.dtype is not dtype:
        raise Unfit(f"a cache of {cache.dtype}")
    memory = cache if apart else cache.transpose(1, 2)  # in the order of the memory
    if not memory.is_contiguous():
        raise Unfit("a cache that is not contiguous, or has the heads of a block before its tokens")
    block = shape[2]
    if block % _LEAST_PAGE:
        raise Unfit(f"blocks of {block} tokens")
    page = math.gcd(block, _MOST_PAGE)
    if not apart:
        both = memory.view(-1, page, kv_heads, 2 * dim)
        return Pages(memory.flatten(0, 1).split(dim, -1), both.split(dim, -1), block, page, apart)
    rows, pages, several = cache.view(-1, kv_heads, dim), cache.view(-1, page, kv_heads, dim), block // page
    return Pages((rows[:-block], rows[block:]), (pages[:-several], pages[several:]), block, page, apart)


def expect_known(model: nn.Module) -> Model:
    """The description of a model that the ops can run. Unfit if they cannot."""
    config = model.vllm_config
    _expect_deployment(config)
    if model.start_layer != 0 or model.end_layer != len(model.layers):
        raise Unfit("it has a part of the layers")
    known = _CLASSES[type(model).__name__]
    _expect_norm(model.norm, known.norm)
    tables: dict = {}
    layers = [_delta_layer_of(known, layer, config) if known.delta and layer.layer_type == "linear_attention" else
              _layer_of(known, layer, config, tables) for layer in model.layers]
    if any(layer.mixture is not None and layer.experts is None for layer in layers):
        for layer in layers:  # vLLM counts the blocks that ran
            layer.experts = None
    reduce = None
    if layers[0].out.tp_size > 1:
        from vllm.distributed import tensor_model_parallel_all_reduce as reduce
    found = Model(layers, reduce)
    if known.delta:
        _expect_states(model, found)
    elif found.is_packed:
        _expect_packed(model, found)
    elif not (found.is_one_op or found.has_ops):
        raise Unfit("norms behind attention and the network, in layers that no one op computes")
    return found


def _expect_states(model: nn.Module, found: Model) -> None:
    """That the op `layer` computes these layers, some with states."""
    for is_so, reason in (
            (not any(isinstance(layer, Layer) for layer in found.layers), "layers without attention"),
            (found.reduce is not None, "tensor parallelism of layers with gates or states"),
            (model.vllm_config.lora_config is not None, "LoRA in layers with gates or states"),
            (found.is_packed, "quantised weights of layers with gates or states"),
            (not found.is_one_op, "layers with states that no one op computes")):
        if is_so:
            raise Unfit(reason)


def _expect_packed(model: nn.Module, found: Model) -> None:
    """Packs the weights of networks as `layer` takes them."""
    if not found.is_one_op:
        raise Unfit("quantised weights of layers that no one op computes")
    if found.reduce is not None:
        raise Unfit("quantised weights under tensor parallelism")
    if model.vllm_config.lora_config is not None:
        raise Unfit("quantised weights with LoRA")
    for layer, own in zip(model.layers, found.layers):
        if own.mixture is None:
            fuse(layer.mlp, own.act, model.vllm_config.scheduler_config.max_num_batched_tokens)


def _expect_deployment(config) -> None:
    parallel, compilation = config.parallel_config, config.compilation_config
    mode = compilation.cudagraph_mode
    for is_so, reason in (
            # A graph of such a batch serves others, whose sequences have different numbers of tokens.
            (any(getattr(config.speculative_config, name, None) for name in (
                "enable_adaptive_verification", "num_speculative_tokens_per_batch_size")),
             "verification of an adaptive number of drafts"),
            (config.kv_transfer_config is not None, "a KV connector"),
            (config.model_config.dtype is not _DTYPE, f"elements of {config.model_config.dtype}"),
            (parallel.pipeline_parallel_size > 1, "pipeline parallelism"),
            (parallel.data_parallel_size > 1, "data parallelism"),
            (parallel.decode_context_parallel_size > 1, "context parallelism"),
            (parallel.prefill_context_parallel_size > 1, "context parallelism"),
            (parallel.enable_dbo or getattr(parallel, "use_ubatching", False), "batches that overlap"),
            (offloads_weights(config), "weights that are offloaded"),
            # 0.33 has no such pass.
            (bool(getattr(compilation.pass_config, "enable_sp", False)), "sequence parallelism"),
            # Compiled pieces in their graphs start faster than ops one by one.
            (bool(mode) and mode.decode_mode().name != "FULL",
             "CUDA graphs of pieces only: cudagraph_mode has no FULL for decoding")):
        if is_so:
            raise Unfit(reason)


def queries_of(config) -> int:
    """Tokens of each sequence in a batch of pure decoding: the new one, and drafts that it verifies."""
    return 1 + (getattr(config.speculative_config, "num_speculative_tokens", None) or 0)


def _base_of(linear: nn.Module) -> nn.Module:
    """The layer below vLLM's layer for LoRA adapters; the layer itself if it is none."""
    return linear.base_layer if type(linear).__name__.endswith("WithLoRA") else linear


def has_adapters(model: nn.Module) -> bool:
    """Whether sequences of this batch have LoRA adapters."""
    if model.vllm_config.lora_config is None:
        return False
    linear = getattr(model.layers[0], _CLASSES[type(model).__name__].home).qkv_proj
    return type(linear).__name__.endswith("WithLoRA") and not bool(
        linear.punica_wrapper.token_mapping_meta.no_lora_flag_cpu[0])


def _expect_class(module: nn.Module, *names: str) -> None:
    cls = type(module)
    if f"{cls.__module__}.{cls.__name__}" not in [_MODELS + name for name in names]:
        raise Unfit(f"{cls.__name__} is not known")


def _expect_norm(norm: nn.Module, name: str) -> None:
    if type(norm).__name__ != name or name == "RMSNorm" and (norm.variance_size_override is not None
                                                             or not norm.has_weight):
        raise Unfit(f"{type(norm).__name__} is not known")
    _expect_tensor("a norm", norm.weight)


def _expect_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype is not _DTYPE or not tensor.is_contiguous():
        raise Unfit(f"{name} of {tensor.dtype}, or that is not contiguous")


def _weight_of(linear: nn.Module) -> Tensor | PackedWeight:
    return getattr(linear, PACKED, None) or linear.weight.data


def _expect_linear(linear: nn.Module, name: str, rows: int | None = None, is_reduced: bool = True) -> None:
    packed = getattr(linear, PACKED, None)
    method = type(linear.quant_method).__name__
    if type(linear).__name__ != name or linear.skip_bias_add:
        raise Unfit(f"{type(linear).__name__} with {method}")
    if packed is None and method != "UnquantizedLinearMethod":
        raise Unfit(f"quantised weights, {type(linear).__name__} with {method}")
    if name == "RowParallelLinear" and is_reduced and not (linear.reduce_results and linear.input_is_parallel):
        raise Unfit("a row-parallel product that is not reduced")
    if packed is None:
        _expect_tensor("weights", linear.weight)
    shape = [packed.n, packed.k] if packed else list(linear.weight.shape)
    if len(shape) != 2 or rows is not None and shape[0] != rows:
        raise Unfit(f"weights of {shape}")
    if linear.bias is not None:
        _expect_tensor("a bias", linear.bias)


def _expect_plain(layer: nn.Module) -> None:
    """That nothing is to run before, behind or in the place of the forward of a module that the ops replace."""
    for name, module in layer.named_modules():
        if "forward" in vars(module) or any(getattr(module, f"_forward{kind}_hooks") for kind in ("", "_pre")):
            raise Unfit(f"{name or type(layer).__name__} has hooks, or a forward of its own")


def _expect_layer(known: _Known, layer: nn.Module) -> None:
    """That the layer's class and its parts beside attention are known."""
    _expect_class(layer, known.layer)
    _expect_plain(layer)
    _expect_class(layer.mlp, *known.networks)
    for name, reason in (("layer_scale", "factors of what a layer adds"),
                         ("use_attn_reduce_scatter_for_moe", "sequence parallelism")):
        if getattr(layer, name, False):
            raise Unfit(reason)


def _network_of(network: nn.Module, out: nn.Module, config) -> dict:
    """The network's fields of a Block. `out`: the product in front of it."""
    mixture = network if type(network).__name__ in _MIXTURES else None
    gate_up = down = experts = None
    act = "silu"
    if mixture is None:
        gate_up, down = _base_of(network.gate_up_proj), _base_of(network.down_proj)
        _expect_linear(gate_up, "MergedColumnParallelLinear")
        _expect_linear(down, "RowParallelLinear")
        if gate_up.bias is not None or down.bias is not None:
            raise Unfit("biases of the network")
        act = _activation_of(network)
    elif mixture.is_sequence_parallel:
        raise Unfit("sequence parallelism")
    if mixture is not None and out.tp_size == 1 and not returns_routed_experts(config):
        experts = _experts_of(mixture)
    return dict(gate_up=gate_up, down=down, mixture=mixture, experts=experts, act=act)


def _norms_of(known: _Known, layer: nn.Module, *others: nn.Module) -> dict:
    before, behind = ([getattr(layer, name) for name in names] for names in (known.norms, known.behind))
    for norm in (*before, *behind, *others):
        _expect_norm(norm, known.norm)
    return dict(zip(("attn_norm", "ffn_norm"), before), behind=tuple(behind) or None,
                convention="gemma" if known.norm == "GemmaRMSNorm" else "llama")


def _delta_layer_of(known: _Known, layer: nn.Module, config) -> DeltaLayer:
    _expect_layer(known, layer)
    own = layer.linear_attn
    if f"{type(own).__module__}.{type(own).__name__}" != known.delta:
        raise Unfit(f"{type(own).__name__} is not known")
    core = linear_cores.GatedDeltaNet().layer_of(own)
    v_heads, v_dim, _ = core.state
    grouped = own.gqa_interleaved_layout
    _expect_linear(own.in_proj_qkvz, "MergedColumnParallelLinear", core.channels + v_heads * v_dim)
    _expect_linear(own.in_proj_ba, "MergedColumnParallelLinear", 2 * v_heads)
    _expect_linear(own.out_proj, "RowParallelLinear")
    norm = own.norm
    if type(norm).__name__ != "RMSNormGated" or norm.activation not in ("silu", "swish") or not norm.norm_before_gate \
            or norm.group_size is not None or norm.bias is not None or norm.weight.shape != (v_dim,):
        raise Unfit(f"{type(norm).__name__} with {getattr(norm, 'activation', 'another activation')} is not known")
    _expect_tensor("a norm", norm.weight)
    if any(module.bias is not None for module in (own.in_proj_qkvz, own.in_proj_ba, own.out_proj, own.conv1d)):
        raise Unfit(f"biases of {type(own).__name__}")
    if grouped not in (True, False):
        raise Unfit(f"projections in the order {grouped}")
    return DeltaLayer(name=own.prefix, attention=own, out=own.out_proj, core=core, **_norms_of(known, layer),
                      **_network_of(layer.mlp, own.out_proj, config))


def _layer_of(known: _Known, layer: nn.Module, config, tables: dict) -> Layer:
    _expect_layer(known, layer)
    own = getattr(layer, known.home)
    _expect_class(own, known.attention)
    if getattr(layer, "ada_rms_norm_t_cond", None) is not None:
        raise Unfit("a norm with a condition")
    if getattr(own, "do_llama_4_scaling", False):
        raise Unfit("queries that are scaled by position")
    if getattr(own, "dual_chunk_attention_config", None) is not None:
        raise Unfit("attention in two chunks")
    # gpt-oss has those of all ranks, too.
    heads, kv_heads = (getattr(own, name, None) or getattr(own, other) for name, other in (
        ("num_local_attention_heads", "num_heads"), ("num_local_key_value_heads", "num_kv_heads")))
    dim, impl = own.head_dim, own.attn.impl
    _expect_attention(own.attn, heads, kv_heads, dim)
    qkv, out = _base_of(own.qkv_proj), _base_of(own.o_proj)
    gated = bool(known.delta and own.attn_output_gate)
    _expect_linear(qkv, "QKVParallelLinear", ((1 + gated) * heads + 2 * kv_heads) * dim)
    _expect_linear(out, "RowParallelLinear")
    if gated and qkv.bias is not None:
        raise Unfit("biases of q, k and v beside gates")
    head_norms = None
    if getattr(own, "q_norm", None) is not None:
        head_norms = own.q_norm, own.k_norm
        if own.q_norm.variance_epsilon != own.k_norm.variance_epsilon:
            raise Unfit("norms of heads with two epsilons")
    norms, of_network = _norms_of(known, layer, *(head_norms or ())), _network_of(layer.mlp, out, config)
    rotary = own.rotary_emb
    if type(rotary).__name__ == "MRotaryEmbedding":
        _expect_text(config.model_config)
    if id(rotary) not in tables:
        tables[id(rotary)] = _angles_of(rotary, config.model_config.max_model_len)
    angles, rope_scale = tables[id(rotary)]
    return Layer(name=own.attn.layer_name, attention=own.attn, qkv=qkv, out=out, head_norm_modules=head_norms,
                 gated=gated, heads=heads, kv_heads=kv_heads, dim=dim, scale=_scale_of(impl.scale, dim), angles=angles,
                 rope_scale=rope_scale, rotary=rotary.rotary_dim,
                 rotation="halves" if rotary.is_neox_style else "interleaved", window=own.attn.sliding_window or 0,
                 softcap=float(impl.logits_soft_cap or 0),
                 sinks=None if impl.sinks is None else impl.sinks.data.float().clone(), **norms, **of_network)


def _expect_text(config) -> None:
    """That tokens have one position: those of images have one for each axis."""
    multimodal = getattr(config, "multimodal_config", None)
    if multimodal is not None and not getattr(multimodal, "language_model_only", False):
        raise Unfit("positions of images: --language-model-only has none")


def _activation_of(network: nn.Module) -> str:
    act = network.act_fn
    found = {"SiluAndMul": "silu", "GeluAndMul": {"tanh": "gelu-tanh", "none": "gelu"}.get(getattr(act, "approximate", ""))
             }.get(type(act).__name__)
    if found is None or getattr(network, "expert_gate", None) is not None:
        raise Unfit("a network that is not known")
    return found


def _experts_of(mixture: nn.Module) -> Experts | None:
    """The mixture as the op `layer` computes it; None if it is another. Its experts have to be packed, or those in
    the place of TritonExperts, which keep the checkpoint's order of the weights."""
    try:
        name = _MIXTURES[type(mixture).__name__]
        gate, runner = getattr(mixture, name), mixture.experts
        router, routed = runner.router, runner.routed_experts
        _expect_router(gate)
        of_gpt_oss = name == "router"  # it computes the logits, and its experts have biases
        shared = _shared_of(mixture, runner.shared_experts)
        is_known = (
            runner.gate is (None if of_gpt_oss else gate)
            and (gate.bias is not None) == of_gpt_oss
            and type(router).__name__ == "FusedTopKRouter" and router.scoring_func == "softmax"
            and router.eplb_state is None and getattr(router, "capture_fn", None) is None and routed.expert_map is None
            and routed.activation.value == ("swigluoai" if of_gpt_oss else "silu")
            and not routed.apply_router_weight_on_input and (router.renormalize or not of_gpt_oss)
            and getattr(routed, "swiglu_limit", None) is None)
        count, d = gate.weight.shape
        packed = getattr(routed, PACKED, None)
        if packed is not None:
            is_known = is_known and (packed.biases is not None) == of_gpt_oss and packed.sizes[::2] == (count, d)
        else:
            tensors = [routed.w13_weight, routed.w2_weight, *(
                [routed.w13_bias, routed.w2_bias] if of_gpt_oss else ())]
            for tensor in tensors:
                _expect_tensor("experts", tensor)
            h = tensors[1].shape[-1]
            is_known = (is_known and type(routed.quant_method).__name__ == "UnquantizedFusedMoEMethod"
                        and routed.quant_method.experts_cls.__name__ == "FFTuneExperts"
                        and (of_gpt_oss or getattr(routed, "w13_bias", None) is None)
                        and [tensor.shape for tensor in tensors] == [(count, 2 * h, d), (count, d, h), (count, 2 * h),
                                                                     (count, d)][:len(tensors)])
    except (AttributeError, Unfit):  # another version, or another kind of mixture
        return None
    if not is_known:
        return None
    # A softmax of the chosen logits is that of all of them whose best ones add up to 1.
    return Experts(gate, routed, router.top_k, router.renormalize and not of_gpt_oss,
                   *(("swiglu-oai", "after") if of_gpt_oss else ("silu", "before")), shared)


def _shared_of(mixture: nn.Module, of_runner: nn.Module | None) -> nn.Module | None:
    """The network beside the experts, which vLLM's runner adds; Unfit if the op `layer` does not compute it."""
    shared = getattr(mixture, "shared_expert", None)
    if of_runner is None and shared is None:
        return None
    # The runner has it in an object that chooses its stream.
    of_runner = getattr(of_runner, "_layer", of_runner)
    if shared is None or shared is not of_runner or type(shared).__name__ != "Qwen2MoeMLP":
        raise Unfit("a network beside the experts that is not known")
    if any(getattr(mixture, name, False) for name in ("replicate_shared_expert", "is_fused_shared_expert_enabled")):
        raise Unfit("a network beside the experts that is fused, or on all ranks")
    gate = shared.expert_gate
    for linear, name, rows in ((shared.gate_up_proj, "MergedColumnParallelLinear", None),
                               (shared.down_proj, "RowParallelLinear", None), (gate, "ReplicatedLinear", 1)):
        if getattr(linear, PACKED, None) is not None or linear.bias is not None:
            raise Unfit("a network beside the experts with packed weights or biases")
        _expect_linear(linear, name, rows, is_reduced=name != "RowParallelLinear")
    if type(shared.act_fn).__name__ != "SiluAndMul":
        raise Unfit("another activation beside the experts")
    return shared


def _expect_router(gate: nn.Module) -> None:
    """0.33 has a class of its own for routers: logits of the model's element type are those of a plain product."""
    is_gate = type(gate).__name__ == "GateLinear"
    if is_gate and gate.out_dtype not in (None, _DTYPE):
        raise Unfit(f"a router with logits of {gate.out_dtype}")
    _expect_linear(gate, "GateLinear" if is_gate else "ReplicatedLinear")


def _scale_of(scale: float, dim: int) -> float:
    """The factor of scores; 0 where it is the op's own."""
    return 0.0 if abs(scale * dim**0.5 - 1) < 1e-6 else scale


def _expect_attention(attention: nn.Module, heads: int, kv_heads: int, dim: int) -> None:
    impl = attention.impl
    if type(attention).__name__ != "Attention" or attention.attn_type != "decoder":
        raise Unfit("attention that is not causal")
    if type(impl).__name__ != "FlashAttentionImpl":
        raise Unfit(f"the attention backend {type(impl).__name__}")
    for is_so, reason in (
            ((attention.num_heads, attention.num_kv_heads, attention.head_size) !=
             (heads, kv_heads, dim), "attention with other heads than its products"),
            (attention.kv_cache_dtype not in _PLAIN + _FLOAT8, f"a cache of {attention.kv_cache_dtype}"),
            (attention.kv_sharing_target_layer_name is not None, "layers that share a cache"),
            (impl.alibi_slopes is not None, "ALiBi")):
        if is_so:
            raise Unfit(reason)
    if attention.kv_cache_dtype in _FLOAT8:
        _expect_scales(attention, kv_heads)


def _expect_scales(attention: nn.Module, kv_heads: int) -> None:
    """That keys and values of float8_e4m3fn have scales as the ops take them, which stay the same."""
    # 0.24 computes scales from the first batch that its own attention runs.
    if getattr(attention, "calculate_kv_scales", False):
        raise Unfit("scales of the cache that vLLM computes from the first batch")
    scales = [getattr(attention, name, None) for name in ("_k_scale", "_v_scale")]
    if not all(isinstance(scale, Tensor) and scale.dtype is torch.float32 and scale.dim() < 2 for scale in scales):
        raise Unfit("scales of the cache that are no float32 of the tensor or of heads")
    if len({scale.numel() for scale in scales}) > 1 or scales[0].numel() not in (1, kv_heads):
        raise Unfit(f"{scales[0].numel()} scales of keys and {scales[1].numel()} of values, for {kv_heads} heads")


def _angles_of(rotary: nn.Module, positions: int) -> tuple[Tensor, float]:
    """The angles [positions, rotary] that have the cosines and sines of vLLM's table, and the
    factor of those.

    The table is rounded to bfloat16, and the cached keys of prompts were rotated by it. So the
    angles are those of the rounded values, not of the frequencies.
    """
    if type(rotary).__name__ not in _ROTARY:
        raise Unfit(f"{type(rotary).__name__} is not known")
    # gpt-oss' is in float32 until vLLM first uses it.
    table = rotary.cos_sin_cache[:positions].to(_DTYPE)
    cos, sin = table.double().chunk(2, -1)
    factor = torch.hypot(cos, sin).mean().item()
    # YaRN has a factor; without one rounding alone moves the mean from 1. 0 is the ops' word for 1.
    factor = factor if abs(factor - 1) > 2**-8 else 0.0
    angles = torch.atan2(sin, cos).float()
    both = (torch.cat((angles, angles), -1) if rotary.is_neox_style else
            angles.repeat_interleave(2, -1))
    return both.contiguous(), factor
