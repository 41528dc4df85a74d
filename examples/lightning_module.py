"""Lightning: manual optimisation with the gradient of the whole batch, however it is split into micro-batches.

Run it with `python examples/lightning_module.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import logging

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

import seqpar
from seqpar.integrations.accumulate import accumulate_step

PAD = 0
VOCAB = 200
losses: list[float] = []


class Tagger(LightningModule):
    """Predict each token's successor in the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.trunk = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh())
        self.engine = seqpar.LossCompute(nn.Linear(64, VOCAB), seqpar.LabelSmoothing(0.1, "torch", ignore_index=PAD))

    def training_step(self, micro_batches: list[tuple[Tensor, Tensor]], index: int) -> None:
        """Take one optimizer step for a list of micro-batches."""
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = accumulate_step(
            self.trainer,
            self,
            micro_batches,
            lambda batch: self.engine(self.trunk(batch[0]), batch[1]),
            tokens_of=lambda batch: (batch[1] != PAD).sum(),
        )
        optimizer.step()
        losses.append(loss.mean.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters, including those of the generator in the loss."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def micro_batch() -> tuple[Tensor, Tensor]:
    """Return random tokens and their targets, with padding."""
    tokens = torch.randint(1, VOCAB - 1, (8, 12))
    target = tokens + 1
    target[::2, 6:] = PAD
    return tokens, target


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
steps = [[micro_batch() for _ in range(2)] for _ in range(40)]
trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Tagger(), torch.utils.data.DataLoader(steps, batch_size=None))
print(f"loss {losses[0]:.3f} at the start, loss {losses[-1]:.3f} at the end")
