"Ranking in chunks equals the definition, tie by tie, however the gallery is cut."

import subprocess
import sys
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from cis_nb.retrieval import ranking
from cis_nb.retrieval.metrics import ranks
from cis_nb.retrieval.ranking import (
    cosine_scores,
    rank_gallery,
    rank_own_galleries,
    ranking_rates,
)

DEVICES = ['cpu', *(['cuda'] if torch.cuda.is_available() else [])]  # one property for both, a GPU where there is one


def dot_scores(q, gallery):
    return q @ gallery.T


def slow_top(scores, targets, valid, k):
    "The best k candidates of one query: of equal scores the targets last, the others by column."
    order = sorted(np.flatnonzero(valid).tolist(), key=lambda c: (-scores[c], c in targets, c))
    return (order + [-1] * k)[:k]


def assert_equals_definition(result, scores, targets, excluded, k, mask=None):
    valid = np.ones(scores.shape, bool) if mask is None else np.tile(mask, (len(scores), 1))
    for v, out in zip(valid, excluded):
        v[list(out)] = False
    assert result.ranks.tolist() == ranks(scores, targets, valid).tolist()
    top = [slow_top(s, set(t[t >= 0].tolist()), v, k) for s, t, v in zip(scores, targets, valid)]
    assert result.top.tolist() == top
    kept = np.where(result.top < 0, -np.inf, np.take_along_axis(scores, np.maximum(result.top, 0), 1))
    assert (result.scores == kept.astype(np.float32)).all() and result.scores.dtype == np.float32
    assert result.candidates.tolist() == valid.sum(1).tolist()


def random_case(seed, levels):
    "Integers multiply without rounding, and tie: queries, gallery, targets, excluded columns."
    r = np.random.default_rng(seed)
    Q, N, D = r.integers(1, 12), r.integers(2, 200), r.integers(1, 4)
    q, g = (torch.from_numpy(r.integers(-levels, levels + 1, (n, D)).astype(np.float32)) for n in (Q, N))
    targets, excluded = np.full((Q, 5), -1), []
    for row in targets:
        columns = r.permutation(N)
        few = r.integers(1, min(N, 5) + 1)
        row[r.permutation(5)[:few]] = columns[:few]  # pads may be anywhere
        excluded.append(columns[few : few + r.integers(0, 4)].tolist() * r.integers(1, 3))  # some are named twice
    return q, g, targets, excluded


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([0, 1, 3]), st.integers(1, 230), st.integers(1, 80), st.sampled_from(DEVICES)
)
@pytest.mark.e2e
def test_equals_the_definition_in_any_chunks(seed, levels, chunk, k, device):
    q, g, targets, excluded = random_case(seed, levels)
    result = rank_gallery(q, g, targets, excluded, k, dot_scores, chunk, device)
    assert_equals_definition(result, (q @ g.T).numpy(), targets, excluded, k)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 230), st.integers(1, 60), st.sampled_from(DEVICES))
def test_subsets_are_rankings_of_smaller_galleries(seed, chunk, k, device):
    q, g, targets, excluded = random_case(seed, 2)
    r = np.random.default_rng(seed)
    masks = {f'{share}': r.random(len(g)) < share for share in (0, 0.1, 0.7, 1)}
    masks['start'] = np.arange(len(g)) < len(g) // 3
    for mask in masks.values():
        mask[targets[targets >= 0]] = True
    result = rank_gallery(q, g, targets, excluded, k, dot_scores, chunk, device, masks)
    assert list(result) == list(masks)
    for name, mask in masks.items():
        assert_equals_definition(result[name], (q @ g.T).numpy(), targets, excluded, k, mask)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 150), st.sampled_from([3, 8, 64, 100, 512]), st.sampled_from(DEVICES))
@pytest.mark.e2e
def test_copies_of_a_target_tie_wherever_they_are(seed, chunk, D, device):
    r = np.random.default_rng(seed)
    N, Q = int(r.integers(20, 400)), int(r.integers(1, 40))
    g = r.normal(size=(N, D)).astype(r.choice(['float16', 'float32']))
    target, *copies = r.permutation(N)[: r.integers(2, 12)].tolist()
    g[copies] = g[target]
    q = torch.from_numpy(g[[target] * Q].astype(np.float32) + 0.01 * r.normal(size=(Q, D)).astype(np.float32))
    found = rank_gallery(q, g, [target] * Q, k=len(copies) + 1, chunk=chunk, device=device)
    first = len(copies) + 1 if D > 3 else found.ranks[0, 0]  # in few dimensions others may be nearer
    assert (found.ranks[:, 0] >= len(copies) + 1).all() and found.ranks[0, 0] == first
    again = rank_gallery(q, g, [target] * Q, excluded=[copies] * Q, chunk=chunk, device=device)
    assert (found.ranks - again.ranks == len(copies)).all() and (again.candidates == N - len(copies)).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 100))
def test_scores_that_depend_on_the_place_in_a_chunk_are_ranked_as_they_are_met(seed, chunk):
    q, g, targets, excluded = random_case(seed, 2)
    width = min(chunk, len(g))

    def uneven(q, gallery):
        return q @ gallery.T + 0.25 * (torch.arange(len(gallery)) % 5)

    met = q @ g.T + 0.25 * (torch.arange(len(g)) % width % 5)
    result = rank_gallery(q, g, targets, excluded, 9, uneven, chunk, 'cpu')
    assert_equals_definition(result, met.numpy(), targets, excluded, 9)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32])
def test_cosines_of_own_and_shared_galleries_are_the_same(dtype):
    q, g = torch.randn(5, 8), torch.randn(7, 8).to(dtype)
    slow = [[torch.cosine_similarity(a, b.float(), 0) for b in g] for a in q]
    assert torch.allclose(cosine_scores(q, g), torch.tensor(slow), atol=1e-6)
    assert torch.allclose(cosine_scores(q, g.expand(5, 7, 8)), torch.tensor(slow), atol=1e-6)


def test_a_score_of_its_own_may_compare_vectors_of_different_lengths():
    q, g, targets = torch.randn(6, 3), torch.randn(90, 5), np.arange(6)[:, None]
    found = rank_gallery(q, g, targets, score=lambda q, g: q @ g[:, :3].T, chunk=64, device='cpu')
    assert (found.ranks == rank_gallery(q, g[:, :3], targets, score=dot_scores, chunk=64, device='cpu').ranks).all()
    with pytest.raises(ValueError, match=r'queries \(6, 3\), gallery \(90, 5\)'):
        rank_gallery(q, g, targets)


def test_blocks_of_queries_change_nothing(monkeypatch):
    q, g = torch.randn(70, 16), torch.randn(500, 16)
    targets = np.stack([np.random.default_rng(i).permutation(500)[:3] for i in range(70)])
    whole = rank_gallery(q, g, targets, k=20, device='cpu')
    monkeypatch.setattr(ranking, '_block_shape', lambda Q, N, D, device, chunk: (9, 64))
    parts = rank_gallery(q, g, targets, k=20, device='cpu')
    assert (whole.ranks == parts.ranks).all() and (whole.top == parts.top).all()
    assert (parts.ranks == ranks(cosine_scores(q, g).numpy(), targets)).all()


class Watched:
    "A gallery that says what is read of it."

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __len__(self):
        return len(self.array)

    def __getitem__(self, which):
        self.reads.append(len(self.array[which]))
        return self.array[which]


def random_own_case(seed):
    "Integer features that tie; galleries of 1 to 12 rows, some rows twice; several targets, excluded columns."
    r = np.random.default_rng(seed)
    Q, N, D = int(r.integers(1, 25)), int(r.integers(5, 40)), int(r.integers(1, 4))
    q, g = (r.integers(-2, 3, (n, D)).astype(np.float32) for n in (Q, N))
    galleries = [r.integers(0, N, r.integers(1, 13)).tolist() for _ in range(Q)]
    targets, excluded = np.full((Q, 3), -1), []
    for row, gallery in zip(targets, galleries):
        columns = r.permutation(len(gallery))
        few = int(r.integers(1, min(len(gallery), 3) + 1))
        row[r.permutation(3)[:few]] = columns[:few]
        excluded.append(columns[few : few + int(r.integers(0, 3))].tolist())
    return torch.from_numpy(q), g, galleries, targets, excluded


def own_dots(q, gallery):
    return (q[:, None] * gallery).sum(-1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 15))
def test_galleries_of_their_own_are_ranked_by_the_definition_in_any_chunks(seed, chunk, k):
    q, g, galleries, targets, excluded = random_own_case(seed)
    result = rank_own_galleries(q, g, galleries, targets, excluded, k, own_dots, chunk)
    k = min(k, max(map(len, galleries)))
    assert result.top.shape == (len(q), k)
    for i, gallery in enumerate(galleries):
        one = ranking.Rankings(result.ranks[[i]], result.top[[i]], result.scores[[i]], result.candidates[[i]])
        assert_equals_definition(one, (g[gallery] @ q[i].numpy())[None], targets[[i]], [excluded[i]], k)


def test_features_of_a_few_queries_are_read_at_a_time():
    array = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    watched, rows = Watched(array), np.random.default_rng(1).integers(0, 50, (7, 4)).tolist()
    rank_own_galleries(torch.randn(7, 8), watched, rows, [[0]] * 7, chunk=3)
    assert watched.reads == [12, 12, 4]
    huge = Watched(np.broadcast_to(np.ones((1, 2**20), np.float32), (50, 2**20)))
    rank_own_galleries(torch.ones(3, 2**20), huge, [[0, 1]] * 3, [[0]] * 3)
    assert huge.reads == [4, 2]  # 16 MB each


@pytest.mark.parametrize(
    'galleries, targets, excluded, message',
    [
        ([[1, 2], []], [[0], [0]], None, 'query b: its gallery is empty'),
        ([[1, 2], [3]], [[0], [-1]], None, 'query b has no target'),
        ([[1, 2], [3]], [[0], [1]], None, 'query b: a target has column 1 of a gallery of 1 images'),
        ([[1, 2], [3]], [[1], [0]], [[1], []], 'query a: a target is not among the candidates'),
        ([[1, 2], [9]], [[1], [0]], None, 'query b: the score of candidate 0 is nan'),
        ([[1, 2]], [[0]], None, '2 queries, 1 galleries, 1 lists of targets'),
        ([[1, 2], [3]], [[0], [0]], [[]], '1 lists of excluded columns'),
    ],
)
@pytest.mark.parametrize('chunk', [1, 2])
def test_own_galleries_that_cannot_be_ranked_are_refused_by_name(galleries, targets, excluded, message, chunk):
    g = np.ones((10, 4), np.float32)
    g[9] = np.nan
    with pytest.raises(ValueError, match=message):
        rank_own_galleries(torch.ones(2, 4), g, galleries, targets, excluded, chunk=chunk, names=['a', 'b'])


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(300, 3000), st.booleans())
def test_large_and_small_subsets_are_collected_alike(seed, k, chunk, unlucky):
    "Subsets of most of a chunk share a list of its best cells; an unlucky one holds none of them."
    r = np.random.default_rng(seed)
    N, Q = 2500, 6
    q, g = (torch.from_numpy(r.integers(-99, 100, (n, 2)).astype(np.float32)) for n in (Q, N))
    targets, excluded = r.integers(0, N, (Q, 1)), [[]] * Q
    masks = {str(share): r.random(N) < share for share in (0.002, 0.02, 0.3, 0.9)}
    if unlucky:
        masks['unlucky'] = (g @ q[0] < 0).numpy()
    for mask in masks.values():
        mask[targets] = True
    found = rank_gallery(q, g, targets, excluded, k, dot_scores, chunk, 'cpu', masks)
    for name, mask in masks.items():
        assert_equals_definition(found[name], (q @ g.T).numpy(), targets, excluded, k, mask)


def test_a_list_has_targets_last_among_equals_and_no_candidate_that_is_excluded():
    rng = np.random.default_rng(3)
    for n, k in [(7, 3), (7, 50), (40, 10), (40, 40)]:
        S = rng.integers(0, 6, (30, n)).astype(np.float32)
        T = np.where(rng.random((30, 2)) < 0.7, rng.integers(0, n, (30, 2)), -1)
        T[:, 0], T[:, 1] = np.abs(T[:, 0]), np.where(T[:, 1] == T[:, 0], -1, T[:, 1])
        valid = rng.random((30, n)) < 0.9
        for q, top in enumerate(ranking._top_columns(S, T, valid, k).tolist()):
            assert top == slow_top(S[q], T[q], valid[q], k)


def test_each_chunk_is_read_once_and_targets_before(tmp_path):
    array = np.memmap(tmp_path / 'g', 'float16', 'w+', shape=(1000, 8))
    array[:] = np.random.default_rng(0).normal(size=array.shape)
    before, q = array.copy(), torch.randn(30, 8)
    watched = Watched(np.memmap(tmp_path / 'g', 'float16', 'r', shape=(1000, 8)))
    result = rank_gallery(q, watched, np.arange(30) % 20, chunk=128, device='cpu')
    assert watched.reads == [20, *[128] * 7, 104]
    whole = Watched(array)
    assert (rank_gallery(q, whole, np.arange(30) % 20, device='cpu').ranks == result.ranks).all()
    assert whole.reads == [1000] and (array == before).all()  # one chunk, one product; the gallery is only read


def test_a_score_is_asked_once_for_each_block():
    calls = []

    def counting(q, gallery):
        calls.append((len(q), len(gallery)))
        return q @ gallery.T

    q, g = torch.randn(10, 4), torch.randn(300, 4)
    rank_gallery(q, g, np.arange(10), score=counting, chunk=100, device='cpu')
    assert calls == [(10, 128)] * 4  # targets, then three chunks, all of one shape
    calls.clear()
    rank_gallery(q, g, np.arange(10), score=counting, device='cpu')
    assert calls == [(10, 320)]


def test_a_score_may_return_a_tensor_that_it_keeps():
    q, g = torch.randn(5, 4), torch.randn(64, 4)
    kept = (q @ g.T).double()
    result = rank_gallery(q, g, np.arange(5), [[9]] * 5, score=lambda q, g: kept, device='cpu')
    assert torch.isfinite(kept).all()
    assert_equals_definition(result, kept.float().numpy(), np.arange(5)[:, None], [[9]] * 5, 50)


@pytest.mark.parametrize(
    'targets, options, message',
    [
        ([[0], [-1]], {}, 'query b has no target'),
        ([[0], [30]], {}, 'query b: a target has column 30 of a gallery of 30'),
        ([0, 3], dict(excluded=[[], [3]]), 'query b: a target is not among the candidates'),
        ([0, 3], dict(excluded=[[-2], []]), 'query a: excluded column -2'),
        ([0, 3], dict(excluded=[[]]), '1 lists for 2 queries'),
        (
            [0, 3],
            dict(subsets=dict(few=np.arange(30) < 3)),
            "query b: its target, column 3, is not in the subset 'few'",
        ),
        ([0, 3], dict(subsets=dict(few=np.arange(30))), r'allowed: a boolean mask of shape \(30,\)'),
        ([0, 3], dict(k=0), 'k ≥ 1'),
        ([0, 3, 4], {}, r'targets \(3, 1\)'),
    ],
)
def test_what_cannot_be_ranked_is_refused_by_name(targets, options, message):
    q, g = torch.randn(2, 4), torch.randn(30, 4)
    with pytest.raises(ValueError, match=message):
        rank_gallery(q, g, targets, chunk=8, names=['a', 'b'], **options)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('column', [0, 17, 29])
@pytest.mark.parametrize('chunk', [8, 30])
def test_scores_that_are_not_finite_are_refused_unless_excluded(value, column, chunk):
    q, g = torch.ones(2, 1), torch.arange(30.0)[:, None]

    def broken(q, gallery):
        return torch.where(gallery.T == column, torch.tensor([[0.0], [value]]), q @ gallery.T)

    with pytest.raises(ValueError, match=f'query b: the score of candidate {column} is {value}'):
        rank_gallery(q, g, [5, 5], score=broken, chunk=chunk, names=['a', 'b'], device='cpu')
    found = rank_gallery(q, g, [5, 5], [[], [column]], score=broken, chunk=chunk, device='cpu')
    assert found.candidates.tolist() == [30, 29]


def test_large_scores_are_not_taken_for_infinite_ones():
    q, g = torch.full((2, 1), 1e38), torch.ones(100, 1)  # their sum is infinite
    assert rank_gallery(q, g, [5, 5], score=dot_scores).ranks.tolist() == [[100], [100]]


def test_no_queries_give_no_rankings():
    none = rank_gallery(torch.randn(0, 4), torch.randn(30, 4), np.zeros((0, 2)), k=3, chunk=8)
    assert (none.ranks.shape, none.top.shape, none.scores.shape, none.candidates.shape) == (
        (0, 2),
        (0, 3),
        (0, 3),
        (0,),
    )


def test_a_random_score_is_refused_in_chunks():
    def luck(q, gallery):
        return torch.rand(len(q), len(gallery))

    with pytest.raises(RuntimeError, match='a score must depend on the query and the image alone'):
        rank_gallery(torch.randn(3, 2), torch.randn(50, 2), [1, 2, 3], score=luck, chunk=10, device='cpu')


@pytest.mark.e2e
def test_memory_is_that_of_a_chunk_and_not_of_the_table():
    code = '''
import numpy as np, torch
from cis_nb.core.report import peak_memory_bytes
from cis_nb.retrieval.ranking import rank_gallery
torch.set_num_threads(1)
g, q = np.random.default_rng(0).standard_normal((400_000, 16), dtype=np.float32), torch.randn(1000, 16)
rank_gallery(q[:2], g[:100], [0, 0], device='cpu')
before = peak_memory_bytes()
rank_gallery(q, g, np.arange(1000), device='cpu')
print(peak_memory_bytes() - before)
'''
    grown = int(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout)
    assert grown < 4 * 1000 * 400_000 / 3  # the table of scores would have 1.6 GB


@pytest.mark.e2e
def test_rates_are_those_of_the_sizes_that_were_asked_for():
    rates = ranking_rates(queries=20, images=500, dim=8, k=5, faiss_images=300, threads=1)
    assert rates.images.tolist()[1:] == [500, 300] and (rates.seconds > 0).all() and rates.share[0] == 1
    assert (rates.peak_bytes.dropna() > 2**24).all()
    assert rates.gflops[1] == pytest.approx(2e-9 * 20 * 8 * 500 / rates.seconds[1])
    rates = ranking_rates(queries=20, images=500, dim=8, k=5, steps=[0, 7], faiss_images=300, threads=1)
    assert rates.implementation[2] == 'one pass for 3 galleries' and rates.images.tolist()[1:] == [500, 500, 300]
    recalls = dict(rates.recalls[2])
    assert [*recalls] == [0, 7, 480] and 100 >= recalls[0] >= recalls[7] >= recalls[480] > 0
    assert rates.recalls.drop(2).isna().all()


def test_no_subsets_give_no_rankings():
    q, gallery = torch.eye(3), torch.eye(3)
    assert rank_gallery(q, gallery, [0, 1, 2], subsets={}) == {}
