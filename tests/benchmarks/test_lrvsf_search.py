"Search among distractors: slow references for every number, and bad input."

import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from lrvsf_files import Hand, MadeUp, dots, slow_rank

from cis_nb.benchmarks.lrvsf import (
    LRVSFBenchmark,
    lrvsf_task,
    read_lrvsf,
)
from cis_nb.benchmarks.lrvsf_search import (
    BootstrapIds,
    bootstrap_of,
    bootstrap_scores,
    bootstrap_summary,
    convert_bootstrap,
    distractor_steps,
    draw_bootstrap,
    encode_task,
    growing_gallery_rows,
    rank_growing_gallery,
    read_bootstrap,
)
from cis_nb.methods.baselines import FusionMethod
from cis_nb.retrieval.protocol import evaluate, evaluate_benchmark


@pytest.fixture
def data(tmp_path):
    return read_lrvsf(Hand().write(tmp_path / 'lrvsf'))


# The curve


@pytest.mark.e2e
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_the_curve_is_that_of_each_gallery_alone(seed, filtered):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        task = lrvsf_task(read_lrvsf(Hand(8, 25).write(Path(folder) / 'lrvsf')), ks=(1,))
    e = encode_task(dots(seed), task)
    steps = [0, 1, 7, 25]
    lines = rank_growing_gallery(e, steps, filtered).set_index(['distractors', 'query_id'])
    feats = MadeUp(seed)
    for n in steps:
        gallery = task.shared_gallery[: 8 + n]
        for q, (t,), v in zip(task.queries.query_id, task.queries.targets, e.q.numpy()):
            mine = [i for i in gallery if not filtered or task.category_of[i] == task.category_of[t]]
            scores = np.array([v @ feats.draw(i) for i in mine])
            rank, first = slow_rank(scores, mine.index(t))
            line = lines.loc[n, q]
            assert (line['rank'], line.gallery_size) == (rank, len(mine))
            assert line.category_hit == (task.category_of[mine[first]] == task.category_of[t])


def test_the_gallery_is_embedded_and_read_once(data):
    task, reads = lrvsf_task(data, ks=(1,)), []
    e = encode_task(dots(), task)

    class Counting:
        shape, dtype = e.features.array.shape, e.features.array.dtype

        def __getitem__(self, which):
            reads.extend(np.arange(len(whole))[which].tolist())
            return whole[which]

    whole = e.features.array
    e.features.array = Counting()
    e.method.backbone = None  # whoever embedded again would fail
    lines = rank_growing_gallery(e, [0, 2, 5, 9])
    assert len(lines) == 24 and sorted(reads) == sorted(e.rows(range(15)).tolist())


def test_the_last_step_is_the_benchmark(data):
    task = lrvsf_task(data, ks=(1, 3))
    per_query, rows = evaluate_benchmark(dots(), LRVSFBenchmark('lrvsf', dict(category=task)))
    lines = rank_growing_gallery(encode_task(dots(), task), [9])
    assert lines['rank'].tolist() == per_query['rank'].tolist()
    curve = growing_gallery_rows(lines, task.protocol, ks=(1, 3), method='dots')
    both = rows.merge(curve, on=['task', 'metric', 'k', 'method', 'protocol'])
    assert len(both) == len(rows) == 3
    assert np.allclose(both[['value_x', 'ci_low_x', 'ci_high_x']], both[['value_y', 'ci_low_y', 'ci_high_y']])


def test_steps_are_the_published_ones():
    published = [0, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_014]
    assert distractor_steps(2_000_014) == published
    assert distractor_steps(5000) == [0, 1000, 2000, 5000] and distractor_steps(0) == [0]


# The bootstrap


def slow_bootstrap(e, ids, ks, filtered=False):
    "The published evaluation, written out: unique products, repeated distractors, metrics repeated by weight."
    task, feats, out = e.task, e.method.backbone, []
    target = dict(zip(task.queries.query_id, task.queries.targets.str[0]))
    q = dict(zip(task.queries.query_id, e.q.numpy()))
    image = dict(zip(task.distractor_ids, task.distractors))
    for n, folds in {0: [[]] * len(ids.products), **ids.distractors}.items():
        for fold, (drawn, others) in enumerate(zip(ids.products, folds)):
            unique = [i for i in task.queries.query_id if i in set(drawn)]
            gallery = [target[i] for i in unique] + [image[i] for i in others]
            found = []
            for j, i in enumerate(unique):
                wanted = task.category_of[target[i]]
                mine = [g for g in gallery if not filtered or task.category_of[g] == wanted]
                scores = np.array([q[i] @ feats.draw(g) for g in mine])
                rank, first = slow_rank(scores, mine.index(gallery[j]))
                hit = task.category_of[mine[first]] == wanted
                found += [(rank, hit)] * drawn.count(i)
            assert len(found) == len(drawn)
            for k in ks:
                out.append((n, fold, 'recall', k, 100 * np.mean([rank <= k for rank, _ in found])))
            out.append((n, fold, 'cat_acc', 1, 100 * np.mean([hit for _, hit in found])))
    return out


@pytest.mark.parametrize('seed', range(6))
def test_the_bootstrap_weighs_as_published(tmp_path, seed):
    task = lrvsf_task(read_lrvsf(Hand(12, 30).write(tmp_path / 'lrvsf')), ks=(1,))
    e = encode_task(dots(seed), task)
    ids = draw_bootstrap(task, sizes=(4, 40), folds=5, n=10, seed=seed)  # 40 of 30: some are drawn twice
    found = [*bootstrap_scores(e, ids, ks=(1, 2)).itertuples(index=False, name=None)]
    slow = slow_bootstrap(e, ids, (1, 2))
    assert [f[:4] for f in found] == [s[:4] for s in slow]
    assert np.allclose([f[4] for f in found], [s[4] for s in slow])
    summary = bootstrap_summary(bootstrap_scores(e, ids, ks=(1, 2)))
    first = [s[4] for s in slow if s[:1] == (4,) and s[2:4] == ('recall', 1)]
    line = summary[(summary.distractors == 4) & (summary.metric == 'recall') & (summary.k == 1)].iloc[0]
    assert np.allclose([line['mean'], line['std']], [np.mean(first), np.std(first, ddof=1)]) and line.folds == 5


@pytest.mark.parametrize('seed', range(3))
def test_a_filtered_bootstrap_ranks_the_category_of_the_target_alone(tmp_path, seed):
    e = encode_task(dots(seed), lrvsf_task(read_lrvsf(Hand(12, 30).write(tmp_path / 'lrvsf')), ks=(1,)))
    ids = draw_bootstrap(e.task, sizes=(40,), folds=4, n=10, seed=seed)
    found = [*bootstrap_scores(e, ids, filtered=True).itertuples(index=False, name=None)]
    slow = slow_bootstrap(e, ids, (1,), filtered=True)
    assert [f[:4] for f in found] == [s[:4] for s in slow] and np.allclose([f[4] for f in found], [s[4] for s in slow])
    assert {f[4] for f in found if f[2] == 'cat_acc'} == {100.0}


def test_the_subsets_of_a_data_set_are_used_drawn_ones_where_it_has_none_and_a_pickle_is_refused(tmp_path):
    root = Hand(12, 30).write(tmp_path / 'lrvsf')
    data = read_lrvsf(root)
    task, fewer = lrvsf_task(data), lrvsf_task(data, distractors=4)
    drawn = bootstrap_of(root, task)
    assert drawn.name == 'none stored, drawn with seed 0' and drawn.distractors == {}
    with open(root / 'bootstrap_IDs.pkl', 'wb') as f:
        pickle.dump(SUBSETS, f)
    with pytest.raises(ValueError, match='is a pickle, .*; convert_bootstrap'):
        bootstrap_of(root, task)
    convert_bootstrap(root / 'bootstrap_IDs.pkl')
    assert bootstrap_of(root.parent, task) == bootstrap_of(root, task) == read_bootstrap(root / 'bootstrap_IDs.json')
    assert (bootstrap_of(root, fewer).products, bootstrap_of(root, fewer).distractors) == (SUBSETS['test_subsets'], {})


def test_photographs_are_families_of_their_own(data):
    lines = rank_growing_gallery(encode_task(dots(), lrvsf_task(data)), [9])
    assert lines.family.tolist() == lines.reference.tolist()


def test_a_repeated_distractor_counts_twice_and_a_repeated_product_once(data):
    e = encode_task(dots(3), lrvsf_task(data, ks=(1,)))
    first = e.task.queries.query_id[0]
    q = e.q[0].numpy()
    target = q @ e.method.backbone.draw('s0')
    better = [n for n in range(9) if q @ e.method.backbone.draw(f'd{n}') >= target]
    worse = sorted(set(range(9)) - set(better))
    assert better and worse, 'the seed has to give both'

    def recall(products, distractors, k):
        ids = BootstrapIds([products], {len(distractors): [[str(d) for d in distractors]]})
        s = bootstrap_scores(e, ids, ks=(k,))
        return s[(s.metric == 'recall') & (s.distractors > 0)].value.item()

    assert recall([first], better[:1] + worse[:1], 2) == 100
    assert recall([first], better[:1] * 2, 2) == 0
    assert recall([first] * 3, worse[:1], 1) == 100


def test_ids_of_another_data_set_are_refused(data):
    e = encode_task(dots(), lrvsf_task(data, ks=(1,)))
    with pytest.raises(ValueError, match="distractor '77' is not in the task; are they of another split"):
        bootstrap_scores(e, BootstrapIds([['100']], {1: [['77']]}))
    with pytest.raises(ValueError, match='none of the 2 products of fold 0 is in the task'):
        bootstrap_scores(e, BootstrapIds([['1', '2']], {}))


SUBSETS = dict(test_subsets=[['100', '100', '103'], ['101', '102', '102']], dist_2_subsets=[['0', '0'], ['1', '4']])


@pytest.mark.parametrize('protocol', [2, 4, 5])
@pytest.mark.parametrize('form', ['lists', 'numbers', 'arrays', 'objects'])
def test_a_pickle_is_refused_and_converted(tmp_path, form, protocol):
    def shaped(some):
        if form == 'lists':
            return some
        if form == 'numbers':
            return [int(i) for i in some]
        return np.array(
            some if form == 'objects' else [int(i) for i in some], dtype=object if form == 'objects' else int
        )

    path = tmp_path / 'bootstrap_IDs.pkl'
    path.write_bytes(pickle.dumps({k: [shaped(s) for s in v] for k, v in SUBSETS.items()}, protocol=protocol))
    with pytest.raises(ValueError, match=r"is a pickle, .*; convert_bootstrap\('.*pkl'\) reads only lists of ids"):
        read_bootstrap(path)
    ids = read_bootstrap(convert_bootstrap(path))
    assert ids.products == SUBSETS['test_subsets'] and ids.distractors == {2: SUBSETS['dist_2_subsets']}


class Evil:
    "A pickle that would make a folder."

    def __reduce__(self):
        return os.mkdir, ('made-by-a-pickle',)


@pytest.mark.parametrize('value', [Evil(), dict(test_subsets=[[Evil()]]), [['1']], dict(test_subsets=[[1.5]]), 'text'])
def test_nothing_but_ids_is_read_from_a_pickle(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'ids.pkl'
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match='ids.pkl is no pickle of bootstrap ids: it (names|holds)'):
        convert_bootstrap(path)
    assert [p.name for p in tmp_path.iterdir()] == ['ids.pkl']


def test_a_pipe_and_a_pickle_that_claims_more_than_the_memory_are_refused_and_nothing_is_written(tmp_path):
    path = tmp_path / 'ids.pkl'
    path.write_bytes(b'\x80\x04\x8e' + (2**40).to_bytes(8, 'little') + b'abc.')
    with pytest.raises(ValueError, match='ids.pkl is no pickle of bootstrap ids: .'):
        convert_bootstrap(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match='ids.pkl is a pipe, not a regular file'):
        convert_bootstrap(path)
    assert [p.name for p in tmp_path.iterdir()] == ['ids.pkl']


@pytest.mark.parametrize('protocol', range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_under_another_name_is_refused_and_converted(tmp_path, protocol):
    (tmp_path / 'ids.json').write_bytes(pickle.dumps(SUBSETS, protocol=protocol))
    with pytest.raises(ValueError, match=r"ids.json is a pickle, .*; convert_bootstrap\('.*ids.json'\) reads only"):
        read_bootstrap(tmp_path / 'ids.json')
    assert read_bootstrap(convert_bootstrap(tmp_path / 'ids.json')).products == SUBSETS['test_subsets']


@pytest.mark.parametrize('text', ['', '<html>', 'Sorry.', 'true', '{"test_subsets"', ' {"a": 1}', '[1]'])
def test_a_file_that_is_neither_json_nor_a_pickle_is_not_called_a_pickle(tmp_path, text):
    (tmp_path / 'ids.json').write_text(text)
    with pytest.raises(ValueError, match='ids.json(?!.*is a pickle)'):
        read_bootstrap(tmp_path / 'ids.json')


def test_lists_inside_the_lists_of_a_pickle_are_refused(tmp_path):
    "A list that contains itself, and one that would grow to 2 ** 40 ids."
    endless, wide = ['1'], ['1']
    endless.append(endless)
    for _ in range(40):
        wide = [wide, wide]
    for value in (endless, wide, [[['1']]]):
        (tmp_path / 'ids.pkl').write_bytes(pickle.dumps(dict(test_subsets=value)))
        with pytest.raises(ValueError, match='ids.pkl is no pickle of bootstrap ids: it holds lists inside the lists'):
            convert_bootstrap(tmp_path / 'ids.pkl')


@pytest.mark.parametrize(
    'found', [[], {'dist_2_subsets': []}, {**SUBSETS, 'dist_2_subsets': [['1']]}, {'test_subsets': [[], []]}]
)
def test_damaged_subsets_are_named(tmp_path, found):
    (tmp_path / 'ids.json').write_text(json.dumps(found))
    with pytest.raises(ValueError, match='ids.json: (expected a dict|.* must be .* lists of ids)'):
        read_bootstrap(tmp_path / 'ids.json')


@pytest.mark.parametrize('lists', [[['1', '2'], ['3']], [['3', '4'], ['1', '2']]])
def test_subsets_of_several_lengths_or_of_one_length_twice_are_named(tmp_path, lists):
    (tmp_path / 'ids.json').write_text(json.dumps({**SUBSETS, 'dist_3_subsets': lists}))
    with pytest.raises(
        ValueError, match='ids.json: dist_3_subsets has lists of 2, [12] ids; all of one name must have'
    ):
        read_bootstrap(tmp_path / 'ids.json')


def test_a_corrupt_jpeg_in_the_gallery_is_skipped_and_counted(tmp_path, store):
    from cis_nb.backbones.loading import load_backbone

    h = Hand()
    h.files['d3'], h.files['s1'] = b'no image', h.files['s1'][:80]
    task = lrvsf_task(read_lrvsf(h.write(tmp_path / 'lrvsf')), ks=(1,))
    e = encode_task(FusionMethod(name='i', fuse=lambda r, c: r, backbone=load_backbone('tiny')), task)
    assert set(e.features.skipped.id) == {'d3', 's1'}
    assert 'partial' in str(e.task.protocol) and len(e.task) == 5 and len(e.task.shared_gallery) == 13
    lines = rank_growing_gallery(e, [0, 4, 9])
    assert lines.groupby('distractors').gallery_size.first().tolist() == [5, 8, 13]  # d3 is one of the first four


def test_a_corrupt_reference_is_skipped_and_counted(tmp_path, store):
    from cis_nb.backbones.loading import load_backbone

    h = Hand()
    h.files['c2'] = h.files['c2'][:80]
    task = lrvsf_task(read_lrvsf(h.write(tmp_path / 'lrvsf')), ks=(1,))
    whole = len(task)
    e = encode_task(FusionMethod(name='i', fuse=lambda r, c: r, backbone=load_backbone('tiny')), task)
    assert set(e.features.skipped.id) == {'c2'} and 'partial' in str(e.task.protocol)
    assert 'c2' not in set(e.task.queries.reference) and len(e.task) == whole - (task.queries.reference == 'c2').sum()
    assert len(e.task) < whole


def test_a_gallery_smaller_than_k_is_refused(data):
    with pytest.raises(ValueError, match='a gallery of 8 has no R@9; use smaller ks'):
        evaluate(dots(), lrvsf_task(data, distractors=2, ks=(1, 9)))
    lines = rank_growing_gallery(encode_task(dots(), lrvsf_task(data, ks=(1,))), [0, 2, 9])
    rows = growing_gallery_rows(lines, lrvsf_task(data).protocol, ks=(1, 7, 15))
    recall = rows[rows.metric == 'recall'].groupby('distractors').k.apply(list)
    assert recall.to_dict() == {0: [1], 2: [1, 7], 9: [1, 7, 15]}
