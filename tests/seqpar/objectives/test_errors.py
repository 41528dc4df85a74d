"""Every bad input of an objective gets one line that names the argument."""

import pytest
import torch

import seqpar
from seqpar import objectives
from tests.approved import assert_no_other_line, assert_refused

ONE, TWO, PAIR = torch.zeros(1), torch.zeros(2), torch.zeros(2, 3)
INTS, MASK = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
CLIPS = {"eps_low": 0.2, "eps_high": 0.2}

CASES = {
    "dpo shapes": lambda o: o.dpo(TWO, ONE, beta=1.0),
    "dpo dtype": lambda o: o.dpo(TWO, INTS, beta=1.0),
    "dpo no tensor": lambda o: o.dpo([0.0], ONE, beta=1.0),
    "dpo beta 0": lambda o: o.dpo(ONE, ONE, beta=0.0),
    "dpo beta nan": lambda o: o.dpo(ONE, ONE, beta=torch.nan),
    "dpo beta text": lambda o: o.dpo(ONE, ONE, beta="1"),
    "dpo variant": lambda o: o.dpo(ONE, ONE, beta=1.0, variant="kto"),
    "dpo smoothing": lambda o: o.dpo(ONE, ONE, beta=1.0, label_smoothing=0.5),
    "ipo smoothing": lambda o: o.dpo(ONE, ONE, beta=1.0, variant="ipo", label_smoothing=0.1),
    "dpo device": lambda o: o.dpo(ONE, ONE.to("meta"), beta=1.0),
    "kto labels": lambda o: o.kto(TWO, INTS, beta=1.0, reference_point=0.0),
    "kto label shape": lambda o: o.kto(ONE, MASK, beta=1.0, reference_point=0.0),
    "kto point": lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=TWO),
    "kto point nan": lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=torch.nan),
    "kto beta": lambda o: o.kto(TWO, MASK, beta=-1.0, reference_point=0.0),
    "kto weight": lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=0.0, desirable_weight=-1.0),
    "kto other weight": lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=0.0, undesirable_weight=-1.0),
    "orpo weight": lambda o: o.orpo(ONE, ONE, weight=0.0),
    "orpo nll_weight": lambda o: o.orpo(ONE, ONE, weight=1.0, nll_weight=-1.0),
    "orpo chosen_nll": lambda o: o.orpo(ONE, ONE, weight=1.0, chosen_nll=TWO),
    "orpo shapes": lambda o: o.orpo(ONE, TWO, weight=1.0),
    "simpo beta": lambda o: o.simpo(ONE, ONE, beta=0, gamma=1.0),
    "simpo gamma": lambda o: o.simpo(ONE, ONE, beta=1.0, gamma=-1.0),
    "cpo beta": lambda o: o.cpo(ONE, ONE, beta=0),
    "cpo weight": lambda o: o.cpo(ONE, ONE, beta=1.0, nll_weight=-1.0),
    "surrogate shapes": lambda o: o.clipped_surrogate(PAIR, TWO, **CLIPS),
    "surrogate low": lambda o: o.clipped_surrogate(TWO, TWO, eps_low=1.0, eps_high=0.2),
    "surrogate high": lambda o: o.clipped_surrogate(TWO, TWO, eps_low=0.2, eps_high=-0.1),
    "surrogate largest": lambda o: o.clipped_surrogate(TWO, TWO, **CLIPS, max_ratio=1.1),
    "soft temperature": lambda o: o.soft_surrogate(TWO, TWO, temperature=0.0),
    "soft negative": lambda o: o.soft_surrogate(TWO, TWO, negative_temperature=0.0),
    "weighted shapes": lambda o: o.weighted_policy_gradient(PAIR, TWO, PAIR),
    "gamma decay": lambda o: o.gamma_weights(TWO, TWO, negative_decay=0.0),
    "an empty range": lambda o: o.masked_weights(TWO, min_weight=2.0, max_weight=1.0),
    "estimator": lambda o: o.kl_estimate(TWO, "k2"),
    "largest weight": lambda o: o.truncated_weights(TWO, max_weight=0.0),
    "group size": lambda o: o.group_advantages(torch.zeros(5), 2),
    "a group of one": lambda o: o.group_advantages(TWO, 1),
    "group size dtype": lambda o: o.group_advantages(TWO, 2.0),
    "rewards in rows": lambda o: o.group_advantages(PAIR, 3),
    "group eps": lambda o: o.group_advantages(TWO, 2, eps=0.0),
    "risk groups": lambda o: o.minimum_risk(torch.zeros(5), torch.zeros(5), 3, alpha=1.0),
    "risk alpha": lambda o: o.minimum_risk(TWO, TWO, 2, alpha=0.0),
    "risk costs": lambda o: o.minimum_risk(TWO, ONE, 2, alpha=1.0),
    "risk candidates": lambda o: o.minimum_risk(TWO, TWO, 2, alpha=1.0, candidates=INTS),
    "ratio shapes": lambda o: o.token_log_ratio(TWO, ONE, MASK),
    "ratio mask": lambda o: o.token_log_ratio(PAIR, PAIR, MASK),
    "ratio of TokenScores": lambda o: o.token_log_ratio((TWO, TWO), TWO, MASK),
    "sequence ratio": lambda o: o.sequence_log_ratio(TWO, TWO, MASK, 1),
    "sequence ratio shape": lambda o: o.sequence_log_ratio(PAIR, PAIR, INTS, 1),
    "kto point meta": lambda o: o.kto(TWO, MASK, beta=1.0, reference_point=ONE.to("meta")),
    "mask list": lambda o: o.per_token(TWO, [True, True]),
    "padded list": lambda o: o.padded_segments([[True]]),
    "segment list": lambda o: o.sequence_sums(TWO, [0, 0], 1),
    "dft mask": lambda o: o.dft(TWO, INTS),
    "per token mask": lambda o: o.per_token(TWO, INTS),
    "per item": lambda o: o.per_item(PAIR),
    "per constant": lambda o: o.per_constant(TWO, MASK, -1),
    "per constant float": lambda o: o.per_constant(TWO, MASK, 2.0),
    "segment range": lambda o: o.per_sequence(TWO, torch.tensor([0, 3]), 3),
    "segment shape": lambda o: o.sequence_sums(PAIR, INTS, 1),
    "segment dtype": lambda o: o.sequence_lengths(TWO, 1),
    "sequences": lambda o: o.sequence_means(TWO, INTS, -1),
    "sequences tensor": lambda o: o.sequence_sums(TWO, INTS, ONE),
    "spread": lambda o: o.spread_to_tokens(PAIR, INTS),
    "spread range": lambda o: o.spread_to_tokens(ONE, INTS + 1),
    "padded mask": lambda o: o.padded_segments(MASK),
    "padded dtype": lambda o: o.padded_segments(PAIR),
    "heads": lambda o: o.head_targets(INTS, 0),
    "heads float": lambda o: o.head_targets(INTS, 2.0),
    "head targets": lambda o: o.head_targets(TWO, 1),
    "head target": lambda o: o.head_targets(INTS[0], 1),
    "head segments": lambda o: o.head_targets(INTS, 1, segment_ids=torch.zeros(3, dtype=torch.int64)),
    "head ignore": lambda o: o.head_targets(INTS, 1, ignore_index=None),
}


@pytest.mark.unswitched
@pytest.mark.parametrize("case", CASES)
def test_a_bad_input_is_refused_in_its_approved_line(case):
    assert_refused("objectives", case, lambda: CASES[case](objectives))


def test_every_approved_line_has_its_case():
    assert_no_other_line("objectives", CASES)


def test_every_objective_has_a_case():
    from_cases = {name for call in CASES.values() for name in call.__code__.co_names}
    assert set(objectives.__all__) <= from_cases


def test_the_room_is_reached_from_the_package():
    assert seqpar.objectives is objectives
    assert all(getattr(objectives, name).__doc__ for name in objectives.__all__)
