"""vLLM 0.24's: backend_to_kernel_cls gives a class."""
from vllm.model_executor.layers.fused_moe.experts.other import OtherExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts


def backend_to_kernel_cls(backend):
    return TritonExperts if backend == "TRITON" else OtherExperts
