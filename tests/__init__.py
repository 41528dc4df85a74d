"""The tests. Triton is imported first, here and in every rank that looks up a test's function."""

import importlib
import importlib.util
import os
from unittest.mock import patch

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    # Kernels can be interpreted only where the first import of Triton was told so, and torch.compile imports it, too
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.language")
