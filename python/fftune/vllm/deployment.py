"""Settings of an engine beyond its layers. Versions of vLLM keep them in different places."""


def current():
    """The configuration of the engine whose model is loaded; None outside of one."""
    try:
        from vllm.config import get_current_vllm_config

        return get_current_vllm_config()
    except Exception:  # outside of an engine
        return None


def returns_routed_experts(config) -> bool:
    """Whether requests get the experts that vLLM's routers chose. 0.24 has the switch with the model, 0.33 with other
    outputs."""
    return any(getattr(getattr(config, name, None), "enable_return_routed_experts", False)
               for name in ("model_config", "aux_output_config"))


def offloads_weights(config) -> bool:
    """Whether weights are in the host's memory, or come from there before each layer runs."""
    own = getattr(config, "offload_config", None)
    return (getattr(own, "offload_backend", "auto") not in ("auto", None)
            or getattr(getattr(own, "uva", None), "cpu_offload_gb", 0) > 0
            or getattr(getattr(own, "prefetch", None), "offload_group_size", 0) > 0)
