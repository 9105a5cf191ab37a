"Image-text retrieval: ranks against slow references, composed search."

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings, strategies as st
from projects import DATA, needs_data
from cis_nb.benchmarks import image_text as R
from cis_nb.retrieval.protocol import RESULT_COLUMNS
from cis_nb.data.packed import evaluation_images

flickr = DATA / 'flickr8k'
quick = settings(max_examples=50, deadline=None)


pytestmark = pytest.mark.usefixtures('store')


# ---- ranks


def slow_rank(scores, targets):
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i in targets))
    return 1 + min(order.index(t) for t in targets)


@quick
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.integers(0, 10**6))
def test_ranks_equal_a_slow_reference_with_many_ties(photos, most, D, seed):
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.concatenate([np.full(rng.integers(1, most + 1), i) for i in range(photos)]))
    image, text = (
        rng.integers(-1, 2, (photos, D)).astype(np.float32),
        rng.integers(-1, 2, (len(owner), D)).astype(np.float32),
    )
    S, r = text @ image.T, R.retrieval_ranks(image, text, owner)
    assert list(r['text to image']) == [slow_rank(s, [o]) for s, o in zip(S, owner)]
    assert list(r['image to text']) == [slow_rank(s, list(np.flatnonzero(owner == i))) for i, s in enumerate(S.T)]


def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(50), 3)
    image, text = R.l2_normalize_array(rng.normal(size=(50, 8))), R.l2_normalize_array(rng.normal(size=(150, 8)))
    whole, block = R.retrieval_ranks(image, text, owner), R._blocks
    monkeypatch.setattr(R, '_blocks', lambda q, g, t, rows=7: block(q, g, t, 7))
    for way, r in R.retrieval_ranks(image, text, owner).items():
        assert (r == whole[way]).all()


@quick
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 10), st.integers(0, 1000))
def test_chance_is_what_random_orders_find(photos, most, k, seed):
    rng = np.random.default_rng(seed)
    owner = np.concatenate([np.full(rng.integers(1, most + 1), i) for i in range(photos)])
    lists = np.stack([rng.permutation(owner) for _ in range(3000)])
    found = np.mean([(lists[:, :k] == i).any(1).mean() for i in range(photos)])
    c = R.retrieval_chance(owner, k)
    assert abs(c['image to text'] - found) < 0.04 and c['text to image'] == min(1, k / photos)


def test_not_finite_and_orphans_are_refused():
    with pytest.raises(ValueError, match='1 of 2 feature vectors are not finite'):
        R.caption_retrieval([[1.0, np.inf], [1, 1]], [[1.0, 1]] * 2, [0, 1], {})
    with pytest.raises(ValueError, match='no caption'):
        R.retrieval_ranks(np.ones((2, 3)), np.ones((1, 3)), [0])


def test_rows_are_the_books_rows():
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(30), 2)
    x = rng.normal(size=(30, 8))
    p = R.retrieval_protocols(30, 60, 'test', 'toy')
    rows = R.caption_retrieval(x, x[owner], owner, p, method='perfect', benchmark='toy', backbone='none', profile='')
    assert (
        list(rows.columns) == RESULT_COLUMNS
        and (rows[rows.metric == 'recall'].value == 100).all()
        and (rows[rows.metric != 'recall'].value == 1).all()
    )
    assert set(rows.protocol) == {q.id for q in p.values()}
    table = R.retrieval_table(pd.concat([rows, R.chance_rows(owner, p)]))
    assert len(table) == 4 and 'nan' not in table.to_string()


# ---- composed search


@quick
@given(st.integers(0, 1000))
def test_compose_and_swap_at_their_ends(seed):
    rng = np.random.default_rng(seed)
    x, y, z = rng.normal(size=(3, 4, 8))
    assert np.allclose(R.compose_features(x, y, 0), R.l2_normalize_array(x), atol=1e-6) and np.allclose(
        R.compose_features(x, y, 1), R.l2_normalize_array(y), atol=1e-6
    )
    assert np.allclose(R.swap_words(x, y, y), R.l2_normalize_array(x), atol=1e-6) and np.allclose(
        R.swap_words(x, y, z, 0), R.l2_normalize_array(x), atol=1e-6
    )
    assert np.allclose(np.linalg.norm(R.compose_features(x, y), axis=1), 1, atol=1e-5)


words = st.lists(
    st.sampled_from('a the dog man is in on snow beach running sitting red blue near'.split()), min_size=1, max_size=9
).map(' '.join)


@quick
@given(st.lists(st.lists(words, min_size=1, max_size=3), min_size=1, max_size=12))
def test_composed_queries_keep_their_promises(photos):
    texts, owner = [c for p in photos for c in p], [i for i, p in enumerate(photos) for _ in p]
    made = R.composed_queries(texts, owner, least=1)
    said = [set(' '.join(p).split()) for p in photos]
    for q in made.itertuples():
        assert q.who in said[q.reference] and q.word not in said[q.reference] and q.reference not in q.targets
        assert q.targets == [i for i, s in enumerate(said) if q.who in s and q.word in s]
    assert made.equals(R.composed_queries(texts, owner, least=1))
    assert len(R.diverse_queries(made, 5)) == min(5, made.drop_duplicates(['kind', 'who', 'condition']).shape[0])


def test_captions_of_another_kind_give_no_questions_and_no_error():
    made = R.composed_queries(['ein Hund im Schnee', '犬', '...', 'x'], [0, 1, 2, 3])
    assert (
        len(made) == 0
        and list(made.columns) == ['reference', 'who', 'kind', 'word', 'condition', 'instead', 'targets']
        and len(R.diverse_queries(made, 3)) == 0
    )


@needs_data('flickr8k')
def test_questions_of_flickr8k():
    pairs = evaluation_images(flickr, 16)
    made = R.composed_queries(pairs.texts, pairs.owner)
    assert pairs.split == 'test' and len(pairs) == 5000 and made.groupby(['who', 'condition']).ngroups > 100
    assert {('dog', 'in the snow'), ('man', 'on the beach'), ('boy', 'running')} <= set(zip(made.who, made.condition))
