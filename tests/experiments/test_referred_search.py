from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from cis_nb import api
from cis_nb.api import Unsolved
from cis_nb.backbones.conditional_vit import conditional_vit
from cis_nb.backbones.features import TextMemory
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks.lrvsf_search import draw_bootstrap
from cis_nb.experiments.entries import Entry
from cis_nb.experiments.referred_search import (
    FILTERED,
    ReferredRun,
    TunedSum,
    bootstrap_table,
    cropped_entries,
    entries_with_prompts,
    growing_rankings,
    leads,
    paper_table,
    rank_referred,
    referred_evidence,
    visible_areas,
)
from cis_nb.experiments.pseudo_words import TunedFusion
from cis_nb.methods.condvit import CondViTMethod
from cis_nb.world.lrvsf import LRVSF_SIDE, split_products, visible_boxes_of, worn_address

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
    folder, _ = rank_referred([entry], world, [20], [entry.name])  # a task each, with and without the filter
    found = pd.read_parquet(folder / 'rankings.parquet').set_index('query_id')
    plain, filtered = (found[found.method == m] for m in (entry.name, entry.name + FILTERED))
    assert len(plain) == len(filtered) == 12 and (filtered['rank'] <= plain['rank']).all()
    assert (filtered.gallery_size < plain.gallery_size).all()


@pytest.mark.e2e
def test_a_task_is_encoded_once_for_rankings_filter_and_subsets(world, model, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    entry, task, encoded = condvit(model, condition='none'), world.tasks['category'], []
    whole = CondViTMethod.encode_queries
    monkeypatch.setattr(CondViTMethod, 'encode_queries', lambda m, q: encoded.append(len(q)) or whole(m, q))
    subsets = draw_bootstrap(task, [5], folds=3, n=8)
    folders = [growing_rankings(entry, task, [0, 20], True, subsets) for _ in range(2)]
    assert encoded == [12] and folders[0] == folders[1]
    scores = pd.read_parquet(folders[0] / 'bootstrap.parquet')
    assert set(scores.method) == {entry.name, entry.name + FILTERED} and set(scores.distractors) == {0, 5}
    other = growing_rankings(entry, task, [0, 20], True, draw_bootstrap(task, [5], folds=3, n=8, seed=1))
    assert other != folders[0]


def test_queries_of_one_outfit_are_redrawn_together():
    ranks = {'a': [1] * 10 + [2] * 10, 'b': [2] * 20}
    run = lines(ranks, seeds=(0,))
    alone = leads(run, 'a', ['b'], 5)['b'][0]
    run.per_query['family'] = run.per_query['query_id'] // 5  # four outfits, each found or lost as a whole
    tied = leads(run, 'a', ['b'], 5)['b'][0]
    assert tied['high'] - tied['low'] > 1.5 * (alone['high'] - alone['low'])


def test_visible_areas_count_pixels_of_whole_and_partial_images(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    item = next(i for i in split_products('test', 9) if len(i.outfit) > 2)
    which = item.outfit.index(item.product)
    addresses = [worn_address(item.outfit, 3), worn_address(item.outfit, 3, which), 'https://shop/a.jpg']
    for url in addresses[:2]:
        queries = pd.DataFrame(dict(query_id=[str(item.product.id)], reference=[url]))
        area = visible_areas(SimpleNamespace(queries=queries))
        left, top, right, bottom = visible_boxes_of(url)[item.product.id]
        assert 0 < area[str(item.product.id)] <= 1.05 * 100 * (right - left) * (bottom - top) / LRVSF_SIDE**2
    photographs = pd.DataFrame(dict(query_id=['1'], reference=addresses[2:]))
    assert len(visible_areas(SimpleNamespace(queries=photographs))) == 0


def test_a_table_of_subsets_has_the_largest_gallery_once():
    run = lines({'condvit_category': [1] * 15 + [2] * 5}, seeds=(0, 1))
    run.per_query['category_hit'] = 1.0
    run.benchmark = SimpleNamespace(tasks={'category': None})
    values = [(d, fold, s, 50 + 10 * fold + 4 * s) for d in (0, 2, 5) for fold in (0, 1) for s in (0, 1)]
    scores = pd.DataFrame(values, columns=['distractors', 'fold', 'seed', 'value'])
    scores = scores.assign(method='condvit_category', task='category', k=1)
    run.bootstrap = pd.concat([scores.assign(metric='recall'), scores.assign(metric='cat_acc', value=90.0)])
    (row,) = bootstrap_table(run).to_dict('records')
    assert row == {
        'method': 'CondViT (category)',
        'condition': 'category',
        '+0': '57.0 ± 7.07 / 90.0 ± 0.00',
        '+2': '57.0 ± 7.07 / 90.0 ± 0.00',
        '+5': '75.0 / 100.0',
    }
    assert bootstrap_table(run, []).empty


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
    assert (
        list(table)[:3] == ['method', 'backbone', 'condition'] and table.iloc[0]['+10K'] == '16.9 ± 1.45 / 67.4 ± 1.70'
    )
