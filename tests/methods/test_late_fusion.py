"Late fusion: settings come from other queries than those that are ranked."

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from cis_nb import api
from cis_nb.api import Unsolved
from cis_nb.backbones.loading import load_backbone
from cis_nb.methods import late_fusion as lf
from cis_nb.retrieval.protocol import rank_task, with_text
from cis_nb.world.composed import composed_root

pytestmark = pytest.mark.usefixtures('store')


@pytest.fixture(scope='module')
def model():
    return load_backbone('tiny_xs', device='cpu')


@pytest.fixture
def cirr(store):
    return api.get('benchmark', 'cirr').load('world', 100, seed=2)


@pytest.mark.parametrize('evaluated, tuned', [(0, 1), (1, 0), (2, 0), (3, 0)])
def test_settings_are_chosen_on_another_world(evaluated, tuned, monkeypatch):
    asked = []
    monkeypatch.setattr(
        lf, 'validation_benchmark', lambda *about: asked.append(about) or (_ for _ in ()).throw(Unsolved)
    )
    task = type('T', (), dict(name='cirr', task='full'))
    with pytest.raises(Unsolved):
        lf.validation_task(task, 'world', evaluated)
    assert asked == [('cirr', 'world', tuned)]


def test_a_benchmark_without_other_queries_is_left_out_with_the_reason(cirr):
    task = cirr.tasks['full']
    with pytest.raises(Unsolved, match='mit_states: photographs has no other queries'):
        lf.validation_benchmark('mit_states', 'photographs', 0)
    with pytest.raises(Unsolved, match='no registered benchmark'):
        lf.validation_task(replace(task, name='mine'))
    with pytest.raises(Unsolved, match='no such file|missing|no validation queries'):
        lf.validation_task(task, 'nowhere')


def test_the_weight_does_not_depend_on_the_queries_that_are_ranked(cirr, model):
    whole, half = cirr.tasks['full'], replace(cirr.tasks['full'], queries=cirr.tasks['full'].queries[:5])
    one, two = (lf.TUNED_SUM.untrained(model, world_seed=2).for_task(t) for t in (whole, half))
    assert one.fuse.keywords == two.fuse.keywords and one.fingerprint == two.fingerprint


def test_another_prompt_is_another_setting(cirr, model):
    m = lf.SCORE_PRODUCT.untrained(model, world_seed=2)
    bare, asked = (b.tasks['full'] for b in (cirr, with_text(cirr, 'a photo of {condition}')))
    assert m.for_task(bare) is m.for_task(bare) is not m.for_task(asked)
    assert m.for_task(bare).text_range != m.for_task(asked).text_range


def test_the_product_ranks_by_both_similarities(cirr, model):
    task = cirr.tasks['full']
    m = lf.SCORE_PRODUCT.untrained(model, world_seed=2).for_task(task)
    one = torch.eye(4, model.D)[:1]
    q = torch.cat([one, torch.eye(4, model.D)[1:2]], 1) / 2**0.5
    gallery = torch.eye(4, model.D) + torch.eye(4, model.D)[[1, 0, 2, 3]]  # the first two are like both halves
    scores = m.score(q, gallery)[0]
    assert scores[0] == scores[1] > scores[2] == scores[3]
    per_query = rank_task(m, task, (1,))
    assert len(per_query) == len(task) and np.isfinite(per_query['rank']).all()


def test_the_strongest_baseline_is_named_by_validation_queries():
    a = lf.TunedSum(name='image_text_tuned', backbone=None, validation=None, read=object())
    b = lf.TunedProduct(name='score_product', backbone=None, validation=None, read=object())
    a.validated, b.validated = dict(full=30.0, subset=10.0), dict(full=20.0, subset=40.0)
    found = [lf.strongest_baseline([a, b], t) for t in (['full'], ['subset'], ['full', 'subset'], ['other'], [])]
    assert found == ['image_text_tuned', 'score_product', 'score_product', 'image_text', 'image_text']


@pytest.mark.e2e
def test_validation_queries_lie_in_the_store_of_the_moment(tmp_path, monkeypatch):
    "The same world may be drawn in a store that is deleted afterwards."
    for name in ('first', 'second'):
        monkeypatch.setenv('CIS_STORE', str(tmp_path / name))
        task = next(iter(lf.validation_benchmark('cirr', 'world', 1).tasks.values()))
        assert task.source.load(task.source.ids[0]).width
        shutil.rmtree(tmp_path / name)


def test_annotations_that_are_edited_in_place_are_read_again(tmp_path, store, monkeypatch):
    "Real data may be mended while a process, such as a notebook, is running."
    root = tmp_path / 'data'
    shutil.copytree(composed_root(cirr=60, seed=1), root / 'cirr')
    monkeypatch.setenv('CIS_DATA', str(root))
    file = next((root / 'cirr').rglob('cap.rc2.train.json'))
    before = lf.validation_benchmark('cirr', 'published', 0)
    assert lf.validation_benchmark('cirr', 'published', 0) is before
    entries = json.loads(file.read_text())
    entries[0]['caption'] = 'is something else'
    file.write_text(json.dumps(entries))
    after = lf.validation_benchmark('cirr', 'published', 0)
    first = [b.tasks['full'].queries.condition[0] for b in (before, after)]
    assert first[0] != 'is something else' == first[1]
