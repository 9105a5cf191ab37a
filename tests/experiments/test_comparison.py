"Comparison of methods: paired differences, several seeds, verdicts, tables of the papers."

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from projects import ROOT
from rankings import rows
from cis_nb.experiments import comparison as cp
from cis_nb.experiments import genecis as ev
from cis_nb.experiments.claims import kept_receipts
from cis_nb.retrieval.statistics import bootstrap_ci, hierarchical_bootstrap


pytestmark = pytest.mark.usefixtures('store')


# --- numbers


def test_mean_counts_tasks_not_queries():
    t = rows(*[('m', 'a', i, 1) for i in range(1)], *[('m', 'b', i, 9) for i in range(99)])
    assert cp.task_mean(cp.hits(t).m) == 50


def test_methods_must_answer_the_same_queries():
    with pytest.raises(ValueError, match='same queries'):
        cp.hits(rows(('m', 'a', 1, 1), ('n', 'a', 2, 1)))


def test_compare_is_antisymmetric_and_ignores_row_order():
    rng = np.random.default_rng(0)
    t = pd.concat(
        [
            pd.DataFrame(
                dict(
                    method=m,
                    draw=0,
                    task=k,
                    query_id=range(80),
                    reference=np.arange(80) // 2,
                    rank=rng.integers(1, 4, 80),
                )
            )
            for m in 'xy'
            for k in 'ab'
        ]
    )
    one, other, mixed = (
        cp.compare(t, 'x', 'y'),
        cp.compare(t, 'y', 'x'),
        cp.compare(t.sample(frac=1, random_state=1), 'x', 'y'),
    )
    assert one['diff'] == pytest.approx(-other['diff']) and one == mixed
    assert one['low'] <= one['diff'] <= one['high']


def test_compare_agrees_with_the_normal_interval():
    rng = np.random.default_rng(1)
    a, b = rng.random(4000) < 0.3, rng.random(4000) < 0.25
    t = pd.concat(
        [
            pd.DataFrame(
                dict(method=m, draw=0, task='a', query_id=range(4000), reference=range(4000), rank=np.where(v, 1, 2))
            )
            for m, v in (('x', a), ('y', b))
        ]
    )
    c, d = cp.compare(t, 'x', 'y'), 100 * (a.astype(float) - b)
    half = 1.96 * d.std() / math.sqrt(4000)
    assert (
        c['diff'] == pytest.approx(d.mean())
        and c['low'] == pytest.approx(d.mean() - half, abs=0.2)
        and c['high'] == pytest.approx(d.mean() + half, abs=0.2)
    )


def test_families_of_queries_widen_the_interval():
    rng = np.random.default_rng(2)
    easy = np.repeat(rng.random(100) < 0.4, 10)  # 100 references, ten queries each that fare alike
    t = pd.concat(
        [
            pd.DataFrame(
                dict(
                    method=m,
                    draw=0,
                    task='a',
                    query_id=range(1000),
                    reference=np.arange(1000) // 10,
                    rank=np.where(v, 1, 2),
                )
            )
            for m, v in (('x', easy), ('y', np.zeros(1000, bool)))
        ]
    )
    width = {f: (lambda c: c['high'] - c['low'])(cp.compare(t, 'x', 'y', families=f)) for f in (True, False)}
    assert width[True] / width[False] == pytest.approx(math.sqrt(10), rel=0.25)


@pytest.mark.parametrize(
    'low, high, verdicts',
    [(0.1, 2, 'better'), (-2, -0.1, 'worse'), (-1, 1, 'undecided'), (0, 1, 'undecided'), (0, 0, 'undecided')],
)
def test_verdict(low, high, verdicts):
    assert cp.verdict(dict(low=low, high=high, p=0.01, p_corrected=0.01)) == verdicts


def test_a_comparison_that_was_never_corrected_decides_nothing():
    found = dict(diff=1.0, low=0.1, high=2.0, p=0.001, seed_intervals=[])
    assert cp.verdict(found) == 'undecided' and cp.format_difference(found).endswith('(undecided)')
    assert cp.verdict(cp.by_own_p(found)) == 'better' and cp.by_own_p(cp.by_own_p(found)) == cp.by_own_p(found)
    lost = cp.corrected({i: dict(found, p=0.03) for i in range(2)})[0]
    assert cp.verdict(cp.by_own_p(lost)) == 'undecided' and cp.verdict_in_words(lost) == 'undecided by Holm'
    limit = dict(low=0.1, high=2.0)  # a distance to a limit has no p-value
    assert cp.verdict(limit) == 'better'


def test_own_p_values_of_evidence_may_not_contradict_a_page():
    about = dict(key='k', p=0.001, seed_intervals=[])
    evidence = dict(evidence=dict(G01=[dict(about, diff=1.0, low=0.1, high=2.0)]))
    page = dict(comparisons=[dict(about, diff=-1.0, low=-2.0, high=-0.1, p_corrected=0.001, family=1)])
    (said,) = cp.contradictions(dict(claims=evidence, page=page))
    assert '(better)' in said and '(worse)' in said


# --- papers


def test_averages_of_the_paper_tables_follow_from_their_columns():
    for table in ('genecis_table2', 'genecis_table6'):
        p = cp.paper_numbers(table)
        one = p[(p.k == 1) & (p.method != 'task_specific')]
        for m, g in one.groupby('method'):
            assert g[g.task != 'mean'].value.mean() == pytest.approx(g[g.task == 'mean'].value.item(), abs=0.06), (
                table,
                m,
            )


EMPTY = pd.DataFrame(columns=['method', 'task', 'k', 'seed', 'value', 'ci_low', 'ci_high', 'n'])


def test_paper_table_keeps_rows_that_were_not_measured():
    t = cp.beside_paper(EMPTY, 'genecis_table2')
    assert len(t) == 6 and list(t['numbers of']) == ['paper; not measured here'] * 6
    assert t.iloc[:, 2:].map(lambda c: c.count('.')).sum().sum() == 12 + 5 * 13  # every number of the paper


@pytest.mark.parametrize(
    'table', ['genecis_table2', 'genecis_table3_mitstates', 'genecis_table4_cirr', 'genecis_table6']
)
def test_every_number_of_a_paper_table_is_shown_once(table):
    t, p = cp.beside_paper(EMPTY, table), cp.paper_numbers(table)
    assert sorted(float(v) for c in t.columns[2:] for cell in t[c] for v in cell.split(' / ') if v != '–') == sorted(
        p.value
    )


def test_a_row_of_several_seeds_is_their_mean_and_says_so():
    mine = pd.DataFrame(
        [('combiner', 'full', 1, s, v, 0.0, 99.0, 10) for s, v in enumerate((20.0, 26.0))], columns=EMPTY.columns
    )
    t = cp.beside_paper(mine, 'genecis_table4_cirr', dict(full={1: 1.0, 5: 5.0, 10: 10.0}))
    ours = t[t['numbers of'].str.startswith('this run, ')].iloc[0]
    assert (
        ours['numbers of'] == 'this run, mean of 2 seeds'
        and ours.iloc[2] == '23.0 / – / –'
        and t.iloc[-1].tolist() == ['Chance', 'this run', '1.0 / 5.0 / 10.0']
    )
    assert cp.format_uncertainty(next(cp.over_seeds(mine).itertuples())) == '23.0 ± 4.2'


# --- seeds


def seeded(gains, n=1000):
    "Image + Text finds a fifth; a training of each seed finds `gain` percent more, on top of the same queries."

    def make(m, s, share):
        return pd.DataFrame(
            dict(
                method=m,
                seed=s,
                draw=0,
                task='a',
                query_id=range(n),
                reference=range(n),
                gallery_size=15,
                rank=np.where(np.arange(n) < round(share * n), 1, 5),
            )
        )

    return pd.concat([make('image_text', -1, 0.2), *(make('combiner', s, 0.2 + g / 100) for s, g in enumerate(gains))])


def test_seeds_that_differ_widen_the_interval():
    alike, apart = (cp.compare(seeded(gains), 'combiner', 'image_text') for gains in ([5, 5, 5], [1, 5, 9]))
    assert alike['diff'] == pytest.approx(apart['diff'])
    assert (
        cp.verdict(cp.by_own_p(alike)),
        cp.verdict(cp.by_own_p(cp.compare(seeded([5, 0, -5]), 'combiner', 'image_text'))),
    ) == (
        'better',
        'undecided',
    )
    assert apart['by_seed'] == pytest.approx([1, 5, 9]) and apart['seeds'] == 3
    width = apart['high'] - apart['low']
    assert width > 1.5 * (alike['high'] - alike['low']) and width > 2 * 1.96 * apart['query_sd']


def test_no_interval_leaves_what_is_possible():
    right = [(a, s, [1] * n + [2] * (60 - n)) for a, s, n in [('m', 0, 60), ('m', 1, 57), ('m', 2, 60), ('r', -1, 1)]]
    lines = [pd.DataFrame(dict(method=m, seed=s, query_id=range(60), rank=r)) for m, s, r in right]
    t = pd.concat(lines).assign(task='a', draw=0)
    t = t.assign(reference=t.query_id, over=100.0 * (t['rank'] == 1) - 98)
    free, within = (cp.contrast(t, dict(m=1), of='over', limits=limits) for limits in (None, (-98, 2)))
    assert free['high'] > 2 == within['high'] and free['low'] == within['low']
    assert cp.contrast(t, dict(m=1))['high'] == 100
    assert cp.contrast(t, dict(m=-1))['low'] == -100
    assert cp.contrast(t, dict(m=0.5, r=-0.5), limits=(0, 90))['high'] <= 45


def test_one_seed_reduces_to_the_bootstrap_over_families():
    t = seeded([5]).assign(reference=lambda t: t.query_id // 5)
    c = cp.compare(t, 'combiner', 'image_text')
    h = cp.hits(t).reset_index()
    families = h.query_id // 5
    assert (c['diff'], c['low'], c['high']) == pytest.approx(
        bootstrap_ci(h.combiner - h.image_text, groups=h.task, families=families)
    )


def test_the_hierarchical_bootstrap_agrees_with_a_plain_loop():
    rng = np.random.default_rng(0)
    v, family, S = rng.normal(size=(60, 3)) + rng.normal(size=3), np.arange(60) // 3, 3
    means = []
    for _ in range(4000):
        mean = v[np.concatenate([np.flatnonzero(family == f) for f in rng.integers(20, size=20)])].mean(0)
        centre = v.mean(0).mean()
        drawn = mean[rng.integers(S, size=S)].mean()
        means.append(mean.mean() + (drawn - mean.mean()) * math.sqrt(S / (S - 1)) - centre)
    found = hierarchical_bootstrap([v], 4000, families=family)
    assert found[0] == pytest.approx(v.mean()) and found[1].std() == pytest.approx(np.std(means), rel=0.1)


def test_methods_with_the_same_seeds_are_compared_seed_by_seed_and_others_apart():
    t = seeded([2, 6, 10])
    shifted = t[t.method == 'combiner'].assign(method='other')
    same = cp.compare(pd.concat([t, shifted]), 'combiner', 'other')
    apart = cp.compare(pd.concat([t, shifted.assign(seed=shifted.seed + 7)]), 'combiner', 'other')
    assert (same['low'], same['high'], same['by_seed']) == (0, 0, [0, 0, 0])
    assert apart['high'] > 3 and apart['by_seed'] == [] and apart['seeds'] == 3


def test_equal_comparisons_have_one_key_whatever_else_a_table_holds():
    t = seeded([4, 8])
    more = pd.concat([t, t[t.method == 'image_text'].assign(method='image_only')]).sample(frac=1, random_state=0)
    one, two = (cp.compare(x, 'combiner', 'image_text') for x in (t, more))
    assert one == two and one['key'] != cp.compare(t, 'combiner', 'image_text', k=5)['key']
    assert cp.compare(t.replace(dict(seed={1: 5})), 'combiner', 'image_text')['key'] == one['key']


def test_doubt_by_few_seeds_is_said():
    c = cp.compare(seeded([4, 8]), 'combiner', 'image_text')
    assert '2 seeds: the spread between seeds is hardly known' in cp.doubt_note([c])
    assert 'not known' not in cp.doubt_note([cp.compare(seeded([4, 8, 6]), 'combiner', 'image_text')])


def test_the_mean_over_seeds_is_what_is_compared():
    t = seeded([4, 8])
    c = cp.compare(t, 'combiner', 'image_text')
    assert c['diff'] == pytest.approx(6) and c['n'] == 1000
    assert c['low'] < 0 < cp.compare(seeded([5, 6, 7]), 'combiner', 'image_text')['low']  # two seeds, four points apart


def test_a_seed_that_has_not_answered_all_is_an_error():
    t = seeded([4, 8])
    with pytest.raises(ValueError, match='same queries'):
        cp.hits(t[~((t.seed == 1) & (t.query_id == 7))])
    with pytest.raises(ValueError, match='two rankings'):
        cp.hits(pd.concat([t, t[:1]]))


def test_summary_has_rows_of_every_seed_and_no_mean_of_half_the_tasks():
    t = pd.concat(
        [seeded([4, 8], 50).assign(task=k) for k in 'ab'] + [seeded([], 50).assign(method='task_specific')]
    ).assign(protocol='p')
    t['ranks'] = [[r] for r in t['rank']]
    r = ev.summary(t, 'eyes')
    assert (
        set(r.seed[r.method == 'combiner']) == {0, 1}
        and set(r.task[r.method == 'combiner']) == {'a', 'b', 'mean'}
        and set(r.task[r.method == 'task_specific']) == {'a'}
    )
    assert cp.recall_over_seeds(r, 'combiner') == '26.0 ± 2.8'


def test_two_pages_that_compare_the_same_runs_agree():
    t = seeded([4, 8, 6])
    other = pd.concat([t, t[t.method == 'combiner'].assign(method='again')])  # a page with more methods
    pair, again = ('combiner', 'image_text'), ('again', 'image_text')
    pages = {
        'one': dict(comparisons=list(cp.rival_leads({'': t}, [pair]).values())),
        'two': dict(comparisons=list(cp.rival_leads({'': other}, [again, pair]).values())),
        'claims': dict(evidence=dict(G04=[dict(what='x', **cp.compare(t, 'combiner', 'image_text'))])),
    }
    assert len(cp.shown_comparisons(pages)) == 1 and cp.contradictions(pages) == []
    alone = [cp.compare(cp.of_seed(t, s), 'combiner', 'image_text') for s in range(3)]  # seed by seed: other keys
    assert len(cp.shown_comparisons(pages | dict(seeds=dict(comparisons=alone)))) == 4
    wrong = dict(alone[0], key=pages['one']['comparisons'][0]['key'])
    (said,) = cp.contradictions(pages | dict(wrong=dict(comparisons=[wrong])))
    assert 'wrong' in said and 'two' in said


def test_evidence_has_the_correction_of_the_page_that_shows_it():
    about = dict(key='k', p=0.03, seed_intervals=[])
    line = dict(about, diff=2.0, low=0.1, high=3.9, what='A − B')
    beside = [dict(about, key=f'n{i}', diff=2.0, low=0.1, high=3.9) for i in range(2)]
    turned = dict(about, key='-k', diff=-2.0, low=-3.9, high=-0.1)
    page = dict(comparisons=[*cp.corrected(dict(enumerate([turned, *beside]))).values()])
    (found,) = cp.as_shown([line], cp.shown_corrections([page, {}]))
    assert cp.verdict_in_words(found) == 'undecided by Holm' and found['family'] == 3 and found['what'] == 'A − B'
    others = [dict(line, high=5.0), dict(line, key='m'), dict(what='untested', role='untested')]  # shown nowhere
    assert cp.as_shown(others, cp.shown_corrections([page])) == others


def test_a_comparison_with_its_sides_exchanged_is_the_same():
    t = seeded([4, 8, 6])
    one, other = cp.compare(t, 'combiner', 'image_text'), cp.compare(t, 'image_text', 'combiner')
    assert other['key'] == cp.opposite(one)['key'] != one['key']
    assert [other[k] for k in ('diff', 'low', 'high')] == pytest.approx([-one['diff'], -one['high'], -one['low']])

    def pages(c):
        evidence = dict(evidence=dict(G04=[dict(other, what='x')]))
        return {'one': dict(comparisons=[*cp.corrected({0: c}).values()]), 'claims': evidence}

    assert len(cp.shown_comparisons(pages(one))) == 1 and cp.contradictions(pages(one)) == []
    (said,) = cp.contradictions(pages(cp.opposite(one) | dict(key=one['key'])))  # a page that says the opposite
    assert 'better' in said and 'worse' in said


def test_a_page_with_more_rivals_and_columns_has_the_same_verdicts():
    t = seeded([4, 8, 6])
    shifts = {'image_text_tuned': 0.3, 'score_product': 0.2, 'combiner_start': 0.1, 'image_only': 0.05, 'other': 0.4}
    rng = np.random.default_rng(0)
    base = t[t.method == 'image_text']
    t = pd.concat([t, *(base.assign(method=m, rank=1 + (rng.random(len(base)) > r)) for m, r in shifts.items())])
    fusions = [('combiner', b) for b in ('image_text', 'image_text_tuned', 'score_product')]
    more = [*fusions, *(('combiner', m) for m in ('combiner_start', 'image_only', 'other'))]
    small = cp.rival_leads({'': t}, fusions)
    large = cp.rival_leads({'': t, 'again': t}, more + [('other', b) for _, b in fusions])
    assert len(large) == 2 * 9 and all(c['p_corrected'] == large[key]['p_corrected'] for key, c in small.items())
    pages = dict(small=dict(comparisons=[*small.values()]), large=dict(comparisons=[*large.values()]))
    assert cp.contradictions(pages) == []
    weak = {key: dict(c, p=0.01, low=0.1, high=2.0) for key, c in large.items()}
    together = dict(large=dict(comparisons=[*cp.corrected(weak).values()]))
    alone = {key: weak[key] for key in small}
    wrong = cp.contradictions(together | dict(small=dict(comparisons=[*cp.by_question(alone).values()])))
    assert len(wrong) == len(small) and 'undecided by Holm' in wrong[0] and '(better)' in wrong[0]


def receipts_of_book(reports) -> dict:  # experiment -> receipt
    made = Path(reports).glob('0*/*/receipt.json')
    return {f.parent.relative_to(reports).as_posix(): json.loads(f.read_text(encoding='utf-8')) for f in made}


@pytest.mark.e2e
def test_pages_of_the_small_book_agree(smoke):
    receipts = receipts_of_book(smoke.home / 'reports' / 'smoke')
    assert len(cp.shown_comparisons(receipts)) > 1 and cp.contradictions(receipts) == []


def test_kept_evidence_of_all_runs_agrees():
    keys = [len(lines) for lines in cp.shown_comparisons(kept_receipts()).values()]
    assert len(keys) > 100 and max(keys) > 1 and cp.contradictions(kept_receipts()) == []


PROFILES = sorted({f.parents[2].name for f in (ROOT / 'reports').glob('*/0*/*/receipt.json')})


@pytest.mark.parametrize('profile', PROFILES or [pytest.param('', marks=pytest.mark.skip(reason='no book was made'))])
def test_pages_of_a_book_that_was_made_agree(profile):
    receipts = receipts_of_book(ROOT / 'reports' / profile)
    assert receipts and cp.contradictions(receipts) == []


def test_a_verdict_on_sides_that_another_page_calls_not_tuned_alike_is_a_contradiction():
    about = dict(key='k', p=0.001, seed_intervals=[], diff=1.0, low=0.1, high=2.0, family=1, p_corrected=0.001)
    page, line = dict(comparisons=[dict(about, untuned=True)]), dict(about, what='a − b')
    (said,) = cp.contradictions(dict(page=page, claims=dict(evidence=dict(C13=[line]))))
    assert 'page +1.0 [+0.1, +2.0] (not tuned alike)' in said and 'claims +1.0 [+0.1, +2.0] (better)' in said
    for agrees in (dict(line, untuned=True), dict(line, role='own')):
        assert cp.contradictions(dict(page=page, claims=dict(evidence=dict(C13=[agrees])))) == []
