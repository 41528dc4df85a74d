"""Import what a measured process would otherwise import by itself, which takes seconds and memory."""

from contextlib import suppress

from benchmarks.scores import measure as measure

with suppress(ImportError):
    import trl.trainer.utils  # noqa: F401
