"""The keys and values of what has been decoded so far, which never move.

The beams of a sentence share one list of slots; a mask says which slots make up a beam's history.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from models.attention import KeyValues, subsequent_mask


@dataclass
class LayerCache:
    """What one decoder layer keeps between steps for B sentences: of all their beams' steps, and of the memory.

    `own` has room for more than the `slots` that are filled, so that a step writes only what is new.
    """

    own: KeyValues | None = None
    memory: KeyValues | None = None
    slots: int = 0

    def extend(self, new: KeyValues) -> KeyValues:
        """Keys and values of further slots; returns all so far."""
        start, self.slots = self.slots, self.slots + new.keys.size(2)
        self.own = with_room(self.own, new, self.slots)
        for held, added in ((self.own.keys, new.keys), (self.own.values, new.values)):
            held[:, :, start : self.slots] = added
        return KeyValues(self.own.keys[:, :, : self.slots], self.own.values[:, :, : self.slots])

    def keep_slots(self, slots: Tensor) -> None:
        """Only these of each sentence, (B, fewer); the room stays."""
        if self.own is None:
            return
        for held in (self.own.keys, self.own.values):
            index = slots[:, None, :, None].expand(-1, held.size(1), -1, held.size(3))
            held[:, :, : slots.size(1)] = held.gather(2, index)
        self.slots = slots.size(1)


FIRST_ROOM = 96
"""Slots that a cache has room for at first: new memory comes page by page, and should not be thrown away soon."""


def with_room(held: KeyValues | None, like: KeyValues, slots: int) -> KeyValues:
    """The same with room for so many slots at least; twice as many where there was too little."""
    if held is not None and held.keys.size(2) >= slots:
        return held
    batch, heads, _, width = like.keys.shape
    more = KeyValues(*(like.keys.new_empty(batch, heads, max(FIRST_ROOM, 2 * slots), width) for _ in range(2)))
    if held is not None:
        for roomy, old in ((more.keys, held.keys), (more.values, held.values)):
            roomy[:, :, : old.size(2)] = old
    return more


@dataclass
class DecoderCache:
    """What the decoder keeps between steps. No gradient goes through it.

    The keys and values of a sentence's beams lie side by side, a slot for each step of each beam, and stay where they
    are: which slots a beam's history is made of is said by `visible`, (B, beams, slots), and changes with the beams.
    When half of the slots are of beams that died, the others move together.
    """

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0
    """Time steps held."""
    visible: Tensor | None = None

    @classmethod
    def empty(cls, layers: int) -> Self:
        """A cache for `layers` decoder layers before the first step."""
        return cls([LayerCache() for _ in range(layers)])

    def grow(self, sentences: int, beams: int, time: int, device: torch.device) -> Tensor | None:
        """`time` more steps of each beam are to come: which slots each may attend to, (B, 1, beams x time, slots).

        None where that is every slot there will be.
        """
        steps_TT = subsequent_mask(time, device)[0, 0]
        itself_KK = torch.eye(beams, dtype=torch.bool, device=device)
        own_QQ = (itself_KK[:, None, :, None] & steps_TT[None, :, None, :]).reshape(beams * time, beams * time)
        mask_BQS = own_QQ.expand(sentences, -1, -1)
        if self.visible is not None:
            mask_BQS = torch.cat((self.visible.repeat_interleave(time, 1), mask_BQS), 2)
        self.visible = mask_BQS.unflatten(1, (beams, time))[:, :, -1]
        self.length += time
        only_one = time == 1 and self.length == mask_BQS.size(2)
        return None if only_one else mask_BQS[:, None]

    def reorder(self, parents: Tensor) -> None:
        """Beam k of a sentence continues what its beam parents[., k] was, as a search picks them: (B, beams)."""
        if self.visible is None:
            return
        self.visible = self.visible.gather(1, parents[:, :, None].expand(-1, -1, self.visible.size(2)))
        alive_BS = self.visible.any(1)
        most = int(alive_BS.sum(1).max()) if len(alive_BS) else 0
        if 2 * most <= alive_BS.size(1):  # beams that died leave slots that nobody sees
            self._keep_slots(alive_BS.byte().topk(most, sorted=False).indices)

    def _keep_slots(self, slots: Tensor) -> None:
        """Only these of each sentence, (B, fewer)."""
        assert self.visible is not None
        self.visible = self.visible.gather(2, slots[:, None].expand(-1, self.visible.size(1), -1))
        for layer in self.layers:
            layer.keep_slots(slots)

    def keep_sentences(self, sentences: Tensor) -> None:
        """Drop all sentences but these, in the given order."""
        self.visible = None if self.visible is None else self.visible.index_select(0, sentences)
        for layer in self.layers:
            layer.own = None if layer.own is None else layer.own.select(sentences)
            layer.memory = None if layer.memory is None else layer.memory.select(sentences)
