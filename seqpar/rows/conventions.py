"""Define how each label-smoothing convention distributes eps, the probability taken from the target: one table.

The criteria, the closed forms, the plain reference, the strategies and the recipe's settings know a convention only by
its entry here. This file does not import torch, so that a command line can show its choices at once.

Symbols: V is the number of classes, eps the probability taken from the target.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Convention = Literal["torch", "fairseq", "harvard"]


class Shares(NamedTuple):
    """Which classes get an equal share of eps, and what the loss is."""

    text: str
    """The share of a class and who gets it, in a few words."""
    target: bool
    """Whether the target gets a share, too."""
    padding: bool
    """Whether the padding class, `ignore_index`, gets a share; if not, it must be a class, and its q is 0."""
    kl: bool
    """Whether the loss is the KL divergence: minus the smoothed target's entropy, so a perfect prediction costs 0."""

    def classes(self, vocab_size: int) -> int:
        """Return how many of V classes get a share, which may be none."""
        return vocab_size - (not self.target) - (not self.padding)

    def excluded_class(self, ignore_index: int) -> int | None:
        """Return the class whose q is 0, if there is one."""
        return None if self.padding else ignore_index

    def is_defined(self, vocab_size: int, ignore_index: int) -> bool:
        """Return whether any class gets a share, and the padding is one of the classes if it has to be."""
        return self.classes(vocab_size) > 0 and (self.padding or 0 <= ignore_index < vocab_size)


CONVENTIONS: dict[Convention, Shares] = {
    # The formula of Szegedy et al. 2016, section 7, and of torch.nn.CrossEntropyLoss
    "torch": Shares("eps/V for every class", target=True, padding=True, kl=False),
    # fairseq's label_smoothed_cross_entropy
    "fairseq": Shares("eps/(V-1) for every class but the target", target=False, padding=True, kl=False),
    # The Annotated Transformer, 2018
    "harvard": Shares(
        "eps/(V-2) for every class but the target and the padding, the entropy constant subtracted",
        target=False,
        padding=False,
        kl=True,
    ),
}


def shares_of(smoothing_convention: object) -> Shares:
    """Return the entry of a convention; raise ValueError for an unknown one."""
    for name, shares in CONVENTIONS.items():
        if name == smoothing_convention:
            return shares
    *others, last = map(repr, CONVENTIONS)
    raise ValueError(f"smoothing_convention is {smoothing_convention!r}; it must be {', '.join(others)} or {last}")
