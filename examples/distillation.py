"""A small model learns a large one's predictions; neither's logits exist all at once.

Run it with `python examples/distillation.py`.
"""

import torch
from torch import nn

import seqpar

PAD, VOCAB = 0, 500


def trunk(width: int) -> nn.Module:
    """Token ids (B, T) to hidden states (B, T, width)."""
    return nn.Sequential(nn.Embedding(VOCAB, width), nn.Linear(width, width), nn.Tanh())


torch.manual_seed(0)
teacher, teacher_head = trunk(128).eval(), nn.Linear(128, VOCAB)
student, student_head = trunk(32), nn.Linear(32, VOCAB)
nn.init.normal_(teacher_head.weight, std=0.5)
optimizer = torch.optim.Adam([*student.parameters(), *student_head.parameters()], lr=1e-2)

for step in range(60):
    tokens = torch.randint(1, VOCAB, (32, 12))
    tokens[::4, 8:] = PAD
    with torch.no_grad():
        seen = teacher(tokens)
    loss = seqpar.linear_distillation(
        student(tokens), student_head.weight, seen, teacher_head.weight, tokens,
        direction="forward", bias=student_head.bias, teacher_bias=teacher_head.bias, temperature=2.0, ignore_index=PAD,
    )  # fmt: skip
    optimizer.zero_grad()
    (2.0**2 * loss.total / loss.tokens).backward()  # temperature squared keeps the gradient's size (Hinton et al. 2015)
    optimizer.step()
    if step in (0, 59):
        print(f"step {step}: loss {loss.mean:.3f} (KL divergence from the teacher, nats a token)")
