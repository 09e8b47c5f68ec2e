"""vLLM's plugin: fftune's kernels in the engine that serves a model.

vLLM loads `register` by the entry point "vllm.general_plugins" in each of its processes. Experts of
mixtures run by moe-ffn behind vLLM's modular kernels, and batches of pure decoding run through whole
decoder layers of fftune's ops. All other calls stay vLLM's. FFTUNE_VLLM=1 turns the plugin on;
FFTUNE_VLLM=experts or layers chooses a part. So do linears and packed-experts for weights with codes, and
linear-attention for cores of layers with recurrent states. Linear layers of fp8 run by fftune where it names
fp8-linears.
"""
from .plugin import register

__all__ = ["register"]
