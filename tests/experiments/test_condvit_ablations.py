"Ablations of CondViT: blocks of a tower, limits of a difference, pages that are small enough to run."

import numpy as np
import pandas as pd
import pytest

from cis_nb.experiments.comparison import verdict
from cis_nb.experiments.condvit_ablations import (
    EMPTY_TOKEN,
    WITHOUT_TOKEN,
    TOKEN_VARIANTS,
    depth_evidence,
    depth_finding,
    depth_variants,
    early_and_late,
    printed_tokens,
    token_evidence,
    token_finding,
    within,
)
from cis_nb.experiments.referred_search import ReferredRun


def run(ranks: dict, variants: dict, steps=(0, 9), seeds=(0, 1)) -> ReferredRun:
    "The same ranks of each variant for every seed and gallery."
    rows = [
        dict(method=m, seed=s, draw=0, task='category', query_id=q, reference=q, rank=r, gallery_size=20, distractors=d)
        for m, ranked in ranks.items()
        for s in seeds
        for d in steps
        for q, r in enumerate(ranked)
    ]
    return ReferredRun(None, None, [], [], pd.DataFrame(rows), {m: variants[m].title for m in ranks})


GOOD, BAD = np.ones(30, int), np.full(30, 3)


@pytest.mark.parametrize(
    'last, early, late',
    [(12, list(range(2, 9)), [10, 11, 12]), (4, [2], [4]), (6, [2, 3, 4], [5, 6]), (2, [], [2]), (1, [], [])],
)
def test_early_and_late_are_shares_of_the_tower(last, early, late):
    variants = depth_variants(last)
    titles = {m: v.title for m, v in variants.items()}
    found = early_and_late(ReferredRun(None, None, [], [], None, titles))
    assert found == ([f'block_{b}' for b in early], [f'block_{b}' for b in late])


def test_a_depth_study_without_early_or_late_blocks_has_no_evidence():
    two = depth_variants(2)
    assert depth_evidence(run(dict.fromkeys(two, GOOD), two), 9, 5) == {}


def test_a_late_block_that_hurts_is_evidence_and_named_in_the_finding():
    four = depth_variants(4)
    ranks = dict(block_1=GOOD, block_2=GOOD, block_3=GOOD, block_4=BAD, unconditional=BAD)
    found = run(ranks, four)
    assert [verdict(c) for c in depth_evidence(found, 9, 5)['L11']] == ['better'] * 3
    text = depth_finding(found, 9)
    assert text.startswith('R@1 among 9 distractors, minus before block 1: before block 4 −100.0 (worse in 2 of 2)')
    assert text.endswith('between: undecided')
    flat = depth_evidence(run(dict.fromkeys(four, GOOD), four), 9, 5)['L11']
    assert [verdict(c) for c in flat] == ['better', 'better', 'undecided']


def test_an_early_block_that_is_worse_than_the_limit_refutes_the_claim():
    four = depth_variants(4)
    ranks = dict.fromkeys(four, GOOD) | dict(block_2=BAD, block_4=BAD)
    assert 'worse' in [verdict(c) for c in depth_evidence(run(ranks, four), 9, 5)['L11']]


@pytest.mark.parametrize('low, high, said', [(-1, 1, 'better'), (-9, 1, 'undecided'), (7, 9, 'worse')])
def test_a_difference_lies_within_a_limit(low, high, said):
    found = within([dict(diff=(low + high) / 2, low=low, high=high)], 5, 'a − b')
    verdicts = [verdict(c) for c in found]
    assert said in verdicts and ('better' in verdicts or said != 'better')
    assert [c['what'] for c in found] == ['a − b + 5', '5 − (a − b)']


def test_a_token_is_judged_in_every_gallery():
    found = run({WITHOUT_TOKEN: GOOD, EMPTY_TOKEN: GOOD}, TOKEN_VARIANTS, steps=(0, 5, 9))
    evidence = token_evidence(found, 5)['L12']
    assert len(evidence) == 7 and verdict(evidence[-1]) == 'undecided'
    assert token_finding(found).count('distractors') == 2
    assert set(printed_tokens()['gallery token']) == {'none', 'learned empty token'}
