"""Parts of a model that training leaves as they are."""

from __future__ import annotations

from collections.abc import Collection

from models import EncoderDecoder
from recipes.translation.errors import ConfigError
from recipes.translation.settings.training import PARTS


def freeze(model: EncoderDecoder, names: Collection[str]) -> None:
    """Take the gradient from the named parts, keys of PARTS, whose weights then never change.

    Raises ConfigError if a weight belongs to a named part and, tied, to another one, and if nothing is left to train.
    """
    parts = {name: getattr(model, part) for name, part in PARTS.items() if hasattr(model, part)}
    weights = {name: {id(each) for each in part.parameters()} for name, part in parts.items()}
    for name in names:
        tied = [other for other in weights if weights[other] & weights[name]]
        if missing := [other for other in tied if other not in names]:
            raise ConfigError(
                f"training.freeze names {name} but not {' and '.join(missing)}; {', '.join(tied)} share a weight, and "
                "are frozen together or not at all: name all of them, or none"
            )
    if set(names) >= weights.keys():
        raise ConfigError("training.freeze names every part of the model, and leaves nothing to train: name fewer")
    for name in names:
        parts[name].requires_grad_(False)
