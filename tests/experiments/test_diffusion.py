"Experiments on CompoDiff: labels and masks, queries, searches, scenes of CIRR, grids of weights, printed tables."

import json
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from cis_nb.api import Queries
from cis_nb.experiments.claims import CERTAIN, judge_evidence
from cis_nb.experiments.comparison import by_own_p, read_printed, verdict
from cis_nb.experiments import diffusion
from cis_nb.experiments.diffusion import (
    NEGATIVE_PAIRS,
    PRINTED,
    UNCERTAINTY,
    CirrScene,
    EditedSum,
    LabelledImages,
    against_baselines,
    along,
    best_point,
    box_masks,
    beside_printed,
    changing_query,
    composition_table,
    edit_holds,
    effect_leads,
    ends_words,
    evenly,
    extreme_losses,
    grid_values,
    guidance_evidence,
    kept_share,
    labelled_images,
    looks_of,
    mask_queries,
    most_changed,
    negative_queries,
    negative_words,
    place_pairs,
    own_name,
    printed_columns,
    regime,
    row_label,
    scene_scores,
    search_effect,
    search_effects,
    search_row,
    searches_table,
    shows,
    spread_over_draws,
    strongest_pairs,
    trade_differences,
    zero_shot_entries,
)
from cis_nb.experiments.entries import Entry
from cis_nb.world.composed import Edit
from cis_nb.world.layouts import IMAGE_SIDE, coco_scene
from cis_nb.world.scenes import THINGS, Scene, Thing, render


def write_labels(root, images: dict, side=(40, 20)):
    "COCO's panoptic layout of images {number: [(category, box)]}, each 40 x 20; the last category is stuff."
    names = ('cat', 'potted-plant', 'sky')
    categories = [dict(id=10 * k, name=n, isthing=int(n != 'sky')) for k, n in enumerate(names, 1)]
    for folder in ('val2017', 'panoptic_val2017', 'annotations'):
        (root / 'coco' / folder).mkdir(parents=True)
    annotations = []
    for number, parts in images.items():
        ids, found = np.zeros(side[::-1], int), []
        for n, (name, (x0, y0, x1, y1)) in enumerate(parts, 300):
            ids[y0:y1, x0:x1] = n
            found.append(dict(id=n, category_id=10 * (names.index(name) + 1)))
        found = [dict(s, area=int((ids == s['id']).sum())) for s in found]
        rgb = np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)
        Image.fromarray(rgb).save(root / f'coco/panoptic_val2017/{number:012d}.png')
        Image.new('RGB', side).save(root / f'coco/val2017/{number:012d}.jpg')
        annotations.append(dict(image_id=number, file_name=f'{number:012d}.png', segments_info=found))
    listed = [dict(id=i, width=side[0], height=side[1], file_name=f'{i:012d}.jpg') for i in images]
    labels = dict(images=listed, annotations=annotations, categories=categories)
    (root / 'coco/annotations/panoptic_val2017.json').write_text(json.dumps(labels))
    return root


LEFT, RIGHT, TINY, ALL = (10, 0, 20, 20), (20, 0, 30, 20), (12, 0, 14, 3), (0, 0, 40, 20)
SCENES = {
    1: [('sky', ALL), ('cat', LEFT), ('potted-plant', RIGHT)],
    2: [('sky', ALL), ('cat', (0, 0, 15, 20)), ('cat', (30, 0, 40, 20))],
    3: [('sky', ALL), ('potted-plant', TINY)],
}


def test_labels_name_things_not_stuff_above_one_percent(tmp_path):
    images = labelled_images(write_labels(tmp_path, SCENES))
    assert images.things == ['cat', 'potted-plant']
    assert images.ids == [f'{i:012d}' for i in (1, 2, 3)]
    assert images.shown.tolist() == [[True, True], [True, False], [False, False]]  # 6 of 800 pixels are too few
    assert images.of(images.ids[0]) == ['cat', 'potted-plant']


def test_masks_are_of_the_centred_square_and_join_segments(tmp_path):
    images = labelled_images(write_labels(tmp_path, SCENES))
    mask = images.mask(images.ids[0], 'cat')  # the square is columns 10 to 30
    assert mask.shape == (64, 64) and mask[:, :32].all() and not mask[:, 32:].any()
    two = images.mask(images.ids[1], 'cat')  # columns 10 to 15 of the square, and 30 to 40 outside it
    assert two[:, :16].all() and not two[:, 16:].any()
    with pytest.raises(KeyError):
        images.mask(images.ids[2], 'cat')


def eps(path):
    "A file that Pillow would hand to Ghostscript."
    path.write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 20\nshowpage\n')


BAD_MASKS = {
    'a pipe': (lambda p: os.mkfifo(p), 'no readable mask .*a pipe'),
    'EPS': (eps, 'no readable mask'),
    'cut': (lambda p: p.write_bytes(b'\x89PNG\r\n\x1a\n'), 'no readable mask'),
    'another size': (
        lambda p: Image.new('RGB', (20, 40)).save(p),
        'has 20 x 40 pixels, its image 40 x 20; get both again',
    ),
}


@pytest.mark.parametrize('kind', BAD_MASKS)
def test_a_mask_that_cannot_be_used_is_named(tmp_path, kind):
    images, (put, why) = labelled_images(write_labels(tmp_path, SCENES)), BAD_MASKS[kind]
    (path := images.masks / f'{images.ids[0]}.png').unlink()
    put(path)
    with pytest.raises(ValueError, match=f'{path.name} .*{why}'):
        images.mask(images.ids[0], 'cat')


def test_a_missing_mask_is_told_with_its_source(tmp_path):
    images = labelled_images(write_labels(tmp_path, SCENES))
    (images.masks / f'{images.ids[0]}.png').unlink()
    with pytest.raises(FileNotFoundError, match='COCO 2017 panoptic: .*png is missing; Get it from .*cocodataset'):
        images.mask(images.ids[0], 'cat')


def test_images_without_a_file_are_left_out_and_none_is_an_error(tmp_path):
    root = write_labels(tmp_path, SCENES)
    (root / 'coco/val2017/000000000002.jpg').unlink()
    images = labelled_images(root)
    assert images.ids == ['000000000001', '000000000003'] and images.shown.shape == (2, 2)
    for i in (1, 3):
        (root / f'coco/val2017/{i:012d}.jpg').unlink()
    with pytest.raises(FileNotFoundError, match='images of the panoptic labels'):
        labelled_images(root)
    with pytest.raises(FileNotFoundError, match='panoptic'):
        labelled_images(tmp_path / 'nowhere')


def random_images(n=30, things=6, seed=0) -> LabelledImages:
    "Labels without image files; a mask covers the left half."
    rng = np.random.default_rng(seed)
    ids, names = [f'i{k}' for k in range(n)], [f'thing{c}' for c in range(things)]

    class Half(LabelledImages):
        def mask(self, id, thing):
            half = np.zeros((64, 64), bool)
            half[:, :32] = thing != 'thing0'  # this one has no pixel left
            return half

    return Half(None, ids, names, rng.random((n, things)) < 0.4, None, {})


def test_negative_queries_keep_their_promises():
    images = random_images()
    q = negative_queries(images, 100)
    usable = [i for k, i in enumerate(images.ids) if 2 <= images.shown[k].sum() <= 4]
    assert sorted(q.reference) == sorted(usable)
    for r in q.itertuples():
        there = images.of(r.reference)
        assert r.forbidden in there and r.wanted not in there and r.other not in there and r.wanted != r.other
    assert negative_queries(images, 3).equals(q[:3])
    assert not negative_queries(images, 100, seed=1).equals(q)
    others = negative_queries(images, 100, seed=1, without=q.reference[:3])
    assert len(others) == len(q) - 3 and not {*others.reference} & {*q.reference[:3]}


def test_mask_queries_leave_out_masks_without_pixels():
    images = random_images()
    q, masks = mask_queries(images, 100)
    assert box_masks(masks).equal(masks)  # they are boxes
    assert 'thing0' not in set(q.masked) and len(q) == len(masks) > 5 and masks.dtype == torch.bool
    for r in q.itertuples():
        assert sorted([*r.outside, r.masked]) == images.of(r.reference) and r.wanted not in images.of(r.reference)
    none = random_images(things=1)
    with pytest.raises(ValueError, match='none of 30 shows an object with a mask beside another object'):
        mask_queries(none, 5)
    with pytest.raises(ValueError, match='none of 30 shows two objects'):
        negative_queries(none, 5)


def test_shares_agree_with_counting():
    images, rng = random_images(), np.random.default_rng(1)
    top = [rng.choice(images.ids, 5, replace=False).tolist() for _ in range(8)]
    things = rng.choice(images.things, 8).tolist()
    outside = [rng.choice(images.things, 2, replace=False).tolist() for _ in range(8)]
    by_hand = [[t in images.of(i) for i in best] for best, t in zip(top, things)]
    assert shows(images, top, things).tolist() == by_hand
    kept = [[sum(t in images.of(i) for t in o) / 2 for i in best] for best, o in zip(top, outside)]
    assert kept_share(images, top, outside) == kept


def lines(values: dict, seeds=(0, 1), score='forbidden', method='compodiff') -> pd.DataFrame:
    "Searches with the same values of each query for every seed: {search: values}."
    rows = [
        dict(method=method, seed=s, search=name, draw=0, task='t', query_id=f'{i}', reference=f'{i}', condition='a cat')
        | {score: v, 'top': ['x']}
        for s in seeds
        for name, mine in values.items()
        for i, v in enumerate(mine)
    ]
    return pd.DataFrame(rows)


def test_an_effect_is_the_paired_difference_of_each_seed():
    found = lines(dict(none=[50.0, 30.0, 40.0], forbidden=[20.0, 10.0, 0.0], other=[50.0, 30.0, 40.0]))
    effect = search_effect(found, 'compodiff', 'forbidden', 'none', 'forbidden')
    assert effect['by_seed'] == pytest.approx([-30.0, -30.0]) and verdict(by_own_p(effect)) == 'worse'
    untrained = found.assign(seed=-1).drop_duplicates(['search', 'query_id'])
    one = search_effect(untrained, 'compodiff', 'other', 'none', 'forbidden')
    assert one['diff'] == 0 and verdict(by_own_p(one)) == 'undecided'
    effects = search_effects(found, [('forbidden', 'none')], ['forbidden'])
    names = dict(none='no', forbidden='with'), dict(compodiff='C'), dict(forbidden='bad')
    table = searches_table(found, effects, *names)
    assert table.bad[0] == '40.0' and table.bad[1].startswith('10.0; Δ −30.0 [')
    assert table.bad[1].endswith('] lower 2/2')  # fewer of them are no loss
    assert most_changed(found, 'compodiff', 'forbidden', 'none', 'forbidden', 0, 2) == ['2', '0']


def test_a_rival_has_its_own_comparison_and_leaves_the_effect_of_stage_two_as_it_is():
    mine = lines(dict(none=[50.0, 30.0, 40.0], forbidden=[20.0, 10.0, 0.0]))
    rival = lines(dict(none=[50.0, 30.0, 40.0], forbidden=[40.0, 20.0, 30.0]), (-1,), method='image_text')
    both, of = pd.concat([mine, rival]), ([('forbidden', 'none')], ['forbidden'])
    ((key, lead),) = effect_leads(both, *of).items()
    assert key == ('compodiff', 'image_text', 'forbidden', 'none', 'forbidden')
    assert lead['by_seed'] == pytest.approx([-20.0, -20.0]) and lead['family'] == 1
    (alone,), (beside, _) = (search_effects(found, *of).values() for found in (mine, both))
    assert alone == beside


class Flat:
    "A backbone whose text features are given and whose image features are its pixels' means."

    name, D, fingerprint, device = 'flat', 2, 'flat', torch.device('cpu')
    texts = {'a cat': [1.0, 0.0], 'a dog': [0.0, 1.0]}

    def features(self, source):
        rows = torch.tensor([[3.0, 3.0], [2.0, 0.0]]).numpy()
        return SimpleNamespace(array=rows, index={i: k for k, i in enumerate(source.ids)})

    def preprocess(self, image):
        return torch.ones(3, 4, 4)

    def encode_image(self, pixels):
        share = pixels.mean((1, 2, 3))
        return torch.stack([share, torch.zeros_like(share)], -1)


def test_the_rival_subtracts_a_text_and_cuts_out_a_mask():
    backbone = Flat()
    m = EditedSum(name='s', backbone=backbone, read=lambda texts: torch.tensor([backbone.texts[t] for t in texts]))
    source = SimpleNamespace(ids=['a', 'b'], load=lambda i: None, features=lambda b: b.features(source))
    q = Queries(['q'], [['a cat']], ['b'], source)
    assert m.encode_queries(q)[0].tolist() == pytest.approx([1, 0])
    away = m.encode_queries(Queries(['q'], [['a cat']], ['b'], source, ['a dog']))[0]
    assert away[0] > 0 > away[1]
    gone = torch.ones(1, 64, 64, dtype=torch.bool)
    cut = m.encode_queries(Queries(['q'], [['a dog']], ['b'], source, None, gone))[0]
    assert cut.tolist() == pytest.approx([0, 1])  # nothing is left of the reference


CAT, FISH = Thing('cat', 'red', x=16, y=22), Thing('fish', 'blue', x=48, y=22)


def scene(*things, place='beach') -> Scene:
    return Scene(place, 0, things, 256)


@pytest.mark.parametrize(
    'edit, right, wrong',
    [
        (Edit('color', 'cat', 'blue'), scene(Thing('cat', 'blue')), scene(Thing('cup', 'blue'))),
        (Edit('remove', 'cat'), scene(FISH), scene(CAT)),
        (Edit('replace', 'cat', 'cup'), scene(Thing('cup')), scene(Thing('cup'), CAT)),
        (Edit('add', 'cup', Thing('cup')), scene(Thing('cup')), scene(CAT, FISH)),
        (Edit('keep', value=('fish',)), scene(FISH, Thing('cup')), scene(CAT, FISH)),
        (Edit('move', 'cat', 3), scene(Thing('cat', x=48, y=46)), scene(CAT)),
        (Edit('place', value='room'), scene(CAT, place='room'), scene(CAT)),
        (Edit('swap', 'cat', 'fish'), scene(Thing('cat', x=48, y=22), Thing('fish', x=16, y=22)), scene(CAT, FISH)),
    ],
    ids=lambda v: getattr(v, 'kind', ''),
)
def test_an_edit_holds_in_what_it_asks_for_only(edit, right, wrong):
    assert edit_holds(edit, scene(CAT, FISH), right) and not edit_holds(edit, scene(CAT, FISH), wrong)


def test_scores_of_scenes_are_means_over_the_first_images():
    blue = Thing('cat', 'blue', x=16, y=22)
    scenes = dict(r=scene(CAT, FISH), t=scene(blue, FISH), half=scene(CAT), none=scene(Thing('cup')))
    scenes = {name: CirrScene(s, False) for name, s in scenes.items()}
    task = SimpleNamespace(queries=pd.DataFrame(dict(query_id=['q'], targets=[['t']])))
    ranked = pd.DataFrame(dict(query_id=['q'], reference=['r'], top=[['t', 'half', 'none', 'none', 't', 't']]))
    (line,) = scene_scores(ranked, task, scenes).to_dict('records')
    assert line['edit_satisfied'] == pytest.approx(100 * 2 / 5)  # the two with a blue cat among the first five
    assert line['reference_kept'] == pytest.approx(100 * (0.5 + 0.5 + 0 + 0 + 0.5) / 5)
    assert len(looks_of(scenes['r'].scene)) == 2


def grid(recall: dict, n=40, seeds=(0, 1)) -> pd.DataFrame:
    "The first images of so many queries in a hundred are right at each point (w_image, w_text)."
    rows = [
        dict(method='compodiff', seed=s, draw=0, task='full', query_id=f'{i}', reference=f'{i}', w_image=a, w_text=t)
        | dict(rank=1 if i < n * share / 100 else 90, to_reference=10 * a, to_text=-t, top=[f'{a}' if i else 'x'])
        for (a, t), share in recall.items()
        for s in seeds
        for i in range(n)
    ]
    return pd.DataFrame(rows)


def test_values_and_best_point_of_a_grid():
    g = grid({(0.0, 1.0): 50, (1.5, 1.0): 75, (0.0, 4.0): 25, (1.5, 4.0): 75})
    values = grid_values(g)
    assert values.index.tolist() == [4.0, 1.0] and values.columns.tolist() == [0.0, 1.5]
    assert values.to_numpy().tolist() == [[25.0, 75.0], [50.0, 75.0]]
    assert best_point(g, 1) == (1.5, 1.0, 75.0)  # of equals the smaller weight
    assert changing_query(g, 0) == '1'  # the first has one first image at all points
    with pytest.raises(ValueError, match='w_image: 3 is not in the grid; it has 0, 1.5'):
        along(g, 'w_text', (3.0, 1.0))


def test_evidence_on_weights_can_fail():
    g = grid({(0.0, 1.0): 50, (1.5, 1.0): 75, (3.0, 1.0): 25, (1.5, 0.5): 75, (1.5, 2.0): 25})
    losses = extreme_losses(g, (1.5, 1.0), 1)
    assert {w: [round(d) for d in found['by_seed']] for w, found in losses.items()} == {
        'R@1, w_I 1.5 − w_I 0': [25, 25],
        'R@1, w_I 1.5 − w_I 3': [50, 50],
        'R@1, w_T 1 − w_T 0.5': [0, 0],
        'R@1, w_T 1 − w_T 2': [50, 50],
    }
    said = [verdict(by_own_p(c)) for c in guidance_evidence(g, (1.5, 1.0), 1, published=(1.5, 1.0))['C14']]
    assert said == ['better', 'worse', 'better', 'better', 'undecided', 'better']  # the text moves away here
    assert trade_differences(g, (1.5, 1.0))['w_image', 'to_reference']['by_seed'] == [30.0, 30.0]
    at_an_end = extreme_losses(g, (0.0, 1.0), 1)
    assert list(at_an_end) == ['R@1, w_I 0 − w_I 3']  # its own end is no comparison


def test_names_of_printed_rows():
    own = [(m, b, s, own_name(m, b, s, 'compodiff_cirr')) for m, b, s in printed_rows('compodiff_cirr')]
    assert [(m, name) for m, _, _, name in own if name] == [
        ('Pic2Word', 'pic2word'),
        ('ARTEMIS', 'artemis'),
        ('CLIP4Cir', 'combiner_synthetic'),
        ('CompoDiff', 'compodiff'),
        ('CLIP4Cir', 'combiner_cirr'),
        ('CLIP4Cir', 'combiner_synthetic_cirr'),
        ('CompoDiff', 'compodiff_cirr'),
    ]
    assert 'T5' not in ''.join(b for _, b, _, name in own if name)
    assert own_name('Pic2Word', '', 'regime=zero-shot;train=LAION-2B-en;source=reproduced', '') == ''
    assert regime('regime=zero-shot;train=CC3M;source=reproduced') == 'zero-shot, CC3M, reproduced'
    assert row_label('CompoDiff', 'CLIP-L/14 image; T5-XL text') == 'CompoDiff, T5-XL text'


def printed_rows(table) -> list:
    printed = read_printed(table, keep_default_na=False)
    return list(dict.fromkeys(zip(printed.method, printed.backbone, printed.setting)))


def fake_run(rows: list, titles: dict) -> SimpleNamespace:
    columns = ['benchmark', 'method', 'task', 'metric', 'k', 'seed', 'value']
    results = pd.DataFrame(rows, columns=columns).assign(ci_low=0.0, ci_high=100.0, n=9)
    asked = [(b, q, t) for b in {r[0] for r in rows} for q, t in (('q0', 'full'), ('q1', 'full'), ('q0', 'subset'))]
    per_query = pd.DataFrame(asked, columns=['benchmark', 'query_id', 'task'])  # one of two queries in two tasks
    per_query = per_query.assign(method='compodiff', seed=0, gallery_size=20, ranks=[[1], [2], [3, 4]])
    return SimpleNamespace(results=results, titles=titles, per_query=per_query)


@pytest.mark.parametrize('which', PRINTED)
def test_a_printed_table_is_whole_and_has_this_runs_line_where_it_belongs(which):
    t = PRINTED[which]
    columns = [to for to, _ in printed_columns(t).values()]
    rows = [
        (t.benchmark, m, *column, s, v)
        for m, start in (('compodiff', 10), ('image_only', 90), ('image_text_tuned', 50))
        for s in (0, 1)
        for v, column in enumerate(columns, start + s)
    ]
    titles = dict(compodiff='CompoDiff', image_text_tuned='Image + Text, tuned', image_only='Image only')
    table = beside_printed(fake_run(rows, titles), which)
    assert (table['numbers of'] == 'paper').sum() == len(printed_rows(t.numbers))
    (at,) = table.index[table['numbers of'] == 'this run, 2 queries, mean of 2 seeds'][:1]
    assert table.method[at - 1] == 'CompoDiff, CLIP-L/14 text' and table.regime[at - 1].startswith('zero-shot')
    assert table.iloc[at, 3:].tolist() == [f'{10.5 + c:.1f} ± 0.7' for c in range(len(columns))]
    assert table.iloc[-1, :2].tolist() == ['Random order', 'images ranked for a query: 20']
    assert table.iloc[-2, :2].tolist() == ['Image + Text, tuned', 'not in this table of the paper']
    assert 'Image only' not in set(table.method)  # the table of the page has it
    first = read_printed(t.numbers).iloc[0]
    assert table.iloc[0, 3] == f'{first.value:.1f}'


def draws(hits) -> SimpleNamespace:
    "Rankings of object composition with so many of ten queries found in each draw."
    rows = [
        dict(benchmark='composition', method='image_text', seed=-1, query_id=f'{d}:{q}', rank=1 if q < n else 3)
        | dict(task='composition', gallery_size=25, ranks=[1 if q < n else 3])
        for d, n in enumerate(hits)
        for q in range(10)
    ]
    value = dict(benchmark='composition', method='image_text', task='composition', metric='recall', k=1, seed=-1)
    results = pd.DataFrame([value | dict(value=40.0, ci_low=30.0, ci_high=50.0, n=10)])
    return SimpleNamespace(per_query=pd.DataFrame(rows), titles=dict(image_text='Image + Text'), results=results)


def test_draws_of_object_composition():
    table = composition_table(draws([3, 5]))
    assert table.iloc[-2][['draw 1', 'draw 2', 'mean']].tolist() == [30.0, 50.0, 40.0]
    assert table[UNCERTAINTY].tolist()[-2:] == ['[30.0, 50.0]', '–']
    assert table.iloc[-1][['method', 'regime']].tolist() == ['Random order', 'images ranked for a query: 25']
    assert table.iloc[-1][['draw 1', 'draw 2', 'mean']].tolist() == pytest.approx([4.0] * 3)
    assert table['numbers of'].iloc[-2] == 'this run, 20 queries'
    assert (table['numbers of'] == 'paper').sum() == len(table) - 2
    assert spread_over_draws(draws([3, 5])) is None
    moved, still = spread_over_draws(draws([3, 5, 4])), spread_over_draws(draws([4, 4, 4]))
    assert (verdict(by_own_p(moved)), judge_evidence([moved]).verdict) == ('better', CERTAIN)
    assert (verdict(by_own_p(still)), judge_evidence([still]).verdict) == ('undecided', 'undecided')


@dataclass
class Listed:
    "Queries and their number."

    queries: pd.DataFrame

    def __len__(self):
        return len(self.queries)


def test_queries_are_thinned_evenly():
    queries = pd.DataFrame(dict(query_id=list('abcdefg')))
    task = Listed(queries)
    assert evenly(task, 3).queries.query_id.tolist() == ['a', 'd', 'g']
    assert len(evenly(task, 0).queries) == len(evenly(task, 99).queries) == 7


def test_pairs_of_edits_are_drawn_from_the_scene():
    scene, _ = coco_scene(7, 3)
    first, second = (t.category for t in scene.things[:2])
    wanted = next(c for c in THINGS if c not in {t.category for t in scene.things})
    row = dict(reference=f'{7:012d}', masked=first, outside=[second], wanted=wanted)
    pairs = place_pairs(pd.DataFrame([row]), 3)
    assert pairs.ids == [f'inside {7:012d}', f'outside {7:012d}']
    for id, at in zip(pairs.ids, (0, 1)):
        things = list(scene.things)
        things[at] = replace(things[at], category=wanted)
        expected = render(replace(scene, things=tuple(things)), IMAGE_SIDE)
        assert (np.asarray(pairs.load(id)) == expected).all()
    assert place_pairs(pd.DataFrame([row]), 4).key != pairs.key


def test_stage_two_is_asked_for_by_name():
    other = Entry(SimpleNamespace(name='lincir', title='LinCIR'))
    with pytest.raises(ValueError, match="trainings: no stage 2 of CompoDiff among lincir; .* stage: '2'"):
        zero_shot_entries([other])


def test_frames_of_results():
    source, black = SimpleNamespace(load=lambda i: black), Image.new('RGB', (8, 8))
    shown = np.array([[1, 0], [1, 1], [0, 0]], bool)
    images = LabelledImages(source, ['a', 'b', 'c'], ['cat', 'dog'], shown, None, {})
    row = search_row(images, dict(top=['a', 'b', 'c'], condition='a cat'), [black], ['r'], 'dog', 't')
    assert row['outlines'] == ['reference', 'target', 'wrong', None] and row['titles'] == ['r', '1', '2', '3']


def test_a_page_says_one_verdict_of_a_search():
    "One of many comparisons is undecided in the finding as in the table, though alone it would be a difference."
    rng = np.random.default_rng(3)
    found = lines({name: list(rng.normal(0, 1, 30)) for name in ('none', 'other')} | dict(forbidden=[0.0] * 30))
    weak = found.assign(forbidden=found.forbidden.where(found.search != 'forbidden', found.forbidden - 0.42))
    alone = search_effect(weak, 'compodiff', 'forbidden', 'none', 'forbidden')
    scores = [f'score {k}' for k in range(9)]
    many = weak.assign(**{s: rng.normal(0, 1, len(weak)) for s in scores})
    effects = search_effects(many, NEGATIVE_PAIRS, ['forbidden', *scores])
    assert verdict(by_own_p(alone)) == 'worse' and '(undecided' in negative_words(effects, {})[0], (
        alone,
        negative_words(effects, {}),
    )


def test_the_strongest_baseline_is_named_and_counted():
    with_reference, captions = (
        SimpleNamespace(tasks=dict(t=SimpleNamespace(queries=pd.DataFrame(dict(reference=[r]))))) for r in ('a', None)
    )
    benchmarks = dict(cirr=with_reference, circo=with_reference, captions=captions)
    ends, inside = SimpleNamespace(at_ends=['smallest w_I']), SimpleNamespace(at_ends=[])
    chosen = {('compodiff', 'cirr'): ends, ('compodiff', 'circo'): inside, ('compodiff_cirr', 'cirr'): ends}
    titles = dict(image_text='A', image_text_tuned='B', compodiff='CompoDiff')
    run = SimpleNamespace(benchmarks=benchmarks, titles=titles, samplers=chosen)
    about = dict(low=1.0, high=3.0, diff=2.0, by_seed=[], p=0.001, p_corrected=0.001, key='k')
    worse = about | dict(low=-3.0, high=-1.0, diff=-2.0)
    found = {(b, r): about for b in run.benchmarks for r in run.titles} | {('circo', 'image_text_tuned'): worse}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diffusion, 'strongest_on', lambda run, name: 'image_text_tuned')
        said = against_baselines(run, found)
        assert strongest_pairs(run, found) == [('cirr', 'image_text_tuned'), ('circo', 'image_text_tuned')]
    assert said.endswith(' CompoDiff is better on 1, undecided on 0 and worse on 1 of 2 benchmarks')
    assert ends_words(run).startswith('On 1 of 2 benchmarks the chosen sampler setting')


@pytest.mark.parametrize('known, said', [(True, 'compared with others likewise'), (False, 'not searched')])
def test_the_learning_rate_of_the_first_stage_is_named(monkeypatch, known, said):
    runs = dict(second=dict(start='first'), first=dict(start='', lr=0.002))
    monkeypatch.setattr(diffusion, 'zero_shot_entries', lambda entries: [SimpleNamespace(run='second')])
    monkeypatch.setattr(diffusion, 'manifest', lambda run: dict(params=runs[run]))
    monkeypatch.setattr(diffusion, 'start_run', lambda start: start or None)
    monkeypatch.setattr(diffusion, 'rate_was_searched', lambda params: known and params['lr'] == 0.002)
    found = diffusion.first_stage_rate(SimpleNamespace(entries=[]))
    assert found.startswith(f'Stage 1 of CompoDiff: learning rate 0.002, {said}')
