"""Layers of a Transformer whose training step `torch.compile` turns into fewer and larger kernels.

All layers of a kind share one compiled function, for any number of sentences and time steps above 1; inputs that it
does not cover, such as a batch of one sentence, are computed without it. It is compiled only within `compiling`. Hence
the shapes decide which code runs, never earlier calls, and a resumed training repeats the same bits.

    compile_layers(model)
    with compiling():
        model(src, tgt).sum().backward()  # sentences, source and target steps: three numbers above 1
    with without_compiling():
        model(src, tgt).sum().backward()  # any numbers

The values are the layer's own up to rounding. Dropout draws different numbers, also fixed by `torch.manual_seed`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from models.transformer import Layer


class CompiledLayer(Layer):
    """A layer that is compiled for training; without gradients it runs as an ordinary one."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Transform the states as `Layer.forward` does."""
        forward = _compiled_forward() if self.training and torch.is_grad_enabled() else Layer.forward
        return forward(self, *args, **kwargs)


@functools.cache
def _compiled_forward() -> Callable[..., Tensor]:
    """Return the function that all layers share; made on first use, as importing the compiler takes seconds."""
    return torch.compile(
        Layer.forward,
        dynamic=True,
        options={
            # Without benchmarking, by which Inductor could choose kernels that round differently in each process
            "deterministic": True,
            # On a GPU small layers wait for launches: one kernel for each sum over rows, and one for several alike
            "split_reductions": False,
            "combo_kernels": True,
        },
    )


def compile_layers(model: nn.Module) -> None:
    """Have the layers of a model compiled, in place; call this before FSDP2 shards them."""
    for module in model.modules():
        if type(module) is Layer:
            module.__class__ = CompiledLayer


@contextmanager
def compiling() -> Iterator[None]:
    """Within the block, compile what is called."""
    # There is one code for each kind of layer on each device; DDP would split a layer's graph where a bucket is full
    settings = {"recompile_limit": 1_000, "accumulated_recompile_limit": 1_000, "optimize_ddp": False}
    with torch.compiler.set_stance("default"), torch._dynamo.config.patch(settings), warnings.catch_warnings():
        # The compiler looks at `.grad` of a replica's weights, which are not leaves
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def without_compiling() -> AbstractContextManager[None]:
    """Within the block, use the code that exists, and compile nothing."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("eager_on_recompile")
    return stance
