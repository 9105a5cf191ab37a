"MIT-States: folders in any state, queries and ranks against slow references, the size of the real data set."

import json
import os
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from made_up import MadeUp, fused

from cis_nb.benchmarks.mit_states import (
    TEST_NOUNS,
    drawn,
    for_test,
    load_mitstates,
    read_states,
    state_queries,
)
from cis_nb.backbones.features import image_features
from cis_nb.retrieval.protocol import Protocol, Task, chance_recall, evaluate
from cis_nb.retrieval.metrics import recall_at_k


class Mean:
    "A backbone that sees the mean colour."

    name, fingerprint, D, dtype = 'mean', 'm', 3, 'float32'

    def preprocess(self, im):
        return torch.tensor(np.asarray(im, np.float32).mean((0, 1)) + 1)

    def encode_image(self, x):
        return x

    def encode_text(self, texts):
        return torch.ones(len(texts), 3)

    def features(self, images):
        return image_features(self, images.ids, images.load, images.key)


def folders(root, names, files=('0.jpg', '1.jpg'), nouns=None):
    "Folders with tiny pictures."
    for k, name in enumerate(names):
        (d := root / 'mit-states/images' / name).mkdir(parents=True, exist_ok=True)
        for i, f in enumerate(files):
            Image.new('RGB', (9, 7), (k * 7 % 256, i * 31 % 256, 0)).save(d / f)
    if nouns is not None:
        (root / 'mit-states/test_nouns.txt').write_text('\n'.join(nouns))
    return root


def made_up(ids, seed, levels):
    "Whole numbers: exact products and many ties."
    r = np.random.default_rng(seed)
    table = {i: r.integers(-levels, levels + 1, 5).astype(np.float32) for i in ids}

    def vector(text):
        return np.random.default_rng([seed, *text.encode()]).integers(-levels, levels + 1, 5).astype(np.float32)

    return table, vector, MadeUp(table.__getitem__, vector)


@pytest.mark.e2e
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 3]), st.sampled_from(['adjective', 'adjective noun']))
def test_queries_and_ranks_equal_slow_ones(seed, levels, text):
    r = np.random.default_rng(seed)
    rows = sorted({(f'a{r.integers(6)} n{r.integers(3)}', f'{r.integers(5)}.jpg') for _ in range(40)})
    table = pd.DataFrame([(f'{d}/{f}', *d.split()) for d, f in rows], columns=['image', 'adjective', 'noun'])
    q = state_queries(table, text)
    slow = [
        (i, a)
        for i, own, n in table.itertuples(index=False)
        for a in sorted(set(table.adjective[table.noun == n]))
        if a != own
    ]
    assert sorted(zip(q.reference, q.condition.str.split().str[0])) == sorted(slow)
    bench = Task(
        'mitstates', 'states', q, None, Protocol('mitstates', reference='removed'), list(table.image), list(table.image)
    )
    features, vector, reader = made_up(table.image, seed, levels)
    per_query, results = evaluate(fused(reader), bench, (1, 5, 10))
    found = []
    for p in per_query.itertuples():
        noun = p.reference.split('/')[0].split()[1]
        right = f'{p.condition.split()[0]} {noun}'
        assert p.condition == (right if text == 'adjective noun' else right.split()[0])
        v = features[p.reference] + vector(p.condition)
        order = sorted(
            (i for i in table.image if i != p.reference),
            key=lambda i: (-float(v @ features[i]), i.split('/')[0] == right),
        )
        found.append(next(n for n, i in enumerate(order, 1) if i.split('/')[0] == right))
        assert p.rank == found[-1] and p.gallery_size == len(table) - 1
    for k, value in zip(results.k, results.value):
        assert np.isclose(value, 100 * np.mean(np.array(found) <= k))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_recall_asks_for_one_target_at_least(seed):
    r = np.random.default_rng(seed)
    R = r.integers(0, 15, (8, 4))
    R[:, 0] = np.maximum(R[:, 0], 1)
    for k in (1, 5, 10):
        assert list(recall_at_k(R, k)) == [float(any(0 < x <= k for x in row)) for row in R]


def test_what_is_no_photograph_is_counted(tmp_path):
    folders(
        tmp_path,
        ['red cat', 'blue cat', 'old cat', 'adj cat', 'cat', 'big red cat', 'red  cat', ' cat', 'red cup'],
        nouns=['cat', 'cup', 'owl'],
    )
    images = tmp_path / 'mit-states/images'
    (images / 'blue cat/2.png').write_bytes(b'')
    (images / 'blue cat/3.JPG').write_bytes(b'')
    (images / 'blue cat/4.jpg').symlink_to('nowhere')
    (images / 'blue cat/.hidden.jpg').write_bytes(b'')
    (images / 'loose.jpg').write_bytes(b'')
    (images / '.git').mkdir()
    for f in (images / 'old cat').iterdir():
        f.unlink()
    states = read_states(tmp_path)
    assert (
        sorted(set(states.table.image.str.split('/').str[0])) == ['blue cat', 'red cat', 'red cup']
        and len(states.table) == 6
    )
    assert states.left_out == {
        'folders that are not named by two words': 4,
        'entries that are no .jpg file': 3,
        'folders without an adjective ("adj …")': 1,
        'folders without a photograph': 1,
    }
    mine = for_test(states)
    assert (
        set(mine.table.noun) == {'cat'}
        and mine.left_out['photographs of nouns with one adjective'] == 2
        and mine.left_out['test nouns without a folder'] == 1
    )
    b = load_mitstates(tmp_path)
    assert len(b) == 4 and '3 entries that are no .jpg file' in str(b.protocol)
    assert b.load('red cat/0.jpg').size == (9, 7)


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems refuse such names themselves')
def test_names_that_are_no_text_are_counted(tmp_path):
    "Bytes of another encoding, in the name of a file or of a folder, cost this one alone."
    folders(tmp_path, ['red cat', 'blue cat'], nouns=['cat'])
    images = tmp_path / 'mit-states/images'
    (images / os.fsdecode(b'red cat/caf\xe9.jpg')).write_bytes(b'')
    (images / os.fsdecode(b'red caf\xe9')).mkdir()
    states = read_states(tmp_path)
    assert states.left_out == {'photographs whose name is not UTF-8': 1, 'folders whose name is not UTF-8': 1}
    b = load_mitstates(tmp_path)
    assert len(b) == 4 and '1 photographs whose name is not UTF-8' in str(b.protocol)


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(FileNotFoundError, match='MIT-States: .*images is missing'):
        load_mitstates(tmp_path)
    (tmp_path / 'mit-states/images').mkdir(parents=True)
    with pytest.raises(ValueError, match='nothing, it is empty'):
        load_mitstates(tmp_path)
    folders(tmp_path, ['red cat'], nouns=['cat'])
    with pytest.raises(ValueError, match='only one adjective'):
        load_mitstates(tmp_path)
    folders(tmp_path, ['blue cat'], nouns=['dog'])
    with pytest.raises(ValueError, match='none of the 1 test nouns of .*test_nouns.txt .dog'):
        load_mitstates(tmp_path)
    for bad in ('', 'cat cat'):
        folders(tmp_path, [], nouns=[bad])
        with pytest.raises(ValueError, match='test_nouns.txt: expected different nouns'):
            load_mitstates(tmp_path)
    with pytest.raises(ValueError, match='unknown text'):
        load_mitstates(folders(tmp_path, [], nouns=['cat']), text='noun')


def test_the_official_nouns_count_where_none_are_named(tmp_path):
    folders(tmp_path, [f'{a} {n}' for n in (*TEST_NOUNS, 'apple', 'dog') for a in ('new', 'old')], files=('0.jpg',))
    b = load_mitstates(tmp_path)
    assert len(TEST_NOUNS) == 49 and len(b.images) == 98 and len(b) == 98 and set(b.queries.targets.map(len)) == {1}
    flat = load_mitstates(tmp_path / 'mit-states')  # the folder itself
    assert list(flat.queries.query_id) == list(b.queries.query_id) and flat.key == b.key


def test_a_part_is_drawn_by_its_seed(tmp_path):
    folders(
        tmp_path,
        [f'{a} {n}' for n in ('cat', 'cup') for a in 'pqrstuv'],
        files=[f'{i}.jpg' for i in range(4)],
        nouns=['cat', 'cup'],
    )
    whole = load_mitstates(tmp_path)
    for per_image, limit in ((2, 0), (0, 50), (3, 60), (99, 10_000)):
        b, again, other = (load_mitstates(tmp_path, per_image=per_image, limit=limit, seed=s) for s in (0, 0, 1))
        n = min(len(whole), 56 * min(per_image or 6, 6), limit or 10**9)
        assert len(b) == n and list(b.queries.query_id) == list(again.queries.query_id) and b.images == whole.images
        assert set(b.queries.query_id) <= set(whole.queries.query_id) and b.queries.groupby(
            'reference'
        ).size().max() <= (per_image or 6)
        assert b.protocol.hash != whole.protocol.hash and f'{n:,} of {len(whole):,}' in b.protocol.extra
        if n < len(whole):
            assert list(b.queries.query_id) != list(other.queries.query_id)
    assert drawn(whole.queries, limit=1)[0].shape[0] == 1


def test_a_damaged_photograph_costs_its_queries_and_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    folders(tmp_path, ['red cat', 'blue cat', 'old cat', 'red cup', 'blue cup'], nouns=['cat', 'cup'])
    path = tmp_path / 'mit-states/images/red cat/0.jpg'
    path.write_bytes(path.read_bytes()[:60])
    whole = load_mitstates(tmp_path)
    per_query, rows = evaluate(fused(Mean()), whole, ks=(1, 5))
    gone = 'red cat/0.jpg'
    left = {
        q.query_id for q in whole.queries.itertuples() if gone != q.reference
    }  # another photograph of the folder is as good
    assert (
        set(per_query.query_id) == left and set(per_query.gallery_size) == {8} and rows.protocol[0] != whole.protocol.id
    )
    told = whole.restrict(set(whole.images) - {gone}).protocol.extra
    assert 'queries left out' in told and 'with fewer targets' in told


@pytest.mark.e2e
def test_the_size_of_the_real_set_stays_small_in_memory():
    "As many photographs as the official test nouns have, names made up: lists of answers are shared."
    r = np.random.default_rng(0)
    table = pd.DataFrame(
        [
            (f'a{a} n{n}/{i}.jpg', f'a{a}', f'n{n}')
            for n in range(49)
            for a in r.choice(115, r.integers(6, 13), replace=False)
            for i in range(r.integers(12, 37))
        ],
        columns=['image', 'adjective', 'noun'],
    )
    q = state_queries(table)
    n = table.groupby('noun').adjective.transform('nunique')
    assert len(q) == int((n - 1).sum()) > 70_000 and q.targets.map(len).sum() > 1_500_000
    lists = {id(t): t for t in q.targets}
    assert len(lists) == table.groupby(['adjective', 'noun']).ngroups and sum(map(len, lists.values())) == len(table)
    assert sum(map(sys.getsizeof, lists.values())) < 500_000  # bytes, for all answers together
    bench = Task(
        'mitstates',
        'states',
        q.iloc[::80],
        None,
        Protocol('mitstates', reference='removed'),
        list(table.image),
        list(table.image),
    )
    rng = np.random.default_rng(1)
    G = rng.normal(size=(len(table), 16)).astype(np.float32)
    words = {a: rng.normal(size=16) for a in sorted(set(q.condition))}
    _, rows = evaluate(fused(MadeUp(dict(zip(table.image, G)).get, words.get)), bench, (10,))
    assert rows.ci_low[0] - 1 < chance_recall(bench, 10) < rows.ci_high[0] + 1


def test_both_layouts_of_the_world(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    from cis_nb.benchmarks.cirr import load_cirr, read_cirr
    from cis_nb.world.composed import composed_root

    root = composed_root(cirr=90, mitstates=1, seed=3)
    b = load_mitstates(root)
    assert len(b) > 100 and b.protocol.coverage == 1 and b.load(b.images[0]).size == (128, 128)
    assert all(
        {re.sub('/.*', '', t) for t in q.targets} == {f'{q.condition} {q.reference.split("/")[0].split()[1]}'}
        for q in b.queries.itertuples()
    )
    for split in ('train', 'val', 'test1'):
        full, subset = (load_cirr(root, split, task) for task in ('full', 'subset'))
        assert len(full) == len(subset) == len(read_cirr(root, split).entries) > 0 and full.protocol.coverage == 1
        assert full.load(full.images[0]).size == (128, 128)
    told = json.loads((root / 'cirr/targets.test1.json').read_text())
    assert dict(zip(full.queries.query_id, full.queries.targets.str[0])) == told
