"Caption retrieval by several ground truths: damaged files, slow metrics, COCO captions, the world's true pairs."

import json
import random
from itertools import combinations
import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from projects import DATA, needs_data
from cis_nb.benchmarks.coco_captions import (
    TRUTH_FILES,
    CAPTION_KS,
    CAPTION_MEASURES,
    DIRECTIONS,
    CaptionSet,
    GroundTruth,
    audit_ground_truth,
    ranks_from_features,
    caption_rows,
    evaluate_captions,
    evaluate_rankings,
    split_folds,
    expected_by_chance,
    locate_images,
    plain_ground_truth,
    restrict_to_images,
    rankings_from_features,
    read_coco_captions,
    read_split_ids,
    read_ground_truth,
)
from cis_nb.retrieval.metrics import METRICS
from cis_nb.world.captions import scene_captions, draw_twin
from cis_nb.world.positives import stated_facts, coco_scenes, true_facts, positives_root, true_images
from cis_nb.world.scenes import ATTRIBUTES, PLACES, draw_scene

data = DATA
real = needs_data('coco_mini/captions_val2017.json')


def made(n=60, per=2) -> CaptionSet:
    "Captions without a file."
    texts = {1000 * i + k: f'picture {i}, sentence {k}' for i in range(1, n + 1) for k in range(per)}
    return CaptionSet('toy', 'test', {i: f'{i}.jpg' for i in range(1, n + 1)}, texts, {t: t // 1000 for t in texts})


def truth_of(c, rng, most=7) -> GroundTruth:
    "Any right answers, of some queries, in any order."

    def pick(asks, answers):
        return {
            int(q): [int(i) for i in rng.choice(list(answers), rng.integers(1, most + 1), replace=False)]
            for q in rng.permutation(list(asks))[: len(asks) * 2 // 3]
        }

    return GroundTruth('any', dict(zip(DIRECTIONS, (pick(c.images, c.texts), pick(c.texts, c.images)))))


def slowly(ranked, right):
    "All measures of one list, counted place by place."
    R, hits, total = len(right), 0, 0.0
    for n, i in enumerate(ranked[:R], 1):
        if i in right:
            hits += 1
            total += hits / n
    return [*(float(bool(set(ranked[:k]) & set(right))) for k in CAPTION_KS), hits / R, total / R]


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_every_row_is_the_slow_one_by_both_roads(seed):
    rng, c = np.random.default_rng(seed), made()
    truth, image, text = truth_of(c, rng), rng.normal(size=(60, 4)), rng.normal(size=(120, 4))
    lists = rankings_from_features(image, text, c)
    slow = [
        100 * v
        for way in DIRECTIONS
        for v in np.mean([slowly(lists[way][q], right) for q, right in truth.right[way].items()], axis=0)
    ]
    assert caption_rows(ranks_from_features(image, text, c), c, [truth], folds=0)[0].value.tolist() == pytest.approx(
        slow
    )
    assert evaluate_rankings(lists, c, [truth], folds=0)[0].value.tolist() == pytest.approx(slow)


@given(st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_ties_are_lost(seed):
    rng, c = np.random.default_rng(seed), made(20)
    truth, image, text = (
        truth_of(c, rng),
        rng.integers(-1, 2, (20, 2)).astype(float),
        rng.integers(-1, 2, (40, 2)).astype(float),
    )
    image, text = (x * 2.0 for x in (image, text))
    found = ranks_from_features(image, text, c)(c, truth)
    from cis_nb.benchmarks.image_text import l2_normalize_array

    S = l2_normalize_array(image) @ l2_normalize_array(text).T
    for way, scores, asks, answers in (
        (DIRECTIONS[0], S, list(c.images), list(c.texts)),
        (DIRECTIONS[1], S.T, list(c.texts), list(c.images)),
    ):
        for r, (q, right) in zip(found[way], truth.right[way].items()):
            s = scores[asks.index(q)]
            order = sorted(range(len(s)), key=lambda j: (-s[j], answers[j] in right))
            assert sorted(v for v in r if v) == [n for n, j in enumerate(order, 1) if answers[j] in right]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9, unique=True))
@settings(max_examples=100, deadline=None)
def test_measures_of_ranks(places):
    ranked, right = list(range(1, 41)), set(places)
    assert [METRICS[m](np.array([[*places, 0]]), k)[0] for m, k in CAPTION_MEASURES] == pytest.approx(
        slowly(ranked, right)
    )


def test_what_a_guess_finds_is_the_mean_over_all_orders():
    for G, R in ((5, 2), (6, 3), (4, 1), (3, 3)):
        r = np.array(list(combinations(range(1, G + 1), R)))
        for m, k in CAPTION_MEASURES:
            assert expected_by_chance([R], G, m, k) == pytest.approx(METRICS[m](r, k).mean())


def test_the_parts_of_coco_1k_are_the_mean_of_five_small_sets():
    rng, c = np.random.default_rng(0), made(103)  # parts of 21 and 20 pictures: means of means, not of queries
    image, text = rng.normal(size=(103, 4)), rng.normal(size=(206, 4))
    rows = caption_rows(ranks_from_features(image, text, c), c, [plain_ground_truth(c)])[0]
    parts = split_folds(c)
    assert [len(p.images) for p in parts] == [21, 21, 21, 20, 20] and [i for p in parts for i in p.images] == list(
        c.images
    )
    at, ta = {i: n for n, i in enumerate(c.images)}, {t: n for n, t in enumerate(c.texts)}
    slow = []
    for p in parts:
        lists = rankings_from_features(image[[at[i] for i in p.images]], text[[ta[t] for t in p.texts]], p)
        slow.append(
            [
                [
                    np.mean(
                        [
                            any(x in right for x in lists[way][q][:k])
                            for q, right in plain_ground_truth(p).right[way].items()
                        ]
                    )
                    for k in CAPTION_KS
                ]
                for way in DIRECTIONS
            ]
        )
    assert rows[rows.benchmark.str.contains('5parts')].value.tolist() == pytest.approx(
        (100 * np.mean(slow, axis=0)).ravel().tolist()
    )


def test_intervals_draw_pictures_not_captions():
    c = made(200, 5)
    easy = np.random.default_rng(0).random(200) < 0.4  # all captions of an easy picture find it
    lists = {
        DIRECTIONS[0]: {
            i: [*(t for t in c.texts if c.owner[t] == i), *(t for t in list(c.texts)[:20] if c.owner[t] != i)]
            for i in c.images
        },
        DIRECTIONS[1]: {
            t: [i, *(j for j in range(1, 13) if j != i)] if easy[i - 1] else [*(j for j in range(1, 13) if j != i), i]
            for t, i in c.owner.items()
        },
    }
    rows = evaluate_rankings(lists, c, [plain_ground_truth(c)], folds=0)[0]
    row = rows[(rows.task == DIRECTIONS[1]) & (rows.metric == 'recall') & (rows.k == 1)].iloc[0]
    assert row.value == pytest.approx(100 * easy.mean()) and (row.ci_high - row.ci_low) / 2 == pytest.approx(
        196 * np.sqrt(0.24 / 200), rel=0.15
    )


# Files


def write(folder, c, truth):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'captions_test.json').write_text(
        json.dumps(
            dict(
                images=[dict(id=i, file_name=f) for i, f in c.images.items()],
                annotations=[dict(id=t, image_id=c.owner[t], caption=s) for t, s in c.texts.items()],
            )
        )
    )
    for way, kind in TRUTH_FILES.items():
        (folder / f'{truth.name}_{kind}.json').write_text(json.dumps({str(q): v for q, v in truth.right[way].items()}))


def test_what_is_written_is_read(tmp_path):
    c = made()
    truth = truth_of(c, np.random.default_rng(1))
    write(tmp_path, c, truth)
    back = read_coco_captions(tmp_path / 'captions_test.json', name='toy')
    assert back == c and read_ground_truth(tmp_path, 'any', back) == truth
    some = read_coco_captions(tmp_path / 'captions_test.json', [7, 3], 'toy')
    assert (
        list(some.images) == [7, 3]
        and list(some.texts) == [7000, 7001, 3000, 3001]
        and some.split != read_coco_captions(tmp_path / 'captions_test.json', [3, 7]).split
    )


@pytest.mark.parametrize(
    'text, why',
    [
        ('{"images": []}', "has no 'annotations'"),
        ('[]', 'is list, not an object'),
        ('{"images": [3]}', r'images\[0\]: is int'),
        ('{"images": [{"id": "1", "file_name": "a"}]}', "id is '1', not int"),
        ('{"images": [{"id": 1, "file_name": "a"}]}', "has no 'annotations'"),
        ('{"images"', 'may be cut off'),
        ('{"images": [{"id": true, "file_name": "a"}]}', 'id is True, not int'),
        (
            '{"images": [{"id": 1, "file_name": "a"}, {"id": 2, "file_name": "b"}], '
            '"annotations": [{"id": 5, "image_id": 1, "caption": "x"}]}',
            r'1 images have no caption \(the first: 2\)',
        ),
    ],
)
def test_damaged_captions_are_named(tmp_path, text, why):
    (tmp_path / 'captions_val.json').write_text(text)
    with pytest.raises(ValueError, match=why) as e:
        read_coco_captions(tmp_path / 'captions_val.json')
    assert 'captions_val.json' in str(e.value)


@pytest.mark.parametrize(
    'text, why',
    [
        ('{"1": [1000]', 'cut off'),
        ('null', 'not NoneType'),
        ('{}', 'without entries'),
        ('{"1": 1000}', 'expected a list of ids'),
        ('{"1": []}', 'the list of positives is empty'),
        ('{"x": [1000]}', "'x' is not a number"),
        ('{"1": [1.5]}', '1.5 is not a number'),
        ('{"1": [true]}', 'True is not a number'),
        ('{"1": [-4]}', '-4 is not a number'),
        ('{"1": [1000], "01": [1001]}', 'query 1 occurs twice'),
        ('{"1": [1000], "1": [1000]}', "'1' occurs twice"),
        ('{"1": [1000, "1000"]}', '1000 is listed twice'),
        ('{"1000": [1]}', 'query 1000 is no image'),
        ('{"1": [1]}', 'query 1: 1 is no caption'),
    ],
)
def test_damaged_truths_are_named(tmp_path, text, why):
    c = made()
    write(tmp_path, c, truth_of(c, np.random.default_rng(1)))
    (tmp_path / 'any_image_to_caption.json').write_text(text)
    with pytest.raises(ValueError, match=why) as e:
        read_ground_truth(tmp_path, 'any', c)
    assert 'any_image_to_caption.json' in str(e.value)


@pytest.mark.parametrize('way', DIRECTIONS)
def test_a_truth_of_one_direction_is_refused(tmp_path, way):
    c = made()
    write(tmp_path, c, truth_of(c, np.random.default_rng(1)))
    (tmp_path / f'any_{TRUTH_FILES[way]}.json').unlink()
    with pytest.raises(FileNotFoundError, match=f'any_{TRUTH_FILES[way]}.json is missing'):
        read_ground_truth(tmp_path, 'any', c)


@given(st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_no_truth_never_pass(tmp_path_factory, junk):
    c, folder = made(), tmp_path_factory.getbasetemp() / 'junk'
    write(folder, c, plain_ground_truth(c))
    (folder / 'plain_caption_to_image.json').write_bytes(junk)
    with pytest.raises(ValueError):
        read_ground_truth(folder, 'plain', c)


@pytest.mark.parametrize(
    'text, why',
    [
        ('{"images": 3}', 'must be a list of objects'),
        ('{"images": [{"cocoid": "7", "split": "test"}]}', 'a number as cocoid'),
        ('{"images": [{"cocoid": 7, "split": "val"}]}', "no image of the split 'test'"),
        ('["7"]', 'list of image numbers'),
        ('[]', 'no image'),
    ],
)
def test_damaged_lists_of_pictures_are_named(tmp_path, text, why):
    (tmp_path / 'dataset_coco.json').write_text(text)
    with pytest.raises(ValueError, match=why):
        read_split_ids(tmp_path / 'dataset_coco.json')


def test_rankings_that_do_not_fit_are_refused():
    c = made()
    rng = np.random.default_rng(2)
    lists = rankings_from_features(rng.normal(size=(60, 4)), rng.normal(size=(120, 4)), c)
    short = {w: {q: v[:12] for q, v in some.items()} for w, some in lists.items()}
    assert len(evaluate_rankings(short, c, [plain_ground_truth(c)], folds=0)[0]) == 10
    with pytest.raises(ValueError, match='give longer rankings'):
        evaluate_rankings(short, c, [plain_ground_truth(c)])  # a part of 12 pictures needs ten of its own
    for bad, why in (
        ([], 'rankings need both directions'),
        ({**lists, DIRECTIONS[0]: {}}, '60 queries have no ranking'),
        ({**lists, DIRECTIONS[0]: {**lists[DIRECTIONS[0]], 1: [1]}}, '1 is not in the gallery'),
    ):
        with pytest.raises(ValueError, match=why):
            evaluate_rankings(bad, c, [plain_ground_truth(c)])


def test_a_missing_picture_costs_its_captions_and_is_counted():
    c = made()
    truth = truth_of(c, np.random.default_rng(3))
    left, cut, note = restrict_to_images(c, [plain_ground_truth(c), truth], set(list(c.images)[6:]))
    assert (len(left.images), len(left.texts), left.coverage) == (
        54,
        108,
        0.9,
    ) and 'plain, text to image: 12 queries left out, 0 with fewer positives' in note
    assert all(
        set(v) <= set(truth.right[w][q]) and v and q in (left.images if w == DIRECTIONS[0] else left.texts)
        for w in DIRECTIONS
        for q, v in cut[1].right[w].items()
    )
    with pytest.raises(ValueError, match='not one query of one'):
        restrict_to_images(
            c,
            [GroundTruth('one', {w: dict([next(iter(plain_ground_truth(c).right[w].items()))]) for w in DIRECTIONS})],
            set(list(c.images)[6:]),
        )


# COCO's own


@real
def test_the_captions_of_coco_are_read():
    c = read_coco_captions(data / 'coco_mini/captions_val2017.json', name='coco_mini')
    assert (len(c.images), len(c.texts), c.split) == (79, 395, 'val2017') and {
        len(v) for v in plain_ground_truth(c).right[DIRECTIONS[0]].values()
    } == {5}
    assert c.images[397133] == '000000397133.jpg' and all(i in c.images for i in c.owner.values())
    train = read_coco_captions(data / 'coco_mini/captions_train2017.json', name='coco_mini')
    assert (len(train.images), len(train.texts)) == (80, 400)
    with pytest.raises(ValueError, match='80 of 80 chosen images are not in it'):
        read_coco_captions(data / 'coco_mini/captions_val2017.json', list(train.images))
    found = audit_ground_truth(plain_ground_truth(c), c)
    assert found['positives, mean'].tolist() == [5.0, 1.0]


@real
def test_coco_pictures_are_found_in_their_tar_and_evaluated(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))

    class Mean:
        "Sees the mean colour and reads nothing: a guess."

        name, fingerprint, D, dtype = 'mean', 'mean-1', 3, 'float32'
        preprocess = staticmethod(lambda im: torch.tensor(np.asarray(im.resize((8, 8)), np.float32).mean((0, 1))))
        encode_image = staticmethod(lambda x: x)
        encode_text = staticmethod(
            lambda ts: torch.tensor([[len(t) % 7 + 1.0, len(t) % 5 + 1.0, len(t) % 3 + 1.0] for t in ts])
        )

    c = read_coco_captions(data / 'coco_mini/captions_val2017.json', name='coco_mini')
    rows, protocols, skipped = evaluate_captions(Mean(), c, data / 'coco_mini', [plain_ground_truth(c)])
    assert len(locate_images(c, data / 'coco_mini')[0]) == 79 and not skipped and len(rows) == 16
    assert 'partial' not in str(protocols[0]) and 'captions of 5 parts of 15 to 16 images' in protocols[2].gallery
    assert rows[(rows.task == DIRECTIONS[1]) & (rows.metric == 'recall') & (rows.k == 1)].value.iloc[0] < 15


# The world


def test_a_changed_fact_makes_a_caption_wrong():
    "Who says a thing's colour is right of the scene and wrong of its twin in another colour."
    told = 0
    for n in range(300):
        r = random.Random(n)
        s = draw_scene(r, n_things=r.choice((2, 3, 4)))
        k = r.randrange(len(s.things))
        kind = r.choice(('color', 'pattern', 'texture', 'pose', 'size'))
        changed, thing = draw_twin(s, k, kind, r), s.things[k]
        for text in scene_captions(s, r):
            stated = stated_facts(text)
            assert stated <= true_facts(s)
            says = (thing.category, getattr(thing, kind)) in stated
            told += says
            if says:
                assert not stated <= true_facts(changed), text
            elif kind != 'size':
                assert stated <= true_facts(changed), text  # a fact that is not mentioned may change
    assert told > 100


def test_facts_are_those_of_the_scene():
    for n in range(100):
        s = draw_scene(random.Random(n))
        f = true_facts(s)
        for t in s.things:
            assert {x[1] for x in f if len(x) == 2 and x[0] == t.category} >= {getattr(t, k) for k in ATTRIBUTES}
            assert not any(
                (t.category, v) in f for k, values in ATTRIBUTES.items() for v in values if v != getattr(t, k)
            )
        assert {x[1] for x in f if x[0] == 'place'} == {s.place} and {x[1] for x in f if x[0] == 'there'} == set(
            PLACES[s.place][0]
        )
        sides = {x for x in f if len(x) == 3 and x[1] not in ('near', 'next to')}
        for a, way, b in sides:
            p, q = (next(t for t in s.things if t.category == x) for x in (a, b))
            assert dict(
                zip(
                    ('to the left of', 'to the right of', 'above', 'below'),
                    (p.x < q.x, p.x >= q.x, p.y < q.y, p.y >= q.y),
                )
            )[way]
        assert len(sides) == len(s.things) * (len(s.things) - 1)


def test_the_worlds_truth_is_exact(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    root = positives_root(40, 3)
    c = read_coco_captions(root / 'coco/annotations/captions_val2017.json', name='world')
    truth, scenes = read_ground_truth(root / 'coco/annotations', 'extended', c), coco_scenes(40, 3)
    assert {(q, i) for q, v in truth.right[DIRECTIONS[1]].items() for i in v} == {
        (t, i) for t, s in c.texts.items() for i, scene in scenes.items() if stated_facts(s) <= true_facts(scene)
    }
    assert {(i, q) for q, v in truth.right[DIRECTIONS[1]].items() for i in v} == {
        (i, q) for i, v in truth.right[DIRECTIONS[0]].items() for q in v
    }
    assert audit_ground_truth(truth, c)['written, but not positive'].tolist() == [0, 0]
    assert true_images({1: 'a dinosaurless cat'.replace('dinosaurless ', '')}, scenes) == {
        1: [i for i, s in scenes.items() if any(t.category == 'cat' for t in s.things)]
    }


def test_sentences_from_elsewhere_are_refused():
    for text in (
        'a man riding a wave',
        'a pencil sketch of a red cat',
        'a red cat and',
        'a red cat on the moon',
        'there is',
    ):
        with pytest.raises(ValueError, match='not a sentence of the world'):
            stated_facts(text)
