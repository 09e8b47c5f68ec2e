"""A stand-in for vLLM: as much of its modules, classes and attributes as fftune.vllm reads, with
plain PyTorch in the place of its kernels. It is written for the tests; nothing of it is vLLM's."""
import os

__version__ = os.environ.get("STAND_IN_VERSION", "0.24.0")
