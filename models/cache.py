"""The keys and values of all time steps decoded so far, in slots that are only moved when they are compacted.

The beams of a sentence share one list of slots; a mask says which slots make up a beam's history. Reordering beams
changes only the mask.

Shapes: B sentences, T time steps, K beams, Q = K x T queries, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from models.attention import KeyValues, subsequent_mask


@dataclass
class LayerCache:
    """Hold the keys and values of one decoder layer for B sentences: of all steps of their beams, and of the memory.

    `own` has room for more than the `slots` in use, so that a step only writes its own keys and values.
    """

    own: KeyValues | None = None
    memory: KeyValues | None = None
    slots: int = 0

    def extend(self, new: KeyValues) -> KeyValues:
        """Append keys and values in further slots, and return those of all slots."""
        start = self.slots
        self.slots += new.keys.size(2)
        self.own = with_room(self.own, new, self.slots)
        for held, added in ((self.own.keys, new.keys), (self.own.values, new.values)):
            held[:, :, start : self.slots] = added
        return KeyValues(self.own.keys[:, :, : self.slots], self.own.values[:, :, : self.slots])

    def keep_slots(self, slots: Tensor) -> None:
        """Drop all slots of each sentence except these, (B, fewer); the storage stays allocated."""
        if self.own is None:
            return
        for held in (self.own.keys, self.own.values):
            index = slots[:, None, :, None].expand(-1, held.size(1), -1, held.size(3))
            held[:, :, : slots.size(1)] = held.gather(2, index)  # gather copies, so that no slot is read after a write
        self.slots = slots.size(1)


FIRST_ROOM = 96
"""Slots that a cache has room for at first. The system provides new memory page by page, which is slow, so the first
allocation should be enough for most sentences."""


def with_room(held: KeyValues | None, like: KeyValues, slots: int) -> KeyValues:
    """Return the same keys and values with room for `slots`: `held` itself, or a copy with room for twice as many."""
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
    """The decoder's state between steps, for decoding without gradients.

    Keys and values of further steps are written in place, so torch refuses a backward pass through steps that others
    have followed.

    The keys and values of a sentence's beams are in one list, with a slot for each step of each beam. `visible`,
    (B, beams, slots), says which slots make up a beam's history. Once half of the slots belong only to discarded
    beams, the others are compacted.
    """

    layers: list[LayerCache] = field(default_factory=list)
    length: int = 0
    """Number of time steps in the cache."""
    visible: Tensor | None = None

    @classmethod
    def empty(cls, layers: int) -> Self:
        """Return a cache for `layers` decoder layers before the first step."""
        return cls([LayerCache() for _ in range(layers)])

    def grow(self, sentences: int, beams: int, time: int, device: torch.device) -> Tensor | None:
        """Announce `time` more steps of each beam; return which slots each may attend to, (B, 1, beams x time, slots).

        Returns None if each may attend to all slots.
        """
        steps_TT = subsequent_mask(time, device)[0, 0]
        itself_KK = torch.eye(beams, dtype=torch.bool, device=device)
        # Among the new slots, step t of beam k attends to steps up to t of the same beam k
        own_QQ = (itself_KK[:, None, :, None] & steps_TT[None, :, None, :]).reshape(beams * time, beams * time)
        mask_BQS = own_QQ.expand(sentences, -1, -1)
        # Slots are in the order of time, and within one call in the order of beams: the new ones come last
        if self.visible is not None:
            mask_BQS = torch.cat((self.visible.repeat_interleave(time, 1), mask_BQS), 2)
        # The history of a beam is what its latest step attends to
        if time:
            self.visible = mask_BQS.unflatten(1, (beams, time))[:, :, -1]
        self.length += time
        # As many slots as steps: each sentence has one beam, whose history is all its slots
        if time == 1 and self.length == mask_BQS.size(2):
            return None
        return mask_BQS[:, None]

    def reorder(self, parents: Tensor) -> None:
        """Let beam k of each sentence continue the history of its beam parents[:, k]: (B, beams)."""
        if self.visible is None:
            return
        self.visible = self.visible.gather(1, parents[:, :, None].expand(-1, -1, self.visible.size(2)))
        alive_BS = self.visible.any(1)
        # All sentences keep the same number of slots: as many as the one that needs the most
        most = 0
        if len(alive_BS):
            most = int(alive_BS.sum(1).max())
        if 2 * most <= alive_BS.size(1):  # discarded beams leave slots that no beam attends to
            slots_BS = alive_BS.byte().topk(most, sorted=False).indices
            self.visible = self.visible.gather(2, slots_BS[:, None].expand(-1, self.visible.size(1), -1))
            for layer in self.layers:
                layer.keep_slots(slots_BS)

    def keep_sentences(self, sentences: Tensor) -> None:
        """Keep only these sentences, in the given order."""
        if self.visible is not None:
            self.visible = self.visible.index_select(0, sentences)
        for layer in self.layers:
            if layer.own is not None:
                layer.own = layer.own.select(sentences)
            if layer.memory is not None:
                layer.memory = layer.memory.select(sentences)
