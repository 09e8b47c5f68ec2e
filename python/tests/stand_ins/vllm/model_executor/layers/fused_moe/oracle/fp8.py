"""It gives a list of classes, as all oracles of vLLM 0.33 do."""
from vllm.model_executor.layers.fused_moe.experts.other import OtherExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts


def backend_to_kernel_cls(backend):
    return [OtherExperts, TritonExperts] if backend == "TRITON" else [OtherExperts]
