"Ranks, metrics, intervals and protocols against slow references."
import json, os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from cis_nb.benchmarks.protocol import (RESULT_COLUMNS, Benchmark, Protocol, bootstrap_ci, evaluate, map_at_k, paired_bootstrap, text_vectors,
                                        ranks, reachable, recall_at_k, result_rows)

seeds = st.integers(0, 10**6)


def slow_ranks(s, targets, valid):
    order = sorted((i for i in range(len(s)) if valid[i]), key=lambda i: (-s[i], i in targets, -(targets.index(i) if i in targets else 0)))
    return [order.index(t)+1 for t in targets]


def slow_ap(hits, n_targets, k):
    found, total = 0, 0.
    for rank, hit in enumerate(hits[:k], 1):
        if hit: found += 1; total += found/rank
    return total/min(n_targets, k)


def random_case(seed, levels):
    r = np.random.default_rng(seed)
    Q, G = r.integers(1, 12), r.integers(2, 25)
    S = r.integers(0, levels, (Q, G)).astype(float)
    T = [list(r.permutation(G)[:r.integers(1, min(G, 6)+1)]) for _ in range(Q)]
    valid = r.random((Q, G)) < .8
    for v,t in zip(valid, T): v[t] = True
    P = max(map(len, T))
    return S, T, np.array([t+[-1]*(P-len(t)) for t in T]), valid


@settings(max_examples=150, deadline=None)
@given(seeds, st.sampled_from([1, 2, 3, 1000]))
def test_ranks_equal_a_slow_sort(seed, levels):
    S, T, padded, valid = random_case(seed, levels)
    R = ranks(S, padded, valid)
    for s,t,v,r in zip(S, T, valid, R): assert [x for x in r if x] == slow_ranks(list(s), t, v)


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_ranks_do_not_depend_on_storage_order_or_scale(seed):
    S, T, padded, valid = random_case(seed, 4)
    perm = np.random.default_rng(seed).permutation(S.shape[1])
    moved = np.where(padded>=0, np.argsort(perm)[padded], -1)
    assert (ranks(S[:, perm], moved, valid[:, perm]) == ranks(S, padded, valid)).all()
    assert (ranks(3*S-7, padded, valid) == ranks(S, padded, valid)).all()


@settings(max_examples=80, deadline=None)
@given(seeds, st.sampled_from([2, 1000]))
def test_no_order_of_sorting_is_worse(seed, levels):
    "The pessimistic rank is the worst over random orders of the gallery under a stable sort, and is reached."
    S, T, padded, valid = random_case(seed, levels)
    R, r = ranks(S, padded[:, :1]), np.random.default_rng(seed)
    worst = np.zeros(len(S), int)
    for _ in range(60):
        perm = r.permutation(S.shape[1])
        order = np.argsort(-S[:, perm], axis=1, kind='stable')
        worst = np.maximum(worst, [list(perm[o]).index(t[0])+1 for o,t in zip(order, T)])
    assert (worst <= R[:,0]).all()


@settings(max_examples=100, deadline=None)
@given(seeds, st.sampled_from([1, 2, 5, 10, 50]))
def test_metrics_equal_slow_ones(seed, k):
    S, T, padded, valid = random_case(seed, 3)
    R = ranks(S, padded, valid)
    hits = [np.isin(range(1, S.shape[1]+1), r[r>0]) for r in R]
    assert np.allclose(map_at_k(R, k), [slow_ap(h, len(t), k) for h,t in zip(hits, T)])
    assert (recall_at_k(R, k) == [h[:k].any() for h in hits]).all()


def test_average_precision_of_the_known_examples():
    far = lambda n: list(range(101, 101+n))
    assert map_at_k([[1, 4] + far(2)], 5)[0] == pytest.approx(.375)
    assert map_at_k([[1, 4] + far(10)], 5)[0] == pytest.approx(.3)
    assert map_at_k([[1] + far(4)], 5)[0] == pytest.approx(.2)


def test_constant_scores_never_hit():
    assert recall_at_k(ranks(np.ones((40, 15)), np.zeros(40, int)), 14).sum() == 0


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused_with_the_query(bad):
    S = np.zeros((3, 4)); S[1, 2] = bad
    with pytest.raises(ValueError, match='query b: the score of candidate 2'): ranks(S, [0, 0, 0], names=['a', 'b', 'c'])
    valid = np.ones((3, 4), bool); valid[1, 2] = False
    assert ranks(S, [0, 0, 0], valid).max() == 4    # what is no candidate may be anything


def test_intervals():
    v = (np.random.default_rng(0).random(500) < .3).astype(float)
    mean, low, high = bootstrap_ci(v, n=2000)
    assert mean == v.mean() and low < mean < high and bootstrap_ci(v, seed=1) != bootstrap_ci(v, seed=0)
    assert (high-low)/2 == pytest.approx(1.96*np.sqrt(.21/500), rel=.15)
    assert bootstrap_ci(np.ones(5)) == (1., 1., 1.)
    assert bootstrap_ci(np.r_[v, np.ones(2000)], groups=['a']*500+['b']*2000)[0] == pytest.approx((v.mean()+1)/2)
    with pytest.raises(ValueError): bootstrap_ci([.1, np.nan])


def test_paired_differences():
    r = np.random.default_rng(0)
    b = (r.random(1000) < .3).astype(float)
    a = np.where(r.random(1000) < .05, 1, b)
    d = paired_bootstrap(a, b)
    assert d.low > 0 and d.p < .01 and d.diff == pytest.approx((a-b).mean())
    back = paired_bootstrap(b, a)
    assert (back.low, back.high) == pytest.approx((-d.high, -d.low))
    assert paired_bootstrap(b, b).p == 1


def test_p_values_are_uniform_where_nothing_differs():
    p = []
    for s in range(150):
        r = np.random.default_rng(s)
        x = r.random((2, 200)) < .4
        p.append(paired_bootstrap(x[0], x[1], n=400, seed=s).p)
    assert .01 < np.mean(np.array(p) < .05) < .12


@pytest.mark.parametrize('change', [dict(gallery='x'), dict(prompt='a {condition}'), dict(caption='joined'), dict(reference='kept'), dict(split='test'), dict(crop='c'), dict(coverage=.5), dict(extra='e')])
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
        some = [str(i) for i in r.choice(ids, 11+n_targets, replace=False)]
        rows.append(dict(query_id=f'q{q}', reference=some[0], condition=f'c{r.integers(5)}', targets=some[1:1+n_targets], gallery=some[1:] if own else None))
    bench = Benchmark('b', 't', pd.DataFrame(rows), lambda i: Image.new('RGB', (4, 4)), Protocol('b/t', **protocol), shared_gallery=None if own else ids)
    calls = []
    def encode(backbone, images, load, key):
        calls.extend(images)
        return SimpleNamespace(array=np.stack([vectors[i] for i in images]), index={i: j for j,i in enumerate(images)})
    backbone = SimpleNamespace(name='vectors', encode_text=lambda ts: torch.tensor(np.stack([texts[t] for t in ts])))
    return bench, backbone, encode, vectors, texts, calls


def unit(x): return x/np.linalg.norm(x, axis=-1, keepdims=True)


def method(fuse):
    dot = lambda q, gal: (q[:,None]*torch.nn.functional.normalize(gal, dim=-1)).sum(-1) if gal.ndim==3 else q @ torch.nn.functional.normalize(gal, dim=-1).T
    return SimpleNamespace(name='m', encode_query=lambda ref, texts, backbone: fuse(ref, text_vectors(backbone, texts)), scores=dot)


@pytest.mark.parametrize('own', [True, False])
@pytest.mark.parametrize('reference', ['kept', 'removed'])
@pytest.mark.parametrize('n_targets', [1, 3])
def test_evaluate_equals_one_query_at_a_time(own, reference, n_targets):
    bench, backbone, encode, vectors, texts, calls = world(own=own, n_targets=n_targets, reference=reference)
    per_query, rows = evaluate(method(lambda ref, cond: ref+cond), bench, backbone, ks=(1, 3), encode=encode)
    assert sorted(calls) == sorted(set(calls))
    for r,got in zip(bench.queries.itertuples(), per_query.itertuples()):
        gallery = [g for g in (r.gallery if own else bench.shared_gallery) if not (reference=='removed' and g==r.reference)]
        s = [unit(vectors[g]) @ (vectors[r.reference]+texts[r.condition]) for g in gallery]
        slow = slow_ranks(s, [gallery.index(t) for t in r.targets], [True]*len(s))
        assert got.ranks == slow and got.rank == min(slow) and got.gallery_size == len(gallery)
        assert got.top[0] == gallery[int(np.argmax(s))]
    assert list(rows.columns) == RESULT_COLUMNS
    assert rows.value[0] == pytest.approx(100*(per_query['rank']==1).mean())
    assert rows.n[0] == len(bench) and rows.protocol[0] == bench.protocol.id


def test_excluded_images_cannot_be_found():
    bench, backbone, encode, *_ = world(own=False)
    first = evaluate(method(lambda ref, cond: ref), bench, backbone, ks=(1,), encode=encode)[0]
    assert all(t[0]==r for t,r in zip(first.top, first.reference))
    q = bench.queries.assign(excluded=[[r] for r in bench.queries.reference])
    again = evaluate(method(lambda ref, cond: ref), replace(bench, queries=q), backbone, ks=(1,), encode=encode)[0]
    assert all(r not in t for t,r in zip(again.top, again.reference)) and set(again.gallery_size) == {39}


def test_queries_without_a_reference():
    bench, backbone, encode, *_ = world(own=False)
    q = bench.queries.assign(reference=None)
    text = evaluate(method(lambda ref, cond: cond), replace(bench, queries=q, images=None), backbone, encode=encode)[0]
    image = evaluate(method(lambda ref, cond: ref), replace(bench, queries=q, images=None), backbone, encode=encode)[0]
    assert set(image['rank']) == {40} and text['rank'].min() < 10


def test_unreadable_images_make_it_partial():
    bench, backbone, encode, *_ = world()
    lost = lambda b, ids, load, key: encode(b, [i for i in ids if i!='i3'], load, key)
    per_query, rows = evaluate(method(lambda ref, cond: ref+cond), bench, backbone, encode=lost)
    touched = [ 'i3' in (r.reference, *r.targets, *r.gallery) for r in bench.queries.itertuples()]
    assert len(per_query) == len(bench)-sum(touched) == rows.n[0] and rows.protocol[0] != bench.protocol.id
    part = bench.restrict([i for i in bench.images if i!='i3'])
    assert part.protocol.coverage == pytest.approx(1-1/len(bench.images)) and f'{sum(touched)} of 25 queries left out' in part.protocol.extra


def test_a_gallery_smaller_than_k():
    bench, backbone, encode, *_ = world()
    with pytest.raises(ValueError, match='a gallery of 11 has no R@12'): evaluate(method(lambda ref, cond: ref), bench, backbone, ks=(1, 12), encode=encode)


def test_nan_features_name_the_query():
    bench, backbone, encode, vectors, *_ = world()
    vectors[bench.queries.targets[0][0]][:] = np.nan
    with pytest.raises(ValueError, match='query q0'): evaluate(method(lambda ref, cond: ref), bench, backbone, encode=encode)


def test_tables_that_cannot_be_ranked():
    bench, *_ = world()
    q = bench.queries
    for bad, text in ((pd.concat([q, q]), 'used twice'), (q.assign(condition=[None]*25), 'condition is not text'), (q.assign(targets=[[]]*25), 'has no target'), (q.assign(targets=[['nowhere']]*25), 'not in the gallery')):
        with pytest.raises(ValueError, match=text): replace(bench, queries=bad)
    kept, gone = reachable(q.assign(targets=[['nowhere']]+list(q.targets[1:])))
    assert gone == ['q0'] and len(kept) == 24


def test_large_shared_galleries_are_scored_in_blocks(monkeypatch):
    import cis_nb.benchmarks.protocol as m
    bench, backbone, encode, *_ = world(own=False)
    whole = evaluate(method(lambda ref, cond: ref+cond), bench, backbone, encode=encode)[0]
    monkeypatch.setattr(m._shared_gallery, '__defaults__', (100,))
    assert evaluate(method(lambda ref, cond: ref+cond), bench, backbone, encode=encode)[0].ranks.tolist() == whole.ranks.tolist()


def test_circo_example_submission():
    root = os.environ.get('CIS_DATA')
    if not root or not (Path(root)/'circo').is_dir(): pytest.skip('CIRCO annotations are not here (set CIS_DATA)')
    gt = json.loads((Path(root)/'circo/annotations/val.json').read_text())
    sub = json.loads((Path(root)/'circo/submission_examples/submission_val.json').read_text())
    assert len(gt) == 220
    P = max(len(g['gt_img_ids']) for g in gt)
    # the score of a submitted list falls by rank; targets that are not in it stand behind it
    ids = [sub[str(g['id'])] for g in gt]
    cols = [list(dict.fromkeys(l + g['gt_img_ids'])) for l,g in zip(ids, gt)]
    G = max(map(len, cols))
    S = np.tile(-np.arange(G, dtype=float), (len(gt), 1))
    valid = np.array([[j<len(c) for j in range(G)] for c in cols])
    T = np.array([[c.index(t) for t in g['gt_img_ids']] + [-1]*(P-len(g['gt_img_ids'])) for c,g in zip(cols, gt)])
    R = ranks(S, T, valid)
    for k in (5, 10, 25, 50):
        slow = [slow_ap([i in g['gt_img_ids'] for i in l], len(g['gt_img_ids']), k) for l,g in zip(ids, gt)]
        assert np.allclose(map_at_k(R, k), slow)
        assert np.allclose(recall_at_k(R[:,:1], k), [g['target_img_id'] in l[:k] for l,g in zip(ids, gt)])
    print({k: round(100*map_at_k(R, k).mean(), 2) for k in (5, 10, 25, 50)})

def test_a_list_is_in_the_order_of_its_scores_with_targets_last_among_equals():
    import cis_nb.benchmarks.protocol as m
    rng = np.random.default_rng(3)
    for n, keep in [(7, 3), (7, 50), (40, 10), (40, 40)]:
        S, T = rng.integers(0, 6, (30, n)).astype(np.float32), np.where(rng.random((30, 2))<.7, rng.integers(0, n, (30, 2)), -1)
        T[:,0], T[:,1] = np.abs(T[:,0]), np.where(T[:,1]==T[:,0], -1, T[:,1])
        valid = rng.random((30, n))<.9
        for q, top in enumerate(m._top(S, T, valid, keep)):
            slow = sorted(range(n), key=lambda j: (not valid[q,j], -S[q,j], j in T[q], j))
            assert [j for j in top if valid[q,j]]==[j for j in slow if valid[q,j]][:keep]
