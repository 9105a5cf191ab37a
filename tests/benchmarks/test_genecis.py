"GeneCIS templates: released files, crops, damaged files, images that cannot be read."

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from cis_nb.benchmarks.genecis import (
    TASKS,
    audit,
    census,
    crop,
    crop_box,
    gallery_size,
    keys_of,
    load_genecis,
    parse_key,
    read_templates,
    templates_file,
    write_templates,
)
from cis_nb.benchmarks.genecis_construction import (
    condition_name,
    read_built,
)
from cis_nb.benchmarks.genecis import _queries, check_templates
from cis_nb.retrieval.protocol import NoQueries, Protocol, Task


def real(name):
    root = os.environ.get('CIS_DATA')
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f'{name} is not here (set CIS_DATA to the folder that holds it)')
    return Path(root)


# --- the released files

FLAWS = {
    'focus_attribute': {
        'the target is in the gallery too': 1,
        'the reference is in the gallery': 0,
        'an image is in the gallery twice': 6,
        'the query is a duplicate': 8,
    },
    'change_attribute': {
        'the target is in the gallery too': 0,
        'the reference is in the gallery': 79,
        'an image is in the gallery twice': 5,
        'the query is a duplicate': 74,
    },
    'focus_object': {
        'the target is in the gallery too': 0,
        'the reference is in the gallery': 0,
        'an image is in the gallery twice': 0,
        'the query is a duplicate': 427,
    },
    'change_object': {
        'the target is in the gallery too': 1,
        'the reference is in the gallery': 0,
        'an image is in the gallery twice': 0,
        'the query is a duplicate': 167,
    },
}
CENSUS = {
    'focus_attribute': (2000, 40, 13348),
    'change_attribute': (2112, 400, 15058),
    'focus_object': (1960, 97, 2198),
    'change_object': (1960, 109, 2739),
}


@pytest.mark.data
@pytest.mark.parametrize('task', TASKS)
def test_released_file_comes_out_byte_for_byte(task, tmp_path):
    data = gzip.decompress((real('genecis') / f'genecis/{task}.json.gz').read_bytes())
    (tmp_path / 'in.json').write_bytes(data)
    write_templates(tmp_path / 'out.json', read_templates(tmp_path / 'in.json'))
    assert (tmp_path / 'out.json').read_bytes() == data
    write_templates(tmp_path / 'out.json.gz', read_templates(real('genecis') / f'genecis/{task}.json.gz'))
    assert gzip.decompress((tmp_path / 'out.json.gz').read_bytes()) == data


@pytest.mark.data
@pytest.mark.parametrize('task', TASKS)
def test_audit_finds_the_known_flaws(task):
    templates = read_templates(templates_file(real('genecis'), task))
    found = audit(templates).set_index('flaw').templates
    assert {f: found[f] for f in FLAWS[task]} == FLAWS[task]
    assert (
        found['reference and target are the same image']
        == found['the condition is empty']
        == found['the gallery has another size']
        == 0
    )
    if 'attribute' in task:
        assert (
            found['a distractor comes from the photograph of reference or target']
            == dict(focus_attribute=39, change_attribute=50)[task]
        )
        assert (
            found['reference and target come from one photograph'] == dict(focus_attribute=0, change_attribute=1)[task]
        )
    c = census(templates)
    assert (c['templates'], c['conditions'], c['photographs']) == CENSUS[task]
    assert {len(t['gallery']) + 1 for t in templates} == {gallery_size(task)}
    keys = {k for t in templates for k in (keys_of(t)[0], keys_of(t)[1], *keys_of(t)[2])}
    some = set(sorted(keys)[::2])
    assert census(templates, some)['present'] == len(some)
    protocol = Task('genecis', task, _queries(templates, task), None, Protocol('genecis'), key='k').protocol
    assert protocol.repeats == found['an image is in the gallery twice']
    with_missing = audit(templates, some).set_index('flaw').templates['an image is missing']
    assert with_missing == sum(not {R, T, *G} <= some for R, T, G, _ in map(keys_of, templates))


@pytest.mark.data
def test_released_conditions_are_the_category_names():
    root = real('genecis')
    real('coco_panoptic')
    names = [
        condition_name(c['name'])
        for c in json.loads((root / 'coco_panoptic/coco128_panoptic_val2017.json').read_text())['categories']
    ]
    assert len(names) == len(set(names)) == 133
    for task in TASKS[2:]:
        assert {t['condition'] for t in read_templates(templates_file(root, task))} <= set(names)


@pytest.mark.data
def test_loading_the_released_files_without_their_pictures(tmp_path):
    root = real('genecis')
    with pytest.raises(FileNotFoundError, match='val2017.zip'):
        load_genecis(root, 'focus_object')
    with pytest.raises(FileNotFoundError, match='visualgenome'):
        load_genecis(root, 'focus_attribute')
    (tmp_path / 'val2017').mkdir()
    templates = read_templates(templates_file(root, 'focus_object'))
    for i in sorted(parse_key(k)[0] for k in {k for R, T, G, _ in map(keys_of, templates[:30]) for k in (R, T, *G)}):
        Image.new('RGB', (8, 6)).save(tmp_path / f'val2017/{i}.jpg')
    b = load_genecis(tmp_path, 'focus_object', root)
    assert len(b) >= 30 and set(b.queries.query_id) >= {f'focus_object-{i:04d}' for i in range(30)}
    assert (
        'partial' in str(b.protocol)
        and 'released templates' in b.protocol.extra
        and f'{1960 - len(b)} of 1960 queries left out' in b.protocol.extra
    )
    (tmp_path / 'val2017' / f'{templates[0]["gallery"][5]["val_image_id"]:012d}.jpg').unlink()
    assert 'focus_object-0000' not in set(load_genecis(tmp_path, 'focus_object', root).queries.query_id)


# --- random annotations


# --- crops


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.floats(-50, 350),
    st.floats(-50, 350),
    st.floats(0.01, 400),
    st.floats(0.01, 400),
    st.sampled_from(['official', 'symmetric']),
)
def test_crop_box(W, H, x, y, w, h, mode):
    try:
        box = crop_box((W, H), (x, y, w, h), mode=mode)
    except ValueError as e:
        assert 'lies outside' in str(e) or 'less than a pixel' in str(e)
        return
    left, top, right, bottom = box
    assert 0 <= left < right <= W and 0 <= top < bottom <= H
    if mode == 'official':
        x0, y0 = max(0, x - 0.7 * w), max(0, y - 0.7 * h)
        assert box == tuple(int(round(v)) for v in (x0, y0, min(W, x0 + 1.7 * w), min(H, y0 + 1.7 * h)))
    im = crop(Image.new('RGB', (W, H), 'white'), (x, y, w, h), mode=mode)
    wide, high = right - left, bottom - top
    assert im.size == (max(wide, high),) * 2 and np.asarray(im).any(-1).sum() == wide * high


@pytest.mark.parametrize(
    'box',
    [(5, 5, 0, 9), (5, 5, 9, -1), (5, 5, float('nan'), 9), (float('inf'), 5, 9, 9), (400, 5, 9, 9), (-90, 5, 9, 9)],
)
def test_boxes_that_show_nothing(box):
    with pytest.raises(ValueError, match='box'):
        crop_box((100, 80), box)


@pytest.mark.parametrize('mode', ['RGB', 'L', 'P', 'CMYK', '1', 'LA', 'RGBA', 'I;16'])
def test_any_kind_of_image_becomes_a_square_rgb(mode):
    im = crop(Image.new(mode, (60, 40)), (10, 10, 20, 10))
    assert im.mode == 'RGB' and im.size == (34, 34)


# --- readers


# --- hostile files

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda c: (
        st.lists(c, max_size=4)
        | st.dictionaries(
            st.sampled_from(['val_image_id', 'image_id', 'instance_bbox', 'reference', 'gallery', 'x']), c, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(junk, st.sampled_from(['reference', 'target', 'gallery', 'condition', None]))
def test_junk_templates_give_a_clear_error(value, field):
    good = dict(
        reference=dict(val_image_id=1), target=dict(val_image_id=2), gallery=[dict(val_image_id=3)], condition='x'
    )
    templates = [good, dict(good, **{field: value})] if field else value
    try:
        check_templates(templates, 'file.json')
    except ValueError as e:
        assert 'file.json' in str(e)
    else:
        [keys_of(t) for t in templates]


@pytest.mark.parametrize('data', [b'', b'[', b'\xff\xfe{}', b'{"a": 1}', b'null', b'[1]'])
def test_files_that_are_no_templates(tmp_path, data):
    (tmp_path / 't.json').write_bytes(data)
    with pytest.raises(ValueError, match='t.json'):
        read_templates(tmp_path / 't.json')
    (tmp_path / 't.json.gz').write_bytes(data)
    with pytest.raises(ValueError, match='t.json.gz'):
        read_templates(tmp_path / 't.json.gz')


def test_a_file_without_a_template_is_refused(tmp_path):
    (tmp_path / 'focus_object.json').write_text('[]')
    with pytest.raises(NoQueries, match='focus_object.json: expected a list of templates, not an empty one; get it'):
        load_genecis(tmp_path, 'focus_object')


# --- the whole way, with the feature store


def test_from_annotations_to_ranks(built):
    root, folder = built
    from cis_nb.retrieval.protocol import evaluate
    from cis_nb.backbones.loading import load_backbone
    from cis_nb.methods.baselines import methods

    backbone = load_backbone('tiny', pretrained='none')
    for task in TASKS:
        bench = load_genecis(root, task, folder)
        assert len(bench) == 6 == len(read_built(folder, task).templates)
        assert ('rebuilt' in bench.protocol.extra) and (bench.protocol.crop != 'whole image') == ('attribute' in task)
        ranked, rows = evaluate(methods(backbone)['image_text'], bench)
        assert len(ranked) == 6 and set(ranked.gallery_size) == {gallery_size(task)} and list(rows.k) == [1, 2, 3]
        again, _ = evaluate(methods(backbone)['image_text'], bench)
        assert again['rank'].tolist() == ranked['rank'].tolist()


def test_a_truncated_photograph_costs_its_queries(built):
    root, folder = built
    from cis_nb.retrieval.protocol import evaluate
    from cis_nb.backbones.loading import load_backbone
    from cis_nb.methods.baselines import methods

    bench = load_genecis(root, 'focus_object', folder)
    bad = bench.queries.gallery[0][3]
    path = root / f'val2017/{bad}.jpg'
    path.write_bytes(path.read_bytes()[:300])
    bench = load_genecis(root, 'focus_object', folder)
    ranked, rows = evaluate(methods(load_backbone('tiny', pretrained='none'))['image_only'], bench)
    hit = [bad in (r.reference, *r.gallery) for r in bench.queries.itertuples()]
    assert len(ranked) == 6 - sum(hit) < 6 and set(ranked.protocol) != {bench.protocol.id}


def test_boxes_outside_their_photograph_cost_their_queries(built):
    root, folder = built
    from cis_nb.retrieval.protocol import evaluate
    from cis_nb.backbones.loading import load_backbone
    from cis_nb.methods.baselines import methods

    templates = read_templates(folder / 'genecis/change_attribute.json')
    templates[0]['target']['instance_bbox'] = [5000, 1, 10, 10]
    templates[1]['gallery'][2]['instance_bbox'] = [1, 1, 0, 10]
    (root / 'genecis').mkdir()
    write_templates(root / 'genecis/change_attribute.json', templates)
    bench = load_genecis(root, 'change_attribute')
    assert len(bench) == 5 and 'partial' in str(bench.protocol)
    ranked, _ = evaluate(methods(load_backbone('tiny', pretrained='none'))['image_only'], bench)
    assert len(ranked) == 4
