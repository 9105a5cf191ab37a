"ARTEMIS-like scorer and re-ranker: any gallery against the definition, equal images, damaged files and features."

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from cis_nb.backbones.features import Features
from cis_nb.data.image_sources import ImageSource
from cis_nb.methods import artemis as A
from cis_nb.methods.baselines import image_text, method
from cis_nb.retrieval.protocol import Protocol, Task, rank_task
from cis_nb.training.validation import write_net

D = 6


class MadeUp:
    "A backbone whose features are drawn by the name of an image up to a dash, or by a text."

    name = fingerprint = 'made-up'
    D = W = D

    def draw(self, word):
        return np.random.default_rng([*str(word).split('-')[0].encode()]).normal(size=D).astype(np.float32)

    def features(self, images):
        array = np.stack([self.draw(i) for i in images.ids])
        return Features(array, images.ids, {i: j for j, i in enumerate(images.ids)})

    def encode_text(self, texts):
        return torch.tensor(np.stack([self.draw(t) for t in texts]))


def task(ids, Q=9, own=0, reference='removed', seed=0):
    "Q queries over the images `ids`; with `own` each has a gallery of so many."
    rng, rows = np.random.default_rng(seed), []
    for k in range(Q):
        gallery = list(rng.permutation(ids)[:own]) if own else None
        target = str(rng.choice(gallery or ids))
        ref = str(rng.choice([i for i in ids if i != target and i not in (gallery or ())]))
        rows.append((str(k), ref, f'text {k}', [target], gallery))
    q = pd.DataFrame(rows, columns=['query_id', 'reference', 'condition', 'targets', 'gallery'])
    source = ImageSource(ids, None, 'made-up')
    shared = None if own else ids
    return Task('toy', 'toy', q, None, Protocol('toy', reference=reference), ids, shared, source=source)


@pytest.fixture(scope='module')
def methods():
    torch.manual_seed(0)
    net, backbone = A.Artemis(D).eval(), MadeUp()
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3.0) if p.ndim else None
    return A.ArtemisMethod(name='artemis', title='a', backbone=backbone, net=net), method('image_text', backbone)


def two_stages(scorer, first, t, k):
    "The definition: sort by the sum, sort the first k by the score."
    b, tops = first.backbone, []
    with torch.no_grad():
        for r in t.queries.itertuples():
            out = {r.reference} if t.protocol.reference == 'removed' else set()
            ids = [i for i in (t.shared_gallery or r.gallery) if i not in out]
            x = torch.tensor(np.stack([b.draw(i) for i in ids]))
            ref, text = torch.tensor(b.draw(r.reference))[None], b.encode_text([r.condition])
            by_sum = (image_text(ref, text) @ torch.nn.functional.normalize(x, dim=-1).T)[0]
            by_score = A.artemis_scores(scorer.net(ref, text), x)[0]
            order = by_sum.argsort(descending=True).tolist()
            again = sorted(order[:k], key=lambda j: -by_score[j])
            tops.append([ids[j] for j in again + order[k:]])
    return tops


@pytest.mark.parametrize('k', [1, 3, 7, 40])
@pytest.mark.parametrize('given', [{}, dict(reference='kept'), dict(own=8), dict(own=4)])
def test_a_reranker_sorts_the_first_k_of_any_gallery(methods, k, given):
    t = task([f'image{i}' for i in range(30)], **given)
    found = rank_task(A.ReRanker(*methods, k).for_task(t), t, (1,), 30)
    tops = two_stages(*methods, t, k)
    assert found.top.tolist() == tops
    assert found['rank'].tolist() == [top.index(x[0]) + 1 for top, x in zip(tops, t.queries.targets)]


def test_images_that_are_equal_to_the_last_are_ordered_too(methods):
    "Twins have equal features: both are among the first, or both are not."
    t = task([f'image{i}-{twin}' for i in range(8) for twin in 'ab'], reference='kept')
    for top in rank_task(A.ReRanker(*methods, 5).for_task(t), t, (1,), 16).top:
        pairs = [i.split('-')[0] for i in top]
        assert pairs[::2] == pairs[1::2]
    by_sum, both = (ranking(m, t) for m in (methods[1], A.ReRanker(*methods, 5).for_task(t)))
    assert all({*a[:6]} == {*b[:6]} and a[6:] == b[6:] for a, b in zip(by_sum, both))


def ranking(m, t):
    "The pairs of twins in the order of their first."
    return [[i.split('-')[0] for i in top] for top in rank_task(m, t, (1,), 16).top]


def test_the_score_needs_no_gallery_in_one_piece(methods):
    "Chunks of a gallery and a gallery for each query have the same scores."
    t, (scorer, _) = task([f'image{i}' for i in range(30)]), methods
    q, x = scorer.encode_queries(t.as_queries()), torch.tensor(scorer.encode_gallery(t.source).array)
    whole = scorer.score(q, x)
    assert torch.allclose(torch.cat([scorer.score(q, part) for part in x.split(7)], 1), whole, atol=1e-6)
    assert torch.allclose(scorer.score(q, x.expand(9, -1, -1)), whole, atol=1e-5)


def test_a_damaged_feature_names_the_image(methods):
    t = task([f'image{i}' for i in range(30)])
    scorer = A.ArtemisMethod(name='artemis', title='a', backbone=MadeUp(), net=methods[0].net)
    scorer.encode_gallery(t.source).array[7, 2] = np.nan
    with pytest.raises(ValueError, match="score of candidate 'image7' is nan"):
        rank_task(scorer, t, (1,))


def test_a_damaged_run_says_so(tmp_path):
    about = dict(D=D, backbone='tiny', pretrained='default', fingerprint='x')
    write_net(tmp_path, 'artemis', A.Artemis(D), about)
    assert A.read_artemis(tmp_path)[1] == about
    file = tmp_path / 'artemis.safetensors'
    weights = load_file(file)
    weights.pop('transform.bias')
    save_file(weights, file)
    with pytest.raises(ValueError, match='(?s)artemis.safetensors or its .json is damaged .*train again'):
        A.read_artemis(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match='is not a run of `method: artemis`'):
        A.read_artemis(tmp_path)
