"""The loss of a sequence model, over any number of devices, in chunks, with the gradient of the single-device model."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpar.names import *  # noqa: F403

__version__ = "0.1.0"


class _Package(ModuleType):
    """Loads the public names, and torch with them, when the first one is asked for: pytest imports a plugin in here.

    A file never becomes an attribute, for some have the name of the function in them (`linear_cross_entropy`).
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        names = import_module("seqpar.names")
        if name == "__all__" or name in names.__all__:
            return getattr(names, name)
        try:
            return import_module(f"seqpar.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"seqpar.{name}":
                raise
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


sys.modules[__name__].__class__ = _Package
