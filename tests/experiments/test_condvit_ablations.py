"Ablations of CondViT: blocks of a tower, limits of a difference, pages that are small enough to run."

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from cis_nb.backbones.conditional_vit import ViTShape
from cis_nb.experiments import referred_search as rs
from cis_nb.experiments.claims import judge_evidence
from cis_nb.experiments.combiner_ablations import OWN_COMPARISON, UNTESTED, within, within_share
from cis_nb.experiments.comparison import TOO_FEW, by_own_p, queries_needed, verdict
from cis_nb.experiments.condvit_ablations import (
    EMPTY_TOKEN,
    WITHOUT_TOKEN,
    TOKEN_VARIANTS,
    against,
    depth_evidence,
    depth_finding,
    depth_variants,
    early_and_late,
    printed_tokens,
    token_differences,
    token_evidence,
    token_finding,
    variant_scores,
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
    titles = {m: variants[m].title if m in variants else m for m in ranks}
    return ReferredRun(None, model, [], [], pd.DataFrame(rows), titles)


def scores(ranks: dict, seeds=(0, 1)) -> pd.DataFrame:
    "Cat@1 among 9 distractors as result rows: 90 and 80 in the two seeds."
    rows = [dict(method=m, seed=s, value=v) for m in ranks for s, v in zip(seeds, (90.0, 80.0))]
    about = dict(task='category', k=1, distractors=9, ci_low=0.0, ci_high=100.0, n=30)
    return pd.concat([pd.DataFrame(rows).assign(metric=metric, **about) for metric in ('recall', 'cat_acc')])


GOOD, BAD = np.ones(30, int), np.full(30, 3)
PRINTED = (0, 10_000)  # distractors of galleries that the paper prints


@pytest.fixture(autouse=True)
def sizes_up_to_10k(monkeypatch):
    "The runs of these tests have no larger gallery, and so miss none."
    every = rs.printed_galleries
    monkeypatch.setattr(rs, 'printed_galleries', lambda *table: [s for s in every(*table) if s in ('+0', '+10K')])
    return every


@pytest.mark.parametrize(
    'last, early, late',
    [(12, list(range(2, 9)), [10, 11, 12]), (4, [2, 3], [4]), (6, [2, 3, 4], [6]), (2, [2], []), (1, [], [])],
)
def test_early_and_late_are_shares_of_the_tower_before_the_block(last, early, late):
    variants = depth_variants(last)
    titles = {m: v.title for m, v in variants.items()}
    found = early_and_late(ReferredRun(None, None, [], [], None, titles))
    assert found == ([f'block_{b}' for b in early], [f'block_{b}' for b in late])


def test_a_depth_study_without_early_or_late_blocks_has_no_evidence():
    two = depth_variants(2)
    assert depth_evidence(run(dict.fromkeys(two, GOOD), two, PRINTED), PRINTED[-1], 0.25) == {}


def test_a_late_block_that_hurts_is_evidence_and_named_in_the_finding():
    four = depth_variants(4)
    ranks = dict(block_1=GOOD, block_2=GOOD, block_3=GOOD, block_4=BAD, unconditional=BAD)
    found = run(ranks, four)
    printed = depth_evidence(run(ranks, four, PRINTED), PRINTED[-1], 0.25)['L11']
    assert [verdict(by_own_p(c)) for c in printed] == ['better'] * 5
    assert {c['role'] for c in depth_evidence(found, 9, 0.25)['L11']} == {OWN_COMPARISON}
    text, accuracy = depth_finding(found, scores(ranks), against(found, 'block_1', 9), 9).split('. ')
    assert text.startswith(
        'R@1 among 9 distractors, minus before block 1: before block 2 +0.00 [+0.00, +0.00] (undecided'
    )
    worse = '−100.0 [−100.0, −100.0] (worse; interval below zero in 2 of 2 seeds)'
    assert text.endswith(f'before block 4 {worse}; no condition {worse}')
    assert accuracy.startswith('Cat@1: before block 1 85.0 ± 7.1, before block 2') and 'no condition' not in accuracy
    flat = depth_evidence(run(dict.fromkeys(four, GOOD), four, PRINTED), PRINTED[-1], 0.25)['L11']
    assert [verdict(by_own_p(c)) for c in flat] == ['better'] * 4 + ['undecided']


@pytest.mark.parametrize('early', ['block_2', 'block_3'])
def test_an_early_block_that_is_worse_than_the_limit_refutes_the_claim(early):
    four = depth_variants(4)
    ranks = dict.fromkeys(four, GOOD) | {early: BAD, 'block_4': BAD}
    lines = depth_evidence(run(ranks, four, PRINTED), PRINTED[-1], 0.25)['L11']
    assert 'worse' in [verdict(by_own_p(c)) for c in lines]


@pytest.mark.parametrize('low, high, said', [(-1, 1, 'better'), (-9, 1, 'undecided'), (7, 9, 'worse')])
def test_a_difference_lies_within_a_limit(low, high, said):
    found = within(dict(diff=(low + high) / 2, low=low, high=high), 5, 'a − b')
    verdicts = [verdict(by_own_p(c)) for c in found]
    assert said in verdicts and ('better' in verdicts or said != 'better')
    assert [c['what'] for c in found] == ['a − b + 5', '5 − (a − b)']


def paired(hits: dict, n: int) -> pd.DataFrame:
    "Rankings of two methods: `hits` is the number of targets that each finds first, no target by both."
    order = dict(a=np.arange(n), b=np.arange(n)[::-1])
    about = dict(seed=0, draw=0, task='category', query_id=range(n), reference=range(n))
    ranks = {m: np.where(order[m] < hits[m], 1, 9) for m in order}
    return pd.concat([pd.DataFrame(dict(about, method=m, rank=r)) for m, r in ranks.items()])


@pytest.mark.parametrize(
    'hits, n, said',
    [
        (dict(a=800, b=800), 2000, {'better'}),
        (dict(a=13, b=13), 1000, {TOO_FEW}),  # R@1 of 1.3 %: a quarter of it is a third of a point
        (dict(a=13, b=3), 1000, {'worse', 'better'}),  # one point apart; three quarters of the score are lost
        (dict(a=0, b=0), 100, {'undecided'}),
    ],
)
def test_no_difference_is_a_share_of_the_scores(hits, n, said):
    assert {verdict(by_own_p(c)) for c in within_share(paired(hits, n), 'a', 'b', 0.25, dict(a='A', b='B'))} == said


def test_the_number_of_queries_that_is_needed_resolves_the_limit():
    few = within_share(paired(dict(a=13, b=13), 1000), 'a', 'b', 0.25, dict(a='A', b='B'))
    needed = few[0]['needed']
    assert needed > 5_000
    enough = paired({m: round(13 * needed / 1000) for m in 'ab'}, needed)
    half = [(c['high'] - c['low']) / 2 for c in within_share(enough, 'a', 'b', 0.25, dict(a='A', b='B'))]
    assert half == pytest.approx([0.25 * 1.3] * 2, rel=0.1)


@pytest.mark.parametrize('limit, needed', [(2, 0), (1, 0), (0.5, 400), (0.1, 10_000), (0, 0)])
def test_half_an_interval_falls_with_the_root_of_the_queries(limit, needed):
    assert queries_needed(dict(query_sd=1 / 1.96, n=100), limit) == needed


def test_too_few_queries_are_a_verdict_with_their_number():
    outcome = judge_evidence(within(dict(diff=0.0, low=-2.0, high=2.0, n=100, query_sd=2 / 1.96), 1, 'a − b'))
    assert outcome.verdict == TOO_FEW
    assert outcome.effect == 'a − b: +0.0 [−2.0, +2.0] points; required: −1 to 1; too few queries, about 400 are needed'


def test_the_table_has_the_untrained_network_and_chance():
    ranks, four = dict(block_1=GOOD, block_4=BAD, condvit_start=BAD), depth_variants(4)
    found = run(ranks, four)
    found.benchmark = SimpleNamespace(tasks=dict(category=gallery_of(GOOD)))
    table = variant_scores(found, scores(ranks), against(found, 'block_1', 9), 'block_1', 9).set_index('variant')
    assert list(table.index) == ['before block 1', 'before block 4', 'condvit_start', 'Chance']
    assert table.loc['condvit_start'].iloc[-1] == '−100.0 [−100.0, −100.0] worse 2/2'
    assert table.loc['Chance', 'R@1'] == f'{100 / 39:.2f}'  # 30 targets, 9 distractors


def gallery_of(queries) -> SimpleNamespace:
    "A task with a target for each query, 9 distractors and one category."
    table = pd.DataFrame(dict(query_id=range(len(queries)), targets=[[f't{i}'] for i in range(len(queries))]))
    distractors = [f'd{i}' for i in range(9)]
    category_of = dict.fromkeys([*table.targets.str[0], *distractors], 'Bags')
    return SimpleNamespace(queries=table, distractors=distractors, category_of=category_of)


def test_a_token_is_judged_in_the_galleries_that_the_paper_prints():
    found = run({WITHOUT_TOKEN: GOOD, EMPTY_TOKEN: GOOD}, TOKEN_VARIANTS, steps=(0, 5, 9, 10_000))
    evidence = token_evidence(found, 0.25)['L12']
    assert len(evidence) == 5 and evidence[-1]['role'] == UNTESTED
    said = token_finding(found, scores(TOKEN_VARIANTS).assign(distractors=10_000), token_differences(found))
    assert said.count('distractors') == 3 and said.endswith(' 90.0, 80.0')
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
def test_a_loss_by_the_token_is_judged_of_a_large_tower_in_a_large_gallery(
    model, largest, rank, said, monkeypatch, sizes_up_to_10k
):
    monkeypatch.setattr(rs, 'printed_galleries', sizes_up_to_10k)
    ranks = {WITHOUT_TOKEN: GOOD, EMPTY_TOKEN: rank}
    steps = (0, 10_000, largest, *((1_000_000, 2_000_000) if largest >= 100_000 else ()))
    found = run(ranks, TOKEN_VARIANTS, steps=steps, model=model)
    outcome = judge_evidence(token_evidence(found, limit=1.01)['L12'])
    fits = model is VIT_B16 and largest >= 100_000
    assert outcome.verdict == said and ('not tested: a ViT-B/16 loses' in outcome.effect) == (not fits)
