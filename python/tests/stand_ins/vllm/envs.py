"""The part of vLLM's key of compiled code that comes from the environment."""


def compile_factors():
    return {"VLLM_USE_TRITON_AWQ": False}
