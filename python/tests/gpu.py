"""Common parts of the tests on a GPU.

With FFTUNE_DRY_RUN=1 those that can run on the CPU do, to see that the tests themselves are sound.
"""
import os

import pytest
import torch

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU and "FFTUNE_DRY_RUN" not in os.environ, reason="no GPU")
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU")

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
