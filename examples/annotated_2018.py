"""The training loop of The Annotated Transformer (2018) on today's PyTorch: a model learns to copy its input.

Run it with `python -m examples.annotated_2018`. It uses the Transformer in this checkout's `models`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import seqpar
from models import TransformerConfig, make_transformer

PAD = 0
START = 1
VOCAB = 11
WIDTH = 64
DEVICES = ["cpu", "cpu"]  # [0, 1, 2, 3] in 2018


class Batch(NamedTuple):
    """Source, decoder input, decoder target, and the number of target tokens, named as in 2018."""

    src: Tensor
    trg: Tensor
    trg_y: Tensor
    ntokens: Tensor


def data(batches: int) -> Iterator[Batch]:
    """Yield batches of random numbers, some rows shorter than others; the target is the source."""
    for _ in range(batches):
        source = torch.randint(2, VOCAB, (32, 8))
        source[::4, 6:] = PAD
        shifted = torch.cat([torch.full((32, 1), START), source[:, :-1]], 1)
        yield Batch(source, shifted, source, (source != PAD).sum())


class NoamOpt:
    """Raise the learning rate for `warmup` steps, then lower it (Vaswani et al. 2017, section 5.3)."""

    def __init__(self, width: int, warmup: int, optimizer: torch.optim.Optimizer) -> None:
        self.width = width
        self.warmup = warmup
        self.optimizer = optimizer
        self.number = 0

    def step(self) -> None:
        """Set this step's learning rate and update the parameters."""
        self.number += 1
        rate = self.width**-0.5 * min(self.number**-0.5, self.number * self.warmup**-1.5)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()


torch.manual_seed(0)
config = TransformerConfig(d_model=WIDTH, d_ff=128, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0)
model = make_transformer(config, VOCAB, VOCAB, PAD)
model_opt = NoamOpt(WIDTH, 200, torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9))
criterion = seqpar.LabelSmoothing(0.1, "harvard", ignore_index=PAD)
model_par = seqpar.DataParallel(model, DEVICES, gather_outputs=False)
loss_compute = seqpar.MultiGPULossCompute(model.generator, criterion, DEVICES, opt=model_opt)

for epoch in range(3):
    total_loss = 0.0
    total_tokens = 0
    for batch in data(25):
        out = model_par(batch.src, batch.trg)
        total_loss += loss_compute(out, batch.trg_y, batch.ntokens)  # steps the optimizer, returns the summed loss
        total_tokens += int(batch.ntokens)
    print(f"epoch {epoch}: loss {total_loss / total_tokens:.3f} per token")
