"""The one line that says which package to install. It needs none itself."""


def missing_package(error: ModuleNotFoundError) -> str | None:
    """Return what to do about a module that cannot be imported; None for one of this repository."""
    package = (error.name or "").partition(".")[0]
    if package in ("", "recipes", "models", "seqpar"):
        return None
    return f"{package} is not installed: in the checkout of seqpar run pip install -e '.[recipes]'"
