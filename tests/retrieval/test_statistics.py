"Confidence intervals, paired differences and p-values."

import numpy as np
import pytest

from cis_nb.retrieval.statistics import bootstrap_ci, paired_bootstrap


def test_an_interval_depends_on_its_seed_and_groups_count_alike():
    v = (np.random.default_rng(0).random(500) < 0.3).astype(float)
    mean, *_ = bootstrap_ci(v, n=2000)
    assert mean == v.mean() and bootstrap_ci(v, seed=1) != bootstrap_ci(v, seed=0)
    assert bootstrap_ci(np.ones(5)) == (1.0, 1.0, 1.0)
    assert bootstrap_ci(np.r_[v, np.ones(2000)], groups=['a'] * 500 + ['b'] * 2000)[0] == pytest.approx(
        (v.mean() + 1) / 2
    )


def test_paired_differences():
    r = np.random.default_rng(0)
    b = (r.random(1000) < 0.3).astype(float)
    a = np.where(r.random(1000) < 0.05, 1, b)
    d = paired_bootstrap(a, b)
    assert d.low > 0 and d.p < 0.01 and d.diff == pytest.approx((a - b).mean())
    back = paired_bootstrap(b, a)
    assert (back.low, back.high) == pytest.approx((-d.high, -d.low))


def test_p_values_are_uniform_where_nothing_differs():
    p = []
    for s in range(150):
        r = np.random.default_rng(s)
        x = r.random((2, 200)) < 0.4
        p.append(paired_bootstrap(x[0], x[1], n=400, seed=s).p)
    assert 0.01 < np.mean(np.array(p) < 0.05) < 0.12
