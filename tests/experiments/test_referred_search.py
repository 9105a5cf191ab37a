from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from condvit_files import published_shapes, random_file
from lrvsf_files import Hand, MadeUp

from cis_nb import api
from cis_nb.api import Unsolved
from cis_nb.backbones.conditional_vit import conditional_vit
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks.lrvsf_search import draw_bootstrap
from cis_nb.core.experiment_files import experiments
from cis_nb.core.store import project_root
from cis_nb.experiments import referred_search as rs
from cis_nb.experiments.claims import CERTAIN, NOT_HERE, joined_evidence, judge_evidence, kept_receipts
from cis_nb.experiments.combiner_ablations import OWN_COMPARISON, TOO_LOW, UNTESTED
from cis_nb.experiments.comparison import UNTRAINED, by_own_p, verdict
from cis_nb.experiments.entries import Entry
from cis_nb.experiments.prompts import PromptChoice
from cis_nb.experiments.referred_search import (
    CONDVITS,
    CROP,
    FILTERED,
    SIZE_CLAUSES,
    CategoryWords,
    ReferredRun,
    cannot_read,
    category_captions,
    category_words,
    held_out_tasks,
    referred_finding,
    late_fusions,
    longer_runs_note,
    accuracy_lines,
    bootstrap_table,
    caption_gain,
    chance_within,
    cropped_entries,
    entries_with_prompts,
    falls,
    filter_gain,
    printed_filter,
    gallery_among,
    growing_rankings,
    joined_table,
    late_fusion,
    leads,
    main_methods,
    over_filter,
    over_text,
    paper_table,
    rank_referred,
    referred_evidence,
    referred_rivals,
    rival_notes,
    run_referred,
    size_slopes,
    slope_interval,
    visible_areas,
)
from cis_nb.methods.late_fusion import weighted_sum
from cis_nb.methods import condvit as condvit_module
from cis_nb.methods.condvit import CondViTMethod
from cis_nb.methods.detector_crop import LearnedWindows, crop_method
from cis_nb.methods.pseudo_words import PseudoWord, make_net
from cis_nb.train import settings
from cis_nb.world.lrvsf import LRVSF_SIDE, split_products, visible_boxes_of, worn_address

PRINTED = 10_000  # distractors of the smallest gallery that the paper prints
NAMES = {'condvit_category': 'CondViT (category)', 'vit_products' + FILTERED: 'ViT, filtered by category'}


@pytest.fixture(scope='module')
def world():
    return api.get('benchmark', 'lrvsf').load('world', 12, 0, distractors=20)


@pytest.fixture(scope='module')
def model():
    return load_backbone('tiny_xs', device='cpu')


@pytest.fixture(autouse=True)
def sizes_up_to_10k(monkeypatch):
    "The runs of these tests have no larger gallery, and so miss none."
    every = rs.printed_galleries
    monkeypatch.setattr(rs, 'printed_galleries', lambda *table: [s for s in every(*table) if s in ('+0', '+10K')])
    return every


def condvit(model, **options):
    net = conditional_vit(model, 0, **options).eval()
    return Entry(CondViTMethod(name='condvit', title='CondViT', backbone=model, net=net))


def lines(ranks: dict, distractors=5, seeds=(0, 1, 2)):
    "Rankings of twenty queries by method, the same for every training seed."
    about = dict(draw=0, task='category', gallery_size=9, distractors=distractors)
    rows = [
        dict(method=m, seed=s, query_id=q, reference=q, rank=r, **about)
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
def test_filtered_rankings_are_kept_apart_and_hold_the_category_of_the_query(world, model, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    entry = condvit(model, condition='none')
    folder, _ = rank_referred([entry], world, [20], [entry.name])  # a task each, with and without the filter
    found = pd.read_parquet(folder / 'rankings.parquet').set_index('query_id')
    plain, filtered = (found[found.method == m] for m in (entry.name, entry.name + FILTERED))
    assert len(plain) == len(filtered) == 12 and (plain.gallery_size == 12 + 20).all()
    task = world.tasks['category']
    asked, of = task.queries.set_index('query_id').condition, task.category_of
    sizes = pd.Series([of[i] for i in gallery_among(task, 20)]).value_counts()
    assert (filtered.gallery_size == asked.map(sizes)[filtered.index]).all()
    assert [of[i] for i in filtered['first']] == asked[filtered.index].tolist()


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
    alone = leads(run, 'a', ['b'], 5)['b']
    outfits = run.per_query.assign(family=run.per_query['query_id'] // 5)  # four, each found or lost as a whole
    tied = leads(replace(run, per_query=outfits), 'a', ['b'], 5)['b']
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


def test_late_fusions_are_set_for_each_condition_and_say_how(world, model):
    tuned, by_product = late_fusions(model, 'world', 12, ['text'])
    curve = {0.0: 1.0, 0.5: 2.0, 1.0: 3.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('cis_nb.methods.late_fusion.text_weight_curve', lambda task, read: curve)
        by_text = tuned.for_task(world.tasks['text'])
    n = tuned.sizes['text']
    assert tuned.note == f'Image + Text, tuned, weight of the text, one of 11: 1 (Text, on {n} validation queries)'
    ref, texts = np.ones((1, model.D), np.float32), ['a red hat']
    assert np.allclose(by_text.encode_query(ref, texts), tuned.read(texts) / tuned.read(texts).norm(), atol=1e-6)
    score = by_product.for_task(world.tasks['text']).score
    assert score(torch.ones(2, 2 * model.D), torch.ones(3, model.D)).shape == (2, 3)
    assert by_text.fingerprint != weighted_sum(0.5, tuned.read).fingerprint
    with pytest.raises(Unsolved, match='nothing was set for it; there are text'):
        tuned.for_task(world.tasks['category'])


@pytest.mark.e2e
def test_trainings_answer_with_a_prompt_and_see_crops(world, model, tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    e, *controls = entries_with_prompts({'lincir': '$ , {condition}'}, [0], 'cpu')
    assert [c.name for c in controls] == ['lincir_start', 'lincir_prompt'] and not any(c.run for c in controls)
    assert {c.method.prompt for c in controls} == {'$ , {condition}'}
    assert e.method.words == {} and (e.method.prompt, e.title) == ('$ , {condition}', 'LinCIR, “$ , {condition}”')
    several, held_out = (
        ['a photo of $ {condition}', '{condition} of $'],
        held_out_tasks(model, 'world', 12, world.tasks),
    )
    best = dict(zip(world.tasks, several))
    monkeypatch.setattr(PromptChoice, 'score', lambda _, prompt, queries: float(prompt == best[queries.task]))
    chosen, *controls = entries_with_prompts({'lincir': several}, [0], 'cpu', held_out, {'Feet': ['boots']})
    assert all(c.method.choice is chosen.method.choice for c in controls)
    assert {name: chosen.method.for_task(task).prompt for name, task in world.tasks.items()} == best
    assert chosen.title == 'LinCIR, chosen prompt' and chosen.method.for_task(world.tasks['text']).words['Feet'] == [
        'boots'
    ]
    said = rival_notes(ReferredRun(None, None, [chosen], [], None, {}))
    assert 'LinCIR, chosen prompt: “a photo of $ {condition}” (category); “{condition} of $” (caption).' in said
    assert 'on validation queries (category 12, caption 12): one of 2 prompts' in said
    with pytest.raises(ValueError, match="'lincir' has 2; give one, or val_products, which choose it"):
        entries_with_prompts({'lincir': several}, [0], 'cpu')
    given = dict(cropped=['vit_products'], seeds=[0, 1], detector='windows', device='cpu')
    crops = cropped_entries(given, model)
    assert [(c.name, c.seed) for c in crops] == [
        (f'vit_products_{crop}', seed) for seed in (0, 1) for crop in ('detector_crop', 'true_box_crop')
    ]
    assert len({c.method.fingerprint for c in crops}) == 4


def test_a_prompt_with_words_of_captions_finds_the_category_more_often_than_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    backbone = load_backbone('tiny_products', device='cpu')
    task = api.get('benchmark', 'lrvsf').load('world', 160, 3, distractors=60).tasks['category']
    captions = category_captions('world', 60, backbone.image_size)
    words = category_words(captions)
    assert all(any(w in caption.split() for caption in captions[c]) for c, some in words.items() for w in some[:2])
    assert not [c for c, some in words.items() if c.lower() in some]
    phi = make_net('phi', D=backbone.D, W=backbone.W, hidden=8).eval()
    by_name = PseudoWord(name='lincir', title='LinCIR', backbone=backbone, phi=phi, prompt='$ , {condition}')
    found = [growing_rankings(Entry(m), task, [60]) for m in (by_name, CategoryWords(by_name, words))]
    name, several = (pd.read_parquet(folder / 'rankings.parquet').category_hit.mean() for folder in found)
    assert several > 2 * name and several > 0.3


def test_the_finding_says_what_a_filtered_crop_knows(world, model):
    ours, crop = CONDVITS['category'], CROP + FILTERED
    run = lines({ours: [1] * 20, crop: [3] * 20}, seeds=(0,))
    rows = [dict(metric='recall', method=m, value=v) for m, v in {ours: 3.0, crop: 4.0}.items()]
    results = pd.DataFrame(rows).assign(task='category', distractors=20, k=1, ci_low=0.0)
    gains = {crop: dict(low=-2.0, high=-1.0, diff=-1.5, seed_intervals=[])}
    for detector, boxes in ((LearnedWindows(model), True), (SimpleNamespace(name='owlv2'), False)):
        run.benchmark, run.entries = world, [SimpleNamespace(name=CROP, method=SimpleNamespace(detector=detector))]
        said = referred_finding(run, results, gains, ours, 20)
        assert 'knows the category of each gallery image) 4.0 %' in said and ('learned from boxes' in said) == boxes


def test_a_rival_that_cannot_read_the_category_is_named_and_not_counted(world):
    method = CategoryWords(SimpleNamespace(name='lincir', title='', backbone=None, encode_gallery=0, score=0), {})
    run = lines({CONDVITS['category']: [1] * 20, 'lincir': [3] * 20, 'image_only': [3] * 20}, seeds=(0,))
    run.benchmark, run.entries = world, [SimpleNamespace(name='lincir', method=method)]
    recalls = {CONDVITS['category']: 9.0, 'lincir': 1.0, 'vit_products': 3.0}
    rows = [dict(metric='recall', method=m, value=v) for m, v in recalls.items()]
    rows += [dict(metric='cat_acc', method='lincir', value=12.0, ci_low=low) for low in (1.0, 2.0)]
    results = pd.DataFrame(rows).assign(task='category', distractors=20, k=1)
    gains = {
        m: dict(low=1.0, high=h, diff=1.5, seed_intervals=[]) for m, h in dict(lincir=2.0, vit_products=3.0).items()
    }
    run.titles |= dict(vit_products='ViT')
    assert cannot_read(run, results, 20) == ['lincir']
    said = referred_finding(run, results, gains, CONDVITS['category'], 20)
    assert '. Better than 1 of 1 rivals. Cannot read the category: lincir. Not compared: ' in said
    read = results.assign(ci_low=99.0)
    run.titles |= dict(image_text='Even', image_text_tuned='Tuned')
    names = ('image_text', 'image_text_tuned')
    alike = referred_finding(
        run,
        read.replace({'lincir': names[0], 'vit_products': names[1]}),
        dict.fromkeys(names, gains['lincir']),
        CONDVITS['category'],
        20,
    )
    assert '. Better than 1 of 1 rivals. Not counted, as its weight is the even one: Tuned. Not compared: ' in alike
    assert cannot_read(run, read, 20) == [] and '. Better than 2 of 2 rivals. Not' in referred_finding(
        run, read, gains, CONDVITS['category'], 20
    )


@pytest.mark.e2e  # networks of the published size
def test_published_checkpoints_are_ranked_on_files_of_the_published_layout(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    Hand(products=3, distractors=2).write(tmp_path / 'lrvsf')
    e = experiments('paper', name='06_evaluation/lrvsf.published')['06_evaluation/lrvsf.published']
    p = e.defaults | e.params | dict(backbone='tiny_xs', device='cpu', first_step=1)
    with pytest.raises(FileNotFoundError, match='condvit-b16-cat.safetensors is missing; Get it from https://hugging'):
        run_referred(p, referred_rivals(p))
    random_file(tmp_path / 'condvit-b16-cat.safetensors', published_shapes(16, True))
    random_file(tmp_path / 'condvit-b16-txt.safetensors', published_shapes(16, False))
    monkeypatch.setattr(condvit_module, 'SentenceTexts', lambda *_: MadeUp(dim=768))
    run = run_referred(p, referred_rivals(p))
    assert run.titles['condvit_category'] == 'CondViT (category), vit_b16' and run.steps == [0, 1, 2]
    ranked = run.per_query.groupby('method').task.unique().map(list)
    assert ranked.condvit_category == ['category'] and ranked.condvit_text == ['text'] and 'image_only' in ranked
    assert (run.per_query.groupby(['method', 'task', 'distractors']).size() == 3).all()


def test_evidence_says_by_how_much_condvit_leads():
    good, bad = np.ones(30, int), np.full(30, 4)
    (found,) = referred_evidence(lines(dict(zip(NAMES, (good, bad)))), 5)['L05']
    assert (found['diff'], found['low'], found['high']) == (100, 100, 100)
    assert found['what'].endswith(
        ', 100.0 against 0.0 % (paper, +2M: 59.0 to 68.4 against 55.1 to 62.4 %), 5 distractors'
    )
    assert found['role'] == OWN_COMPARISON  # the paper has no gallery as small as this
    (found,) = referred_evidence(lines(dict(zip(NAMES, (good, bad))), PRINTED), PRINTED)['L05']
    assert 'role' not in found and '(paper, +10K: 90.9 to 93.3 against ' in found['what']
    (found,) = referred_evidence(lines(dict(zip(NAMES, (bad, good)))), 5)['L05']
    assert found['diff'] == -100 and referred_evidence(lines({'condvit_category': good}), 5) == {}


def test_every_printed_gallery_with_enough_hits_is_judged(monkeypatch, sizes_up_to_10k):
    monkeypatch.setattr(rs, 'printed_galleries', sizes_up_to_10k)
    good, bad = np.ones(30, int), np.full(30, 4)
    large, small = ([1] * hits + [3] * (30 - hits) for hits in (25, 24))
    galleries = {5000: (good, bad), PRINTED: (good, bad), 20_000: (good, bad), 100_000: (large, bad)}
    parts = {n: lines(dict(zip(NAMES, ranks)), n) for n, ranks in galleries.items()}
    run = replace(parts[PRINTED], per_query=pd.concat([part.per_query for part in parts.values()]))
    *found, rest = over_filter(run, 100_000)
    assert [c['what'].rsplit(', ', 1)[1] for c in found] == ['10,000 distractors', '100,000 distractors']
    assert judge_evidence(found).verdict == 'reproduced' and judge_evidence([*found, rest]).verdict == 'undecided'
    assert rest['role'] == UNTESTED and rest['what'].endswith('; not ranked here: +1M, +2M')
    rare = lines(dict(zip(NAMES, (small, bad))), 100_000).per_query
    judged, rest = over_filter(replace(run, per_query=pd.concat([parts[PRINTED].per_query, rare])), 100_000)
    assert 'role' not in judged and '; too few hits among 100,000 distractors: 24; ' in rest['what']
    (few,) = over_filter(replace(run, per_query=rare), 100_000)
    assert few['role'] == UNTESTED and judge_evidence([few]).verdict == NOT_HERE
    worse = replace(run, per_query=lines(dict(zip(NAMES, (bad, good))), PRINTED).per_query)
    assert judge_evidence(over_filter(worse, PRINTED)).verdict == 'not reproduced'  # the best of both has the hits


def test_no_claim_on_methods_is_judged_in_a_gallery_that_the_paper_does_not_print():
    text, fusion, category = ('text', 'condvit_text'), ('text', 'clip4cir_products'), ('category', 'condvit_category')
    hits = {text: 0.9, fusion: 0.6, category: 0.5, ('category', 'vit_products'): 0.3}
    areas = pd.Series(2.0 ** (np.arange(300) % 6), index=[str(q) for q in range(300)])
    for distractors, is_judged in ((5000, False), (PRINTED, True)):
        run = both_tasks(hits | {('category', 'vit_products' + FILTERED): 0.4}, distractors=distractors)
        run.per_query = pd.concat([run.per_query.assign(distractors=0), run.per_query])
        evidence = referred_evidence(run, distractors, areas=areas)
        for claim in ('L05', 'L09', 'L10', 'L14'):
            assert any('diff' in c for c in evidence[claim])
            assert any('diff' in c and 'role' not in c for c in evidence[claim]) == is_judged, claim
        assert all(c.get('role') == UNTESTED or is_judged for c in evidence['L14'] if 'clause' in c)


def test_leads_are_one_for_each_seed():
    found = leads(lines(dict(zip(NAMES, ([1, 2] * 10, [2, 2] * 10)))), *map(str, list(NAMES)[:1]), list(NAMES)[1:], 5)
    assert found[list(NAMES)[1]]['by_seed'] == [50, 50, 50]


def test_an_unranked_number_of_distractors_is_refused():
    with pytest.raises(ValueError, match=r'distractors: 7 were not ranked; there are \[5\]'):
        lines({'condvit_category': [1] * 20}).among(7)


def test_printed_tables_keep_their_order():
    table = paper_table('lrvsf_table1')
    assert (
        list(table)[:3] == ['method', 'backbone', 'condition'] and table.iloc[0]['+10K'] == '16.9 ± 1.45 / 67.4 ± 1.70'
    )


def both_tasks(hits: dict, accuracy: dict = None, n: int = 300, distractors: int = PRINTED) -> ReferredRun:
    "Rankings by task and method: of queries of which a share is solved, and with the category of another share."
    rng, rows, accuracy = np.random.default_rng(0), [], accuracy or {}
    for (task, m), share in hits.items():
        first, category = rng.random(n) < share, rng.random(n) < accuracy.get((task, m), 1.0)
        rows += [
            dict(method=m, seed=s, draw=0, task=task, query_id=str(q), reference=q, rank=1 if first[q] else 4)
            | dict(gallery_size=9, distractors=distractors, category_hit=float(category[q]))
            for s in (0, 1)
            for q in range(n)
        ]
    return ReferredRun(None, None, [], [], pd.DataFrame(rows), {m: m for _, m in hits})


def test_late_fusion_is_compared_by_caption():
    text, fusion = ('text', 'condvit_text'), ('text', 'clip4cir_products')
    by_category = {('category', 'condvit_category'): 0.9, ('category', 'clip4cir_products_category'): 0.1}
    trails, alike, cosmo, own = late_fusion(
        both_tasks({text: 0.9, fusion: 0.6, ('text', 'combiner_products'): 0.5} | by_category), PRINTED
    )
    assert (
        trails['what'] == 'R@1 under a caption: condvit_text − clip4cir_products, 10,000 distractors'
        and verdict(by_own_p(trails)) == 'better'
    )
    assert verdict(by_own_p(alike)) == 'worse' and alike['what'].startswith(
        'R@1 clip4cir_products − 0.9 × R@1 condvit_text, '
    )
    near = late_fusion(both_tasks({text: 0.9, fusion: 0.88} | by_category), PRINTED)
    assert verdict(by_own_p(near[1])) == 'better'
    assert cosmo['role'] == UNTESTED and 'CoSMo' in cosmo['what'] and own['role'] == OWN_COMPARISON
    assert set(referred_evidence(both_tasks(by_category), PRINTED)) == set()


def cropped_by(detector, accuracy: dict) -> ReferredRun:
    "`both_tasks` of CondViT and of a crop at the box of a detector, or of a stand-in with its name."
    run = both_tasks({('category', m): 0.5 for m in ('condvit_category', CROP)}, accuracy)
    found = SimpleNamespace(name=detector) if isinstance(detector, str) else detector
    return replace(run, entries=[SimpleNamespace(name=CROP, method=SimpleNamespace(detector=found))])


def test_category_accuracy_alone_is_half_of_a_claim():
    cat, crop = ('category', 'condvit_category'), ('category', CROP)
    half = judge_evidence(accuracy_lines(both_tasks({cat: 0.5}), PRINTED))
    assert half.verdict == 'undecided' and 'not tested: above the detection pipeline' in half.effect
    whole = judge_evidence(accuracy_lines(cropped_by('owlv2', {crop: 0.8}), PRINTED))
    assert (whole.verdict, len(whole.comparisons)) == ('reproduced', 2)
    below = judge_evidence(accuracy_lines(cropped_by('owlv2', {cat: 0.8}), PRINTED))
    assert below.verdict == 'not reproduced'


def test_windows_of_the_backbone_are_no_detection_pipeline(model):
    windows = crop_method('detector_crop', None, 'windows', model, 'cpu').detector
    run = cropped_by(windows, {('category', CROP): 0.8})
    accuracy, crop, missing = accuracy_lines(run, PRINTED)
    assert crop['role'] == OWN_COMPARISON and ' 100.0 − ' in crop['what'] and 'tiny_xs-windows, ' in crop['what']
    assert missing['role'] == UNTESTED and judge_evidence([accuracy, crop, missing]).verdict == 'undecided'


def test_windows_of_the_backbone_are_no_detection_pipeline_for_small_products_either(model):
    windows = crop_method('detector_crop', None, 'windows', model, 'cpu').detector
    assert isinstance(LearnedWindows(model), type(windows))
    run, areas = sized({'condvit_category': (0.5, 0.05), 'vit_products': (0.1, 0.15), CROP: (0.1, 0.15)})
    for detector, verdict_of_crop in ((windows, 'undecided'), (SimpleNamespace(name='owlv2'), 'not reproduced')):
        run.entries = [SimpleNamespace(name=CROP, method=SimpleNamespace(detector=detector))]
        found = size_slopes(run, areas, PRINTED)
        of_crop = [c for c in found if CROP in c['what'] and 'diff' in c]
        assert len(of_crop) == 3 and judge_evidence(found).verdict == verdict_of_crop
        own = {c.get('role') == OWN_COMPARISON for c in of_crop}
        assert own == {detector is windows} or verdict_of_crop == 'not reproduced'
    run.entries[0].method.detector = windows
    missing = [c['what'] for c in size_slopes(run, areas, PRINTED) if c.get('clause') == SIZE_CLAUSES[CROP]]
    assert missing == [f'{SIZE_CLAUSES[CROP]}; no open-vocabulary detector']


def test_accuracy_of_unknown_categories_is_no_evidence():
    unknown = both_tasks({('category', 'condvit_category'): 0.5})
    unknown.per_query['category_hit'] = np.nan
    assert accuracy_lines(unknown, PRINTED) == []


def test_caption_against_category_is_an_own_comparison():
    (line,) = caption_gain(both_tasks({('category', 'condvit_category'): 0.5, ('text', 'condvit_text'): 0.8}), PRINTED)
    assert line['role'] == OWN_COMPARISON and 20 < line['diff'] < 40 and verdict(by_own_p(line)) == 'better'


def test_a_fall_in_nested_galleries_is_certain():
    run = both_tasks({('category', 'condvit_category'): 0.5, ('category', 'vit_products'): 0.3})
    alone = run.per_query.assign(distractors=0, rank=1)
    run.per_query = pd.concat([alone, run.per_query])
    assert judge_evidence(falls(run, PRINTED)).verdict == CERTAIN


def sized(rates: dict, n: int = 1200) -> tuple:  # run, areas
    "Methods whose share of hits grows with the area, from `rates`: method -> (share at the smallest, per doubling)."
    size = np.arange(n) % 6
    rng, rows = np.random.default_rng(1), []
    for m, (least, more) in rates.items():
        hit = rng.random(n) < least + more * size
        rows += [
            dict(method=m, seed=0, draw=0, task='category', query_id=str(q), reference=q // 2, rank=1 if h else 3)
            | dict(gallery_size=9, distractors=PRINTED, family=q // 6)
            for q, h in enumerate(hit)
        ]
    run = ReferredRun(None, None, [], [], pd.DataFrame(rows), {m: m for m in rates})
    return run, pd.Series(2.0**size, index=[str(q) for q in range(n)])


def test_methods_that_lose_more_on_small_products_have_a_steeper_slope():
    rates = dict(condvit_category=(0.6, 0.05), vit_products=(0.1, 0.15), clip4cir_products_category=(0.1, 0.14))
    lines = size_slopes(*sized(rates), PRINTED)
    slopes = {c['what'].split(': ')[1].split(', ')[0]: c for c in lines if 'diff' in c}
    relative = [100 * more / (least + 2.5 * more) for least, more in rates.values()]  # of the mean over six sizes
    assert [slopes[m]['diff'] for m in rates] == pytest.approx(relative, abs=4)
    assert {c['unit'] for c in slopes.values()} == {' % of its mean R@1'}
    assert verdict(by_own_p(slopes['vit_products − condvit_category'])) == 'better'
    assert verdict(by_own_p(slopes['clip4cir_products_category − condvit_category'])) == 'better'
    (detector,) = [c['what'] for c in lines if c.get('role') == UNTESTED]
    assert detector.startswith('detection degrades') and judge_evidence(lines).verdict == 'undecided'


def test_all_methods_of_the_paper_decide_on_size():
    rates = dict(condvit_category=(0.5, 0.05), vit_products=(0.1, 0.15), clip4cir_products_category=(0.1, 0.14))
    run, areas = sized(rates)
    crop = run.per_query[run.per_query.method == 'condvit_category'].assign(method=CROP)
    run.per_query, run.titles = pd.concat([run.per_query, crop]), run.titles | {CROP: CROP}
    assert judge_evidence(size_slopes(run, areas, PRINTED)).verdict == 'reproduced'
    steep = run.per_query.method.replace(dict(condvit_category='vit_products', vit_products='condvit_category'))
    exchanged = replace(run, per_query=run.per_query.assign(method=steep))
    assert judge_evidence(size_slopes(exchanged, areas, PRINTED)).verdict == 'not reproduced'


def test_a_clause_on_size_is_not_untested_where_another_page_tests_it():
    rates = dict(condvit_category=(0.5, 0.05), vit_products=(0.1, 0.15), clip4cir_products_category=(0.1, 0.14))
    run, areas = sized(rates)
    two = replace(run, per_query=run.per_query[run.per_query.method != 'clip4cir_products_category'])
    rare = replace(run, per_query=run.per_query.assign(rank=3))
    pages = [dict(evidence=dict(L14=size_slopes(r, areas, PRINTED))) for r in (two, rare, run)]
    assert 'CLIP4Cir degrades faster; not trained by category in this run' in [
        c['what'] for c in pages[0]['evidence']['L14']
    ]
    left = [c['what'] for c in joined_evidence(dict(enumerate(pages)))['L14'] if c.get('role') == UNTESTED]
    assert set(left) == {'detection degrades like CondViT; no open-vocabulary detector'}
    alone = [c['what'] for c in joined_evidence(dict(enumerate(pages[:2])))['L14'] if c.get('role') == UNTESTED]
    assert len(alone) == 4 and any('clip4cir_products_category finds only 0' in what for what in alone)


def test_a_detector_on_another_page_tests_the_crop_and_windows_do_not(model):
    crop = {('category', CROP): 0.8}
    windows = crop_method('detector_crop', None, 'windows', model, 'cpu').detector
    none, own, real = (
        dict(evidence=dict(L10=accuracy_lines(run, PRINTED)))
        for run in (
            both_tasks({('category', 'condvit_category'): 0.5}),
            cropped_by(windows, crop),
            cropped_by('o', crop),
        )
    )
    assert judge_evidence(joined_evidence(dict(a=none, b=own))['L10']).verdict == 'undecided'
    assert judge_evidence(joined_evidence(dict(a=none, b=real))['L10']).verdict == 'reproduced'


def test_kept_runs_test_no_clause_that_they_name_as_untested():
    for claim in ('L05', 'L09', 'L10', 'L14'):
        lines = joined_evidence(kept_receipts())[claim]
        judged = {c['clause'] for c in lines if 'clause' in c and 'diff' in c}
        assert not judged & {c.get('clause') for c in lines if c.get('role') == UNTESTED}


def test_the_page_says_what_each_longer_run_trains_and_ranks():
    name = '06_evaluation/lrvsf'
    lines = {line.split('`')[1]: line for line in longer_runs_note().splitlines() if line.startswith('- ')}
    assert {'lrvsf', 'lrvsf.distractors', 'lrvsf.rivals', 'lrvsf.text'} <= {*lines}
    for run, line in lines.items():
        e = experiments('full', name=f'06_evaluation/{run}')[f'06_evaluation/{run}']
        assert f' among {e.params["distractors"]:,} distractors. ' in line
        assert ('CondViT (text)' in line) == any('condvit_text' in t for t in e.params['trainings'])
    assert 'longer_runs_note()' in (project_root() / f'nbs/{name}.ipynb').read_text()


def test_the_largest_gallery_has_both_condvits():
    full = experiments('full', name='06_evaluation/lrvsf.distractors')['06_evaluation/lrvsf.distractors'].params
    assert {'05_train.condvit_category.short', '05_train.condvit_text.short'} <= {*full['trainings']}
    assert full['distractors'] > experiments('quick')['06_evaluation/lrvsf'].params['distractors']


def test_a_weak_method_that_loses_the_same_part_is_as_sensitive_to_size():
    size, place = np.repeat(np.arange(6.0), 500), np.tile(np.arange(500) / 500, 6)
    strong = place < 0.3 + 0.1 * size - 1e-9  # the shares are exact: ten points more for each doubling,
    weak = place < 0.06 + 0.02 * size - 1e-9  # and two points, a fifth at every size
    pair = slope_interval(size, [[weak], [strong]], np.arange(3000), (1, -1))
    assert pair['diff'] == pytest.approx(0, abs=1e-6) and pair['low'] < 0 < pair['high']
    assert np.polyfit(size, weak, 1)[0] == pytest.approx(np.polyfit(size, strong, 1)[0] / 5)


def test_a_slope_of_a_few_hits_is_not_compared():
    lines = size_slopes(*sized(dict(condvit_category=(0.5, 0.05), vit_products=(0.005, 0.0))), PRINTED)
    (few,) = [c for c in lines if 'too few' in c['what']]
    assert few['role'] == UNTESTED and few['what'].split(': ')[1].startswith('vit_products finds only ')
    assert [c['what'] for c in lines if 'diff' in c] == [
        'slope of R@1 per doubling of the area: condvit_category, 10,000 distractors'
    ]


def test_the_lead_over_the_text_alone_is_an_own_comparison():
    text, alone = ('text', 'condvit_text'), ('text', 'text_only')
    run = both_tasks({text: 0.5, alone: 0.8, ('category', 'condvit_category'): 0.5, ('text', 'clip4cir_products'): 0.4})
    found = referred_evidence(run, PRINTED)
    for claim in ('L08', 'L09'):
        (line,) = [c for c in found[claim] if c['what'].startswith('R@1 under a caption: CondViT (text) − Text only, ')]
        assert line['role'] == OWN_COMPARISON and -40 < line['diff'] < -20
    assert over_text(both_tasks({text: 0.5}), PRINTED) == []


def test_the_model_that_reads_captions_has_the_name_that_pages_look_for():
    for task, condition in (('text', 'text'), ('category', 'category')):
        config = settings(dict(method='condvit', condition=condition))
        assert api.get('method', 'condvit').variant(config) == CONDVITS[task]
    assert api.method_style(CONDVITS['text']).title == 'CondViT (text)'


def filter_run(solved: int):
    "A ViT that solves so many of twenty queries, and one more in the filtered gallery."
    ranks = {
        m: [1] * n + [2] * (20 - n) for m, n in (('vit_products', solved), ('vit_products' + FILTERED, solved + 1))
    }
    return lines(ranks, seeds=(0,))


def test_the_filter_is_asked_for_two_to_four_points():
    above, below = filter_gain(filter_run(12), 5)
    assert (above['diff'], below['diff'], above['asked'], above['measured']['diff']) == (3, -1, '2 to 4', 5)
    assert 'role' not in above and '65.0 − 60.0 %, 1.1 times' in above['measured']['what']


def test_the_points_of_the_filter_are_not_asked_for_at_a_low_recall():
    least = printed_filter().before.min() / 2  # half of the lowest of the paper
    assert 25 < least < 30
    for solved in (0, 1, 5, 6):  # of 20
        roles = {c.get('role', '') for c in filter_gain(filter_run(solved), 5)}
        assert roles == ({TOO_LOW} if 5 * solved < least else {''})
    low, zero = (filter_gain(filter_run(n), 5)[0] for n in (2, 0))
    assert '15.0 − 10.0 %, 1.5 times (paper: 1.03 to 1.07 times)' in low['measured']['what']
    asked = '2 to 4, where R@1 without the filter is at least 26 %, half of the lowest in the paper'
    assert low['asked'].startswith(asked) and ', from zero (' in zero['measured']['what']
    assert judge_evidence([low]).verdict == TOO_LOW


def test_the_settings_that_were_tried_are_where_the_page_says():
    page = (project_root() / 'nbs/06_evaluation/lrvsf.ipynb').read_text()
    for file in ('params/quick/05_train.condvit_category.yaml', 'params/quick/05_train.vit_products.yaml'):
        assert f'`{file}`' in page and 'earning rate' in (project_root() / file).read_text().splitlines()[0]


def test_chance_within_a_category_counts_its_images(world):
    task = world.tasks['category']
    gallery = [task.category_of[i] for i in gallery_among(task, 20)]
    of = [gallery.count(task.category_of[t]) for (t,) in task.queries.targets]
    assert chance_within(task, 20) == pytest.approx(100 * np.mean([1 / n for n in of]))
    assert chance_within(task, 20, 10**6) == 100 and np.isnan(chance_within(replace(task, category_of={}), 20))


def test_galleries_of_both_tables_are_joined():
    run = lines({'condvit_category': [1] * 20}, seeds=(0,))
    run.per_query['category_hit'], run.benchmark = 1.0, SimpleNamespace(tasks={'category': None})
    run.per_query['distractors'] = 100_000  # all: measured once, so no gallery of both
    scores = [dict(distractors=10_000, fold=f, metric=m, value=50.0) for f in (0, 1) for m in ('recall', 'cat_acc')]
    run.bootstrap = pd.DataFrame(scores).assign(method='condvit_category', task='category', k=1, seed=0)
    joined = joined_table(run)
    assert list(joined) == ['source', 'method', 'backbone', 'condition', '+10K']
    assert joined.iloc[-1].tolist() == ['this run', 'CondViT (category)', '–', 'category', '50.0 ± 0.00 / 50.0 ± 0.00']
    assert set(joined.source[:-1]) == {'paper'}


def test_the_figures_by_category_show_the_main_methods():
    ranks = dict(image_only=[2] * 20, text_only=[1] * 2 + [2] * 18, condvit_category=[1] * 20, vit_products=[2] * 20)
    run = lines(ranks | {'vit_products' + FILTERED: [1] * 20, 'combiner_products': [1] * 20})
    run.entries = [SimpleNamespace(name=m, seed=UNTRAINED) for m in ('image_only', 'text_only')]
    assert main_methods(run, 5) == ['text_only', 'condvit_category', 'vit_products', 'vit_products' + FILTERED]


def test_the_interval_of_a_slope_redraws_families():
    x, hit = np.repeat(np.arange(6.0), 50), np.repeat([0, 100, 0, 100, 0, 100], 50)
    alone, together = (slope_interval(x, [[hit]], f) for f in (np.arange(300), np.arange(300) // 25))
    assert alone['diff'] == together['diff'] == pytest.approx(100 * np.polyfit(x, hit, 1)[0] / 50)
    assert together['high'] - together['low'] > 2 * (alone['high'] - alone['low'])


@pytest.mark.parametrize('given', [3, [], ['$ , {condition}', 3], None])
def test_what_is_no_prompt_is_refused(given):
    with pytest.raises(ValueError, match="prompts: 'lincir' has .*; give a prompt, or a list of prompts"):
        entries_with_prompts({'lincir': given}, [0])
