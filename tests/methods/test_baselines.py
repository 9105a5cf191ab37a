"Baselines: hand-computed scores, normalised queries, random scores."

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
import torch
from rankings import rows
from cis_nb.api import Queries
from cis_nb.backbones.features import Features, l2_normalize
from cis_nb.experiments import comparison as cp
from cis_nb.methods import baselines as bl
from cis_nb.retrieval.ranking import rank_gallery


pytestmark = pytest.mark.usefixtures('store')


def images(ids, featured=None):
    "Images of which all have a feature, whatever it is, or those `featured`, in these rows."
    rows = dict.fromkeys(ids) if featured is None else featured
    skipped = pd.DataFrame([('dark', 'cannot be read')], columns=['id', 'reason'])
    known = Features(np.zeros((0, 5)), list(rows), rows, skipped, Path('known'))
    return SimpleNamespace(ids=ids, features=lambda b: known)


def queries(n):
    return Queries([f'q{i}' for i in range(n)], [['at night']] * n, [None] * n, images([]))


# --- baselines


def test_raw_and_unit_average_differ_only_when_lengths_differ():
    ref, cond = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    assert torch.allclose(bl.image_text(ref, cond), torch.tensor([[3.0, 1.0]]) / math.sqrt(10))
    assert torch.allclose(bl.image_text(ref, cond, normalise=True), torch.tensor([[1.0, 1.0]]) / math.sqrt(2))
    assert torch.allclose(bl.image_text(ref / 3, cond), bl.image_text(ref, cond, normalise=True))


def test_queries_have_length_one_for_every_method():
    ref, cond = torch.randn(7, 5) * 4, torch.randn(7, 5)
    for m in bl.methods().values():
        q = m.fuse(ref, cond) if isinstance(m, bl.FusionMethod) else m.encode_queries(queries(7))
        assert torch.allclose(q.norm(dim=1), torch.ones(7), atol=1e-6), m.name


def test_scores_agree_for_own_and_shared_galleries():
    m, q, gal = bl.method('image_text'), l2_normalize(torch.randn(4, 6)), torch.randn(9, 6)
    assert torch.allclose(m.score(q, gal), m.score(q, gal.expand(4, 9, 6)), atol=1e-6)


def random_scores(seed=0):
    return bl.method('random_scores', SimpleNamespace(fingerprint='blind'), seed=seed)


def test_random_scores_depend_on_seed_query_and_image_alone():
    m, asked, ids = random_scores(), queries(4), [f'i{j}' for j in range(9)]
    f, turned = m.encode_gallery(images(ids)), m.encode_gallery(images(ids[::-1]))
    q, g = m.encode_queries(asked), torch.tensor(f.array)
    scores = m.score(q, g)
    assert torch.equal(q, random_scores().encode_queries(asked)) and (f.array == turned.array[::-1]).all()
    assert {i: f.array[r].tolist() for i, r in f.index.items()} == {
        i: turned.array[r].tolist() for i, r in turned.index.items()
    }
    assert torch.equal(f[['i3']], turned[['i3']]) and f.counts == dict(encoded=9, skipped=1)
    with pytest.raises(KeyError, match="'dark': cannot be read"):
        f[['dark']]
    assert torch.allclose(m.score(q[1:2], g[3:5]), scores[1:2, 3:5], atol=1e-6)
    assert not torch.equal(q, random_scores(1).encode_queries(asked))
    assert (random_scores(1).encode_gallery(images(ids)).array != f.array).any()
    assert random_scores().fingerprint != random_scores(1).fingerprint
    for other in (
        replace(asked, ids=list('abcd')),
        replace(asked, texts=[['x']] * 4),
        replace(asked, references=ids[:4]),
    ):
        assert (m.encode_queries(other) != q).any(1).all()


def test_random_scores_know_only_images_that_have_a_feature():
    f = random_scores().encode_gallery(images(['a', 'b', 'c'], dict(a=0, c=2)))
    assert list(f.index) == ['a', 'c'] and f.array.shape[0] == 2
    assert (f.array == random_scores().encode_gallery(images(['a', 'c'])).array).all()


def test_random_scores_find_what_chance_finds():
    m, n = random_scores(), 10_000
    own = torch.tensor(m.encode_gallery(images(range(15 * n))).array).float().view(n, 15, -1)
    first = m.score(m.encode_queries(queries(n)), own).argmax(1)
    assert ((first.bincount(minlength=15) / n - 1 / 15).abs() < 0.012).all()


def test_random_scores_rank_a_shared_gallery_in_chunks():
    m, targets = random_scores(), np.arange(4000) % 500
    q, g = m.encode_queries(queries(4000)), m.encode_gallery(images(range(500))).array
    found = rank_gallery(q, g, targets, score=m.score, device='cpu')
    assert (found.ranks == rank_gallery(q, g, targets, score=m.score, chunk=70, device='cpu').ranks).all()
    assert [100 * (found.ranks <= k).mean() for k in (5, 50, 250)] == pytest.approx([1, 10, 50], abs=2)


@dataclass(kw_only=True)
class Weighted(bl.FusionMethod):
    w: float


class WithList:
    "A rule whose weights are an attribute of the class."

    def __call__(self, ref, cond):
        return ref + self.W[0] * cond


def keys(**given) -> list:
    "Fingerprints of methods that differ in one field; the last value of each is that of the first."
    made = dict(name='sum', fuse=bl.image_text, w=0.2, backbone=SimpleNamespace(fingerprint='blind'))
    ((field, values),) = given.items()
    return [Weighted(**made | {field: v}, **run).fingerprint for run in ({}, dict(run='r')) for v in values]


def test_a_field_of_a_subclass_of_a_rule_decides_the_fingerprint():
    one, other, same, *trained = keys(w=(0.2, 0.8, 0.2))
    assert one == same != other and trained[0] == trained[2] != trained[1] and trained[0] != one


def test_a_list_of_a_rules_class_decides_the_fingerprint():
    light, heavy, again = (type('Rule', (WithList,), dict(W=[w], __module__=__name__))() for w in (0.2, 0.8, 0.2))
    one, other, same, *_ = keys(fuse=(light, heavy, again))
    assert one == same != other


def test_chance_of_mixed_galleries():
    assert cp.chance(rows(('m', 'a', 1, 1), ('m', 'a', 2, 1)).assign(gallery_size=[10, 20]))['a'] == pytest.approx(7.5)
