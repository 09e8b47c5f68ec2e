"""fftune's ops as functions of tensors.

Conventions that every function shares:

* Activations are ``[..., features]`` with any leading dimensions. Weights are
  ``[out_features, in_features]``, as in ``torch.nn.Linear``.

* Element types are bfloat16, float16 and float32 on a GPU, and bfloat16 and float32 on the CPU. All
  tensors of a call have one element type unless an argument says otherwise. Sums are float32.

* Tensors that are not contiguous are copied, except where a function takes strides.

* Results are new contiguous tensors of x's element type unless a function says otherwise.

* Wrong shapes, element types, devices and values raise ``fftune.Error``, before a kernel is launched.

Each function is backed by custom ops (``torch.ops.fftune.*``) with fake kernels, gradients and
autocast rules. ``torch.compile(fullgraph=True)`` keeps them whole, and CUDA graphs capture them.
"""
from ._ops.all_reduce import all_argmax, all_reduce, all_reduce_norm, all_reduce_norm_quantised
from ._ops.attention import attention, pack_mask
from ._ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from ._ops.cross_entropy import cross_entropy, linear_cross_entropy
from ._ops.decode import decode
from ._ops.elementwise import act_mul, bias_gelu, scale_
from ._ops.ffn import ffn, ffn_backward, ffn_block, ffn_fp8, mlp
from ._ops.gated_delta_rule import gated_delta_rule
from ._ops.gated_rmsnorm import gated_rmsnorm
from ._ops.head import head, head_logits, sample
from ._ops.indexer import indexer
from ._ops.layer import layer
from ._ops.layernorm import add_layernorm, layernorm
from ._ops.linear import linear, linear_backward, linear_fp8
from ._ops.masked import (masked_ffn, masked_ffn_backward, masked_linear, masked_linear_backward)
from ._ops.masked_softmax import masked_softmax
from ._ops.mla import head_linear, mla, mla_rope
from ._ops.moe_ffn import moe_ffn, moe_ffn_backward, moe_ffn_fp8
from ._ops.moe_route import moe_route
from ._ops.ngram_block import ngram_block
from ._ops.packed import PackedWeight, pack_weight, unpack_weight
from ._ops.qkv import qkv
from ._ops.rmsnorm import add_rmsnorm, rmsnorm, rmsnorm_quantised
from ._ops.rope import rope
from ._ops.ssd import ssd

__all__ = ["ffn", "ffn_backward", "ffn_block", "ffn_fp8", "mlp", "linear", "linear_fp8", "linear_backward",
           "masked_ffn", "masked_ffn_backward", "masked_linear", "masked_linear_backward",
           "rmsnorm", "add_rmsnorm", "rmsnorm_quantised", "bias_gelu", "act_mul", "scale_", "rope",
           "ngram_block", "attention", "mla", "mla_rope", "head_linear", "indexer", "masked_softmax", "pack_mask",
           "moe_ffn", "moe_ffn_backward", "moe_route", "moe_ffn_fp8", "qkv", "layernorm", "add_layernorm", "layer", "head",
           "head_logits", "sample",
           "decode", "gated_delta_rule", "ssd", "cross_entropy", "linear_cross_entropy", "all_argmax", "all_reduce",
           "all_reduce_norm", "all_reduce_norm_quantised", "causal_conv1d", "causal_conv1d_update", "gated_rmsnorm",
           "PackedWeight", "pack_weight", "unpack_weight"]
