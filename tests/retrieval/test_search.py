"Search indexes: equal to the exact ranking, whole or absent after a kill, extended, measured."

import json
import subprocess
import sys
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from cis_nb.core.experiment_files import experiments
from cis_nb.core.store import store_root
from cis_nb.retrieval import search as S
from cis_nb.retrieval.ranking import rank_gallery

pytestmark = pytest.mark.usefixtures('store')
quick = settings(max_examples=40, deadline=None)


def vectors(n, dim=16, part=1):
    return S.clustered_vectors(n, dim, clusters=20, noise=0.7, part=part)


# ---- what is found


@quick
@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 200), st.integers(0, 1000))
def test_flat_search_is_brute_force(n, dim, k, seed):
    rng = np.random.default_rng(seed)
    x, q = rng.normal(size=(n, dim)).astype(np.float32), rng.normal(size=(5, dim)).astype(np.float32)
    k = min(k, n)
    scores, rows = S.build_index(x, range(n), 'x').search(q, k)
    table = S.l2_normalize_array(q) @ S.l2_normalize_array(x).T
    assert rows.shape == (5, k) and np.allclose(scores, -np.sort(-table, axis=1)[:, :k], atol=1e-5)
    assert np.allclose(np.take_along_axis(table, rows, 1), scores, atol=1e-5) and all(len(set(r)) == k for r in rows)


@quick
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 1000))
def test_equal_scores_follow_the_ranking_up_to_the_last_ones(n, k, seed):
    rng = np.random.default_rng(seed)
    x = np.eye(4, dtype=np.float32)[rng.integers(0, 4, n)]  # scores are exactly 0 or 1
    k = min(k, n)
    scores, rows = S.build_index(x, range(n), 'x').search(torch.eye(4), k)
    exact = rank_gallery(torch.eye(4), x, k=k, device='cpu')
    assert (scores.numpy() == exact.scores).all()
    for mine, theirs, s in zip(rows.numpy(), exact.top, exact.scores):
        sure = s > s[-1]  # what ties with the last may be another one of those that tie
        assert (mine[sure] == theirs[sure]).all() and (np.diff(mine[~sure]) > 0).all()


@pytest.mark.parametrize('kind', S.INDEX_KINDS)
def test_each_kind_finds_nearly_what_the_exact_ranking_finds(kind):
    x, q = vectors(3000).astype(np.float16), vectors(50, part=0)
    index = S.build_index(x, [f'i{n}' for n in range(3000)], 'x', kind)
    exact = rank_gallery(torch.from_numpy(q), x, k=10, device='cpu')
    scores, rows = index.search(q, 10, effort=None if kind == 'flat' else 128)
    recall = S.index_recall(x, q, rows, exact.scores, 10)
    assert recall == 1 if kind in ('flat', 'ivf') else recall > dict(hnsw=0.95, ivfpq=100 * 10 / 3000)[kind]
    assert (np.diff(scores, axis=1) <= 0).all() and index.ids[rows[0, 0]] == f'i{rows[0, 0]}'
    kept, own = index.vectors(rows[0]), S.l2_normalize_array(x[rows[0]])
    assert (kept * own).sum(1).min() > (0.7 if kind == 'ivfpq' else 0.999)
    assert S.SearchIndex(index.folder).search(q, 10)[1].shape == (50, 10)


def test_more_clusters_find_more_and_few_may_hold_fewer_than_k():
    x, q = vectors(2000), vectors(40, part=0)
    index = S.build_index(x, range(2000), 'x', 'ivf')
    exact = rank_gallery(torch.from_numpy(q), x, k=10, device='cpu').scores
    recalls = [S.index_recall(x, q, index.search(q, 10, e)[1], exact, 10) for e in (1, 4, 51)]
    assert recalls[0] < recalls[1] <= recalls[2] == 1
    scores, rows = index.search(q, 500, effort=1)
    assert ((rows == -1) == np.isneginf(scores)).all() and (rows[:, -1] == -1).all()


@pytest.fixture(scope='module')
def coarse():
    "Vectors and their ivfpq index."
    x = vectors(2000)
    return x, S.build_index(x, range(2000), 'x', 'ivfpq')


@pytest.mark.e2e
@quick
@given(candidates=st.integers(10, 200), part=st.integers(0, 100))
def test_re_ranking_never_finds_less(coarse, candidates, part):
    (x, index), q = coarse, vectors(40, part=part)
    exact = rank_gallery(torch.from_numpy(q), x, k=10, device='cpu').scores
    plain = S.index_recall(x, q, index.search(q, 10, 51)[1], exact, 10)
    scores, rows = S.search_reranked(index, x, q, 10, candidates, effort=51)
    assert S.index_recall(x, q, rows, exact, 10) >= plain and (np.diff(scores, axis=1) <= 0).all()
    whole = S.search_reranked(index, x, q, 10, 2000, effort=51)[1]
    assert S.index_recall(x, q, whole, exact, 10) == 1


def test_tensors_give_tensors_and_one_query_needs_no_second_axis():
    x = vectors(30)
    index = S.build_index(torch.from_numpy(x), range(30), 'x')
    scores, rows = index.search(torch.from_numpy(x[7]), 3)
    assert isinstance(scores, torch.Tensor) and rows.shape == (1, 3) and rows[0, 0] == 7
    assert index.search(x[7].tolist(), 3)[1][0, 0] == 7


# ---- building


def test_an_index_is_kept_and_made_again_when_damaged():
    x = vectors(20)
    a = S.build_index(x, range(20), 'a')
    assert S.build_index(x, range(20), 'a').folder == a.folder == S.build_index(x * 2, range(20), 'a').folder
    assert S.build_index(x, range(1, 21), 'a').folder != a.folder
    (a.folder / 'index.faiss').unlink()
    with pytest.warns(UserWarning, match='incomplete'):
        b = S.build_index(x, range(20), 'a')
    assert (b.search(x, 1)[1][:, 0] == np.arange(20)).all()


@pytest.mark.parametrize('kind', S.INDEX_KINDS)
def test_a_memory_map_and_chunks_change_nothing(kind, tmp_path, monkeypatch):
    x, q = vectors(900), vectors(10, part=0)
    np.save(tmp_path / 'x.npy', x)
    whole = S.build_index(x, range(900), 'x', kind).search(q, 5)
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'other'))
    monkeypatch.setattr(S, '_CHUNK', 70)
    parts = S.build_index(np.load(tmp_path / 'x.npy', mmap_mode='r'), range(900), 'x', kind).search(q, 5)
    if kind in ('flat', 'ivf'):
        assert np.allclose(whole[0], parts[0], atol=1e-5)
    shared = [len(set(a) & set(b)) / 5 for a, b in zip(whole[1], parts[1])]
    assert parts[1].shape == (10, 5) and (parts[1] >= 0).all() and np.mean(shared) > 0.8


@pytest.mark.parametrize('kind', S.INDEX_KINDS)
def test_an_index_of_another_kind_than_its_note_is_refused(kind):
    x = vectors(900)
    folder = S.build_index(x, range(900), 'other-kind', kind).folder
    about = json.loads((folder / 'index.json').read_text())
    for other in (*S.INDEX_KINDS, 'zzz', ''):
        (folder / 'index.json').write_text(json.dumps(about | dict(kind=other)))
        if other != kind:
            with pytest.raises(ValueError, match='index.(json|faiss).*kind.*: delete|index.json: kind is .*; delete'):
                S.SearchIndex(folder)
    (folder / 'index.json').write_text(json.dumps(about))
    assert S.SearchIndex(folder).kind == kind


@pytest.mark.parametrize(
    'features, ids, kind, said',
    [
        (np.zeros((0, 4)), [], 'flat', 'at least one'),
        (np.ones((3, 4)), 'ab', 'flat', '3 feature vectors and 2 ids'),
        (np.ones(3), 'abc', 'flat', r'shape \(3,\)'),
        (np.ones((3, 4)), 'abc', 'tree', "'tree' is none of flat, ivf, hnsw, ivfpq"),
        (np.array([[1, 2], [3, 4], [np.inf, 1]]), 'abc', 'hnsw', 'the first is row 2'),
        (np.ones((3, 4)), 'aba', 'flat', "the id of row 2 is 'a', as one before"),
        (np.ones((3, 4)), [1, '1', 2], 'flat', "the id of row 1 is '1', as one before"),
        (np.ones((3, 4)), ['a', None, 'b'], 'flat', 'the id of row 1 is empty'),
        (np.ones((3, 4)), ['a', 'b', ''], 'flat', 'the id of row 2 is empty'),
        (np.ones((3, 4)), [np.nan, 1, 2], 'flat', 'the id of row 0 is empty'),
    ],
)
def test_what_cannot_be_an_index_is_refused(features, ids, kind, said):
    with pytest.raises(ValueError, match=said):
        S.build_index(features, ids, 'x', kind)
    assert not list(store_root().glob('index/x-*'))


def test_the_row_that_is_not_finite_is_counted_over_chunks(monkeypatch):
    monkeypatch.setattr(S, '_CHUNK', 10)
    x = vectors(95)
    x[83, 2] = np.nan
    with pytest.raises(ValueError, match='the first is row 83'):
        S.build_index(x, range(95), 'x')


@pytest.mark.parametrize(
    'queries, more, said',
    [
        (np.ones((1, 3)), {}, 'vectors of 4 numbers, the queries have 3: they were made by another backbone'),
        (np.full((1, 4), np.nan), {}, 'not finite; the first is row 0'),
        (np.ones((1, 4)), dict(k=5), 'k = 5 of an index of 4 vectors; allowed: 1 to 4'),
        (np.ones((1, 4)), dict(k=0), 'k = 0'),
        (np.ones((1, 4)), dict(k=1, effort=3), 'a flat index'),
    ],
)
def test_queries_that_do_not_fit(queries, more, said):
    index = S.build_index(np.eye(4), 'abcd', 'e')
    with pytest.raises(ValueError, match=said):
        index.search(queries, **dict(dict(k=2), **more))
    with pytest.raises(ValueError, match='nprobe and efSearch must be an integer ≥ 1, got 0'):
        S.build_index(np.eye(4), 'abcd', 'e', 'hnsw').search(np.ones((1, 4)), 2, 0)
    with pytest.raises(FileNotFoundError, match='no index there'):
        S.SearchIndex(store_root() / 'index' / 'none')


# ---- a kill


KILLED = '''
import os, signal, sys
import numpy as np
from cis_nb.retrieval import search as S

x = S.clustered_vectors(600, 8, clusters=20, part=1)
S._CHUNK = 100


class Deadly:
    "Vectors whose reader is killed within the second pass, when half of the index is there."

    def __init__(self):
        self.shape, self.reads = x.shape, 0

    def __len__(self):
        return len(x)

    def __getitem__(self, which):
        self.reads += 1
        if self.reads == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return x[which]


if sys.argv[1] == 'build':
    S.build_index(Deadly(), range(600), 'x')
else:
    S.append_to_index(S.SearchIndex(sys.argv[1]), Deadly(), range(50, 650), 'x')
'''


def killed(what, reads):
    done = subprocess.run([sys.executable, '-c', KILLED, str(what), str(reads)], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr


@pytest.mark.e2e
def test_a_killed_build_leaves_no_index_and_the_next_one_is_whole():
    killed('build', 9)
    assert not list(store_root().glob('index/x-*'))
    x = S.clustered_vectors(600, 8, clusters=20, part=1)
    index = S.build_index(x, range(600), 'x')
    assert len(index) == index.faiss.ntotal == 600 and (index.search(x, 1)[1][:, 0] == np.arange(600)).all()
    assert not list(store_root().glob('index/.partial-*'))


@pytest.mark.e2e
def test_a_killed_append_leaves_the_old_index_as_it_was():
    x = S.clustered_vectors(600, 8, clusters=20, part=1)
    old = S.build_index(x[:50], range(50), 'old')
    before = (old.folder / 'index.faiss').read_bytes()
    killed(old.folder, 10)
    assert (old.folder / 'index.faiss').read_bytes() == before and len(S.SearchIndex(old.folder)) == 50
    assert [p.name for p in store_root().glob('index/x-*')] == []
    assert len(S.append_to_index(old, x, range(50, 650), 'x')) == 650


# ---- more vectors


@pytest.mark.e2e
@quick
@given(st.integers(1, 80), st.integers(1, 80), st.integers(0, 100))
def test_appended_vectors_come_after_the_old_ones(n, m, seed):
    x = np.random.default_rng(seed).normal(size=(n + m, 5)).astype(np.float32)
    old = S.build_index(x[:n], range(n), 'old')
    new = S.append_to_index(old, x[n:], range(n, n + m), 'new')
    once = S.build_index(x, range(n + m), 'once')
    assert new.ids == once.ids and len(old) == n
    for mine, theirs in zip(new.search(x, 1), once.search(x, 1)):
        assert (mine == theirs).all()
    assert S.append_to_index(old, x[n:], range(n, n + m), 'new').folder == new.folder


@pytest.mark.parametrize('kind', S.INDEX_KINDS)
def test_every_kind_can_be_extended(kind):
    x = vectors(1500)
    old = S.build_index(x[:1200], range(1200), 'old', kind)
    new = S.append_to_index(old, x[1200:], range(1200, 1500), 'new')
    kept = (new.vectors(range(1200, 1500)) * S.l2_normalize_array(x[1200:])).sum(1)
    rows = S.search_reranked(new, x, x[1200:], 1, 100, None if kind == 'flat' else 64)[1][:, 0]
    assert new.faiss.ntotal == 1500 and (rows == np.arange(1200, 1500)).mean() > 0.98
    assert kind == 'ivfpq' or kept.min() > 0.999


def test_what_cannot_be_appended_is_refused():
    old = S.build_index(np.eye(4), 'abcd', 'old')
    with pytest.raises(ValueError, match='vectors of 4 numbers, the new ones have 3'):
        S.append_to_index(old, np.ones((1, 3)), 'e', 'new')
    with pytest.raises(ValueError, match='the first is row 1'):
        S.append_to_index(old, [[1, 2, 3, 4], [1, 2, 3, np.nan]] * np.ones(1), 'ef', 'new')
    for ids, said in (('eb', "row 1 is 'b', as one before"), ('ee', "row 1 is 'e'"), (['e', None], 'row 1 is empty')):
        with pytest.raises(ValueError, match=said):
            S.append_to_index(old, np.ones((2, 4)), ids, 'new')


# ---- memory


MEMORY = '''
import sys
import numpy as np
from cis_nb.core.report import peak_memory_bytes
from cis_nb.retrieval import search as S

n, kind = int(sys.argv[1]), sys.argv[2]


class Endless:
    "Vectors that are made when they are read."

    shape = (n, 64)

    def __len__(self):
        return n

    def __getitem__(self, which):
        rows = np.arange(n)[which] if isinstance(which, slice) else which
        return np.sin(np.outer(rows + 1, np.arange(1, 65)), dtype=np.float32)


S.build_index(Endless()[:2000], range(2000), 'small', kind)
before = peak_memory_bytes()
index = S.build_index(Endless(), range(n), 'large', kind)
print(peak_memory_bytes() - before, index.bytes)
'''


@pytest.mark.e2e
def test_building_takes_the_memory_of_the_index_and_of_chunks():
    run = subprocess.run([sys.executable, '-c', MEMORY, '600000', 'flat'], capture_output=True, text=True, check=True)
    grown, size = map(int, run.stdout.split())
    assert size == pytest.approx(600_000 * 64 * 4, rel=0.01)
    assert grown < 1.8 * size  # a copy of the vectors beside the index would make it 2


# ---- measurements and the plan


@pytest.mark.e2e
def test_rates_are_those_of_the_files_and_sizes_that_were_asked_for():
    files = S.clustered_files(3000, 16, 20, clusters=30)
    assert np.load(files[0]).shape == (3000, 16) and np.load(files[1]).shape == (20, 16)
    rates = S.index_rates(*files, kinds=['flat', 'ivf'], sizes=[3000, 500], seconds=0.01, threads=1)
    assert rates[rates.way == 'flat'][['vectors', 'recall_1', 'recall_10']].values.tolist() == [
        [500, 1, 1],
        [3000, 1, 1],
    ]
    ivf = rates[(rates.way == 'ivf') & (rates.vectors == 3000)]
    assert ivf.effort.tolist() == S.index_efforts('ivf', 3000) and ivf.recall_10.is_monotonic_increasing
    assert (rates[['bytes', 'peak_bytes', 'build_seconds']] > 0).all(axis=None)
    timed = rates.dropna(subset='batch_per_s')
    assert len(timed) == 1 + len(ivf) + 2  # both flat ones, all efforts of the largest ivf, one of the smaller
    assert (timed[['batch_per_s', 'batch_per_s_low', 'single_per_s', 'single_per_s_low']] > 0).all(axis=None)
    assert (timed.batch_per_s <= timed.batch_per_s_high).all()
    for wrong in (50, 4000):
        with pytest.raises(ValueError, match=f'sizes: {wrong} of 3000 vectors'):
            S.index_rates(*files, sizes=[wrong])


def made_up_rates():
    "Recall@10 is the same in all rows, so whatever is chosen by it shows."
    about = dict(dim=64, bytes=20_000, build_seconds=1.0, peak_bytes=10**6, single_per_s=100.0, batch_per_s=100.0)
    sizes = (1000, 0.7), (316, 0.75), (100, 0.8)
    lines = [('flat', None, n, 1) for n, _ in sizes]
    lines += [('ivfpq', e, n, r + e / 100) for e in (2, 4) for n, r in sizes]
    lines += [('ivfpq', 8, 1000, 0.9), *(('ivfpq, re-ranked', 4, n, 0.55 + r / 2) for n, r in sizes)]
    found = pd.DataFrame(lines, columns=['way', 'effort', 'vectors', 'recall_1'])
    spread = {f'{kind}_per_s_{end}': 100.0 for kind in ('batch', 'single') for end in ('low', 'high')}
    return found.assign(recall_10=1.0, **about, **spread)


def made_up_recalls(error=0.0):
    "Recalls on a plane, and the largest size off by an error of its log-odds."
    found = pd.DataFrame([(n, c) for n in (100, 316, 1000) for c in (1, 10)], columns=['vectors', 'candidates'])
    odds = 2 + np.log10(found.candidates) - np.log10(found.vectors) + error * (found.vectors == 1000)
    return found.assign(recall_1=1 / (1 + np.exp(-odds)))


def plan_of(rates=None, recalls=None, **more):
    rates, recalls = (
        f() if given is None else given for f, given in ((made_up_rates, rates), (made_up_recalls, recalls))
    )
    return S.search_plan(rates, recalls, **more).rename(columns={'64 numbers': 'value'}).set_index('quantity')


def made_up_plan(dims=(), **machine):
    machine = S.PlanMachine(**dict(dict(disk=10**7, read_rate=1e6, memory=1e6, cores=8), **machine))
    return plan_of(n=10**6, machine=machine, dims=dims, candidates=100)


@pytest.fixture
def few_vectors_are_enough(monkeypatch):
    monkeypatch.setattr(S, '_LEAST_FOR_RECALL', 1000)


def test_recall_is_not_extrapolated_from_few_vectors():
    plan = made_up_plan(dims=[512])
    rows = plan.loc[['recall@1, without re-ranking', 'recall@1, 100 re-ranked']]
    assert (rows[['value', '512 numbers']] == '–').all(axis=None)
    assert rows.source.str.startswith('not extrapolated from 1,000 vectors; measured at 1,000: ').all()
    assert not plan.value.str.contains(' to ').any()


def test_a_plan_for_more_dimensions_has_more_machines_and_takes_longer():
    plan, row = made_up_plan(dims=[512]), 'time of a query: centroids'
    assert plan['512 numbers']['machines'] == str(-(-(64 + 8 + 1024) // 10))
    shard = -(-(10**6) // int(plan['512 numbers']['machines']))
    slower = 512 / 64 * S.cluster_count(shard) / 1000 / 100
    assert plan['512 numbers'][row] == f'{1000 * slower:.2g} ms'


@pytest.mark.usefixtures('few_vectors_are_enough')
def test_a_plan_follows_from_its_rows_and_says_what_is_extrapolated():
    plan = made_up_plan()
    assert plan.value['code and number, bytes per vector'] == '16' and plan.value['machines'] == str(-(-144 // 10))
    assert plan.value['index, bytes per vector'] == '20.0'
    times = plan.index[plan.index.str.startswith('time of a query')]
    recalls = ['recall@1, without re-ranking', 'recall@1, 100 re-ranked']
    beyond = [*recalls, *times, 'queries per second, by the cores']
    assert len(times) == 4 and plan.source[beyond].str.startswith('extrapolated').all()
    assert plan.source['memory of a machine; cores'] == 'assumed'


@pytest.mark.usefixtures('few_vectors_are_enough')
@pytest.mark.parametrize('candidates, row', [(1, 'without re-ranking'), (100, '100 re-ranked')])
def test_a_plan_continues_recall_to_the_vectors_of_one_machine(candidates, row):
    plan, shard = made_up_plan(), 10**6 / 15
    recall = 100 / (1 + np.exp(np.log10(shard) - 2 - np.log10(candidates)))
    assert plan.value[f'recall@1, {row}'] == f'{recall:.0f} % ({recall:.0f} to {recall:.0f} %)'
    source = plan.source[f'recall@1, {row}']
    assert source.startswith(
        f'extrapolated to {shard:,.0f} vectors; the smaller sizes predict the largest within 0 points'
    )
    assert source.endswith('; measured at 1,000: 27 % with 1, 50 % with 10')
    assert '1,000,000 vectors' in made_up_plan(disk=10**9).source[f'recall@1, {row}']


def test_a_plan_has_the_centroids_in_its_time_and_its_memory():
    plan, clusters = made_up_plan(), S.cluster_count(10**6 // 15)
    assert plan.value['clusters of a machine'] == f'{clusters:,}'
    of_flat = clusters / 1000 / 100  # seconds; the flat index compares 100 times 1000 vectors in one
    assert plan.value['time of a query: centroids'] == f'{1000 * of_flat:.2g} ms'
    memory = 4 * 64 * (clusters + 256)
    assert plan.value['memory to search: centroids, code words'] == f'{memory / 1e9:.2g} GB'
    left = (1e6 - memory) / (16 * 10**6 / 15)
    assert plan.value['codes that fit into the memory that is left'] == f'{100 * left:.0f} %'
    row = 'queries per second, by the cores'
    more, fewer = (float(p.value[row].replace(',', '')) for p in (made_up_plan(cores=80), plan))
    assert more == pytest.approx(10 * fewer, abs=6)


@pytest.mark.usefixtures('few_vectors_are_enough')
def test_a_fit_that_does_not_hold_shows_its_error_and_a_wider_range():
    exact, bent = (plan_of(recalls=made_up_recalls(error)).loc['recall@1, without re-ranking'] for error in (0, 1))
    widths = [np.diff([int(x) for x in p.value.split('(')[1][:-3].split(' to ')])[0] for p in (exact, bent)]
    assert widths[0] == 0 < widths[1]
    off = 100 * abs(1 / (1 + np.exp(0.0)) - 1 / (1 + np.exp(-1.0)))
    assert f'the largest within {off:.0f} points' in bent.source


@pytest.mark.usefixtures('few_vectors_are_enough')
@pytest.mark.parametrize(
    'limit, where, sizes',
    [(1.0, 'vectors > 0', 0), (0.0, 'vectors == 316', 2), (0.998, 'vectors == 100 and candidates == 10', 2)],
)
def test_recall_at_a_limit_is_not_fitted(limit, where, sizes):
    recalls = made_up_recalls()
    recalls.loc[recalls.query(where).index, 'recall_1'] = limit
    plan = plan_of(recalls=recalls)
    for row in ('recall@1, without re-ranking', 'recall@1, 10,000 re-ranked'):
        assert plan.value[row] == '–'
        said = f'not extrapolated: {sizes} sizes have recalls between 0 and 100 %; measured at 1,000: '
        assert plan.source[row].startswith(said)


def test_recall_by_candidates_is_that_of_re_ranking():
    files = S.clustered_files(3000, 16, 120, clusters=30)
    found = S.recall_by_candidates(*files, [500, 3000], (1, 10, 100, 1000), effort=8)
    assert found.candidates.tolist() == [1, 10, 100, 1, 10, 100, 1000]
    x, q = (np.load(f) for f in files)
    for row in found[found.candidates > 1].itertuples():
        gallery, name = x[: row.vectors], files[0].parent.name
        index = S.build_index(gallery, range(row.vectors), name, 'ivfpq')
        best = rank_gallery(torch.from_numpy(q), gallery, k=1, device='cpu').scores
        rows = S.search_reranked(index, gallery, q, 1, row.candidates, effort=8)[1]
        assert row.recall_1 == S.index_recall(gallery, q, rows, best, 1)


def test_the_finding_names_the_fastest_index_that_is_good_enough_by_its_first_image():
    rates = made_up_rates()
    rates.loc[rates.effort == 8, ['batch_per_s', 'batch_per_s_low', 'batch_per_s_high']] = 250.0
    said = S.index_finding(rates, 0.85)
    assert 'ivfpq (effort 8)' in said and 'at 2.5 (2.5 to 2.5) times the batch rate' in said
    assert 'one query at a time 1.0 (1.0 to 1.0) times' in said
    assert S.index_finding(rates, 0.95).startswith('No approximate index reaches a recall@1 of 95 %')
    chosen = S.cheapest_efforts(rates, 0.95).set_index('way')
    assert chosen.effort['ivfpq'] == 8 and set(chosen.vectors) == {1000}
    slow = S.no_faster_note(S.cheapest_efforts(rates, 0.85))
    assert slow.endswith(', all queries at once: ivfpq re-ranked; one query at a time: ivfpq, ivfpq re-ranked.')
    rates.loc[rates.effort == 8, 'batch_per_s_low'] = 90.0  # below the highest rate of exact search
    assert 'is measurably faster' in S.index_finding(rates, 0.85)
    assert S.rows_of_same_effort(rates).query('way == "ivfpq"').effort.tolist() == [4, 4, 4]
    table = S.index_table(rates)
    assert len(table) == len(rates) and table['nprobe / efSearch'][0] == '–'


def test_the_figure_has_recall_at_1_over_rate_and_the_memory_of_each_index():
    rates = made_up_rates()
    rates['bytes'] = rates.way.map({'flat': 8e6, 'ivfpq': 1e6, 'ivfpq, re-ranked': 1e6})
    speed, memory = S.index_figure(rates).axes
    assert 'recall@1' in speed.get_ylabel() and 'memory' in memory.get_xlabel()
    groups = list(rates[rates.vectors == 1000].groupby('way', sort=False))
    for line, (_, group) in zip(speed.lines, groups, strict=True):
        assert np.allclose(line.get_xdata(), group.batch_per_s)
        assert np.allclose(line.get_ydata(), 100 * group.recall_1)
    assert [bar.get_width() for bar in memory.patches] == [8, 1, 1]
    assert speed.lines[0].get_zorder() > speed.lines[1].get_zorder() and speed.get_ylim()[0] > 0


def test_features_of_any_kind_become_files_once(monkeypatch):
    monkeypatch.setattr(S, '_CHUNK', 70)
    x, q = vectors(200).astype(np.float16), vectors(9, part=0)
    files = S.vector_files('own', x, torch.from_numpy(q))
    assert [np.load(f).dtype for f in files] == [np.float32] * 2
    assert (np.load(files[0]) == x).all() and (np.load(files[1]) == q).all()
    assert S.vector_files('own', x, q) == files != S.vector_files('own', x[:100], q)
    with pytest.raises(ValueError, match='the first is row 0'):
        S.vector_files('own', x, q * np.nan)


def test_the_profiles_search_the_features_of_the_referred_search():
    found = experiments('full')
    page, search = found['08_scaling/search'], found['06_evaluation/lrvsf'].params
    p = page.defaults | page.params
    assert '05_train.condvit_category' in page.needs and p['training'] in search['trainings']
    assert (p['products'], p['world_seed']) == (search['queries'], search['world_seed'])
    assert p['vectors'] == search['queries'] + search['distractors'] and p['seed'] in search['seeds']
    assert len({1, *p['smaller']}) >= 3  # an extrapolation of recall needs three sizes
    bench = experiments('bench')['08_scaling/search'].params
    assert len({1, *bench['smaller'], *bench['larger']}) >= 3 and bench['training'] == ''


@quick
@given(st.integers(1, 10**10))
def test_clusters_have_enough_vectors(n):
    c = S.cluster_count(n)
    assert c == 1 or n / c >= 39 and c <= 4 * n**0.5 + 1


def test_speed_is_measured_for_the_size_asked_for():
    speed = S.search_speed(300, 8, queries=10, k=5)
    assert speed['vectors'] == 300 and speed['MB'] == pytest.approx(4 * 300 * 8 / 1e6) and min(speed.values()) > 0


@pytest.mark.parametrize('n', [1, 5, 10])
def test_the_speed_of_search_among_a_few_images(n):
    assert S.search_speed(n, 8, queries=4)['NumPy, queries/s'] > 0
