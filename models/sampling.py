"""Sampling of translations: by temperature, from the most probable tokens, or from the nucleus.

Shapes: B sentences, N samples of each, R = rows still being sampled (B x N at first), C tokens to draw from, T target
time so far, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from models.candidates import Beams, logits_blocks
from models.decoding import check_alive
from models.decoding_rules import Forbidden, Rule, Task
from models.ensemble import Batch, Models, Start, evaluating, members
from models.hypotheses import Hypothesis


def sample(
    model: Models,
    src: Tensor,
    *,
    bos: Start,
    eos: int,
    seeds: Sequence[int],
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    rules: Sequence[Rule] = (),
    max_length: int | Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """Draw translations token by token: src (B, S) ids -> `samples` for each sentence, in the order drawn.

    At each step the token is drawn from softmax(logits / `temperature`) of the tokens that `rules` allow; with `top_k`,
    from the k most probable of them (Fan et al. 2018); with `top_p`, from the smallest set of the most
    probable ones left whose probabilities, which then sum to 1, reach p (the nucleus of Holtzman et al. 2020, section
    3.1). A translation ends at `eos` or after `max_length` steps, as for `greedy`.

    `seeds` has one for each sentence. A sentence's samples depend on its seed and on nothing else in the batch; with
    more `samples`, the first ones stay the same. Both score and log-probability of a hypothesis are its log-probability
    under the model, at temperature 1 and over the whole vocabulary.

    Raises ValueError for a temperature not above 0, a top_k below 1, a top_p outside (0, 1], less than one sample,
    seeds of another number than the sentences, and whatever `greedy` refuses; DeadEndError where the rules forbid every
    next token.
    """
    check_sampling(temperature, top_k, top_p, samples)
    if len(seeds) != src.size(0):
        raise ValueError(f"{len(seeds)} seeds were given for {src.size(0)} sentences: give one for each")
    models = members(model)
    found: dict[tuple[int, int], Hypothesis] = {}
    with evaluating(models):
        batch = Batch.encoded(models, src, max_length, bos)
        forbidden = Task.of(batch, eos).forbidden(rules)
        # Each sample is a sentence of its own, which leaves when it ends
        batch.keep([sentence for sentence in range(src.size(0)) for _ in range(samples)])
        numbers = list(range(samples)) * src.size(0)
        # Python's generator: a text is a seed, so sentence and sample need not be mixed into one number
        streams = [random.Random(f"{seed} {number}") for seed in seeds for number in range(samples)]
        beams = Beams.first(batch.memories[0], batch.bos)
        while batch.sentences:
            uniform_R = torch.tensor([stream.random() for stream in streams], dtype=torch.float64, device=src.device)
            beams = extended(batch, beams, forbidden, uniform_R, temperature, top_k, top_p)
            going = []
            for row, token in enumerate(beams.prefixes[:, 0, -1].tolist()):
                if token == eos or batch.step == batch.limits[row]:
                    key = (batch.sentences[row], numbers[row])
                    found[key] = hypothesis_of(beams, row, eos)
                else:
                    going.append(row)
            if len(going) < len(numbers):
                batch.keep(going)
                beams = Beams(beams.prefixes[going], beams.scores[going])
                numbers = [numbers[row] for row in going]
                streams = [streams[row] for row in going]
    return [[found[sentence, number] for number in range(samples)] for sentence in range(src.size(0))]


def check_sampling(temperature: float, top_k: int | None, top_p: float, samples: int) -> None:
    """Raise ValueError for invalid settings."""
    if not temperature > 0:
        raise ValueError(
            f"temperature is {temperature}, not above 0: 1 samples from the model, greedy search is near 0"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}, below 1: 1 is greedy search, None considers all tokens")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}, outside (0, 1]: 1 considers all tokens")
    if samples < 1:
        raise ValueError(f"samples is {samples}, below 1: draw at least one")


def extended(
    batch: Batch,
    beams: Beams,
    forbidden: Forbidden,
    uniform_R: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float,
) -> Beams:
    """Return the samples with one more token each, and its log-probability added to the scores."""
    hiddens = batch.next_hidden(beams.prefixes[:, 0, -1])
    tokens: list[Tensor] = []
    scores = []
    for block in logits_blocks(batch, beams, hiddens):
        logits_RV = block.logits
        # Before anything is forbidden: log p = z - log sum exp z over the whole vocabulary
        total_R = logits_RV.logsumexp(-1)
        forbidden.mask(logits_RV, block.prefixes, block.sentences)
        check_alive(logits_RV, block.sentences)
        start = sum(len(found) for found in tokens)
        token_R = draw(logits_RV, uniform_R[start : start + len(logits_RV)], temperature, top_k, top_p)
        tokens.append(token_R)
        scores.append(logits_RV.gather(1, token_R[:, None])[:, 0] - total_R)
    prefixes_R1T = torch.cat((beams.prefixes, torch.cat(tokens)[:, None, None]), dim=2)
    return Beams(prefixes_R1T, beams.scores + torch.cat(scores)[:, None])


def draw(logits_RV: Tensor, uniform_R: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Return the token at which the cumulative probability exceeds a uniform number from [0, 1): (R,).

    In float64: the rounding errors of a float32 sum over a large vocabulary are larger than many of its probabilities.
    """
    scaled_RC = logits_RV.double() / temperature
    tokens_RC = None
    if top_k is not None or top_p < 1:
        vocab = scaled_RC.size(1)
        scaled_RC, tokens_RC = scaled_RC.topk(min(top_k or vocab, vocab))
    p_RC = scaled_RC.softmax(-1)
    if top_p < 1:
        # A token belongs to the nucleus if the more probable ones do not reach p without it
        p_RC = p_RC.masked_fill(p_RC.cumsum(-1) - p_RC >= top_p, 0)
    cumulative_RC = p_RC.cumsum(-1)
    # The first of which more than u of the total lies at or before it; so none of probability 0 is drawn
    drawn_R1 = torch.searchsorted(cumulative_RC, uniform_R[:, None] * cumulative_RC[:, -1:], right=True)
    if tokens_RC is None:
        return drawn_R1[:, 0]
    return tokens_RC.gather(1, drawn_R1)[:, 0]


def hypothesis_of(beams: Beams, row: int, eos: int) -> Hypothesis:
    """Return a sample that is complete."""
    tokens = beams.prefixes[row, 0, 1:].tolist()
    if tokens[-1] == eos:
        tokens.pop()
    score = beams.scores[row, 0].item()
    return Hypothesis(tokens, score, score)
