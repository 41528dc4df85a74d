"""Distillation: a small model learns a large one's predictions, and neither model's full logits ever exist.

Three students learn: one from the teacher's hidden states, one from the 20 most likely classes of each token (which
could have been stored beforehand), and one from log-probabilities that a function computes chunk by chunk.

Run it with `python examples/distillation.py`.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import torch
from torch import Tensor, nn

import seqpar

PAD = 0
VOCAB = 500
TEMPERATURE = 2.0


def trunk(width: int) -> nn.Module:
    """Return a model from token ids (B, T) to hidden states (B, T, width)."""
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Tanh())


torch.manual_seed(0)
teacher = trunk(128).eval()
teacher_head = nn.Linear(128, VOCAB)
nn.init.normal_(teacher_head.weight, std=0.5)


def log_probs(states: Tensor) -> Tensor:
    """Return the teacher's log-probabilities at the temperature of the loss."""
    return (teacher_head(states) / TEMPERATURE).log_softmax(-1)


def from_hidden(states: Tensor) -> seqpar.TeacherHidden:
    """Describe the teacher by its hidden states and its projection."""
    return seqpar.TeacherHidden(states, teacher_head.weight, teacher_head.bias)


def from_top_20(states: Tensor) -> seqpar.TeacherTopK:
    """Describe the teacher by its 20 most likely classes, with all others as one further class."""
    log_q, ids = log_probs(states).topk(20)
    return seqpar.TeacherTopK(ids, log_q, "one_class")


def from_function(states: Tensor) -> seqpar.TeacherLogProbs:
    """Describe the teacher by a function that is called with the rows of each chunk."""
    return seqpar.TeacherLogProbs(lambda rows: log_probs(states.flatten(0, 1)[rows]))


def train(describe, divergence: str, beta: float | None = None) -> None:
    """Train a student for 60 steps, and print its first and last loss."""
    torch.manual_seed(1)
    student = trunk(32)
    head = nn.Linear(32, VOCAB)
    optimizer = torch.optim.Adam([*student.parameters(), *head.parameters()], lr=1e-2)
    for step in range(60):
        tokens = torch.randint(1, VOCAB, (32, 12))
        tokens[::4, 8:] = PAD
        with torch.no_grad():
            taught_by = describe(teacher(tokens))
        loss = seqpar.linear_distillation(
            student(tokens), head.weight, taught_by, tokens,
            divergence=divergence, beta=beta, bias=head.bias, temperature=TEMPERATURE, ignore_index=PAD,
        )  # fmt: skip
        optimizer.zero_grad()
        # temperature squared keeps the gradient's size (Hinton et al. 2015)
        (TEMPERATURE**2 * loss.total / loss.tokens).backward()
        optimizer.step()
        if step in (0, 59):
            print(f"{describe.__name__}, {divergence}, step {step}: loss {loss.mean:.3f} (nats per token)")


train(from_hidden, "forward_kl")
train(from_top_20, "reverse_kl")
train(from_function, "jsd", beta=0.5)
