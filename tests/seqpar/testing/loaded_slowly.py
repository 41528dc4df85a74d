"""A right training step in a file that a rank loads slowly, if it is the last of the ranks."""

import os
import time

from seqpar.testing.conformance import LayoutAdapter
from seqpar.testing.conformance.layout_adapters import torch_step

if os.environ.get("RANK") == "1":
    time.sleep(5)

STEP = LayoutAdapter("loaded slowly", torch_step, frozenset({"data parallel"}))
