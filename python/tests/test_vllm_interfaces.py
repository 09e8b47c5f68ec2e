"""The names of vLLM that the plugin touches are in the versions that it supports.

vllm_interfaces.json has what they are in vLLM's sources; vllm_interfaces.py wrote it."""
import importlib
import inspect
import json

import pytest
import torch

import vllm_interfaces

RECORD = json.loads(vllm_interfaces.RECORD.read_text())
# Names that the plugin asks for with a default, or that it knows in another form.
ABSENT = {"0.24": {"SpeculativeConfig.enable_adaptive_verification", "AuxOutputConfig", "VllmConfig.aux_output_config",
                   "GDNAttentionMetadata.checkpoint", "GDNAttentionMetadata.flashinfer_checkpoint_plan",
                   "Mamba2AttentionMetadata.checkpoint_chunk_idx", "MambaMixer2.use_replayssm",
                   "MambaMixer2.mamba_config", "Qwen3NextDecoderLayer.use_attn_reduce_scatter_for_moe",
                   "Qwen3_5DecoderLayer.use_attn_reduce_scatter_for_moe",
                   "Qwen3NextSparseMoeBlock.replicate_shared_expert",
                   "Qwen3NextSparseMoeBlock.is_fused_shared_expert_enabled"},
          "0.33": {"MPLinearLayerConfig.has_g_idx", "FlashAttentionMetadata.use_cascade",
                   "ModelConfig.enable_return_routed_experts", "CompressedTensorsWNA16MarlinMoEMethod",
                   "Attention.calculate_kv_scales"}}


def recorded(version, module):
    return RECORD[version][module.removeprefix("vllm.").replace(".", "/")]


def of_class(version, name):
    found, = (classes[name] for classes in RECORD[version].values() if name in classes)
    return found


@pytest.mark.parametrize("version", RECORD)
def test_all_names_are_there(version):
    assert {module: {cls: set(names.split()) for cls, names in classes.items()}
            for module, classes in vllm_interfaces.TOUCHED.items()} == {
        module: {cls: set(vllm_interfaces.TOUCHED[module][cls].split() if names is None else names)
                 for cls, names in classes.items()} for module, classes in RECORD[version].items()}
    absent = {name for classes in RECORD[version].values() for cls, names in classes.items()
              for name in ([cls] if names is None else [f"{cls}.{own}" for own, value in names.items() if value is None])}
    assert absent == ABSENT[version]


@pytest.mark.parametrize("version", RECORD)
def test_modules_and_classes(vllm, version):
    interfaces = importlib.import_module("fftune.vllm.interfaces")
    structure = importlib.import_module("fftune.vllm.structure")
    for module, functions in interfaces.PARAMETERS.items():
        for name, parameters in functions.items():
            cls, _, own = name.rpartition(".")
            if cls in ABSENT[version]:
                continue
            found = recorded(version, module)[cls][own].strip("()").replace("=", "").split(", ")
            assert tuple(found[:len(parameters)] if own == "forward" else found) == parameters, name
    for module, cls in interfaces.MODELS.items():
        known = structure._CLASSES[cls]
        for name in (known.layer, known.attention, *known.networks):
            home, own = name.split(".")
            found = recorded(version, f"{structure._MODELS}{home}")[own]
            if name == known.layer:
                assert {known.home, "mlp", *known.norms, *known.behind} <= set(found)
            if own in structure._MIXTURES:
                assert structure._MIXTURES[own] in found
        if known.delta:
            home, own = known.delta.rsplit(".", 1)
            assert own in recorded(version, home)
            of_layer = of_class(version, known.layer.split(".")[1])
            assert {"linear_attn", "layer_type", "layer_scale"} <= set(of_layer)
        assert of_class(version, known.norm)["variance_epsilon"] == "attribute"
    for name in structure._ROTARY:
        assert of_class(version, name)["cos_sin_cache"] == "attribute"


@pytest.mark.parametrize("version", RECORD)
def test_methods_of_quantised_layers(vllm, version):
    assert of_class(version, "FP8ScaledMMLinearKernel")["apply_weights"] == "(self, layer, x, bias=)"
    base = of_class(version, "FusedMoEMethodBase")
    assert base["apply"] == "(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)"
    assert base["apply_monolithic"] == "(self, layer, x, router_logits, input_ids=)"


def test_metadata_of_linear_attention(vllm):
    """The fields of vLLM 0.33's metadata that the cores read, and those that they change for a made-up batch."""
    cores = importlib.import_module("fftune.vllm.linear_cores")
    of_mamba = of_class("0.33", "BaseMambaAttentionMetadata") | of_class("0.33", "Mamba2AttentionMetadata")
    for core, fields in ((cores.GatedDeltaNet(), of_class("0.33", "GDNAttentionMetadata")), (cores.Mamba2(), of_mamba)):
        assert {*core.metadata} <= set(fields)
        own, indices = type("Metadata", (), {})(), torch.tensor([3, 0], dtype=torch.int32)
        batches = [cores.Batch(2, 2, indices)]
        if isinstance(core, cores.GatedDeltaNet):
            batches.append(cores.Batch(2, 0, indices[None], indices, accepted=indices[:1]))
        for batch in batches:
            assert set(vars(core.metadata_of(own, batch))) <= set(fields)


@pytest.mark.parametrize("version", RECORD)
def test_experts_take_the_same_arguments(vllm, version):
    experts = importlib.import_module("fftune.vllm.experts")
    own = experts.experts_class(type("TritonExperts", (), {}))
    assert of_class(version, "TritonExperts")["apply"] == \
        f"({', '.join(inspect.signature(own.apply).parameters)})"


@pytest.mark.parametrize("version", RECORD)
def test_functions(version):
    assert recorded(version, "vllm.forward_context")[""] == {
        "get_forward_context": "()", "is_forward_context_available": "()"}
    assert recorded(version, "vllm.logger")[""] == {"init_logger": "(name)"}
    assert recorded(version, "vllm.distributed.communication_op")[""] == {
        "tensor_model_parallel_all_reduce": "(input_)"}
    assert recorded(version, "vllm.platforms.interface")["Platform"] == {
        "is_cuda": "(self)", "get_device_capability": "(cls, device_id=)"}
