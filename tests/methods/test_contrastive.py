"The contrastive loss and its measures at their edges: one pair, ties, one class, incomplete blocks."

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cis_nb.api import configure
from cis_nb.backbones.loading import load_backbone
from cis_nb.methods.contrastive import (
    ContrastiveConfig,
    ContrastivePlugin,
    auc,
    info_nce,
    probe_rows,
    retrieval,
    twin_hits,
    zero_shot,
)


def unit(n, d=8, seed=0):
    return F.normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_the_loss_equals_its_definition_for_features_of_any_length():
    image, text, scale = 7 * unit(6), 0.1 * unit(6, seed=1), torch.tensor(20.0)
    S = [[20 * F.cosine_similarity(a, b, 0) for b in text] for a in image]
    rows = [-torch.log_softmax(torch.stack(S[i]), 0)[i] for i in range(6)]
    columns = [-torch.log_softmax(torch.stack([r[i] for r in S]), 0)[i] for i in range(6)]
    assert torch.allclose(info_nce(image, text, scale), (sum(rows) + sum(columns)) / 12, atol=1e-5)


def test_the_loss_keeps_its_digits_in_reduced_precision():
    image, text, scale = unit(30), unit(30, seed=1), torch.tensor(100.0)
    exact = info_nce(image, text, scale)
    with torch.autocast('cpu', torch.bfloat16):
        assert info_nce(image, text, scale) == exact


def test_one_pair_has_no_loss_and_a_zero_feature_a_finite_one():
    one = torch.tensor(1.0)
    assert info_nce(unit(1), unit(1, seed=1), one) == 0
    image = unit(3)
    image[1] = 0
    image.requires_grad_()
    info_nce(image, unit(3, seed=1), one).backward()
    assert torch.isfinite(image.grad).all()


def test_retrieval_leaves_out_an_incomplete_block_and_compares_within_blocks():
    u = unit(25)
    twice = torch.cat([u, u])  # every image has its copy 25 places on: in another block it does no harm
    assert retrieval(twice, twice, 25).all() and not retrieval(twice, twice, 50).any()
    assert retrieval(u, u, 10).shape == (2, 20) and retrieval(u[:4], u[:4], 10).shape == (2, 4)


def test_equal_twins_are_no_hits():
    same = unit(1).expand(4, -1)
    assert not twin_hits(same, same).any()


@pytest.mark.parametrize('there', [[0, 0, 0], [1, 1, 1]])
def test_one_class_alone_has_no_area_and_is_left_out(there):
    assert np.isnan(auc([0.1, 0.2, 0.3], there))
    labels = np.stack([there, [0, 1, 1]], 1)
    assert zero_shot(unit(3), unit(2, seed=1), labels).shape == (1,)


def test_results_name_the_gallery_that_was_ranked():
    rows, protocols = probe_rows({'image to caption': np.ones(7), 'presence': np.ones(3)}, 'a/folder')
    assert [p.gallery for p in protocols] == ['7 captions', 'the prompts of the probe']
    assert rows.metric.tolist() == ['recall', 'auc'] and rows.benchmark.tolist() == ['pairs/folder'] * 2


def test_a_training_on_products_reads_their_images_and_is_named_by_them(store):
    backbone, plugin = load_backbone('tiny_xs', 'none', device='cpu'), ContrastivePlugin()
    given = dict(content='products', samples=6, val_samples=4)
    inputs = [plugin.inputs(backbone, configure(ContrastiveConfig, given | dict(samples=n))) for n in (6, 7)]
    assert inputs[0] != inputs[1]
    o = plugin.objective(backbone, configure(ContrastiveConfig, given))
    assert torch.isfinite(o.loss(o.prepare(range(5), np.random.default_rng(0))))
    assert set(o.validate()) == {'mean', 'image to caption', 'caption to image'}
    assert set(o.evaluation(method='x').rows.benchmark) == {'pairs/world-products'}
