"""Minimum risk training (Shen et al. 2016): a translation model learns from the chrF of its own samples.

Run it with `python examples/minimum_risk.py`.

The model spells numbers in German, character by character. After some training with cross-entropy, it samples seven
translations of each source and lowers the expected cost, 1 - chrF, over them and the reference. Its chrF is that of
numbers that are not trained on.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads leave a busy CPU alone

import sacrebleu
import torch
from torch import Tensor

import seqpar
from models import TransformerConfig, greedy, make_transformer
from recipes.translation.data.builtin_words import german_number
from seqpar import objectives as o

PAD, BOS, EOS = 0, 1, 2
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzäöüß"
VOCAB = 3 + len(LETTERS)
LONGEST = 28
SAMPLES = 8


def padded(texts: list[str]) -> Tensor:
    """Return ids (B, T), each text followed by the end symbol."""
    rows = [torch.tensor([3 + LETTERS.index(letter) for letter in text] + [EOS]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def text_of(ids: list[int]) -> str:
    """Return the letters before the end symbol."""
    if EOS in ids:
        ids = ids[: ids.index(EOS)]
    return "".join(LETTERS[i - 3] for i in ids if i > EOS)


def hidden_of(sources: Tensor, targets: Tensor) -> Tensor:
    """Return the decoder's hidden states (B, T, D), from which each target is predicted."""
    starts = torch.full_like(targets[:, :1], BOS)
    return model(sources, torch.cat([starts, targets[:, :-1]], 1))


@torch.no_grad()
def sampled(sources: Tensor) -> Tensor:
    """Return a sampled translation of each source (B, T), padded after the end symbol."""
    memory = model.encode(sources)
    src_mask = (sources != PAD)[:, None, None, :]
    cache = model.decoder.empty_cache()
    tokens = torch.full((len(sources), 1), BOS)
    ended = torch.zeros(len(sources), dtype=torch.bool)
    steps = []
    for _ in range(LONGEST):
        logits = model.generator(model.decode(memory, src_mask, tokens, cache=cache)[:, -1])
        logits[:, [PAD, BOS]] = -torch.inf
        tokens = torch.multinomial(logits.softmax(-1), 1)
        steps.append(tokens.masked_fill(ended[:, None], PAD))
        ended |= tokens[:, 0] == EOS
    return torch.cat(steps, 1)


def chrf(numbers: list[int]) -> float:
    """Return the corpus chrF of greedy translations."""
    found = greedy(model, padded([str(n) for n in numbers]), bos=BOS, eos=EOS, max_length=LONGEST)
    references = [[german_number(n) for n in numbers]]
    return float(sacrebleu.corpus_chrf([text_of(ids) for ids in found], references).score)


torch.manual_seed(0)
numbers = torch.randperm(1000).tolist()
test, train = numbers[:100], numbers[100:]
model = make_transformer(TransformerConfig(64, 128, 4, 2, 2, dropout=0.0, norm="pre"), VOCAB, VOCAB, PAD)
generator = model.generator
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for _ in range(100):
    batch = [train[i] for i in torch.randint(len(train), (32,))]
    target = padded([german_number(n) for n in batch])
    hidden = hidden_of(padded([str(n) for n in batch]), target)
    loss = seqpar.linear_cross_entropy(hidden, generator.weight, target, bias=generator.bias, ignore_index=PAD)
    optimizer.zero_grad()
    (loss.total / loss.tokens).backward()  # several ranks: seqpar.accumulate_gradients
    optimizer.step()
print(f"cross-entropy: chrF {chrf(test):.1f}")

optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
for step in range(12):
    batch = [train[i] for i in torch.randint(len(train), (12,)) for _ in range(SAMPLES)]
    sources = padded([str(n) for n in batch])
    texts = [text_of(ids) for ids in sampled(sources).tolist()]
    texts[::SAMPLES] = [german_number(n) for n in batch[::SAMPLES]]  # the reference is one of the candidates
    target = padded(texts)
    quality = [sacrebleu.sentence_chrf(text, [german_number(n)]).score for text, n in zip(texts, batch, strict=True)]
    scores = seqpar.token_scores(
        hidden_of(sources, target), generator.weight, target, bias=generator.bias, ignore_index=PAD
    )
    log_prob = o.sequence_sums(scores.log_prob, o.padded_segments(target != PAD), len(batch))
    risk = o.per_item(o.minimum_risk(log_prob, 1 - torch.tensor(quality) / 100, SAMPLES, alpha=0.05))
    optimizer.zero_grad()
    (risk.total / risk.tokens).backward()  # several ranks: seqpar.accumulate_gradients
    optimizer.step()
    if step in (0, 11):
        print(f"step {step}: risk {risk.mean:.3f}")
print(f"minimum risk: chrF {chrf(test):.1f}")
