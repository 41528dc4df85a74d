"""The loss of a sequence model in chunks, over any number of devices, with the gradient of the single-device model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpar.names import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the public names, and torch with them, when the first one is requested.

    pytest imports `seqpar.testing.plugin`, and with it this package, in every run in an environment that has seqpar
    installed; torch takes more than a second to import.
    """
    if name in ("testing", "integrations", "memory_plan", "objectives"):
        return import_module(f"{__name__}.{name}")
    if name == "__all__" or not name.startswith("_"):
        names = import_module(f"{__name__}.names")
        if name == "__all__" or name in names.__all__:
            # Found without this function from now on
            globals()[name] = getattr(names, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names besides what is already loaded."""
    return sorted({*globals(), *import_module(f"{__name__}.names").__all__})
