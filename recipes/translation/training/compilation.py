"""What `training.compile` needs: a compiler for the devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from recipes.translation.errors import ConfigError


def check_compiler(devices: Iterable[torch.device]) -> None:
    """Raise ConfigError if layers cannot be compiled, which is tested with a small function on each device."""
    for device in dict.fromkeys(devices):
        try:
            with warnings.catch_warnings(), torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
                warnings.simplefilter("ignore")  # torch warns of what it does not cache
                torch.compile(lambda x: x.exp() + 1)(torch.ones(2, device=device))
        except RuntimeError as error:
            raise ConfigError(
                f"training.compile is true, but torch.compile fails for {device} ({_reason(error)}): install a C++ "
                "compiler and, for a GPU, Triton, or leave training.compile out"
            ) from error


@contextmanager
def explain_compile_errors() -> Iterator[None]:
    """Within the block, raise ConfigError for a layer that the compiler cannot handle."""
    try:
        yield
    except RuntimeError as error:
        # Importing the compiler takes a second
        from torch._dynamo.exc import TorchDynamoException

        if not isinstance(error, TorchDynamoException):
            raise
        raise ConfigError(f"the layers cannot be compiled ({_reason(error)}): set training.compile false") from error


def _reason(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0][:200]
