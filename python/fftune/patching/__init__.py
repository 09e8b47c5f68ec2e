"""patch() and unpatch(): fused ops in the place of what transformers models compute with many.

A module is recognised by its parts and by what it computes: it is run on a few random rows, or with
stand-ins for its parts, and compared with what it is taken for. Only the `forward` of instances is
replaced; parameters, state dicts and classes stay as they are.
"""
from torch import nn

from .._checks import expect_module, expect_one_of, flag, named
from .._library import Error
from .._untouched import same_random_numbers, usual_settings
from . import attention as attentions
from .blocks import patch_block, patch_layer
from .copies import keep_copies_right, restore
from .decoding import patch_greedy
from .experts import patch_experts, patch_router, restore_experts
from .fp8_linear import part_fp8
from .generation import patch_generation
from .graphs import patch_steps
from .host_forms import host_forms
from .inline_mlps import patch_inline_mlp
from .layers import patch_whole_layers, restore_layers
from .losses import patch_loss
from .masks import patch_masks
from .memory import MODES
from .mixers import patch_mixer
from .mlps import patch_coded_mlp, patch_gated_mlp, patch_plain_mlp
from .mxfp4 import patch_mxfp4_experts, restore_mxfp4_experts
from .norms import patch_norm
from .packed_experts import patch_packed_experts
from .quantised import has_codes, patch_quantised, restore_merged
from .recognise import Options, PatchReport, calls_dropout, try_all, try_to
from .rotary import patch_rotary
from .sparse_attention import patch_indexer, patch_sparse_attention


def patch(model: nn.Module, *, recompute: bool = False, memory: str = "fast",
          projections: bool | str = "auto", attention: bool = False, graphs: bool = False,
          whole_layers: bool = False, loss: bool = True) -> PatchReport:
    """Replaces parts of a transformers model with fused ops, in place.

    These are norms, MLPs with their norm and residual, bias and gelu, rotary embeddings, quantised linear
    layers, experts and routers, and causal masks that need not be made. In training the loss is one of
    them, in ``generate`` the blocking of repeated n-grams. A module is replaced only if what it
    computes is recognised for every input, and its replacement ran on a stand-in of its sizes and types, in
    evaluation and training, with gradients and without. All others are left alone, and the report says why.
    Nothing is raised for them, and nothing of the model runs during patch().

    A patched model can be trained, compiled, copied and moved, and its state dict is the same; a pickle
    of it is that of the model before patch(). A second call of patch() takes back the first; unpatch()
    restores the model. No other thread may run the model during either.

    Args:
        model: A model of transformers, or any module with such parts.
        recompute: Save only the inputs of MLPs for the backward pass.
        memory: Activations for the backward pass. Mode "fast" saves all that makes it fast. Mode
            "balanced" computes the norms of layers again, a pass over memory each. Mode "small" also
            does so with the first products of MLPs, as `recompute` does. With torch.compile the
            compiler decides about the norms.
        projections: Whether to replace the projections of attention: True in all calls, "auto" in calls
            of up to 64 tokens without gradients, where they are faster, False in none.
        attention: Whether to replace PyTorch's attention by `fftune.ops.attention`, and attention to chosen keys,
            as in DeepSeek-V3.2, by `fftune.ops.mla`. The latter is replaced with `whole_layers` too.
        graphs: Whether ``generate`` uses a static cache and replays each step as a CUDA graph.
        whole_layers: With a static cache, run all layers by `fftune.ops.layer` in calls of up to 64
            tokens, and the steps of greedy and sampled ``generate`` as `fftune.generate` does.
        loss: In training, compute the loss of calls with labels by `fftune.ops.linear_cross_entropy`.
            ``outputs.logits`` are then computed when they are read, before the optimizer's step; under
            ``torch.compile`` they are None.

    Returns:
        A ``PatchReport``: the modules that were replaced, and those that were not, with reasons.

    Raises:
        fftune.Error: `model` is no ``torch.nn.Module``, or an option has another value.
    """
    expect_module("patch", model)
    if projections is not True and projections is not False and not (
            isinstance(projections, str) and projections == "auto"):
        raise Error(f"patch: projections is {named(projections)}: give True, False or \"auto\"")
    expect_one_of("patch: memory", memory, MODES)
    for name, value in dict(recompute=recompute, attention=attention, graphs=graphs,
                            whole_layers=whole_layers, loss=loss).items():
        flag("patch", name, value)
    options = Options(recompute or memory == "small", projections, attention, memory != "fast")
    return patch_knowing({}, model, options, graphs=graphs, whole_layers=whole_layers, loss=loss)


@usual_settings()
@same_random_numbers()
def patch_knowing(known: dict, model: nn.Module, options: Options, *, graphs: bool = False,
                  whole_layers: bool = False, loss: bool = True) -> PatchReport:
    """patch() with what a module of each kind was found to be, or why it is unfit, to which it adds: whatever the
    options were, while the model exists."""
    unpatch(model)
    report = PatchReport()
    with host_forms(model):
        _replace_parts(model, report, known, options, graphs, whole_layers, loss)
    for module in model.modules():
        keep_copies_right(module)
    return report


def _replace_parts(model: nn.Module, report: PatchReport, known: dict, options: Options, graphs: bool,
                   whole_layers: bool, loss: bool) -> None:
    try_all(report, "", lambda: patch_quantised(model, report, known))
    for name, module in model.named_modules():
        try_all(report, name, lambda: _mark_dropout(module))
    for recognise in (patch_norm, patch_gated_mlp, patch_coded_mlp, patch_plain_mlp, patch_experts,
                      patch_packed_experts, patch_mxfp4_experts, patch_router, patch_layer, patch_block, patch_inline_mlp,
                      patch_mixer):
        for name, module in model.named_modules():
            if not has_codes(module):
                try_to(report, name, lambda: recognise(module, known, options))
    try_all(report, "", lambda: patch_rotary(model, report, options))
    try_all(report, "", lambda: patch_masks(model, report, options))
    for recognise in (patch_sparse_attention,) * (options.attention or whole_layers) + (patch_indexer,):
        for name, module in model.named_modules():
            try_to(report, name, lambda: recognise(module, known, options))
    if loss:
        try_to(report, "", lambda: patch_loss(model, known))
    if whole_layers:
        try_all(report, "", lambda: patch_whole_layers(model, report))
    try_all(report, "generate", lambda: patch_generation(model, report))
    if whole_layers and any("_fftune_layers" in m.__dict__ for m in model.children()):
        try_to(report, "generate", lambda: patch_greedy(model))
    if graphs:
        try_to(report, "generate", lambda: patch_steps(model))


def _mark_dropout(module: nn.Module) -> None:
    rates = calls_dropout(module)
    if rates:
        module.__dict__["_fftune_drops"] = rates


def unpatch(model: nn.Module) -> nn.Module:
    """Restores a model that patch() changed. No other thread may run it meanwhile.

    Returns:
        The model.
    """
    expect_module("unpatch", model)
    for module in model.modules():
        restore_experts(module)
        restore_mxfp4_experts(module)
        restore_layers(module)
        part_fp8(module)
        restore(module)
    for module in model.modules():
        restore_merged(module)
    attentions.restore(model)
    return model
