"""Small models and random sentences that the tests of `models` share."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

import seqpar
from models import DecoderOnlyConfig, EncoderDecoder, TransformerConfig, make_decoder_only, make_transformer
from models.decoder_only import DecoderOnly

PAD, BOS, EOS = 0, 1, 2
TINY = TransformerConfig(
    d_model=16, d_ff=24, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0, norm="pre", tie="all"
)
TINY_DECODER_ONLY = DecoderOnlyConfig(
    d_model=16, d_ff=24, heads=4, decoder_layers=2, dropout=0.0, norm="pre", tie="all"
)


def small_transformer(seed: int = 0, vocab: int = 11, spread: float = 1.0, **changes: object) -> EncoderDecoder:
    """A float64 model in training mode, its config `TINY` with `changes`.

    `spread` scales every parameter; 2 or 3 makes a random model's choices depend on its whole input. Biases and
    norm weights are random, too: at their initial values they would hide mistakes.
    """
    torch.manual_seed(seed)
    model = make_transformer(replace(TINY, **changes), vocab, vocab, PAD).double()  # type: ignore[arg-type]
    scatter(model, spread)
    return model


def small_decoder_only(seed: int = 0, vocab: int = 11, spread: float = 1.0, **changes: object) -> DecoderOnly:
    """The same for a decoder-only model, its config `TINY_DECODER_ONLY` with `changes`."""
    torch.manual_seed(seed)
    model = make_decoder_only(replace(TINY_DECODER_ONLY, **changes), vocab, PAD).double()  # type: ignore[arg-type]
    scatter(model, spread)
    return model


@torch.no_grad()
def scatter(model: EncoderDecoder, spread: float) -> None:
    """Make biases and norm weights random, and scale every parameter."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        parameter.mul_(spread)


def pad_to(sentences: list[list[int]], width: int) -> Tensor:
    """Token ids padded at the end to (sentences, width)."""
    return torch.tensor([sentence + [PAD] * (width - len(sentence)) for sentence in sentences])


def sentence(vocab: int = 11, min_size: int = 1) -> st.SearchStrategy[list[int]]:
    """Token ids without padding and symbols."""
    return st.lists(st.integers(3, vocab - 1), min_size=min_size, max_size=6)


def batch(vocab: int = 11, min_size: int = 1) -> st.SearchStrategy[list[list[int]]]:
    """One to four sentences."""
    return st.lists(sentence(vocab, min_size), min_size=1, max_size=4)


def random_batch(seed: int, size: int = 5, width: int = 6, vocab: int = 11) -> Tensor:
    """(size, width) ids, the sentences of different lengths, the first one full."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, vocab, (size, width), generator=generator)
    for row in range(1, size):
        tokens[row, 1 + int(torch.randint(width, (), generator=generator)) :] = PAD
    return tokens


def assert_loss_over_replicas_is_plain(model: EncoderDecoder, src: Tensor, tgt: Tensor, target: Tensor) -> None:
    """Compare the gradients of two replicas and a loss in chunks with those of one model and all logits."""
    criterion = seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD)
    hidden = seqpar.DataParallel(model, ["cpu", "cpu"], gather_outputs=False)(src, tgt)
    seqpar.LossCompute(model.generator, criterion, ["cpu", "cpu"], chunk_tokens=2)(hidden, target).total.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    logits = model.generator(model(src, tgt)).flatten(0, 1)
    F.cross_entropy(logits, target.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=0.1).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-12, atol=1e-12)
