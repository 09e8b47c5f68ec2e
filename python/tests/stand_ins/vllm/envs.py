"""What vLLM's key of compiled code has of the environment."""


def compile_factors():
    return {"VLLM_USE_TRITON_AWQ": False}
