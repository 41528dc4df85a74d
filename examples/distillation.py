"""Distillation: a small model learns a large one's predictions, and neither model's full logits ever exist.

Run it with `python examples/distillation.py`.
"""

import torch
from torch import nn

import seqpar

PAD = 0
VOCAB = 500


def trunk(width: int) -> nn.Module:
    """Return a model from token ids (B, T) to hidden states (B, T, width)."""
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Tanh())


torch.manual_seed(0)
teacher = trunk(128).eval()
teacher_head = nn.Linear(128, VOCAB)
student = trunk(32)
student_head = nn.Linear(32, VOCAB)
nn.init.normal_(teacher_head.weight, std=0.5)
optimizer = torch.optim.Adam([*student.parameters(), *student_head.parameters()], lr=1e-2)

for step in range(60):
    tokens = torch.randint(1, VOCAB, (32, 12))
    tokens[::4, 8:] = PAD
    with torch.no_grad():
        teacher_hidden = teacher(tokens)
    loss = seqpar.linear_distillation(
        student(tokens), student_head.weight, teacher_hidden, teacher_head.weight, tokens,
        direction="forward", bias=student_head.bias, teacher_bias=teacher_head.bias, temperature=2.0, ignore_index=PAD,
    )  # fmt: skip
    optimizer.zero_grad()
    (2.0**2 * loss.total / loss.tokens).backward()  # temperature squared keeps the gradient's size (Hinton et al. 2015)
    optimizer.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss.mean:.3f} (KL divergence from the teacher, nats per token)")
