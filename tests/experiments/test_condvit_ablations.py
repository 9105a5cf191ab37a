"Ablations of CondViT: blocks of a tower, limits of a difference, pages that are small enough to run."

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cis_nb.backbones.conditional_vit import ViTShape
from cis_nb.experiments.claims import judge_evidence
from cis_nb.experiments.combiner_ablations import UNTESTED, within
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
)
from cis_nb.experiments.referred_search import ReferredRun


def tower(*shape) -> SimpleNamespace:
    "A backbone with an image tower of a `ViTShape`, without weights."
    with torch.device('meta'):
        visual = ViTShape(*shape).build()
    blocks = visual.transformer.resblocks
    return SimpleNamespace(name='vit', image_tower=SimpleNamespace(visual=visual, blocks=blocks))


SMALL, VIT_B32, VIT_B16 = (tower(*s) for s in ((64, 16, 64, 2, 64), (768, 32, 224, 12, 512), (768, 16, 224, 12, 512)))


def run(ranks: dict, variants: dict, steps=(0, 9), seeds=(0, 1), model=SMALL) -> ReferredRun:
    "The same ranks of each variant for every seed and gallery."
    rows = [
        dict(method=m, seed=s, draw=0, task='category', query_id=q, reference=q, rank=r, gallery_size=20, distractors=d)
        for m, ranked in ranks.items()
        for s in seeds
        for d in steps
        for q, r in enumerate(ranked)
    ]
    return ReferredRun(None, model, [], [], pd.DataFrame(rows), {m: variants[m].title for m in ranks})


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
    assert len(evidence) == 7 and evidence[-1]['role'] == UNTESTED
    assert token_finding(found).count('distractors') == 2
    assert set(printed_tokens()['gallery token']) == {'none', 'learned empty token'}


@pytest.mark.parametrize(
    'model, largest, rank, said',
    [
        (SMALL, 100_000, BAD, 'undecided'),
        (VIT_B32, 100_000, BAD, 'undecided'),
        (VIT_B16, 99_999, BAD, 'undecided'),
        (VIT_B16, 100_000, BAD, 'reproduced'),
        (VIT_B16, 100_000, GOOD, 'undecided'),
    ],
)
def test_a_loss_by_the_token_is_judged_of_a_large_tower_in_a_large_gallery(model, largest, rank, said):
    ranks = {WITHOUT_TOKEN: GOOD, EMPTY_TOKEN: rank}
    outcome = judge_evidence(
        token_evidence(run(ranks, TOKEN_VARIANTS, steps=(0, largest), model=model), limit=101)['L12']
    )
    fits = model is VIT_B16 and largest >= 100_000
    assert outcome.verdict == said and ('not tested: a ViT-B/16 loses' in outcome.effect) == (not fits)
