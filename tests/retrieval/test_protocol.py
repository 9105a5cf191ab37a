"Evaluation and protocols against a slow reference."

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from PIL import Image

from cis_nb.data.image_sources import ImageSource
from cis_nb.methods.baselines import FusionMethod
from cis_nb.retrieval import ranking
from cis_nb.retrieval.protocol import RESULT_COLUMNS, Protocol, Task, chance_recall, evaluate, reachable
from cis_nb.retrieval.metrics import map_at_k, ranks, recall_at_k
from made_up import Dots
from slow_metrics import slow_ranks, slow_ap


@pytest.mark.parametrize(
    'change',
    [
        dict(gallery='x'),
        dict(prompt='a {condition}'),
        dict(caption='joined'),
        dict(reference='kept'),
        dict(split='test'),
        dict(crop='c'),
        dict(coverage=0.5),
        dict(extra='e'),
    ],
)
def test_every_word_of_a_protocol_counts(change):
    p = Protocol('b')
    q = replace(p, **change)
    assert p.hash != q.hash and q.id in str(q) and replace(q, **{k: getattr(p, k) for k in change}) == p
    assert ('partial' in str(q)) == ('coverage' in change)


# --- evaluation with a backbone made of vectors


def world(n_images=40, Q=25, D=6, seed=0, own=True, n_targets=1, **protocol):
    r = np.random.default_rng(seed)
    ids = [f'i{j}' for j in range(n_images)]
    vectors = dict(zip(ids, r.normal(size=(n_images, D)).astype(np.float32)))
    texts = {f'c{j}': r.normal(size=D).astype(np.float32) for j in range(5)}
    rows = []
    for q in range(Q):
        some = [str(i) for i in r.choice(ids, 11 + n_targets, replace=False)]
        rows.append(
            dict(
                query_id=f'q{q}',
                reference=some[0],
                condition=f'c{r.integers(5)}',
                targets=some[1 : 1 + n_targets],
                gallery=some[1:] if own else None,
            )
        )
    bench = Task(
        'b',
        't',
        pd.DataFrame(rows),
        lambda i: Image.new('RGB', (4, 4)),
        Protocol('b/t', **protocol),
        shared_gallery=None if own else ids,
    )
    return bench, Vectors(vectors, texts), vectors, texts


class Vectors:
    "A backbone that knows the features of images and texts; images in `lost` cannot be read."

    name, D = 'vectors', 6

    def __init__(self, vectors, texts, lost=()):
        self.vectors, self.texts, self.lost, self.encoded = vectors, texts, lost, []

    def encode_text(self, texts):
        return torch.tensor(np.stack([self.texts[t] for t in texts]))

    def features(self, images):
        ids = [i for i in images.ids if i not in self.lost]
        self.encoded += ids
        array = np.stack([self.vectors[i] for i in ids])
        return SimpleNamespace(array=array, index={i: j for j, i in enumerate(ids)})


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def method(fuse, backbone):
    return FusionMethod(name='m', fuse=fuse, backbone=backbone)


def add(ref, cond):
    return ref + cond


def image(ref, cond):
    return ref


def text(ref, cond):
    return cond


@pytest.mark.parametrize('own', [True, False])
@pytest.mark.parametrize('reference', ['kept', 'removed'])
@pytest.mark.parametrize('n_targets', [1, 3])
def test_evaluate_equals_one_query_at_a_time(own, reference, n_targets):
    bench, backbone, vectors, texts = world(own=own, n_targets=n_targets, reference=reference)
    per_query, rows = evaluate(method(add, backbone), bench, ks=(1, 3))
    assert sorted(backbone.encoded) == sorted(set(backbone.encoded))
    for r, got in zip(bench.queries.itertuples(), per_query.itertuples()):
        gallery = [
            g for g in (r.gallery if own else bench.shared_gallery) if not (reference == 'removed' and g == r.reference)
        ]
        s = [unit(vectors[g]) @ (vectors[r.reference] + texts[r.condition]) for g in gallery]
        slow = slow_ranks(s, [gallery.index(t) for t in r.targets], [True] * len(s))
        assert got.ranks == slow and got.rank == min(slow) and got.gallery_size == len(gallery)
        assert got.top[0] == gallery[int(np.argmax(s))]
    assert list(rows.columns) == RESULT_COLUMNS
    assert rows.value[0] == pytest.approx(100 * (per_query['rank'] == 1).mean())
    assert rows.n[0] == len(bench) and rows.protocol[0] == bench.protocol.id


def test_excluded_images_cannot_be_found():
    bench, backbone, *_ = world(own=False)
    first = evaluate(method(image, backbone), bench, ks=(1,))[0]
    assert all(t[0] == r for t, r in zip(first.top, first.reference))
    q = bench.queries.assign(excluded=[[r] for r in bench.queries.reference])
    again = evaluate(method(image, backbone), replace(bench, queries=q), ks=(1,))[0]
    assert all(r not in t for t, r in zip(again.top, again.reference)) and set(again.gallery_size) == {39}


def test_queries_without_a_reference():
    bench, backbone, *_ = world(own=False)
    q = bench.queries.assign(reference=None)
    bench = replace(bench, queries=q, images=None, source=None)
    by_text, by_image = (evaluate(method(fuse, backbone), bench)[0] for fuse in (text, image))
    assert set(by_image['rank']) == {40} and by_text['rank'].min() < 10


def test_unreadable_images_make_it_partial():
    bench, backbone, *_ = world()
    backbone.lost = ('i3',)
    per_query, rows = evaluate(method(add, backbone), bench)
    touched = ['i3' in (r.reference, *r.targets, *r.gallery) for r in bench.queries.itertuples()]
    assert len(per_query) == len(bench) - sum(touched) == rows.n[0] and rows.protocol[0] != bench.protocol.id
    part = bench.restrict([i for i in bench.images if i != 'i3'])
    assert (
        part.protocol.coverage == pytest.approx(1 - 1 / len(bench.images))
        and f'{sum(touched)} of 25 queries left out' in part.protocol.extra
    )


def test_a_gallery_smaller_than_k():
    bench, backbone, *_ = world()
    with pytest.raises(ValueError, match='a gallery of 11 has no R@12'):
        evaluate(method(image, backbone), bench, ks=(1, 12))


def small_task(targets, gallery=None, shared=None) -> Task:
    "One query with these targets and galleries."
    queries = pd.DataFrame(dict(query_id=['q'], reference=['a'], condition=[''], targets=[targets], gallery=[gallery]))
    return Task('b', 't', queries, None, Protocol('b'), None, shared, 'key')


@pytest.mark.parametrize(
    'given, said',
    [
        (dict(targets=['b', 'b'], shared=['b', 'c']), "query q: target 'b' is named twice"),
        (dict(targets=['b', 'b'], gallery=['b', 'c']), "query q: target 'b' is named twice"),
        (dict(targets=['b'], shared=['b', 'c', 'c']), "the gallery names 'c' twice"),
        (dict(targets=['b'], gallery=['b', 'c', 'b']), "query q: the gallery names target 'b' twice"),
    ],
)
def test_a_target_or_an_image_of_a_gallery_that_is_named_twice(given, said):
    with pytest.raises(ValueError, match=said):
        small_task(**given)


def test_a_distractor_that_a_query_repeats_is_ranked_twice_and_the_protocol_says_so():
    "Released templates of GeneCIS have such galleries."
    once, twice = small_task(['b'], ['b', 'c', 'd']), small_task(['b'], ['b', 'c', 'c'])
    assert (once.protocol.repeats, twice.protocol.repeats) == (0, 1)
    assert 'name an image twice: 1' in str(twice.protocol) and 'twice' not in str(once.protocol)
    assert twice.protocol.hash == replace(twice.protocol, repeats=0).hash != once.protocol.hash
    vectors = {i: np.eye(6, dtype=np.float32)[n] for n, i in enumerate('abc')}
    per_query, _ = evaluate(method(image, Vectors(vectors, {'': np.zeros(6, np.float32)})), twice, ks=(1, 2))
    assert per_query.gallery_size.tolist() == [3]


def test_the_number_of_galleries_with_a_repeated_image_is_that_of_the_queries_that_are_left():
    rows = [(f'q{i}', 'r', '', ['t'], ['t', f'd{i}', f'd{i}' if i < 2 else 'e']) for i in range(4)]
    columns = ['query_id', 'reference', 'condition', 'targets', 'gallery']
    task = Task('b', 't', pd.DataFrame(rows, columns=columns), None, Protocol('b'), key='key')
    assert task.protocol.repeats == 2 and task.restrict({*task.images} - {'d0'}).protocol.repeats == 1
    shared = small_task(['b'], shared=['b', 'c'])
    assert shared.protocol.repeats == 0


def test_nan_features_name_the_query():
    bench, backbone, vectors, *_ = world()
    vectors[bench.queries.targets[0][0]][:] = np.nan
    with pytest.raises(ValueError, match='query q0'):
        evaluate(method(image, backbone), bench)


@dataclass
class WithCategories(Task):
    "A task with a field of its own."

    category_of: dict = field(default_factory=dict)


def fingerprint_of(key='', source_key='', **own) -> str:
    "The fingerprint of a task with one query."
    queries = pd.DataFrame(dict(query_id=['q'], reference=['a'], condition=[''], targets=[['b']]))
    source = ImageSource(['a', 'b'], None, source_key) if source_key else None
    task = (WithCategories if own else Task)('b', 't', queries, None, Protocol('b'), None, ['a', 'b'], key, **own)
    return (replace(task, source=source, key=key) if source else task).fingerprint


def test_a_task_is_known_by_its_images_and_by_the_fields_of_its_class():
    images = [fingerprint_of(source_key='one'), fingerprint_of(source_key='two'), fingerprint_of('one')]
    assert images[0] != images[1] and images[0] == images[2]
    own = [fingerprint_of('one', category_of={'a': c}) for c in ('coat', 'hat')]
    assert len({*own, images[0]}) == 3


def test_a_guess_leaves_out_what_is_excluded_from_its_gallery():
    ids = list('abcdef')

    def chance(reference, gallery=ids, excluded=()):
        row = dict(query_id=['q'], reference=[reference], condition=[''], targets=[['b']], excluded=[list(excluded)])
        return chance_recall(Task('b', 't', pd.DataFrame(row), None, Protocol('b'), ids, gallery), 1)

    assert np.allclose([chance('a'), chance(None), chance('a', ids[1:]), chance('a', ids, 'cg')], [20, 100 / 6, 20, 25])


def test_tables_that_cannot_be_ranked():
    bench, *_ = world()
    q = bench.queries
    for bad, text in (
        (pd.concat([q, q]), 'used twice'),
        (q.assign(condition=[None] * 25), 'condition is not text'),
        (q.assign(targets=[[]] * 25), 'has no target'),
        (q.assign(targets=[['nowhere']] * 25), 'not in the gallery'),
    ):
        with pytest.raises(ValueError, match=text):
            replace(bench, queries=bad)
    kept, gone = reachable(q.assign(targets=[['nowhere']] + list(q.targets[1:])))
    assert gone == ['q0'] and len(kept) == 24


def tied_world(seed):
    "A task with a shared gallery of random features, half of them copies, with excluded images and several targets."
    r = np.random.default_rng(seed)
    N, Q = int(r.integers(12, 150)), int(r.integers(1, 12))
    bench, backbone, vectors, _ = world(N, 1, seed=seed, own=False)
    rows, ids = [], bench.shared_gallery
    for n, i in enumerate(ids):
        if r.random() < 0.5:
            vectors[i] = vectors[ids[int(r.integers(0, n + 1))]]
    for q in range(Q):
        picked = [str(i) for i in r.permutation(ids)]
        targets, gone = picked[1 : 1 + int(r.integers(1, 5))], picked[5 : 5 + int(r.integers(0, 4))]
        row = dict(query_id=f'q{q}', reference=picked[0], condition=f'c{r.integers(5)}', targets=targets)
        rows.append(row | dict(excluded=gone + ['nowhere']))
    protocol = Protocol('b/t', reference=str(r.choice(['kept', 'removed'])))
    order = [str(i) for i in r.permutation(ids)] if r.random() < 0.5 else ids
    return replace(bench, queries=pd.DataFrame(rows), shared_gallery=order, protocol=protocol), backbone, vectors


def slow_lines(bench, score, keep):
    "Each query by the definition: ranks, the best, the size of its gallery."
    for r in bench.queries.itertuples():
        gone = {*r.excluded, *([r.reference] if bench.protocol.reference == 'removed' else [])}
        gallery = [i for i in bench.shared_gallery if i not in gone]
        s = [score(r, i) for i in gallery]
        best = sorted(range(len(s)), key=lambda j: (-s[j], gallery[j] in r.targets, j))[:keep]
        slow = slow_ranks(s, [gallery.index(t) for t in r.targets], [True] * len(s))
        yield slow, [gallery[j] for j in best], len(gallery)


def in_chunks(monkeypatch, chunk, queries=3):
    monkeypatch.setattr(ranking, '_block_shape', lambda Q, N, D, device, _: (min(queries, Q), min(chunk, N)))


@pytest.mark.e2e
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 5, 64, 10**6]), st.sampled_from([1, 10, 1000]))
def test_a_shared_gallery_is_ranked_by_the_definition_in_any_chunks(seed, chunk, keep):
    bench, backbone, vectors = tied_world(seed)
    m = Dots(name='m', fuse=image, backbone=backbone)
    for i, v in vectors.items():
        vectors[i] = np.round(v).astype(np.float32)  # small integers: products are exact, and many tie
    with pytest.MonkeyPatch.context() as patch:
        in_chunks(patch, chunk)
        found = evaluate(m, bench, ks=(1,), keep=keep)[0]
    slow = list(slow_lines(bench, lambda r, i: float(vectors[r.reference] @ vectors[i]), keep))
    assert [(g.ranks, g.top, g.gallery_size) for g in found.itertuples()] == slow
    assert found['rank'].tolist() == [min(r) for r, _, _ in slow] and found.query_id.tolist() == list(
        bench.queries.query_id
    )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 7, 64, 10**6]))
def test_copies_of_an_image_tie_by_the_cosine_in_any_chunks(seed, chunk):
    bench, backbone, vectors = tied_world(seed)
    with pytest.MonkeyPatch.context() as patch:
        in_chunks(patch, chunk)
        found = evaluate(method(image, backbone), bench, ks=(1,), keep=12)[0]
    units = {i: unit(v.astype(np.float64)) for i, v in vectors.items()}

    def score(r, i):
        return round(float(units[r.reference] @ units[i]), 6)  # copies are equal, others differ by more

    distinct = np.unique(np.stack(list(units.values())), axis=0)
    for r in bench.queries.reference:
        gaps = np.diff(np.sort(distinct @ units[r]))
        assume(gaps.min(initial=1) > 1e-5)
    assert [(g.ranks, g.top, g.gallery_size) for g in found.itertuples()] == list(slow_lines(bench, score, 12))


class Watched:
    "An array that keeps how many rows were read at a time."

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __len__(self):
        return len(self.array)

    def __getitem__(self, which):
        part = self.array[which]
        self.reads.append(len(part))
        return part


@pytest.mark.parametrize('whole', [True, False])
def test_a_shared_gallery_is_read_chunk_by_chunk(whole, monkeypatch):
    bench, backbone, *_ = world(n_images=1000, own=False)
    bench = replace(bench, shared_gallery=bench.images[:: 1 if whole else -1])
    expected, features = evaluate(method(add, backbone), bench)[0], backbone.features(bench.source)
    features.array = Watched(features.array)
    monkeypatch.setattr(backbone, 'features', lambda images: features)
    in_chunks(monkeypatch, 64, queries=25)
    found = evaluate(method(add, backbone), bench)[0]
    assert max(features.array.reads) == 64 and len(features.array.reads) >= 1000 / 64
    assert sum(features.array.reads) == 25 + len({t for some in bench.queries.targets for t in some}) + 1000
    assert found.ranks.tolist() == expected.ranks.tolist() and found.top.tolist() == expected.top.tolist()


def test_broken_features_and_targets_of_a_shared_gallery_name_the_query():
    bench, backbone, vectors, _ = world(own=False)
    with pytest.raises(ValueError, match='query q3: a target is not among the candidates'):
        q = bench.queries.assign(excluded=[r.targets if r.query_id == 'q3' else [] for r in bench.queries.itertuples()])
        evaluate(method(add, backbone), replace(bench, queries=q))
    vectors['i7'][:] = np.nan
    with pytest.raises(ValueError, match="query q0: the score of candidate 'i7' is nan"):
        evaluate(method(text, backbone), bench)


@pytest.mark.data
def test_circo_example_submission():
    root = os.environ.get('CIS_DATA')
    if not root or not (Path(root) / 'circo').is_dir():
        pytest.skip('CIRCO annotations are not here (set CIS_DATA)')
    gt = json.loads((Path(root) / 'circo/annotations/val.json').read_text())
    sub = json.loads((Path(root) / 'circo/submission_examples/submission_val.json').read_text())
    assert len(gt) == 220
    P = max(len(g['gt_img_ids']) for g in gt)
    # the score of a submitted list falls by rank; targets that are not in it stand behind it
    ids = [sub[str(g['id'])] for g in gt]
    cols = [list(dict.fromkeys(found + g['gt_img_ids'])) for found, g in zip(ids, gt)]
    G = max(map(len, cols))
    S = np.tile(-np.arange(G, dtype=float), (len(gt), 1))
    valid = np.array([[j < len(c) for j in range(G)] for c in cols])
    T = np.array([[c.index(t) for t in g['gt_img_ids']] + [-1] * (P - len(g['gt_img_ids'])) for c, g in zip(cols, gt)])
    R = ranks(S, T, valid)
    for k in (5, 10, 25, 50):
        slow = [slow_ap([i in g['gt_img_ids'] for i in found], len(g['gt_img_ids']), k) for found, g in zip(ids, gt)]
        assert np.allclose(map_at_k(R, k), slow)
        assert np.allclose(recall_at_k(R[:, :1], k), [g['target_img_id'] in found[:k] for found, g in zip(ids, gt)])
    print({k: round(100 * map_at_k(R, k).mean(), 2) for k in (5, 10, 25, 50)})
