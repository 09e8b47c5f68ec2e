#!/usr/bin/env python3
"""The names of vLLM that the plugin touches, as vLLM's sources have them.

usage: vllm_interfaces.py VERSION FOLDER

FOLDER is the package `vllm` of that version, such as an unpacked wheel's; it is read, not imported.
Writes what each name is into vllm_interfaces.json, which test_vllm_interfaces.py compares with the
plugin: the parameters of a function, the type of a field, or "attribute".
"""
import ast
import json
import sys
from pathlib import Path

RECORD = Path(__file__).with_suffix(".json")
_MODELS = "model_executor/models"
_LAYERS = "model_executor/layers"
_MIXED = "model_executor/kernels/linear/mixed_precision"
# By module: the names of the module under "", and those of its classes, with their bases'. Not here:
# the weights of linear layers, which their quant_method makes, and the model's vllm_config, which the
# decorator support_torch_compile sets.
TOUCHED = {
    "forward_context": {"": "get_forward_context is_forward_context_available",
                        "ForwardContext": "attn_metadata slot_mapping cudagraph_runtime_mode batch_descriptor "
                                                     "moe_layer_index"},
    "envs": {"": "compile_factors"},
    "logger": {"": "init_logger"},
    "distributed/communication_op": {"": "tensor_model_parallel_all_reduce"},
    "distributed/parallel_state": {"": "get_tp_group",
                                   "GroupCoordinator": "world_size rank_in_group cpu_group device_communicator"},
    "distributed/device_communicators/cuda_communicator": {"CudaCommunicator": "ca_comm"},
    "distributed/device_communicators/custom_all_reduce": {"CustomAllreduce": "_IS_CAPTURING"},
    "platforms/interface": {"Platform": "is_cuda get_device_capability"},
    "v1/attention/backends/flash_attn": {
        "FlashAttentionMetadata": "num_actual_tokens max_query_len query_start_loc max_seq_len seq_lens "
                                  "block_table slot_mapping scheduler_metadata use_cascade causal",
        "FlashAttentionImpl": "scale alibi_slopes logits_soft_cap sinks"},
    f"{_LAYERS}/attention/attention": {
        "Attention": "layer_name attn_type impl num_heads num_kv_heads head_size kv_cache "
                     "kv_cache_dtype kv_sharing_target_layer_name sliding_window _k_scale _v_scale calculate_kv_scales"},
    f"{_LAYERS}/linear": {
        "QKVParallelLinear": "bias quant_method skip_bias_add",
        "MergedColumnParallelLinear": "bias quant_method skip_bias_add",
        "RowParallelLinear": "bias quant_method skip_bias_add tp_rank tp_size reduce_results "
                             "input_is_parallel",
        "ReplicatedLinear": "bias quant_method skip_bias_add",
        "UnquantizedLinearMethod": ""},
    f"{_LAYERS}/layernorm": {"RMSNorm": "weight variance_epsilon variance_size_override has_weight",
                             "GemmaRMSNorm": "weight variance_epsilon",
                             "RMSNormGated": "weight eps activation norm_before_gate group_size"},
    f"{_LAYERS}/activation": {"SiluAndMul": "", "GeluAndMul": "approximate"},
    f"{_LAYERS}/rotary_embedding/base": {"RotaryEmbedding": "cos_sin_cache rotary_dim is_neox_style"},
    f"{_LAYERS}/rotary_embedding/llama3_rope": {"Llama3RotaryEmbedding": "cos_sin_cache"},
    f"{_LAYERS}/rotary_embedding/yarn_scaling_rope": {"YaRNScalingRotaryEmbedding": "cos_sin_cache"},
    f"{_LAYERS}/rotary_embedding/linear_scaling_rope": {
        "LinearScalingRotaryEmbedding": "cos_sin_cache"},
    f"{_LAYERS}/rotary_embedding/dynamic_ntk_scaling_rope": {
        "DynamicNTKScalingRotaryEmbedding": "cos_sin_cache"},
    f"{_LAYERS}/rotary_embedding/mrope": {"MRotaryEmbedding": "cos_sin_cache"},
    f"{_LAYERS}/fused_moe/oracle/unquantized": {"": "backend_to_kernel_cls"},
    f"{_LAYERS}/fused_moe/oracle/fp8": {"": "backend_to_kernel_cls"},
    f"{_LAYERS}/fused_moe/experts/triton_moe": {"TritonExperts": "apply"},
    f"{_LAYERS}/fused_moe/modular_kernel": {
        "FusedMoEExperts": "quant_config quant_dtype block_shape w1_scale w2_scale w1_bias w2_bias"},
    f"{_LAYERS}/fused_moe/config": {
        "FusedMoEQuantConfig": "gemm1_clamp_limit",
        "FusedMoEConfig": "in_dtype experts_per_token is_lora_enabled moe_parallel_config",
        "FusedMoEParallelConfig": "use_all2all_kernels enable_eplb"},
    f"{_MIXED}/machete": {
        "MacheteLinearKernel": "config process_weights_after_loading apply_weights _get_weight_params"},
    f"{_MIXED}/marlin": {
        "MarlinLinearKernel": "config process_weights_after_loading apply_weights _get_weight_params"},
    f"{_MIXED}/MPLinearKernel": {
        "MPLinearLayerConfig": "partition_weight_shape weight_type act_type group_size zero_points "
                               "has_g_idx out_type"},
    f"{_LAYERS}/quantization/fp8": {
        "Fp8LinearMethod": "process_weights_after_loading apply fp8_linear"},
    f"{_LAYERS}/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8": {
        "CompressedTensorsW8A8Fp8": "process_weights_after_loading apply_weights fp8_linear"},
    "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel": {
        "FP8ScaledMMLinearKernel": "config apply_weights",
        "FP8ScaledMMLinearLayerConfig": "weight_quant_key activation_quant_key input_dtype out_dtype"},
    "model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel": {
        "Fp8BlockScaledMMLinearKernel": "config apply_weights"},
    "model_executor/kernels/linear/scaled_mm/deep_gemm": {
        "DeepGemmFp8BlockScaledMMKernel": "use_deep_gemm_e8m0"},
    "model_executor/kernels/linear/scaled_mm/cutlass": {"CutlassFP8ScaledMMLinearKernel": "logical_output_size"},
    f"{_LAYERS}/quantization/utils/quant_utils": {"QuantKey": "scale", "ScaleDesc": "static group_shape"},
    f"{_LAYERS}/fused_moe/fused_moe_method_base": {
        "FusedMoEMethodBase": "moe apply apply_monolithic is_monolithic mk_can_overlap_shared_experts "
                              "topk_indices_dtype"},
    f"{_LAYERS}/fused_moe/routed_experts": {
        "RoutedExperts": "activation expert_map global_num_experts apply_router_weight_on_input swiglu_limit "
                         "quant_method"},
    f"{_LAYERS}/fused_moe/runner/moe_runner": {"MoERunner": "gate router routed_experts shared_experts"},
    f"{_LAYERS}/fused_moe/runner/shared_experts": {"SharedExperts": "_layer"},
    f"{_LAYERS}/fused_moe/router/gate_linear": {"GateLinear": "out_dtype"},
    f"{_LAYERS}/mamba/gdn/qwen_gdn_linear_attn": {
        "QwenGatedDeltaNetAttention": "_forward_core conv1d A_log dt_bias num_k_heads num_v_heads head_k_dim "
                                      "head_v_dim tp_size prefix activation kv_cache gdn_prefill_backend "
                                      "enable_packed_recurrent_decode in_proj_qkvz in_proj_ba norm out_proj "
                                      "gqa_interleaved_layout"},
    f"{_LAYERS}/mamba/mamba_mixer2": {
        "MambaMixer2": "conv_ssm_forward conv1d A D dt_bias num_heads n_groups head_dim ssm_state_size tp_size prefix "
                       "activation kv_cache use_replayssm mamba_config tped_intermediate_size tped_conv_size "
                       "tped_dt_size"},
    "config/mamba": {"MambaConfig": "enable_stochastic_rounding"},
    "v1/attention/backends/mamba2_attn": {"Mamba2AttentionMetadata": "checkpoint_chunk_idx"},
    "v1/attention/backends/mamba_attn": {
        "BaseMambaAttentionMetadata": "num_prefills num_prefill_tokens num_decodes num_decode_tokens "
                                      "num_accepted_tokens has_initial_states_p query_start_loc_p "
                                      "state_indices_tensor_p state_indices_tensor_d query_start_loc_d"},
    "v1/attention/backends/gdn_attn": {
        "GDNAttentionMetadata": "num_prefills num_prefill_tokens num_decodes num_decode_tokens num_spec_decodes "
                                "num_spec_decode_tokens num_actual_tokens checkpoint flashinfer_checkpoint_plan "
                                "has_initial_state non_spec_query_start_loc non_spec_state_indices_tensor "
                                "spec_sequence_masks spec_query_start_loc spec_state_indices_tensor "
                                "num_accepted_tokens prefill_query_start_loc prefill_state_indices "
                                "prefill_has_initial_state"},
    "lora/layers/base": {"BaseLayerWithLoRA": ""},
    "lora/layers/base_linear": {"BaseLinearLayerWithLoRA": "base_layer punica_wrapper"},
    "lora/punica_wrapper/punica_gpu": {"PunicaWrapperGPU": "token_mapping_meta"},
    "lora/ops/triton_ops/lora_kernel_metadata": {"LoRAKernelMeta": "no_lora_flag_cpu"},
    f"{_LAYERS}/fused_moe/router/fused_topk_router": {
        "FusedTopKRouter": "scoring_func renormalize top_k eplb_state capture_fn"},
    f"{_LAYERS}/fused_moe/unquantized_fused_moe_method": {"UnquantizedFusedMoEMethod": "experts_cls"},
    f"{_LAYERS}/quantization/auto_gptq": {
        "AutoGPTQMoEMethod": "process_weights_after_loading quant_config input_dtype",
        "AutoGPTQConfig": "weight_bits desc_act"},
    f"{_LAYERS}/quantization/auto_awq": {"AutoAWQMoEMethod": "process_weights_after_loading input_dtype"},
    f"{_LAYERS}/quantization/mxfp4": {
        "GptOssMxfp4MoEMethod": "process_weights_after_loading mxfp4_backend",
        "Mxfp4MoEMethod": "process_weights_after_loading mxfp4_backend"},
    # 0.24 has the first, 0.33 the second for the same experts.
    f"{_LAYERS}/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16_marlin": {
        "CompressedTensorsWNA16MarlinMoEMethod": "process_weights_after_loading num_bits actorder"},
    f"{_LAYERS}/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_wna16": {
        "CompressedTensorsWNA16MoEMethod": "process_weights_after_loading num_bits"},
    "config/vllm": {"": "get_current_vllm_config", "VllmConfig": "lora_config quant_config speculative_config kv_transfer_config "
                                  "model_config parallel_config compilation_config scheduler_config offload_config "
                                  "aux_output_config"},
    "config/offload": {"OffloadConfig": "offload_backend uva prefetch", "UVAOffloadConfig": "cpu_offload_gb",
                       "PrefetchOffloadConfig": "offload_group_size"},
    "config/aux_output": {"AuxOutputConfig": "enable_return_routed_experts"},
    "config/speculative": {"SpeculativeConfig": "num_speculative_tokens num_speculative_tokens_per_batch_size "
                                                "enable_adaptive_verification"},
    "config/scheduler": {"SchedulerConfig": "max_num_seqs max_num_batched_tokens"},
    "config/model": {"ModelConfig": "dtype max_model_len enable_return_routed_experts multimodal_config"},
    "config/multimodal": {"MultiModalConfig": "language_model_only"},
    "config/parallel": {
        "ParallelConfig": "pipeline_parallel_size data_parallel_size decode_context_parallel_size "
                          "prefill_context_parallel_size enable_dbo use_ubatching"},
    "config/compilation": {"CompilationConfig": "cudagraph_mode pass_config max_cudagraph_capture_size",
                           "CUDAGraphMode": "NONE FULL decode_mode"},
    f"{_MODELS}/llama": {
        "LlamaModel": "forward embed_input_ids layers norm start_layer end_layer",
        "LlamaDecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm",
        "LlamaAttention": "num_heads num_kv_heads head_dim qkv_proj o_proj rotary_emb attn",
        "LlamaMLP": "gate_up_proj down_proj act_fn"},
    f"{_MODELS}/mistral": {"MistralModel": "forward", "MistralDecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm",
                           "MistralAttention": "qkv_proj o_proj rotary_emb attn"},
    f"{_MODELS}/qwen2": {
        "Qwen2Model": "forward embed_input_ids layers norm start_layer end_layer",
        "Qwen2DecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm",
        "Qwen2Attention": "num_heads num_kv_heads head_dim qkv_proj o_proj rotary_emb attn",
        "Qwen2MLP": "gate_up_proj down_proj act_fn"},
    f"{_MODELS}/qwen3": {
        "Qwen3Model": "forward", "Qwen3DecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm",
        "Qwen3Attention": "num_heads num_kv_heads head_dim qkv_proj o_proj q_norm k_norm attn"},
    f"{_MODELS}/qwen3_moe": {
        "Qwen3MoeModel": "forward embed_input_ids layers norm start_layer end_layer",
        "Qwen3MoeDecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm",
        "Qwen3MoeAttention": "num_heads num_kv_heads head_dim qkv_proj o_proj q_norm k_norm attn",
        "Qwen3MoeMLP": "gate_up_proj down_proj act_fn expert_gate",
        "Qwen3MoeSparseMoeBlock": "forward is_sequence_parallel gate experts"},
    f"{_MODELS}/gpt_oss": {
        "GptOssModel": "forward embed_input_ids layers norm start_layer end_layer",
        "TransformerBlock": "attn mlp input_layernorm post_attention_layernorm",
        "OAIAttention": "num_local_attention_heads num_local_key_value_heads head_dim qkv_proj o_proj rotary_emb attn sinks",
        "MLPBlock": "is_sequence_parallel router experts"},
    f"{_MODELS}/gemma2": {
        "Gemma2Model": "forward embed_input_ids layers norm start_layer end_layer",
        "Gemma2DecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm pre_feedforward_layernorm "
                              "post_feedforward_layernorm",
        "Gemma2Attention": "num_heads num_kv_heads head_dim qkv_proj o_proj rotary_emb attn",
        "Gemma2MLP": "gate_up_proj down_proj act_fn"},
    f"{_MODELS}/gemma3": {
        "Gemma3Model": "forward embed_input_ids layers norm start_layer end_layer",
        "Gemma3DecoderLayer": "self_attn mlp input_layernorm post_attention_layernorm pre_feedforward_layernorm "
                              "post_feedforward_layernorm",
        "Gemma3Attention": "num_heads num_kv_heads head_dim qkv_proj o_proj rotary_emb attn q_norm k_norm",
        "Gemma3MLP": "gate_up_proj down_proj act_fn"},
    f"{_MODELS}/qwen2_moe": {"Qwen2MoeMLP": "gate_up_proj down_proj act_fn expert_gate"},
    f"{_MODELS}/qwen3_next": {
        "Qwen3NextModel": "forward embed_input_ids layers norm start_layer end_layer",
        "Qwen3NextDecoderLayer": "layer_type linear_attn self_attn mlp input_layernorm post_attention_layernorm "
                                 "layer_scale use_attn_reduce_scatter_for_moe",
        "Qwen3NextAttention": "num_heads num_kv_heads head_dim qkv_proj o_proj rotary_emb attn q_norm k_norm "
                              "attn_output_gate",
        "Qwen3NextSparseMoeBlock": "is_sequence_parallel gate experts shared_expert replicate_shared_expert "
                                   "is_fused_shared_expert_enabled"},
    f"{_MODELS}/qwen3_5": {
        "Qwen3_5Model": "forward embed_input_ids layers norm start_layer end_layer",
        "Qwen3_5DecoderLayer": "layer_type linear_attn self_attn mlp input_layernorm post_attention_layernorm "
                               "layer_scale use_attn_reduce_scatter_for_moe"},
}


def parameters(function: ast.FunctionDef) -> str:
    """Their names; those with a default have a "="."""
    given = function.args
    places = given.posonlyargs + given.args
    first = len(places) - len(given.defaults)
    names = [argument.arg + "=" * (i >= first) for i, argument in enumerate(places)]
    names += ["*" + given.vararg.arg] if given.vararg else ["*"] * bool(given.kwonlyargs)
    names += [argument.arg + "=" * (default is not None)
              for argument, default in zip(given.kwonlyargs, given.kw_defaults)]
    names += ["**" + given.kwarg.arg] if given.kwarg else []
    return f"({', '.join(names)})"


class Sources:
    def __init__(self, folder: Path):
        self.folder = folder
        self.modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self.modules:
            path = self.folder / f"{name}.py"
            self.modules[name] = ast.parse(path.read_text()) if path.exists() else None
        return self.modules[name]

    def class_of(self, module: str, name: str):
        """(module, class), which the module may import from another one of vLLM."""
        tree = self.module(module)
        for node in [] if tree is None else ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        for node in [] if tree is None else ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and any((own.asname or own.name) == name
                                                        for own in node.names):
                home = module.split("/")[:-node.level] if node.level else []
                home += (node.module or "").removeprefix("vllm.").split(".")
                path = "/".join(part for part in home if part)
                for other in (path, f"{path}/__init__"):
                    if other != module and self.module(other) is not None:
                        return self.class_of(other, name)
        return None

    def member(self, module: str, cls: ast.ClassDef, name: str) -> str | None:
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
                return "attribute" if is_property else parameters(node)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return ast.unparse(node.annotation)
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
                return "attribute"
        for node in ast.walk(cls):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
                    f"self.{name}" in ast.unparse(target).strip("()").split(", ")
                    for target in targets):
                return "attribute"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_parameter" \
                    and ast.unparse(node.args[0]) == repr(name):
                return "attribute"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.register_buffer" \
                    and ast.unparse(node.args[0]) == repr(name):
                return "attribute"
        for node in ast.walk(self.module(module)):  # of a function that gives layers their buffers
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "layer.register_buffer" \
                    and ast.unparse(node.args[0]) == repr(name):
                return "attribute"
        for base in cls.bases:
            found = self.class_of(module, ast.unparse(base).split("[")[0].split(".")[-1])
            value = found and self.member(*found, name)
            if value:
                return value
        return None

    def record(self) -> dict:
        found: dict = {}
        for module, classes in TOUCHED.items():
            for cls, names in classes.items():
                own = found.setdefault(module, {})[cls] = {}
                home = self.class_of(module, cls) if cls else None
                if cls and home is None:
                    found[module][cls] = None
                    continue
                for name in names.split():
                    if home:
                        own[name] = self.member(*home, name)
                    else:
                        functions = [node for node in ast.walk(self.module(module) or ast.Module([], []))
                                     if isinstance(node, ast.FunctionDef) and node.name == name]
                        own[name] = parameters(functions[0]) if functions else None
        return found


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    _, version, folder = sys.argv
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record[version] = Sources(Path(folder)).record()
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
