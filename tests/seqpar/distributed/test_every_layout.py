"""Every layout over ranks has the loss and every gradient of the plain, un-chunked loss of all tokens on one device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import seqpar
from seqpar.testing.ranks import ranks
from seqpar.testing.strategies import vocabulary_splits
from tests.seqpar.distributed.layouts import (
    Case,
    assert_answers,
    build,
    build_split,
    cases,
    count_tokens,
    gradients_of,
    mesh,
    reference,
    torch_may_warn,
    wrap,
)


@dataclass(frozen=True)
class Layout:
    """A mesh of (data, inner) ranks: who reduces the gradients, and what the inner ranks share out between them."""

    wrappers: tuple[str, ...]
    """Any of them, as `wrap` names them; none where nothing is reduced."""
    meshes: tuple[tuple[int, int], ...]
    inner: str = "nothing"


LINE = tuple((world, 1) for world in (2, 3, 4, 2, 3, 4, 1))
ROW = tuple((1, world) for world in (2, 3, 4, 2, 3, 4, 1))
GRID = (*[(2, 2)] * 8, (1, 2), (2, 1), (1, 3), (3, 1), (1, 1))
"""What four ranks can be cut into, mostly two by two, which alone has two ranks on both axes."""

LAYOUTS = {
    "ddp": Layout(("ddp",), LINE),
    "fsdp2": Layout(("fsdp2", "fsdp2, head a unit", "fsdp2, head in a shared unit"), LINE),
    "hsdp": Layout(("hsdp",), ((4, 1),)),
    "sequence": Layout(("ddp",), ROW, "time"),
    "data x sequence": Layout(("ddp",), GRID, "time"),
    "vocabulary": Layout((), ROW, "vocabulary"),
    "data x vocabulary": Layout(("ddp",), GRID, "vocabulary"),
    "fsdp2 x vocabulary": Layout(("fsdp2",), GRID, "vocabulary"),
}


@dataclass(frozen=True)
class Cut:
    """One way to have a layout."""

    mesh: tuple[int, int]
    wrapper: str | None
    inner: str
    order: str
    """Of time steps."""
    rows: list[int]
    """Classes of each vocabulary rank: uneven ones, and none."""
    own_class_weights: bool


@st.composite
def steps(draw: st.DrawFn, layout: Layout) -> tuple[Case, Cut]:
    """A training step of up to four ranks; a data rank has 0 to 3 micro-batches."""
    shape = draw(st.sampled_from(layout.meshes))
    least = int("fsdp2" in layout.wrappers)  # torch's reduce-scatter takes no parameter without rows
    case = draw(cases(shape[0], micro_batches=(0, 3), longest=11 if layout.inner == "time" else 5))
    return case, Cut(
        mesh=shape,
        wrapper=draw(st.sampled_from(layout.wrappers)) if layout.wrappers else None,
        inner=layout.inner,
        order=draw(st.sampled_from(["contiguous", "zigzag"])) if layout.inner == "time" else "",
        rows=draw(vocabulary_splits(case.vocab_size, shape[1], least)) if layout.inner == "vocabulary" else [],
        own_class_weights=draw(st.booleans()) if layout.inner == "vocabulary" else False,
    )


def step(rank, world, case, cut):
    """This rank's loss, gradients and tokens of the whole step."""
    data_rank, inner_rank = divmod(rank, cut.mesh[1])
    micro_batches, both, group, options = case.micro_batches(data_rank), build(case), dist.group.WORLD, {}
    if cut.inner == "time":
        inner = mesh(*cut.mesh).get_group("inner")
        micro_batches = [own_time_steps(m, case, cut, inner) for m in micro_batches]
    if cut.inner == "vocabulary":  # its ranks have the same tokens, which count once
        inner, group = mesh(*cut.mesh).get_group("inner"), mesh(*cut.mesh).get_group("outer")
        vocab = seqpar.VocabShard.of(cut.rows[inner_rank], inner)
        both = build_split(case, vocab, cut.rows[inner_rank], cut.own_class_weights)
        options = {"process_group": group} if cut.wrapper == "ddp" else {"where": mesh(*cut.mesh)["outer"]}
    with torch_may_warn():
        wrapped = wrap(both, cut.wrapper, **options) if cut.wrapper else both
        loss = seqpar.accumulate_gradients(
            micro_batches,
            lambda m: wrapped(*m[:-1], target=m[-1]),
            count_tokens(case),
            model=wrapped if cut.wrapper else None,
            group=group or seqpar.THIS_PROCESS,
            backward=lambda loss: (loss * case.factor).backward(),
        )
    return (float(loss.total), gradients_of(wrapped)), int(loss.tokens)


def own_time_steps(micro_batch, case, cut, group):
    """A language model's: the next token, across the seams, is the target, unless the case ignores its place."""
    tokens, kept = micro_batch[0], micro_batch[1] != case.padding
    mine, kept = (seqpar.split_time(t, group, order=cut.order) for t in (tokens, kept))
    target = seqpar.next_token_targets(mine, group, order=cut.order, ignore_index=case.padding)
    positions = seqpar.time_steps(tokens.size(1), group.rank(), group.size(), cut.order)
    return mine, positions, target.where(kept, case.padding)


def whole(case, cut):
    """The micro-batches of all data ranks."""
    batches = [b for rank in range(cut.mesh[0]) for b in case.micro_batches(rank)]
    if cut.inner != "time":
        return batches
    following = [torch.cat([t, t.new_full((len(t), 1), case.padding)], 1)[:, 1:] for t, _ in batches]
    return [
        (tokens, torch.arange(tokens.size(1)), shifted.where(target != case.padding, case.padding))
        for (tokens, target), shifted in zip(batches, following, strict=True)
    ]


def joined(answers, case, cut):
    """Each rank's answer, its rows joined with those of the other vocabulary ranks of its data rank."""
    split = {f"model.{'embed' if case.tied else 'generator'}.weight", "model.generator.bias"}
    completed = []
    for rank, (total, gradients) in enumerate(answers):
        first = rank - rank % cut.mesh[1]
        group = [theirs for _, theirs in answers[first : first + cut.mesh[1]]]
        together = {name: joined_rows(name, [g[name] for g in group]) for name in split & set(gradients)}
        completed.append((total, gradients | together))
    return completed


def joined_rows(name, parts):
    assert len({part is None for part in parts}) == 1, f"only some vocabulary ranks have a gradient of {name}"
    return None if parts[0] is None else torch.cat(parts)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=settings.default.max_examples // 6)  # of each of eight layouts
@given(data=st.data())
def test_every_layout_has_the_loss_and_gradients_of_the_single_device(layout, data):
    case, cut = data.draw(steps(LAYOUTS[layout]))
    batches = whole(case, cut)
    results = ranks(cut.mesh[0] * cut.mesh[1], step, case, cut)
    answers = [answer for answer, _ in results]
    assert_answers(joined(answers, case, cut) if cut.inner == "vocabulary" else answers, reference(case, batches))
    tokens = sum(int((target != case.padding).sum()) for *_, target in batches)
    assert [counted for _, counted in results] == [tokens] * len(results)
