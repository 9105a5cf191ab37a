"Baselines: hand-computed scores, normalised queries, random scores."

import math
import pandas as pd, pytest, torch
from cis_nb.backbones.features import l2_normalize
from cis_nb.experiments import comparison as cp
from cis_nb.methods import baselines as bl


@pytest.fixture(autouse=True)
def own_store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))


def rows(*items):
    return pd.DataFrame(items, columns=['method', 'task', 'query_id', 'rank']).assign(
        draw=0, gallery_size=15, reference='r'
    )


# --- baselines


def test_raw_and_unit_average_differ_only_when_lengths_differ():
    ref, cond = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert torch.allclose(bl.image_text(ref, cond), torch.tensor([[3.0, 1.0]]) / math.sqrt(10))
    assert torch.allclose(bl.image_text(ref, cond, normalise=True), torch.tensor([[1.0, 1.0]]) / math.sqrt(2))
    assert torch.allclose(bl.image_text(ref / 3, cond), bl.image_text(ref, cond, normalise=True))


def test_queries_have_length_one_for_every_method():
    ref, cond = torch.randn(7, 5) * 4, torch.randn(7, 5)
    for m in bl.methods().values():
        assert torch.allclose(m.fuse(ref, cond).norm(dim=1), torch.ones(7), atol=1e-6), m.name


def test_scores_agree_for_own_and_shared_galleries():
    m, q, gal = bl.method('image_text'), l2_normalize(torch.randn(4, 6)), torch.randn(9, 6)
    assert torch.allclose(m.score(q, gal), m.score(q, gal.expand(4, 9, 6)), atol=1e-6)


def test_random_scores_are_seeded_and_differ_between_calls():
    gal = torch.zeros(3, 15, 2)
    a, b = bl.method('random_scores', seed=1), bl.method('random_scores', seed=1)
    first = a.score(torch.zeros(3, 2), gal)
    assert torch.equal(first, b.score(torch.zeros(3, 2), gal)) and not torch.equal(
        first, a.score(torch.zeros(3, 2), gal)
    )


def test_random_scores_find_what_chance_finds():
    ranks = bl.method('random_scores').score(torch.zeros(20000, 2), torch.zeros(20000, 15, 2)).argmax(1)
    assert abs((ranks == 0).float().mean().item() - 1 / 15) < 0.006


def test_chance_of_mixed_galleries():
    assert cp.chance(rows(('m', 'a', 1, 1), ('m', 'a', 2, 1)).assign(gallery_size=[10, 20]))['a'] == pytest.approx(7.5)
