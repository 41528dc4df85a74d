"""What can be wrong with a user's settings, data or files, and with a training. Every message is one line.

This module imports nothing, so that even a missing package can be named.
"""


class ConfigError(ValueError):
    """A setting does not exist or cannot have this value."""


class DataError(ValueError):
    """Data is missing, or does not fit the settings."""


class CheckpointError(Exception):
    """A checkpoint is missing, damaged, or of a different model or run."""


class TrainingError(Exception):
    """Training cannot continue; the message gives advice."""


class OtherRankError(Exception):
    """Another process of the run failed first or was lost; the message names it and, if known, its error."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to do about a module that cannot be imported; None for one of this repository."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "recipes", "models", "seqpar"):
        return None
    return f"{package} is not installed: in the checkout of seqpar, run pip install -e '.[recipes]'"
