"""The training loop of The Annotated Transformer (2018) on today's PyTorch: learning to say again what was read.

Run it with `python -m examples.annotated_2018`. It takes the Transformer of this checkout's `models`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import seqpar
from models import TransformerConfig, make_transformer

PAD, START, VOCAB, WIDTH, DEVICES = 0, 1, 11, 64, ["cpu", "cpu"]  # devices=[0, 1, 2, 3] in 2018


class Batch(NamedTuple):
    """Source, target in and target out, with the number of target tokens."""

    src: Tensor
    trg: Tensor
    trg_y: Tensor
    ntokens: Tensor


def data(batches: int) -> Iterator[Batch]:
    """Sentences of random numbers, some of them shorter than the others; the target is the source."""
    for _ in range(batches):
        said = torch.randint(2, VOCAB, (32, 8))
        said[::4, 6:] = PAD
        heard = torch.cat([torch.full((32, 1), START), said[:, :-1]], 1)
        yield Batch(said, heard, said, (said != PAD).sum())


class NoamOpt:
    """An optimizer whose rate rises for `warmup` steps and falls from then on (Vaswani et al. 2017, section 5.3)."""

    def __init__(self, width: int, warmup: int, optimizer: torch.optim.Optimizer) -> None:
        self.width, self.warmup, self.optimizer, self.number = width, warmup, optimizer, 0

    def step(self) -> None:
        """A step at this step's rate."""
        self.number += 1
        rate = self.width**-0.5 * min(self.number**-0.5, self.number * self.warmup**-1.5)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()


torch.manual_seed(0)
config = TransformerConfig(d_model=WIDTH, d_ff=128, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.0)
model = make_transformer(config, VOCAB, VOCAB, PAD)
model_opt = NoamOpt(WIDTH, 60, torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9))
criterion = seqpar.LabelSmoothing(0.1, "harvard", ignore_index=PAD)
model_par = seqpar.DataParallel(model, DEVICES, gather_outputs=False)
loss_compute = seqpar.MultiGPULossCompute(model.generator, criterion, DEVICES, opt=model_opt)

for epoch in range(4):
    total_loss, total_tokens = 0.0, 0
    for batch in data(50):
        out = model_par(batch.src, batch.trg)
        total_loss += loss_compute(out, batch.trg_y, batch.ntokens)  # steps the optimizer, returns the summed loss
        total_tokens += int(batch.ntokens)
    print(f"epoch {epoch}: loss {total_loss / total_tokens:.3f} a token")
