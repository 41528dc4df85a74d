"""Ray Train: two workers with DDP, and the gradient is that of all their sentences together.

Run it with `python examples/ray_train.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import seqpar

PAD = 0
VOCAB = 200


def train(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 64), nn.Tanh())
    engine = seqpar.LossCompute(nn.Linear(64, VOCAB), seqpar.CrossEntropy(ignore_index=PAD))
    both = prepare_model(seqpar.ModelWithLoss(model, engine))  # DDP around the model with its loss
    optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    means = []
    for _ in range(config["steps"]):
        micro_batches = []
        for _ in range(1 + rank):  # workers may have different numbers of micro-batches, and of tokens
            tokens = torch.randint(1, VOCAB, (8, 12))
            tokens[rank:, 6 + rank :] = PAD
            micro_batches.append(tokens)
        loss = seqpar.accumulate_gradients(
            micro_batches,
            lambda tokens: both(tokens, target=tokens),
            tokens_of=lambda tokens: (tokens != PAD).sum(),
            model=both,
        )
        optimizer.step()
        optimizer.zero_grad()
        means.append(float(loss.mean))  # of both workers' tokens, the same on each
    return means


if __name__ == "__main__":
    trainer = TorchTrainer(train, train_loop_config={"steps": 30}, scaling_config=ScalingConfig(num_workers=2))
    means = trainer.fit().return_value
    print(f"first step: loss {means[0]:.3f}; last step: loss {means[-1]:.3f}")
