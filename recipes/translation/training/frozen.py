"""Parts of a model that training leaves as they are."""

from __future__ import annotations

from collections.abc import Collection

from models import EncoderDecoder
from recipes.translation.settings.config import ConfigError
from recipes.translation.settings.training import PARTS


def freeze(model: EncoderDecoder, names: Collection[str]) -> None:
    """Take the gradient from the named parts, keys of PARTS, whose weights then never change.

    Raises ConfigError if a weight belongs to a named part and, tied, to another one, and if nothing is left to train.
    """
    parts = {name: getattr(model, part) for name, part in PARTS.items() if hasattr(model, part)}
    weights = {name: {id(each) for each in part.parameters()} for name, part in parts.items()}
    for name in names:
        for other in weights.keys() - set(names):
            if weights[name] & weights[other]:
                raise ConfigError(
                    f"training.freeze names {name}, which shares its weight with {other}: name both, or set model.tie "
                    "so that they have weights of their own"
                )
    if set(names) >= weights.keys():
        raise ConfigError("training.freeze names every part of the model, and leaves nothing to train: name fewer")
    for name in names:
        parts[name].requires_grad_(False)
