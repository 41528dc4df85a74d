"""Train and use translation models; `load_translator` opens a trained one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipes.translation.translating.loaded import LoadedTranslator, load_translator

__all__ = ["LoadedTranslator", "load_translator"]


def __getattr__(name: str) -> Any:
    """Import the public names, and torch with them, on first use: the commands' help needs none of them."""
    if name in __all__:
        from recipes.translation.translating import loaded

        return getattr(loaded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
