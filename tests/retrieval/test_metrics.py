"Ranks and metrics against slow references."

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cis_nb.retrieval.metrics import map_at_k, ranks, recall_at_k
from slow_metrics import slow_ranks, slow_ap

seeds = st.integers(0, 10**6)


def random_case(seed, levels):
    r = np.random.default_rng(seed)
    Q, G = r.integers(1, 12), r.integers(2, 25)
    S = r.integers(0, levels, (Q, G)).astype(float)
    T = [list(r.permutation(G)[: r.integers(1, min(G, 6) + 1)]) for _ in range(Q)]
    valid = r.random((Q, G)) < 0.8
    for v, t in zip(valid, T):
        v[t] = True
    P = max(map(len, T))
    return S, T, np.array([t + [-1] * (P - len(t)) for t in T]), valid


@settings(max_examples=150, deadline=None)
@given(seeds, st.sampled_from([1, 2, 3, 1000]))
def test_ranks_equal_a_slow_sort(seed, levels):
    S, T, padded, valid = random_case(seed, levels)
    R = ranks(S, padded, valid)
    for s, t, v, r in zip(S, T, valid, R):
        assert [x for x in r if x] == slow_ranks(list(s), t, v)


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_ranks_do_not_depend_on_storage_order_or_scale(seed):
    S, T, padded, valid = random_case(seed, 4)
    perm = np.random.default_rng(seed).permutation(S.shape[1])
    moved = np.where(padded >= 0, np.argsort(perm)[padded], -1)
    assert (ranks(S[:, perm], moved, valid[:, perm]) == ranks(S, padded, valid)).all()
    assert (ranks(3 * S - 7, padded, valid) == ranks(S, padded, valid)).all()


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
        worst = np.maximum(worst, [list(perm[o]).index(t[0]) + 1 for o, t in zip(order, T)])
    assert (worst <= R[:, 0]).all()


@settings(max_examples=100, deadline=None)
@given(seeds, st.sampled_from([1, 2, 5, 10, 50]))
def test_metrics_equal_slow_ones(seed, k):
    S, T, padded, valid = random_case(seed, 3)
    R = ranks(S, padded, valid)
    hits = [np.isin(range(1, S.shape[1] + 1), r[r > 0]) for r in R]
    assert np.allclose(map_at_k(R, k), [slow_ap(h, len(t), k) for h, t in zip(hits, T)])
    assert (recall_at_k(R, k) == [h[:k].any() for h in hits]).all()


def test_average_precision_of_the_known_examples():
    def far(n):
        return list(range(101, 101 + n))

    assert map_at_k([[1, 4] + far(2)], 5)[0] == pytest.approx(0.375)
    assert map_at_k([[1, 4] + far(10)], 5)[0] == pytest.approx(0.3)
    assert map_at_k([[1] + far(4)], 5)[0] == pytest.approx(0.2)


def test_constant_scores_never_hit():
    assert recall_at_k(ranks(np.ones((40, 15)), np.zeros(40, int)), 14).sum() == 0


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused_with_the_query(bad):
    S = np.zeros((3, 4))
    S[1, 2] = bad
    with pytest.raises(ValueError, match='query b: the score of candidate 2'):
        ranks(S, [0, 0, 0], names=['a', 'b', 'c'])
    valid = np.ones((3, 4), bool)
    valid[1, 2] = False
    assert ranks(S, [0, 0, 0], valid).max() == 4  # what is no candidate may be anything
