"""Layers of a Transformer whose training step `torch.compile` turns into fewer and larger kernels.

All layers of a kind share one compiled code, for any number of sentences and time steps above 1; what it is not for,
such as a batch of one sentence, is computed as without it. The code is made within `compiling` alone. So which code
runs depends on the shapes and never on earlier calls, and a training that is resumed repeats the same bits.

    compile_layers(model)
    with compiling():
        model(src, tgt).sum().backward()  # sentences, source and target steps: three numbers above 1
    with compiled():
        model(src, tgt).sum().backward()  # any numbers

Values are the layer's own but for rounding. Dropout draws other numbers, which `torch.manual_seed` determines as well.
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
    """A layer that is compiled for training; without gradients it is the ordinary one."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Transform the states as `Layer.forward` does."""
        forward = _compiled_forward() if self.training and torch.is_grad_enabled() else Layer.forward
        return forward(self, *args, **kwargs)


@functools.cache
def _compiled_forward() -> Callable[..., Tensor]:
    """Return the code that all layers share; made when it is needed, as importing the compiler takes seconds."""
    return torch.compile(
        Layer.forward,
        dynamic=True,
        options={
            # Without measuring, by which Inductor would choose kernels with other roundings from process to process
            "deterministic": True,
            # On a GPU, whose small layers wait for launches: one for each sum over rows, one for several that are alike
            "split_reductions": False,
            "combo_kernels": True,
        },
    )


def compile_layers(model: nn.Module) -> None:
    """Let the layers of a model be compiled, in place; before FSDP2 shards them."""
    for module in model.modules():
        if type(module) is Layer:
            module.__class__ = CompiledLayer


@contextmanager
def compiling() -> Iterator[None]:
    """Within the block, compile what is called."""
    # A code for each kind of layer on each device; and DDP would have a layer's code cut where gradients fill a bucket
    settings = {"recompile_limit": 1_000, "accumulated_recompile_limit": 1_000, "optimize_ddp": False}
    with torch.compiler.set_stance("default"), torch._dynamo.config.patch(settings), warnings.catch_warnings():
        # The compiler looks at `.grad` of a replica's weights, which are no leaves
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        yield


def without_compiling() -> AbstractContextManager[None]:
    """Within the block, use the code that there is, and compile nothing."""
    stance: AbstractContextManager[None] = torch.compiler.set_stance("eager_on_recompile")
    return stance
