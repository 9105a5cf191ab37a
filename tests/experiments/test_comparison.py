"Comparison of methods: paired differences, several seeds, verdicts, tables of the papers."

import math
import numpy as np
import pandas as pd
import pytest
from rankings import rows
from cis_nb.experiments import comparison as cp
from cis_nb.experiments import genecis as ev


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
    assert cp.verdict(dict(low=low, high=high)) == verdicts


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


def test_each_seed_is_compared_on_its_own():
    verdicts = [cp.verdict(c) for c in cp.compare_seeds(seeded([5, 0, -5]), 'combiner', 'image_text')]
    assert verdicts == ['better', 'undecided', 'worse'] and cp.compare(seeded([5, 0, -5]), 'combiner', 'image_text')[
        'diff'
    ] == pytest.approx(0)
    assert cp.compare_seeds(seeded([5]), 'image_text', 'combiner') == []  # the sum has no seeds


def test_the_mean_over_seeds_is_what_is_compared():
    t = seeded([4, 8])
    c = cp.compare(t, 'combiner', 'image_text')
    assert c['diff'] == pytest.approx(6) and c['n'] == 1000 and c['low'] > 0


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
    assert 'of 2 seeds better' in ev.headline(
        t[t.method != 'task_specific'], r[r.method != 'task_specific'], dict(image_text='Image + Text', combiner='C')
    )
