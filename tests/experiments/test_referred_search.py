import numpy as np
import pandas as pd
import pytest

from cis_nb import api
from cis_nb.api import Unsolved
from cis_nb.backbones.conditional_vit import conditional_vit
from cis_nb.backbones.features import TextMemory
from cis_nb.backbones.loading import load_backbone
from cis_nb.experiments.entries import Entry
from cis_nb.experiments.referred_search import (
    FILTERED,
    ReferredRun,
    TunedSum,
    cropped_entries,
    entries_with_prompts,
    leads,
    paper_table,
    rank_referred,
    referred_evidence,
)
from cis_nb.experiments.pseudo_words import TunedFusion
from cis_nb.methods.condvit import CondViTMethod

NAMES = {'condvit_category': 'CondViT (category)', 'vit_products' + FILTERED: 'ViT, filtered by category'}


@pytest.fixture(scope='module')
def world():
    return api.get('benchmark', 'lrvsf').load('world', 12, 0, distractors=20)


@pytest.fixture(scope='module')
def model():
    return load_backbone('tiny_xs', device='cpu')


def condvit(model, **options):
    net = conditional_vit(model, 0, **options).eval()
    return Entry(CondViTMethod(name='condvit', title='CondViT', backbone=model, net=net))


def lines(ranks: dict, seeds=(0, 1, 2)):
    "Rankings of twenty queries by method, the same for every training seed."
    rows = [
        dict(method=m, seed=s, draw=0, task='category', query_id=q, reference=q, rank=r, gallery_size=9, distractors=5)
        for m, ranked in ranks.items()
        for s in seeds
        for q, r in enumerate(ranked)
    ]
    return ReferredRun(None, None, [], [], pd.DataFrame(rows), {m: NAMES.get(m, m) for m in ranks})


@pytest.mark.e2e
def test_a_model_is_ranked_on_the_tasks_that_it_can_read(world, model, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    entries = [condvit(model), condvit(model, condition='text', text_width=model.D)]
    folders = rank_referred(entries, world, [0, 20])
    tasks = [pd.read_parquet(f / 'rankings.parquet').task.unique().tolist() for f in folders]
    assert tasks == [['category'], ['text']]
    with pytest.raises(Unsolved, match='is no category of this model'):
        entries[0].method.for_task(world.tasks['text'])


@pytest.mark.e2e
def test_filtered_rankings_are_kept_apart_and_never_worse(world, model, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    entry = condvit(model, condition='none')
    found = [pd.read_parquet(f / 'rankings.parquet') for f in rank_referred([entry], world, [20], [entry.name])]
    plain, filtered = (t[t.task == 'category'].set_index('query_id') for t in found[:2])
    assert set(filtered.method) == {entry.name + FILTERED} and (filtered['rank'] <= plain['rank']).all()
    assert (filtered.gallery_size < plain.gallery_size).all()


def test_the_tuned_sum_has_a_weight_for_each_condition_and_says_it(world, model):
    curves = dict(category={0.0: 5.0, 0.5: 9.0, 1.0: 9.0}, text={0.0: 1.0, 0.5: 2.0, 1.0: 3.0})
    m = TunedSum(TunedFusion(curves, TextMemory(model)))
    assert (m.title, m.note) == ('Image + Text, tuned', 'Its share of the text: 0.5 by category, 1.0 by text.')
    ref, texts = np.ones((1, model.D), np.float32), ['a red hat']
    by_text = m.for_task(world.tasks['text']).encode_query(ref, texts)
    assert np.allclose(by_text, m.fusion.read(texts) / m.fusion.read(texts).norm(), atol=1e-6)
    other = TunedSum(TunedFusion(dict(curves, text={0.0: 4.0}), m.fusion.read))
    assert other.fingerprint != m.fingerprint
    with pytest.raises(Unsolved, match='no weight was chosen; there are category'):
        TunedSum(TunedFusion(dict(category={0.0: 1.0}), m.fusion.read)).for_task(world.tasks['text'])


@pytest.mark.e2e
def test_trainings_answer_with_a_prompt_and_see_crops(model, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    (e,) = entries_with_prompts({'lincir': '$ , {condition}'}, [0], 'cpu')
    assert (e.method.prompt, e.title) == ('$ , {condition}', 'LinCIR, “$ , {condition}”')
    given = dict(cropped=['vit_products'], seeds=[0, 1], detector='windows', device='cpu')
    crops = cropped_entries(given, model)
    assert [(c.name, c.seed) for c in crops] == [
        (f'vit_products_{crop}', seed) for seed in (0, 1) for crop in ('detector_crop', 'true_box_crop')
    ]
    assert len({c.method.fingerprint for c in crops}) == 4


def test_evidence_says_by_how_much_condvit_leads():
    good, bad = np.ones(20, int), np.full(20, 4)
    (found,) = referred_evidence(lines(dict(zip(NAMES, (good, bad)))), 5)['L05']
    assert (found['diff'], found['low'], found['high']) == (100, 100, 100)
    (found,) = referred_evidence(lines(dict(zip(NAMES, (bad, good)))), 5)['L05']
    assert found['diff'] == -100 and referred_evidence(lines({'condvit_category': good}), 5) == {}


def test_leads_are_one_for_each_seed():
    found = leads(lines(dict(zip(NAMES, ([1, 2] * 10, [2, 2] * 10)))), *map(str, list(NAMES)[:1]), list(NAMES)[1:], 5)
    assert [c['diff'] for c in found[list(NAMES)[1]]] == [50, 50, 50]


def test_an_unranked_number_of_distractors_is_refused():
    with pytest.raises(ValueError, match=r'distractors: 7 were not ranked; there are \[5\]'):
        lines({'condvit_category': [1] * 20}).among(7)


def test_printed_tables_keep_their_order():
    table = paper_table('lrvsf_table1')
    assert list(table)[:3] == ['method', 'backbone', 'condition'] and table.iloc[0]['+10K'] == '16.9 / 67.4'
