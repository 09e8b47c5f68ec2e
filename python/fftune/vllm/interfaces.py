"""The functions of vLLM that each part wraps, or is called in the place of, and their parameters.

vLLM changes them between versions. A module is changed only if its functions have these parameters; what a part reads
of vLLM's objects beyond them is read inside of a guarded call, and compared with vLLM's results.
"""
import inspect

from .logs import Unfit

_LAYERS = "vllm.model_executor.layers"
_FUSED_MOE, _QUANTISATION = f"{_LAYERS}.fused_moe", f"{_LAYERS}.quantization"
_CT = f"{_QUANTISATION}.compressed_tensors"
_MIXED = "vllm.model_executor.kernels.linear.mixed_precision"

ORACLES = tuple(f"{_FUSED_MOE}.oracle.{name}" for name in ("unquantized", "fp8"))
MODELS = {f"vllm.model_executor.models.{module}": name for module, name in (
    ("llama", "LlamaModel"), ("mistral", "MistralModel"), ("qwen2", "Qwen2Model"),
    ("qwen3", "Qwen3Model"), ("qwen3_moe", "Qwen3MoeModel"), ("gpt_oss", "GptOssModel"), ("gemma2", "Gemma2Model"),
    ("gemma3", "Gemma3Model"), ("qwen3_next", "Qwen3NextModel"), ("qwen3_5", "Qwen3_5Model"))}
# By module, the classes whose weights are processed after loading. A version has some of the modules.
KERNELS = {f"{_MIXED}.machete": ("MacheteLinearKernel",), f"{_MIXED}.marlin": ("MarlinLinearKernel",)}
FP8_METHODS = {f"{_QUANTISATION}.fp8": ("Fp8LinearMethod",),
               f"{_CT}.schemes.compressed_tensors_w8a8_fp8": ("CompressedTensorsW8A8Fp8",)}
EXPERTS_METHODS = {
    f"{_QUANTISATION}.auto_gptq": ("AutoGPTQMoEMethod",), f"{_QUANTISATION}.auto_awq": ("AutoAWQMoEMethod",),
    f"{_QUANTISATION}.mxfp4": ("GptOssMxfp4MoEMethod", "Mxfp4MoEMethod"),
    f"{_CT}.compressed_tensors_moe.compressed_tensors_moe_wna16_marlin": ("CompressedTensorsWNA16MarlinMoEMethod",),
    f"{_CT}.compressed_tensors_moe.compressed_tensors_moe_wna16": ("CompressedTensorsWNA16MoEMethod",)}

LINEAR_ATTENTION = {f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn": ("QwenGatedDeltaNetAttention",),
                    f"{_LAYERS}.mamba.mamba_mixer2": ("MambaMixer2",)}

_PROCESS = "process_weights_after_loading"
# A model may have further parameters behind these.
_FORWARD = ("self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds")
# By module, the functions by their names, and their parameters.
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    **{module: {"backend_to_kernel_cls": ("backend",)} for module in ORACLES},
    **{module: {f"{name}.forward": _FORWARD} for module, name in MODELS.items()},
    **{module: {f"{name}.{_PROCESS}": ("self", "layer") for name in names}
       for module, names in (KERNELS | FP8_METHODS | EXPERTS_METHODS).items()},
    f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn": {
        "QwenGatedDeltaNetAttention._forward_core": ("self", "mixed_qkv", "b", "a", "core_attn_out")},
    f"{_LAYERS}.mamba.mamba_mixer2": {"MambaMixer2.conv_ssm_forward": ("self", "projected_states", "output")},
}
for _module, _names in KERNELS.items():
    PARAMETERS[_module] |= {f"{name}.apply_weights": ("self", "layer", "x", "bias") for name in _names}


def expect_known(module) -> None:
    """Unfit if a function of the module that is wrapped is not there, or has other parameters."""
    for name, parameters in PARAMETERS.get(module.__name__, {}).items():
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            raise Unfit(f"this vLLM has no {name}")
        expect_parameters(name, found, parameters)


def expect_parameters(name: str, function, parameters: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if (found[:len(parameters)] if parameters is _FORWARD else found) != parameters:
        raise Unfit(f"{name} of this vLLM takes ({', '.join(found)}), and not ({', '.join(parameters)})")
