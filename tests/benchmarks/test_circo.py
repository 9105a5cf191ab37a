"CIRCO: released annotations, the example submission, damaged files."

import json
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from made_up import MadeUp, fused
from projects import DATA, ROOT, needs_data
from cis_nb.benchmarks.circo import (
    CIRCO_SPLITS,
    audit_circo,
    check_circo_submission,
    circo_image_names,
    circo_ranked_lists,
    load_circo,
    read_circo,
    score_circo_submission,
    write_circo_submission,
)
from cis_nb.retrieval.metrics import map_at_k

data = DATA
real = needs_data('circo/annotations/val.json')


def slow_ap(right, ranked, k):
    hits, total = 0, 0.0
    for n, i in enumerate(ranked[:k], 1):
        if i in right:
            hits += 1
            total += hits / n
    return total / min(len(right), k)


@real
def test_the_released_annotations_hold_what_the_chapter_prints():
    nb = json.loads((ROOT / 'nbs/02b_benchmarks/03_circo.ipynb').read_text())
    cell = next(''.join(c['source']) for c in nb['cells'] if ''.join(c['source']).startswith('released ='))
    space = {}
    exec(cell.split('\nshow_table')[0], {}, space)
    for split, column in zip(CIRCO_SPLITS, (1, 2)):
        found = audit_circo(data, split).set_index('what')['count']
        printed = {row[0]: row[column] for row in space['released'] if row[column] is not None}
        assert {k: round(float(found[k]), 1) for k in printed} == printed and set(printed) == set(found.index)


@real
def test_the_example_submission_scores_as_counted_by_hand():
    c = read_circo(data)
    file = data / 'circo/submission_examples/submission_val.json'
    lists, found = json.loads(file.read_text()), score_circo_submission(file, c).set_index(['metric', 'k']).value
    for k in (5, 10, 25, 50):
        assert found['map', k] == pytest.approx(
            100 * np.mean([slow_ap(set(e['gt_img_ids']), lists[str(e['id'])], k) for e in c.entries])
        )
        assert found['recall', k] == pytest.approx(
            100 * np.mean([e['target_img_id'] in lists[str(e['id'])][:k] for e in c.entries])
        )
    check_circo_submission(data / 'circo/submission_examples/submission_test.json', read_circo(data, 'test'))
    with pytest.raises(ValueError, match='query'):
        check_circo_submission(file, read_circo(data, 'test'))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=14, unique=True), st.sampled_from((1, 5, 10, 25, 50)))
@settings(max_examples=200, deadline=None)
def test_average_precision_is_the_slow_one(places, k):
    assert map_at_k(np.array([places]), k)[0] == pytest.approx(slow_ap(set(places), list(range(1, 61)), k))


def test_a_list_of_images_without_numbers_is_named(tmp_path):
    (tmp_path / 'circo/annotations').mkdir(parents=True)
    (tmp_path / 'circo/annotations/val.json').write_text(
        json.dumps(
            [
                dict(
                    reference_img_id=1,
                    target_img_id=2,
                    relative_caption='is red',
                    shared_concept='a cat',
                    gt_img_ids=[2],
                    id=0,
                    semantic_aspects=[],
                )
            ]
        )
    )
    (tmp_path / 'circo/annotations/image_info_unlabeled2017.json').write_text('{"images": [{"id": 1}]}')
    with pytest.raises(ValueError, match="image_info_unlabeled2017.json, images.0.: has no 'file_name'"):
        circo_image_names(read_circo(tmp_path))
    (tmp_path / 'circo/annotations/image_info_unlabeled2017.json').write_text(
        '{"images": [{"id": 1, "file_name": "../../1.jpg"}, {"id": 2, "file_name": "2.jpg"}]}'
    )
    # a path keeps its last part only
    assert circo_image_names(read_circo(tmp_path)) == {'1': '1.jpg', '2': '2.jpg'}


@pytest.mark.parametrize(
    'images, why',
    [
        ([], 'json: images is .*at least 1 item.*; get it again'),
        ([dict(id=7, file_name='x' * 5000)], 'json, image 7, file_name: has a file name of more than 255 bytes.*; get'),
        ([dict(id=7, file_name='')], "json, image 7, file_name: has no file name but ''; get"),
        ([dict(id=7, file_name='..')], 'json, image 7, file_name: has a file outside the folder'),
    ],
)
def test_a_list_without_usable_images_is_refused(tmp_path, images, why):
    small_circo(tmp_path)
    path = tmp_path / 'circo/annotations/image_info_unlabeled2017.json'
    path.write_text(json.dumps(dict(images=images)))
    with pytest.raises(ValueError, match=f'image_info_unlabeled2017.{why}'):
        load_circo(tmp_path)


def small_circo(root):
    "A made-up CIRCO of two queries among 51 images."
    (root / 'circo/annotations').mkdir(parents=True)
    entry = dict(relative_caption='is red', shared_concept='a cat', semantic_aspects=[])
    entries = [
        dict(entry, id=0, reference_img_id=60, target_img_id=2, gt_img_ids=[2, 3]),
        dict(entry, id=1, reference_img_id=61, target_img_id=5, gt_img_ids=[5]),
    ]
    (root / 'circo/annotations/val.json').write_text(json.dumps(entries))
    return read_circo(root)


@pytest.mark.parametrize('odd', [11.9, 'abc', None])
def test_an_id_that_is_no_whole_number_is_not_written(tmp_path, odd):
    c, lists = small_circo(tmp_path), {q: [*np.arange(1, 50), odd] for q in '01'}
    with pytest.raises(ValueError, match='x.json: not written, query 0 needs a list of integers from 0'):
        write_circo_submission(lists, tmp_path / 'x.json', c)
    assert not (tmp_path / 'x.json').exists()
    lists = {q: [*np.arange(1, 50), '50'] for q in '01'}
    assert json.loads(write_circo_submission(lists, tmp_path / 'x.json', c).read_text())['1'] == [*range(1, 51)]


def test_ids_written_as_text_are_scored_like_numbers(tmp_path):
    c, lists = small_circo(tmp_path), {'0': [*range(1, 51)], '1': [*range(1, 51)]}
    (tmp_path / 'numbers.json').write_text(json.dumps(lists))
    (tmp_path / 'text.json').write_text(json.dumps({q: [*map(str, ids)] for q, ids in lists.items()}))
    found = score_circo_submission(tmp_path / 'text.json', c)
    assert found.equals(score_circo_submission(tmp_path / 'numbers.json', c))
    # query 0: (1/2 + 2/3) / 2, query 1: 1/5
    assert found.value[0] == pytest.approx(100 * ((1 / 2 + 2 / 3) / 2 + 1 / 5) / 2)
    assert check_circo_submission(tmp_path / 'text.json', c) == lists


@pytest.mark.parametrize('odd', ['1a', '', '1.0', '-1', '\u0661', None, True, 1.0])
def test_ids_that_are_no_numbers_are_refused(tmp_path, odd):
    c = small_circo(tmp_path)
    (tmp_path / 'odd.json').write_text(json.dumps({q: [odd, *range(2, 51)] for q in '01'}))
    with pytest.raises(ValueError, match='odd.json: query 0 needs a list of integers'):
        check_circo_submission(tmp_path / 'odd.json', c)


def test_one_image_as_text_and_as_a_number_is_named_twice(tmp_path):
    c = small_circo(tmp_path)
    (tmp_path / 'twice.json').write_text(json.dumps({q: ['2', *range(2, 51)] for q in '01'}))
    with pytest.raises(ValueError, match='names image 2 twice'):
        check_circo_submission(tmp_path / 'twice.json', c)


@pytest.mark.parametrize('broken, said', [('image', "candidate '7' is nan"), ('query', 'query 0: .* is nan')])
def test_features_that_are_not_finite_never_reach_a_submission(tmp_path, broken, said):
    c = small_circo(tmp_path)
    names = [dict(id=i, file_name=f'{i}.jpg') for i in (*range(1, 51), 60, 61)]
    (tmp_path / 'circo/annotations/image_info_unlabeled2017.json').write_text(json.dumps(dict(images=names)))
    r = np.random.default_rng(0)
    vectors = {str(n['id']): r.normal(size=8).astype(np.float32) for n in names}
    words = {'is red': np.full(8, np.nan if broken == 'query' else 1, np.float32)}
    if broken == 'image':
        vectors['7'][3] = np.nan
    with pytest.raises(ValueError, match=said):
        circo_ranked_lists(fused(MadeUp(vectors.get, words.get)), c)
