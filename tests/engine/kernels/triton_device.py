"""Where the kernels run in tests: on a GPU, or in Triton's interpreter with TRITON_INTERPRET=1. Not a test."""

import importlib.util
import os

import pytest
import torch

GPU = torch.cuda.is_available()
INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if GPU else "cpu")
needs_triton = pytest.mark.skipif(not (GPU or INTERPRETED), reason="needs a GPU, or Triton and TRITON_INTERPRET=1")
