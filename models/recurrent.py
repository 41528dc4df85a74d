"""An LSTM encoder-decoder with attention (Luong, Pham and Manning 2015), without its projection to the vocabulary.

It has the interface of the Transformer's `EncoderDecoder`, and so the same loss, training and searches.

    encoder   m_1 ... m_S = a bidirectional LSTM over the source (Bahdanau, Cho and Bengio 2015, section 3.2)
    start     h_0 = tanh(W_0 mean_s m_s)                          (Sennrich et al. 2017, section 2)
    decoder   h_t = LSTM(y_{t-1}, h_{t-1})
    attention a_t = softmax_s(h_t W_a m_s), c_t = sum_s a_ts m_s  (Luong et al. 2015, equations 7 and 8, "general")
    output    tanh(W_c [c_t; h_t])                                (equation 5), the hidden state for the generator

The decoder's input has no c_{t-1} ("input feeding", section 3.3), so that all steps of a training batch are one call.

Shapes: B sentences, R rows (sentences x beams), S source time, T target time, D model width, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from models.attention import added_scores, check_mask, padding_mask
from models.cache import DecoderCache
from models.dropout import Dropout
from models.presets import RecurrentConfig
from models.transformer import (
    EncoderDecoder,
    Generator,
    check_beams,
    check_pairs,
    check_tokens,
    initialize,
    tie_embeddings,
)

State = tuple[Tensor, Tensor]
"""The hidden and the cell state of the decoder's layers, each (L, R, D)."""


class WordEmbedding(nn.Module):
    """Token vectors with dropout."""

    def __init__(self, vocab: int, d_model: int, dropout: float) -> None:
        super().__init__()
        self.lookup = nn.Embedding(vocab, d_model)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ids (B, T): (B, T, D)."""
        # Embeddings are drawn from normal(0, 1/D); times sqrt(D) their values are O(1), as in the Transformer
        embedded: Tensor = self.dropout(self.lookup(tokens) * self.lookup.embedding_dim**0.5)
        return embedded


class LSTM(nn.LSTM):
    """torch's LSTM of batches (B, T, D), which leaves a CPU's autocast aside.

    Low precision there is a matter of oneDNN, which has it on some CPUs only (not on those with AVX2) and raises
    RuntimeError on the others; torch's own steps, for sequences of several lengths, return float32 in any case.
    """

    def __init__(self, size: int, hidden: int, layers: int, dropout: float, bidirectional: bool = False) -> None:
        if layers == 1:
            dropout = 0.0  # torch warns about one without layers to be between
        super().__init__(size, hidden, layers, batch_first=True, dropout=dropout, bidirectional=bidirectional)

    def forward(self, input, hx=None):  # type: ignore[no-untyped-def]
        weight = self.weight_ih_l0
        if weight.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
            return super().forward(input, hx)
        if hx is not None:
            hx = tuple(state.to(weight.dtype) for state in hx)
        with torch.autocast("cpu", enabled=False):
            return super().forward(input.to(weight.dtype), hx)


class RecurrentEncoder(nn.Module):
    """A bidirectional LSTM; each direction has half of the width."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width = config.d_model
        self.lstm = LSTM(width, width // 2, config.encoder_layers, config.dropout, bidirectional=True)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, length_B: Tensor) -> Tensor:
        """Transform the states (B, S, D) of sources of the given lengths; the memory of padding is 0."""
        if not len(x):
            return x
        states = pack_padded_sequence(x, length_B.cpu(), batch_first=True, enforce_sorted=False)
        memory, _ = pad_packed_sequence(self.lstm(states)[0], batch_first=True, total_length=x.size(1))
        dropped: Tensor = self.dropout(memory)
        return dropped


class RecurrentDecoder(nn.Module):
    """An LSTM, and attention from each of its states to the memory."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.layers = config.decoder_layers
        self.start = nn.Linear(config.d_model, config.decoder_layers * config.d_model)
        self.lstm = LSTM(config.d_model, config.d_model, config.decoder_layers, config.dropout)
        self.score = nn.Linear(config.d_model, config.d_model)
        self.output = nn.Linear(2 * config.d_model, config.d_model)
        self.dropout = Dropout(config.dropout)

    def empty_cache(self) -> RecurrentCache:
        """Return a new cache for `decode` to decode step by step."""
        return RecurrentCache()

    def first_state(self, memory: Tensor, real_BS: Tensor, beams: int) -> State:
        """Compute the state before the first step of every row."""
        weight_BS1 = real_BS[:, :, None].to(memory.dtype)
        mean_BD = (memory * weight_BS1).sum(1) / weight_BS1.sum(1)
        hidden_BLD = self.start(mean_BD).tanh().view(len(memory), self.layers, memory.size(2))
        hidden_LRD = hidden_BLD.repeat_interleave(beams, 0).transpose(0, 1).contiguous()
        return hidden_LRD, torch.zeros_like(hidden_LRD)

    def forward(self, x: Tensor, memory: Tensor, real_BS: Tensor, state: State) -> tuple[Tensor, State]:
        """Transform the states x (R, T, D) of a target; return the hidden states and the LSTM's last state."""
        if not x.numel():  # torch's LSTM takes neither a batch nor a sequence without entries
            return x, state
        h_RTD, state = self.lstm(x, state)
        h_RTD = self.dropout(h_RTD)
        attention_BQS = self.attention(h_RTD, memory, real_BS)
        context_RTD = (attention_BQS @ memory).reshape(h_RTD.shape)
        hidden_RTD: Tensor = self.dropout(self.output(torch.cat((context_RTD, h_RTD), -1)).tanh())
        return hidden_RTD, state

    def attention(self, h_RTD: Tensor, memory: Tensor, real_BS: Tensor) -> Tensor:
        """Compute how much each state attends to the memory (equations 7 and 8): (R, T, D) -> (B, beams x T, S)."""
        # The beams of a sentence are queries to the same memory: (R, T, D) -> (B, beams x T, D)
        query_BQD = self.score(h_RTD).reshape(len(memory), -1, h_RTD.size(2))
        scores_BQS = query_BQD @ memory.mT
        added_B11S = added_scores(real_BS[:, None, None, :], scores_BQS)
        assert added_B11S is not None
        shares_BQS: Tensor = (scores_BQS + added_B11S[:, 0]).softmax(-1)
        return shares_BQS


@dataclass
class RecurrentCache(DecoderCache):
    """The decoder's state between steps: that of its LSTM, for every beam of every sentence."""

    state: State | None = None
    sentences: int = 0
    """Sentences at the last step; the rows of the state are as many, times the beams."""

    def reorder(self, parents: Tensor) -> None:
        """Let beam k of each sentence continue the history of its beam parents[:, k]: (B, beams)."""
        if self.state is None:
            return
        beams = self.state[0].size(1) // max(1, self.sentences)
        first_B1 = torch.arange(self.sentences, device=parents.device)[:, None] * beams
        self._select((first_B1 + parents).flatten())

    def keep_sentences(self, sentences: Tensor) -> None:
        """Drop all sentences but these, in the given order."""
        if self.state is None:
            return
        beams = self.state[0].size(1) // max(1, self.sentences)
        rows_BK = sentences[:, None] * beams + torch.arange(beams, device=sentences.device)
        self._select(rows_BK.flatten())
        self.sentences = len(sentences)

    def _select(self, rows: Tensor) -> None:
        assert self.state is not None
        hidden, cell = self.state
        self.state = (hidden.index_select(1, rows), cell.index_select(1, rows))


class RecurrentEncoderDecoder(EncoderDecoder):
    """A model of p(target | source) whose `forward` returns hidden states, before the generator."""

    encoder: RecurrentEncoder  # type: ignore[assignment]
    decoder: RecurrentDecoder  # type: ignore[assignment]
    attention_read = "the attention of the LSTM, which has one"

    def encode(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        """Compute the memory: (B, S) ids -> (B, S, D). Padding is at the end; another `src_mask` is refused."""
        check_tokens("src", src)
        check_mask("src_mask", src_mask)
        real_BS = padding_mask(src, self.pad)[:, 0, 0]
        if src_mask is not None and not torch.equal(src_mask.expand(len(src), 1, 1, -1)[:, 0, 0], real_BS):
            raise ValueError("src_mask differs from padding_mask(src, pad): an LSTM reads every token but the padding")
        if not src.size(1):
            raise ValueError("src has no time steps: give every sentence its end symbol")
        position_S = torch.arange(1, src.size(1) + 1, device=src.device)
        # The last real token ends a sentence; in one of only padding the first position counts as real
        length_B = (position_S * real_BS).amax(1)
        memory: Tensor = self.encoder(self.src_embed(src), length_B)
        return memory

    def decode(
        self,
        memory: Tensor,
        src_mask: Tensor | None,
        tgt: Tensor,
        tgt_mask: Tensor | None = None,
        cache: DecoderCache | None = None,
    ) -> Tensor:
        """Compute the hidden states of a target prefix: memory (B, S, D), tgt (R, T) ids -> (R, T, D).

        R is B, or B x beams with the beams of a sentence next to each other. With a cache (`decoder.empty_cache()`),
        tgt contains only the steps after the cached ones. A `tgt_mask` is refused: an LSTM is causal by itself.
        """
        check_tokens("tgt", tgt)
        check_mask("src_mask", src_mask)
        if tgt_mask is not None:
            raise ValueError("tgt_mask was given, but an LSTM reads every token before a step: leave it out")
        check_beams(memory, tgt)
        real_BS = torch.ones(memory.shape[:2], dtype=torch.bool, device=memory.device)
        if src_mask is not None:
            real_BS = src_mask.expand(len(memory), 1, 1, memory.size(1))[:, 0, 0]
        beams = tgt.size(0) // max(1, memory.size(0))
        state = None
        if isinstance(cache, RecurrentCache):
            state = cache.state
        if state is None:
            state = self.decoder.first_state(memory, real_BS, beams)
        hidden: Tensor
        hidden, state = self.decoder(self.tgt_embed(tgt), memory, real_BS, state)
        if isinstance(cache, RecurrentCache):
            cache.state = state
            cache.sentences = memory.size(0)
            cache.length += tgt.size(1)
        return hidden

    def source_attention(self, src: Tensor, tgt: Tensor, layer: int | None = None) -> Tensor:
        """Compute the attention to the source (equation 7), which follows the last LSTM layer: (B, T, S)."""
        if layer not in (None, 0):
            raise ValueError(f"layer is {layer}, but an LSTM attends to the source once, after its layers: use 0")
        check_pairs(src, tgt)
        memory = self.encode(src)
        real_BS = padding_mask(src, self.pad)[:, 0, 0]
        if not tgt.numel():
            return memory.new_zeros(*tgt.shape, src.size(1))
        h_BTD, _ = self.decoder.lstm(self.tgt_embed(tgt), self.decoder.first_state(memory, real_BS, 1))
        return self.decoder.attention(self.decoder.dropout(h_BTD), memory, real_BS)


def make_recurrent(config: RecurrentConfig, src_vocab: int, tgt_vocab: int, pad: int = 0) -> RecurrentEncoderDecoder:
    """Build an LSTM model with random weights; `pad` is the padding id of both vocabularies.

    Raises ValueError as `make_transformer` does.
    """
    with torch.device("meta"):
        model = RecurrentEncoderDecoder(
            RecurrentEncoder(config),  # type: ignore[arg-type]
            RecurrentDecoder(config),  # type: ignore[arg-type]
            WordEmbedding(src_vocab, config.d_model, config.dropout),  # type: ignore[arg-type]
            WordEmbedding(tgt_vocab, config.d_model, config.dropout),  # type: ignore[arg-type]
            Generator(config.d_model, tgt_vocab),
            pad,
        )
    tie_embeddings(model, config.tie)
    initialize(model)  # after tying, so that a shared matrix is drawn once, as an embedding
    return model
