"""A decoder-only Transformer that translates by prompt, without its projection to the vocabulary.

A pair of sentences is one sequence of a causal language model (Liu et al. 2018, "Generating Wikipedia by Summarizing
Long Sequences", section 4.2.3; Radford et al. 2019 for translation):

    x_1 ... x_S end start y_1 ... y_T end

The source and its end symbol are the prompt. Hidden states, and so losses, are those of the cells from `start` on:
they predict y_1 ... y_T and the end symbol. The layers are those of a decoder (Vaswani et al. 2017, section 3.1)
without attention to a memory; one embedding reads both languages, and positions count through the whole sequence from
0.

The model has the interface of `EncoderDecoder`, and so the same loss, training and searches. `forward` packs the pairs
of a batch into rows, without attention from one pair to another. `encode` computes the prompts once for all steps of a
search; the memory is the keys and values of every layer.

Shapes: B sentences, R rows (packed, or sentences x beams), S source time, T target time, W width of a packed row, D
model width, M width of the memory (2 x layers x D), H heads, K width of a head, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.attention import Attention, KeyValues, check_mask, log_weights_of, padding_mask, subsequent_mask
from models.cache import DecoderCache
from models.embedding import Embedding
from models.presets import DecoderOnlyConfig
from models.sequence_packing import own_cells_mask, pack
from models.transformer import (
    EncoderDecoder,
    Generator,
    Stack,
    check_beams,
    check_pairs,
    check_tokens,
    initialize,
    layer_of,
    tie_embeddings,
)

ROW = 96
"""Approximate number of tokens in a packed row. On the CPU a step takes the same time with 1 (a row for each pair) and
with 64 to 256; attention in rows of up to `attention.SHORT` tokens is computed by matrix products there."""


class DecoderOnly(EncoderDecoder):
    """A model of p(target | source) whose `forward` returns hidden states, before the generator."""

    attention_read = (
        "the mean over the heads of the penultimate layer. A decoder-only model attends to source and translation at "
        "once: the part on the source is shown, divided by its sum"
    )

    def __init__(self, decoder: Stack, embed: Embedding, generator: Generator, pad: int) -> None:
        nn.Module.__init__(self)  # without the encoder that EncoderDecoder has
        self.decoder = decoder
        self.tgt_embed = embed
        self.generator = generator
        self.pad = pad
        self.row = ROW

    @property
    def src_embed(self) -> Embedding:  # type: ignore[override]
        """Return the one embedding, which reads both languages."""
        return self.tgt_embed

    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the hidden states of the target, packed: src (B, S) and tgt (B, T) ids -> (B, T, D).

        This is `decode(encode(src), ...)`, but in rows of about `row` tokens that hold several pairs, so that hardly
        any padding is computed. src ends with the end symbol and tgt begins with the start symbol; tgt is padded at the
        end, where its hidden states are meaningless. `src_mask`, (B, 1, 1, S), says which tokens of src are read; the
        default is all but padding. A `tgt_mask` is refused.

        Raises TypeError or ValueError for ids or masks of the wrong dtype or shape.
        """
        check_pairs(src, tgt)
        check_no_mask(tgt_mask)
        prompt_BS = self._prompt(src, src_mask)
        # Up to the last token that is not padding; the first token is always read
        real_BT = (tgt != self.pad).flip(1).cumsum(1).flip(1) > 0
        real_BT[:, :1] = True
        real_BL = torch.cat((prompt_BS, real_BT), 1)
        place_BL = real_BL.cumsum(1) - 1  # of each token in its sequence
        places = pack(real_BL.sum(1).tolist(), self.row)
        cells = places.rows * places.width
        start_B = torch.tensor(places.starts, device=src.device, dtype=torch.long)
        # Tokens that are not read go into one extra cell, which is cut off again
        cell_BL = (start_B[:, None] + place_BL).masked_fill(~real_BL, cells)
        number_BL = torch.arange(len(src), device=src.device)[:, None].expand_as(cell_BL)

        def lay_out(values_BL: Tensor, elsewhere: int) -> Tensor:
            row = values_BL.new_full((cells + 1,), elsewhere)
            row[cell_BL] = values_BL
            return row[:cells].view(places.rows, places.width)

        x = self._embed(
            lay_out(torch.cat((src, tgt), 1), self.pad), lay_out(place_BL, 0), stop=src.size(1) + tgt.size(1)
        )
        hidden_RWD = self.decoder(x, own_cells_mask(lay_out(number_BL, -1)))
        # Padding, whose hidden states are meaningless, gets those of its sequence's first token
        cell_BT = torch.where(real_BT, cell_BL[:, src.size(1) :], start_B[:, None])
        hidden_BTD: Tensor = hidden_RWD.flatten(0, 1).index_select(0, cell_BT.flatten()).unflatten(0, tgt.shape)
        return hidden_BTD

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Compute the prompts: (B, S) ids -> their keys and values in every layer, (B, S, M)."""
        check_tokens("src", src)
        prompt_BS = self._prompt(src, src_mask)
        place_BS = (prompt_BS.cumsum(1) - 1).clamp(min=0)
        cache = self.decoder.empty_cache()
        mask = prompt_BS[:, None, None] & subsequent_mask(src.size(1), src.device)
        self.decoder(self._embed(src, place_BS, stop=src.size(1)), mask, cache=cache)
        held = []
        for layer in cache.layers:
            assert layer.own is not None
            both_BHSK = (layer.own.keys[:, :, : layer.slots], layer.own.values[:, :, : layer.slots])
            held += [each_BHSK.transpose(1, 2).flatten(2) for each_BHSK in both_BHSK]
        return torch.cat(held, 2)

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Compute the hidden states of a target prefix: memory (B, S, M), tgt (R, T) ids -> (R, T, D).

        R is B, or B x beams with the beams of a sentence next to each other. src_mask, (B, 1, 1, S), says which tokens
        of the prompt were read; None means all. With a cache (`decoder.empty_cache()`), tgt contains only the steps
        after the cached ones. A `tgt_mask` is refused.
        """
        check_tokens("tgt", tgt)
        check_no_mask(tgt_mask)
        check_beams(memory, tgt)
        sentences, source_time = memory.shape[:2]
        prompt_BS = prompt_of(src_mask, sentences, source_time, memory.device)
        beams = tgt.size(0) // max(1, sentences)
        if cache is None:
            cache = self.decoder.empty_cache()
        if cache.visible is None:
            self._begin(cache, memory)
            cache.visible = prompt_BS[:, None].expand(-1, beams, -1)
        start = cache.length
        mask = cache.grow(sentences, beams, tgt.size(1), tgt.device)
        step_T = torch.arange(start, cache.length, device=tgt.device)
        place_RT = prompt_BS.sum(1).repeat_interleave(beams)[:, None] + step_T
        x = self._embed(tgt, place_RT, stop=source_time + cache.length)
        hidden: Tensor = self.decoder(x, mask, cache=cache)
        return hidden

    def source_attention(self, src: Tensor, tgt: Tensor, layer: int | None = None) -> Tensor:
        """Compute the attention to the prompt in one layer, averaged over its heads: (B, T, S).

        A target token attends to the source and to the target up to itself. This is the mean over the heads of its
        attention to the source, divided by its sum, so that each row sums to 1 here as well. A head that attends only
        to the target therefore contributes next to nothing.
        """
        check_pairs(src, tgt)
        attention = layer_of(self.decoder.layers, layer).self_attention
        assert isinstance(attention, Attention)
        src_mask = padding_mask(src, self.pad)
        memory = self.encode(src, src_mask)
        with log_weights_of(attention) as calls:
            self.decode(memory, src_mask, tgt)
        # The prompt is in the first slots; in logarithms, even a small share of attention to it does not underflow
        (log_BHTS,) = (log_weights[..., : src.size(1)] for log_weights in calls)
        return log_BHTS.logsumexp(1).softmax(-1)

    def _prompt(self, src: Tensor, src_mask: Tensor | None) -> Tensor:
        """Return which tokens of the source are read, (B, S)."""
        if src_mask is None:
            src_mask = padding_mask(src, self.pad)
        return prompt_of(src_mask, src.size(0), src.size(1), src.device)

    def _embed(self, tokens: Tensor, place: Tensor, *, stop: int) -> Tensor:
        """Embed tokens (R, T) at the given positions in their sequences, which are below `stop`: (R, T, D)."""
        vectors = self.tgt_embed.lookup(tokens)
        d_model = vectors.size(-1)
        positions = self.tgt_embed.positions_of(0, stop, like=vectors)
        embedded: Tensor = self.tgt_embed.dropout(vectors * math.sqrt(d_model) + positions[place])
        return embedded

    def _begin(self, cache: DecoderCache, memory: Tensor) -> None:
        """Put the prompts' keys and values into the first slots of a cache."""
        attention = self.decoder.layers[0].self_attention
        assert isinstance(attention, Attention)  # with the heads of this rank, if they are split
        held = [each_BSD.unflatten(2, (attention.heads, -1)) for each_BSD in memory.chunk(2 * len(cache.layers), 2)]
        for layer, keys_BSHK, values_BSHK in zip(cache.layers, held[::2], held[1::2], strict=True):
            layer.extend(KeyValues(keys_BSHK.transpose(1, 2), values_BSHK.transpose(1, 2)))


def check_no_mask(tgt_mask: Tensor | None) -> None:
    """Raise ValueError for a target mask."""
    if tgt_mask is not None:
        raise ValueError("tgt_mask was given, but every token of the sequence attends to those before it: leave it out")


def prompt_of(src_mask: Tensor | None, sentences: int, time: int, device: torch.device) -> Tensor:
    """Return which tokens of the prompts are read, (B, S); raise ValueError for a mask with rows of queries."""
    if src_mask is None:
        return torch.ones(sentences, time, dtype=torch.bool, device=device)
    check_mask("src_mask", src_mask)
    if src_mask.size(1) != 1 or src_mask.size(2) != 1:
        raise ValueError(
            f"src_mask has shape {tuple(src_mask.shape)}, not (batch, 1, 1, source time): the prompt is causal, and a "
            "mask can only leave out some of its tokens"
        )
    return src_mask.expand(sentences, 1, 1, time)[:, 0, 0]


def make_decoder_only(config: DecoderOnlyConfig, vocab: int, pad: int = 0) -> DecoderOnly:
    """Build a decoder-only Transformer with random weights for a joint vocabulary; `pad` is its padding id.

    Raises ValueError for a `pad` outside the vocabulary.
    """
    sizes = config.layers()
    with torch.device("meta"):
        model = DecoderOnly(
            Stack(sizes, sizes.decoder_layers),
            Embedding(vocab, sizes),
            Generator(sizes.d_model, vocab),
            pad,
        )
    tie_embeddings(model, sizes.tie)
    initialize(model)  # after tying, so that a shared matrix is drawn once, as an embedding
    return model
