"CIRR: released annotations, slow references for every rank, damaged files, submissions."

import copy
import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from made_up import MadeUp, fused
from projects import DATA, ROOT, needs_data

from cis_nb.backbones.features import image_features
from cis_nb.benchmarks.cirr import (
    CIRR_LENGTHS,
    audit_cirr,
    averages,
    check_cirr_submission,
    cirr_benchmark,
    load_cirr,
    cirr_image_paths,
    cirr_ranked_lists,
    read_cirr,
    score_cirr_submission,
    write_cirr_submission,
)
from cis_nb.retrieval.protocol import evaluate, evaluate_benchmark

real = needs_data('cirr')


def features(seed, dim=16, levels=None):
    "Made-up features by name; whole numbers up to `levels` give many ties, and exact products."

    def vector(word):
        r = np.random.default_rng([seed, *word.encode()])
        return (r.normal(size=dim) if levels is None else r.integers(-levels, levels + 1, dim)).astype(np.float32)

    return vector, MadeUp(vector, lambda t: vector('text ' + t))


def small_set(root, seed=0, n_sets=4, n_queries=9, split='val'):
    "A made-up CIRR without pictures: sets of six that share some images with the set before."
    r = np.random.default_rng(seed)
    names = [f'{split}-{i}' for i in range(6 * n_sets)]
    sets = [list(r.permutation(names[max(0, 6 * s - 2) : 6 * s + 6])[:6]) for s in range(n_sets)]
    entries = []
    for p in range(n_queries):
        members = [str(m) for m in sets[r.integers(n_sets)]]
        ref, target = (str(m) for m in r.permutation(members)[:2])
        entries.append(
            dict(
                pairid=int(10 * p + 3),
                reference=ref,
                target_hard=target,
                target_soft={target: 1.0},
                caption=f'words {r.integers(4)}',
                img_set=dict(id=0, members=members, reference_rank=0, target_rank=0),
            )
        )
    return put(root, entries, {n: f'./dev/{n}.png' for n in names}, split)


def put(root, entries, files, split='val'):
    for sub, name, content in (('captions', 'cap', entries), ('image_splits', 'split', files)):
        (root / 'cirr' / sub).mkdir(parents=True, exist_ok=True)
        (root / f'cirr/{sub}/{name}.rc2.{split}.json').write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return entries, files


def by_task(per_query, rows):
    return {task: q.reset_index(drop=True) for task, q in per_query.groupby('task', sort=False)}, rows


def slow_rank(vector, e, candidates, members_only=False):
    "Sort all candidates, the target last among equals, and look where it is."
    q = vector(e['reference']).astype(np.float64) + vector('text ' + e['caption'])
    pool = [n for n in (e['img_set']['members'] if members_only else candidates) if n != e['reference']]
    score = {n: float(q @ vector(n).astype(np.float64)) for n in pool}
    return 1 + sorted(pool, key=lambda n: (-score[n], n == e['target_hard'])).index(e['target_hard'])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]))
@pytest.mark.e2e
def test_every_rank_of_made_up_sets_equals_a_slow_sort(tmp_path_factory, seed, levels):
    root = tmp_path_factory.mktemp('cirr')
    entries, files = small_set(root, seed)
    vector, reader = features(seed, 6, levels)
    benchmark = cirr_benchmark(root, images=False, ks=(1, 5, 10))
    per_query, rows = by_task(*evaluate_benchmark(fused(reader), benchmark, keep=50))
    expected = [('full', k) for k in (1, 5, 10)] + [('subset', k) for k in (1, 2, 3)] + [('average', k) for k in (1, 5)]
    assert (
        list(zip(rows.task, rows.k)) == expected and benchmark.tasks['full'].source is benchmark.tasks['subset'].source
    )
    slow_f, slow_s = ([slow_rank(vector, e, files, only) for e in entries] for only in (False, True))
    assert list(per_query['full']['rank']) == slow_f and list(per_query['subset']['rank']) == slow_s
    assert set(per_query['full'].gallery_size) == {23} and set(per_query['subset'].gallery_size) == {5}
    value = rows.set_index(['task', 'k']).value
    for k in (1, 5):
        assert np.isclose(
            value['average', k], (100 * np.mean(np.array(slow_f) <= k) + 100 * np.mean(np.array(slow_s) <= 1)) / 2
        )
    references = {e['reference'] for e in entries}
    kept = [e for e in entries if e['target_hard'] in references]
    if kept:
        mistaken, _ = evaluate(fused(reader), load_cirr(root, gallery='references', images=False), ks=(1,))
        assert list(mistaken['rank']) == [slow_rank(vector, e, references) for e in kept]


@real
def test_the_page_counts_what_the_released_files_hold():
    cells = [''.join(c['source']) for c in json.loads((ROOT / 'nbs/02b_benchmarks/02_cirr.ipynb').read_text())['cells']]
    space = dict(pd=pd, show_table=lambda *a: None)
    exec(next(c for c in cells if c.startswith('released = ')), space)
    said = space['released'].set_index('what')
    for split in ('val', 'test1'):
        counted = audit_cirr(DATA, split).set_index('what')['count']
        assert counted.to_dict() == said[split].dropna().astype(int).to_dict()


@real
def test_how_many_sentences_have_no_word_of_change():
    "The world's share of describing sentences (01e) follows this count."
    words = (
        r'remov(?:e[sd]?|ing)|replac(?:e[sd]?|ing)|chang(?:e[sd]?|ing)|add(?:s|ed|ing)?|mak(?:es?|ing)|made|'
        r'turn(?:s|ed|ing)?|put(?:s|ting)?|tak(?:es?|en|ing)|took|mov(?:e[sd]?|ing)|keep(?:s|ing)?|kept|'
        r'delet(?:e[sd]?|ing)|instead|same|different|more|less|fewer|rather|than|without|no|not'
    )
    said = load_cirr(DATA / 'cirr', images=False).queries.condition
    assert (
        len(said) == 4181
        and round(100 * np.mean([not re.search(rf'\b({words})\b', s, re.IGNORECASE) for s in said])) == 47
    )


@real
def test_the_odd_scores_of_the_released_files_do_not_count():
    c = read_cirr(DATA)
    scores = pd.Series([v for e in c.entries for v in e['target_soft'].values()]).value_counts().to_dict()
    assert scores == {1.0: 4216, -1.0: 807, 0.5: 62, 0.2: 6}
    odd = [e for e in c.entries if e['target_soft'].get(e['target_hard']) != 1.0]
    assert len(odd) == 42 and sum(e['reference'] in e['target_soft'] for e in odd) == 37
    targets = load_cirr(DATA, images=False).queries.targets
    assert [t for [t] in targets] == [e['target_hard'] for e in c.entries]


@real
def test_a_gallery_of_references_loses_targets():
    full, mistaken = (load_cirr(DATA, gallery=g, images=False) for g in ('split', 'references'))
    assert (len(full), len(full.shared_gallery), len(mistaken), len(mistaken.shared_gallery)) == (
        4181,
        2297,
        4046,
        2165,
    )
    assert full.protocol.hash != mistaken.protocol.hash and '135 of 4181' in mistaken.protocol.extra
    references = {e['reference'] for e in read_cirr(DATA, 'test1').entries}
    assert len(set(read_cirr(DATA, 'test1').files) - references) == 137


@real
def test_random_features_on_the_released_queries(tmp_path):
    "4,181 × 2,297: ranks against loops, and the score of the submission against the metric."
    c = read_cirr(DATA)
    rng = np.random.default_rng(0)
    table = {n: rng.normal(size=24).astype(np.float32) for n in c.files}
    words = {t: rng.normal(size=24).astype(np.float32) for t in sorted({e['caption'] for e in c.entries})}
    m = fused(MadeUp(table.get, words.get))
    per_query, rows = by_task(*evaluate_benchmark(m, cirr_benchmark(DATA, images=False), keep=50))
    names, G = list(table), np.stack(list(table.values())).astype(np.float64)
    col = {n: j for j, n in enumerate(names)}
    off = 0
    for e, rank, rank_s in zip(c.entries, per_query['full']['rank'], per_query['subset']['rank']):
        s = G @ (G[col[e['reference']]] + words[e['caption']])
        t = s[col[e['target_hard']]]
        before = [j for j in np.flatnonzero(s >= t) if names[j] not in (e['reference'], e['target_hard'])]
        off += rank != 1 + len(before)
        assert abs(rank - 1 - len(before)) <= 1  # the last bit of single precision
        assert rank_s == 1 + sum(
            s[col[m]] >= t for m in e['img_set']['members'] if m not in (e['reference'], e['target_hard'])
        )
    assert off <= 8
    value = rows.set_index(['task', 'k']).value
    assert abs(value['full', 50] - 100 * 50 / 2296) < 1 and abs(value['subset', 1] - 20) < 2  # what a guess finds
    for kind, task in (('recall', 'full'), ('recall_subset', 'subset')):
        path = write_cirr_submission(per_query[task], kind, tmp_path / f'{kind}.json', c)
        assert path.stat().st_size < 5_000_000
        score = score_cirr_submission(path, c)
        assert np.allclose(score.value, [value[task, k] for k in score.k])
    lists = cirr_ranked_lists(m, c)
    assert [lists['recall'][q] for q in per_query['full'].query_id] == list(per_query['full'].top)
    assert [lists['recall_subset'][q] for q in per_query['subset'].query_id] == [t[:3] for t in per_query['subset'].top]


@real
def test_the_released_test_split_is_read_ranked_and_refused(tmp_path):
    c = read_cirr(DATA, 'test1')
    assert (len(c.entries), len(c.files), c.targets) == (4148, 2315, {})
    with pytest.raises(ValueError, match='only its server has them'):
        load_cirr(DATA, 'test1')
    with pytest.raises(FileNotFoundError, match='NLVR2'):
        load_cirr(DATA, 'val')
    with pytest.raises(FileNotFoundError, match='cap.rc2.train.json is missing'):
        read_cirr(DATA, 'train')
    _, reader = features(0)
    for kind, lists in cirr_ranked_lists(fused(reader), c).items():
        path = write_cirr_submission(lists, kind, tmp_path / f'{kind}.json', c)
        with pytest.raises(ValueError, match='only its server can score'):
            score_cirr_submission(path, c)
        said = json.loads(path.read_text())
        assert (
            said['version'] == 'rc2'
            and said['metric'] == kind
            and {len(v) for k, v in said.items() if k.isdigit()} == {CIRR_LENGTHS[kind]}
            and len(said) == 4150
        )


MUTATIONS = [
    lambda r, v: None,
    lambda r, v: 7,
    lambda r, v: '',
    lambda r, v: [],
    lambda r, v: {},
    lambda r, v: 'val-1',
    lambda r, v: True,
    lambda r, v: [v],
    lambda r, v: -1.5,
    lambda r, v: '../../x.png',
]


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_no_spoilt_file_is_half_read(tmp_path_factory, seed):
    "Any value replaced or dropped: the annotations are read and hold together, or an error names the file."
    r, root = np.random.default_rng(seed), tmp_path_factory.mktemp('spoilt')
    entries, files = small_set(root, seed % 7)
    entries, files = copy.deepcopy(entries), dict(files)
    holder = [
        entries,
        entries[r.integers(len(entries))],
        entries[0]['img_set'],
        entries[0]['img_set']['members'],
        files,
    ][r.integers(5)]
    key = r.integers(len(holder)) if isinstance(holder, list) else str(r.choice(list(holder)))
    if r.random() < 0.25:
        holder.pop(int(key) if isinstance(holder, list) else key)
    else:
        holder[key] = MUTATIONS[r.integers(len(MUTATIONS))](r, holder[key])
    put(root, entries, files)
    try:
        c = read_cirr(root)
    except ValueError as e:
        assert 'rc2.val.json' in str(e)
        return
    for e in c.entries:
        m = e['img_set']['members']
        assert (
            len(set(m)) == 6
            and set(m) <= set(c.files)
            and {e['reference'], e['target_hard']} <= set(m)
            and e['reference'] != e['target_hard']
        )
    assert len({e['pairid'] for e in c.entries}) == len(c.entries) and all('..' not in f for f in c.files.values())
    load_cirr(root, images=False), load_cirr(root, task='subset', images=False), audit_cirr(root)


@pytest.mark.parametrize(
    'captions, files, why',
    [
        ('[]', '{"a": "./a.png"}', 'expected a list of entries'),
        ('{"a": 1}', '{"a": "./a.png"}', 'is dict, not list'),
        ('[', '{"a": "./a.png"}', 'may be cut off'),
        ('[1]', '{"a": "./a.png"}', 'entry 0: is int, not an object'),
        ('[]', '{}', 'expected names with their files'),
        ('[]', '["a"]', 'is list, not dict'),
        ('[]', '{"a": "/etc/passwd"}', 'outside the folder'),
        ('[]', '{"a": "dev\\\\..\\\\a.png"}', 'outside the folder'),
        ('[]', '{"a": 3}', 'a is 3, not str'),
        (
            '[]',
            '{"a": "./' + 'x' * 5000 + '"}',
            "split.rc2.val.json: 'a' has a file name of more than 255 bytes: .*; get",
        ),
        ('[]', '{"a": "./d/a.png", "b": "d/a.png"}', "split.rc2.val.json: 'a' and 'b' have one file, 'd/a.png'; get"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, captions, files, why):
    put(tmp_path, captions, files)
    with pytest.raises(ValueError, match=why):
        read_cirr(tmp_path)


def test_an_empty_condition_is_in_the_protocol(tmp_path):
    "A released entry of test1 has one, so that it is no error."
    entries, files = small_set(tmp_path)
    assert 'condition' not in load_cirr(tmp_path, images=False).protocol.extra
    entries[0]['caption'], entries[1]['caption'] = '', ' \n'
    put(tmp_path, entries, files)
    for task in ('full', 'subset'):
        assert (
            f'2 of {len(entries)} conditions are empty' in load_cirr(tmp_path, task=task, images=False).protocol.extra
        )


class Mean:
    "A backbone that sees the mean colour."

    name, fingerprint, D, dtype = 'mean', 'm', 2, 'float32'

    def preprocess(self, im):
        return torch.tensor(np.asarray(im, np.float32).mean((0, 1)))

    def encode_image(self, x):
        return torch.stack([x[:, 0] + 1, x.sum(1)], 1)

    def encode_text(self, texts):
        return torch.ones(len(texts), 2)

    def features(self, images):
        return image_features(self, images.ids, images.load, images.key)


def test_pictures_are_found_where_they_may_lie_and_damage_costs_queries(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    entries, files = small_set(tmp_path, 3, n_queries=20)
    with pytest.raises(FileNotFoundError, match='CIRR images'):
        load_cirr(tmp_path)
    for i, (n, f) in enumerate(files.items()):
        path = tmp_path / 'cirr' / ('img_raw' if i % 2 else '') / f
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (12, 8), (i * 9, 0, 0)).save(path)
    b = load_cirr(tmp_path)
    assert (
        len(b) == 20
        and b.protocol.coverage == 1
        and [b.load(n).getpixel((0, 0))[0] for n in files] == [i * 9 for i in range(len(files))]
    )
    bad, gone = (
        entries[0]['target_hard'],
        next(e['reference'] for e in entries if e['reference'] != entries[0]['target_hard']),
    )
    paths = cirr_image_paths(read_cirr(tmp_path))
    paths[gone].unlink()
    paths[bad].write_bytes(paths[bad].read_bytes()[:40])
    per_query, rows = evaluate(fused(Mean()), load_cirr(tmp_path), ks=(1, 5))
    left = {str(e['pairid']) for e in entries if not {bad, gone} & {e['reference'], e['target_hard']}}
    assert set(per_query.query_id) == left and 0 < len(left) < 20 and set(per_query.gallery_size) == {len(files) - 3}
    assert rows.protocol[0] != b.protocol.id


def test_answers_beside_a_secret_split(tmp_path):
    entries, files = small_set(tmp_path, 1, split='test1')
    bare = [{k: v for k, v in e.items() if not k.startswith('target')} for e in entries]
    put(tmp_path, bare, files, 'test1')
    assert read_cirr(tmp_path, 'test1').targets == {}
    right = {str(e['pairid']): e['target_hard'] for e in entries}
    (path := tmp_path / 'cirr/targets.test1.json').write_text(json.dumps(right))
    assert read_cirr(tmp_path, 'test1').targets == right and len(load_cirr(tmp_path, 'test1', images=False)) == len(
        entries
    )
    for wrong in ({}, [], {**right, '3': 'nowhere'}, {**right, '3': entries[0]['reference']}, {**right, '3': ['x']}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match='targets.test1.json: (the target of pair 3|3 is|is list, not dict)'):
            read_cirr(tmp_path, 'test1')


def test_submissions_that_a_server_would_refuse(tmp_path):
    entries, files = small_set(tmp_path, 2, n_sets=10)
    c = read_cirr(tmp_path)
    _, reader = features(2)
    lists = cirr_ranked_lists(fused(reader), c)
    first, e = str(entries[0]['pairid']), entries[0]
    path = write_cirr_submission(lists['recall'], 'recall', tmp_path / 's.json', c)
    assert check_cirr_submission(path, c)['metric'] == 'recall'
    fine = lists['recall'][first]
    for names, why in (
        (fine[:-1], 'has 49 names, not 50'),
        (fine[:-1] + [e['reference']], 'names the reference'),
        (fine[:-1] + [fine[0]], 'twice'),
        (fine[:-1] + [fine[-1] + '.png'], 'names have no ending'),
        (fine[:-1] + ['dev-1'], 'not an image of val$'),
        ('text', 'needs a list of names'),
        (fine[:-1] + [3], 'needs a list of names'),
    ):
        with pytest.raises(ValueError, match=f'pair {first} .*{why}'):
            (tmp_path / 'bad.json').write_text(json.dumps({**json.loads(path.read_text()), first: names}))
            check_cirr_submission(tmp_path / 'bad.json', c)
    with pytest.raises(ValueError, match='not written'):
        write_cirr_submission({**lists['recall'], first: fine[:-1]}, 'recall', tmp_path / 'never.json', c)
    with pytest.raises(ValueError, match='missing'):
        write_cirr_submission(dict(list(lists['recall'].items())[1:]), 'recall', tmp_path / 'never.json', c)
    with pytest.raises(ValueError, match='unknown kind'):
        write_cirr_submission(lists['recall'], 'R@50', tmp_path / 'never.json', c)
    assert not (tmp_path / 'never.json').exists()


def test_files_that_are_no_submission(tmp_path):
    small_set(tmp_path, 2, n_sets=10)
    c = read_cirr(tmp_path)
    lists = cirr_ranked_lists(fused(features(2)[1]), c)
    path = write_cirr_submission(lists['recall'], 'recall', tmp_path / 's.json', c)
    for text, why in (
        ('{', 'is not JSON'),
        ('[]', 'is list'),
        ('{"version": "rc2", "version": "rc2"}', 'occurs twice'),
        ('{"metric": "recall"}', 'version is None'),
        ('{"version": "rc2", "metric": []}', 'metric is'),
    ):
        (tmp_path / 'bad.json').write_text(text)
        with pytest.raises(ValueError, match=why):
            check_cirr_submission(tmp_path / 'bad.json', c)
    (tmp_path / 'bad.json').write_text(path.read_text() + ' ' * 5_000_000)
    with pytest.raises(ValueError, match='less than 5,000,000'):
        check_cirr_submission(tmp_path / 'bad.json', c)


def test_averages_need_common_queries(tmp_path):
    entries, _ = small_set(tmp_path, 4)
    _, reader = features(4)
    f, s = (evaluate(fused(reader), load_cirr(tmp_path, task=t, images=False), (1,))[0] for t in ('full', 'subset'))
    assert averages(f, s).n.tolist() == [9, 9] and averages(f.iloc[:5], s.iloc[::-1]).n.tolist() == [5, 5]
    with pytest.raises(ValueError, match='no query in common'):
        averages(f.iloc[:2], s.iloc[2:])


def test_what_is_not_finite_is_refused_by_name(tmp_path):
    entries, files = small_set(tmp_path, 5)
    c, broken = read_cirr(tmp_path), next(iter(files))
    vector, reader = features(5)
    reader.see = lambda i: vector(i) * (np.nan if i == broken else 1)
    with pytest.raises(ValueError, match=f"the score of candidate '{broken}' is nan"):
        cirr_ranked_lists(fused(reader), c)
    reader.see, last = vector, entries[-1]['caption']
    reader.read = lambda t: vector('text ' + t) * (np.inf if t == last else 1)
    first = next(str(e['pairid']) for e in entries if e['caption'] == last)
    with pytest.raises(ValueError, match=f'query {first}: the score of candidate'):
        cirr_ranked_lists(fused(reader), c)
