"""Ray Train's own workers: a step over two of them has the gradient of one batch in one process."""

import pytest
import torch
from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import seqpar

pytestmark = pytest.mark.filterwarnings("ignore")

PAD, VOCAB, WIDTH = 0, 23, 8


def with_loss():
    torch.manual_seed(3)
    engine = seqpar.LossCompute(nn.Linear(WIDTH, VOCAB), seqpar.CrossEntropy(ignore_index=PAD), chunk_tokens=5)
    return seqpar.ModelWithLoss(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)), engine).double()


def micro_batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randint(1, VOCAB, (2 + index, 5), generator=generator) for index in range(count)]
    for index, tokens in enumerate(batches):
        tokens[seed:, 1 + index :] = PAD
    return batches


def stepped(config):
    """Keep this worker's gradients and loss after a step of its own micro-batches."""
    plain = with_loss()
    model, rank = prepare_model(plain), get_context().get_world_rank()
    loss = seqpar.accumulate_gradients(
        micro_batches(config["counts"][rank], rank),
        lambda tokens: model(tokens, target=tokens),
        tokens_of=lambda tokens: (tokens != PAD).sum(),
        model=model,
    )
    torch.save((loss.mean, [p.grad for p in plain.parameters()]), f"{config['folder']}/{rank}.pt")


@pytest.mark.launched
@pytest.mark.timeout(600)
def test_the_gradient_of_two_workers_is_that_of_the_whole_batch(tmp_path):
    counts = [3, 1]
    TorchTrainer(
        stepped,
        train_loop_config={"counts": counts, "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
    model = with_loss()
    losses = [model(m, target=m) for rank, count in enumerate(counts) for m in micro_batches(count, rank)]
    total = sum(loss.total for loss in losses) / sum(loss.tokens for loss in losses)
    total.backward()
    for rank in range(2):
        mean, gradients = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(mean, total.detach(), rtol=1e-12, atol=0)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert (gradient - parameter.grad).norm() < 1e-12 * parameter.grad.norm()
