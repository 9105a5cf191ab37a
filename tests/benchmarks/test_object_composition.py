"Object composition: damaged instances, sampling, object sizes, masks against a slow decoder, real COCO."

import io
import json
import os
import subprocess
import sys
import tarfile
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from projects import DATA, ROOT, needs_data
from cis_nb.benchmarks.object_composition import (
    ALONE,
    NOTHING,
    PUBLISHED_COMPOSITION,
    SIZE,
    audit_instances,
    cut,
    draw_objects,
    load_composition,
    mask_of,
    read_instances,
    right_size,
)
from cis_nb.world.domains import run_lengths

data = DATA
real = needs_data('coco_mini/instances_val2017.json')
W, H = 40, 20


def thing(n, image, kind, bbox, **more):
    x, y, w, h = bbox
    return dict(
        dict(
            id=n,
            image_id=image,
            category_id=kind,
            bbox=list(bbox),
            iscrowd=0,
            segmentation=[[x, y, x + w, y, x + w, y + h, x, y + h]],
        ),
        **more,
    )


def coco():
    boxes = [
        thing(1, 1, 1, (0.0, 0.0, 10.0, 10.0)),
        thing(2, 1, 2, (20.0, 5.0, 12.0, 12.0)),
        thing(3, 1, 2, (1.0, 1.0, 2.0, 2.0)),
        thing(4, 2, 3, (0.0, 0.0, 40.0, 15.0)),
        thing(5, 2, 1, (0.0, 0.0, 3.0, 3.0)),
        thing(6, 3, 1, (5.0, 5.0, 10.0, 10.0)),
    ]
    return dict(
        images=[dict(id=i, file_name=f'{i:012d}.jpg', width=W, height=H) for i in (1, 2, 3, 4)],
        annotations=boxes,
        categories=[dict(id=k, name=n) for k, n in ((1, 'cat'), (2, 'hot dog'), (3, 'tree'))],
    )


def write(root, c=None, pictures=(), split='val'):
    (root / 'coco/annotations').mkdir(parents=True, exist_ok=True)
    (root / f'coco/annotations/instances_{split}2017.json').write_text(
        c if isinstance(c, str) else json.dumps(c or coco())
    )
    for i in pictures:
        (root / f'coco/{split}2017').mkdir(exist_ok=True)
        Image.new('RGB', (W, H), (i * 40, 0, 0)).save(root / f'coco/{split}2017/{i:012d}.jpg')
    return root


@pytest.mark.parametrize(
    'text, why',
    [
        ('{"images": ', 'is not JSON'),
        ('[]', 'is list, not an object'),
        ('{}', "has no 'images'"),
        ('{"images": [], "annotations": [], "categories": []}', "the list 'images' is empty"),
        ('{"images": {}, "annotations": [], "categories": []}', 'images is {}, not list'),
    ],
)
def test_what_is_no_instances_file(tmp_path, text, why):
    with pytest.raises(ValueError, match=why) as e:
        read_instances(write(tmp_path, text))
    assert 'instances_val2017.json' in str(e.value)


RUNS = dict(size=[H, W], counts=[0, W * H])


@pytest.mark.parametrize(
    'field, n, change, why',
    [
        ('images', 0, dict(id=None), r"images\[0\]: has no 'id'"),
        ('images', 0, dict(id='1'), "id is '1', not int"),
        ('images', 1, dict(id=1), 'images use an id twice'),
        ('images', 0, dict(file_name='../../etc/passwd'), 'is no plain name'),
        ('images', 0, dict(file_name='/a.jpg'), 'is no plain name'),
        ('images', 0, dict(file_name='..'), 'is no plain name'),
        ('images', 0, dict(file_name='a\\b.jpg'), 'is no plain name'),
        ('images', 0, dict(file_name=''), 'is no plain name'),
        ('images', 0, dict(height=0), 'has the size 40 x 0'),
        ('images', 1, dict(file_name='000000000001.jpg'), 'two images have the same name'),
        ('annotations', 1, dict(id=1), 'annotations use an id twice'),
        ('annotations', 1, dict(bbox=None), r"annotations\[1\]: has no 'bbox'"),
        ('annotations', 1, dict(bbox=[1, 2, 3]), 'bbox needs'),
        ('annotations', 1, dict(bbox=[1, 2, -3, 4]), 'bbox needs'),
        ('annotations', 1, dict(bbox=[1, 2, '3', 4]), 'bbox needs'),
        ('annotations', 1, dict(bbox=[1, 2, float('nan'), 4]), 'NaN is no number of JSON'),
        ('annotations', 1, dict(bbox=[40.0, 0.0, 3.0, 4.0]), 'lies outside'),
        ('annotations', 1, dict(bbox=[-9.0, 0.0, 3.0, 4.0]), 'lies outside'),
        ('annotations', 1, dict(image_id=77), 'image_id 77'),
        ('annotations', 1, dict(category_id=77), 'category_id 77'),
        ('annotations', 1, dict(iscrowd=True), 'iscrowd is True, not int'),
        ('annotations', 1, dict(iscrowd=3), 'iscrowd is 3'),
        ('annotations', 1, dict(segmentation=None), 'neither polygons nor runs'),
        ('annotations', 1, dict(segmentation=[]), 'needs polygons'),
        ('annotations', 1, dict(segmentation=[[1, 2, 3, 4, 5]]), 'needs polygons'),
        ('annotations', 1, dict(segmentation=[[1, 2, 3, 4, 5, None]]), 'needs polygons'),
        ('annotations', 1, dict(segmentation='x'), 'is str, neither'),
        ('annotations', 1, dict(segmentation=dict(RUNS, counts='abc')), 'is compressed'),
        ('annotations', 1, dict(segmentation=dict(RUNS, counts=[1, -1, 800])), 'do not add up'),
        ('annotations', 1, dict(segmentation=dict(RUNS, counts=[5])), 'do not add up to 800'),
        ('annotations', 1, dict(segmentation=dict(RUNS, size=[W, H])), 'has the size'),
        ('categories', 0, dict(name=' '), 'is empty'),
        ('categories', 1, dict(name='cat'), 'two categories have the same name'),
        ('categories', 1, dict(id=1), 'categories use an id twice'),
    ],
)
def test_damaged_entries_are_refused(tmp_path, field, n, change, why):
    c = coco()
    c[field][n] = {k: v for k, v in {**c[field][n], **change}.items() if v is not None}
    with pytest.raises(ValueError, match=why) as e:
        read_instances(write(tmp_path, c))
    assert 'instances_val2017.json' in str(e.value)


def test_what_is_missing_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match='annotations_trainval2017'):
        read_instances(tmp_path)
    with pytest.raises(FileNotFoundError, match='instances_train2017.json is missing'):
        read_instances(write(tmp_path), 'train')
    with pytest.raises(FileNotFoundError, match='images.cocodataset.org/zips'):
        load_composition(tmp_path)
    with pytest.raises(ValueError, match='the splits are val, train'):
        load_composition(tmp_path, 'test')


def test_who_asks_and_who_is_left_out(tmp_path):
    c = read_instances(write(tmp_path))
    assert draw_objects(c)[1] == {NOTHING: 1, ALONE: 1, SIZE: 1} and draw_objects(c, literal=True)[1] == {
        NOTHING: 1,
        ALONE: 1,
        SIZE: 0,
    }
    assert [(o['image_id'], others) for o, others in draw_objects(c)[0]] in ([(1, ['hot dog'])], [(1, ['cat'])])
    assert draw_objects(c, literal=True)[0][1][0]['id'] == 5  # 9 of 800 pixels ask in the literal reading
    crowd = coco()
    crowd['annotations'][1]['iscrowd'] = 1
    assert {draw_objects(read_instances(write(tmp_path / 'crowd', crowd)), s)[0][0][0]['id'] for s in range(10)} == {1}
    tiny = coco()
    tiny['annotations'] = tiny['annotations'][4:]
    with pytest.raises(ValueError, match='no image has an object of the right size'):
        load_composition(write(tmp_path / 'tiny', tiny, (1, 2)))


@given(st.floats(0, 60), st.floats(0, 60), st.integers(1, 80), st.integers(1, 80))
def test_the_literal_size_lacks_a_factor(w, h, W, H):
    assert right_size([0, 0, w, h], W, H) == (0.05 * W * H < w * h < 0.5 * W * H)
    assert right_size([0, 0, w, h], W, H, literal=True) == (0.05 < w * h < 0.5 * W * H)


def test_a_draw_depends_on_the_seed_and_the_picture_alone(tmp_path):
    whole, part = coco(), coco()
    part['images'] = part['images'][:1]
    part['annotations'] = part['annotations'][:3]
    a, b = read_instances(write(tmp_path / 'a', whole)), read_instances(write(tmp_path / 'b', part))
    for s in range(20):
        assert draw_objects(a, s)[0][0] == draw_objects(b, s)[0][0] == draw_objects(a, s)[0][0]
    assert {draw_objects(a, s)[0][0][0]['id'] for s in range(20)} == {1, 2}


@given(arrays(bool, st.tuples(st.integers(1, 9), st.integers(1, 9))))
@settings(max_examples=200, deadline=None)
def test_runs_are_read_as_they_were_written(mask):
    r = run_lengths(mask)
    h, w = mask.shape
    slow, at = np.zeros((h, w), bool), 0
    for n, run in enumerate(r['counts']):
        for p in range(at, at + run):
            slow[p % h, p // h] = n % 2
        at += run
    assert at == h * w and (slow == mask).all() and (mask_of(dict(segmentation=r), (w, h), w, h) == mask).all()


def test_a_crop_is_measured_in_the_stored_picture():
    picture = Image.new('RGB', (20, 10), (10, 20, 30))
    o = thing(1, 1, 1, (20.0, 4.0, 12.0, 8.0))
    assert cut(picture, o, W, H).size == (6, 6) and (np.asarray(cut(picture, o, W, H)) == (10, 20, 30)).all()
    edge = thing(1, 1, 1, (39.9, 19.9, 5.0, 5.0))  # beyond the picture's corner
    assert cut(picture, edge, W, H).size == (1, 1)
    half = thing(1, 1, 1, (0.0, 0.0, 20.0, 20.0), segmentation=[[0, 0, 9.9, 0, 9.9, 20, 0, 20]])
    a, b = (np.asarray(cut(Image.new('RGB', (W, H)), half, W, H, masked=m)) for m in (True, False))
    assert (a[:, -5:] == 255).all() and (a[:, :5] == 0).all() and (b == 0).all()


def test_the_benchmark(tmp_path):
    root = write(tmp_path, pictures=(1, 2))
    b, named, published = (
        load_composition(root),
        load_composition(root, named=True),
        load_composition(root, **PUBLISHED_COMPOSITION),
    )
    assert (
        (len(b), len(published)) == (1, 2)
        and b.shared_gallery == ['000000000001.jpg']
        and named.queries.condition[0] in ('cat and hot dog', 'hot dog and cat')
        and b.queries.condition[0] in ('cat', 'hot dog')
    )
    assert (
        len(
            {
                x.protocol.hash
                for x in (b, named, published, load_composition(root, seed=1), load_composition(root, masked=False))
            }
        )
        == 5
    )
    assert (
        published.load(published.queries.targets[0][0]).size == (W, H)
        and published.load(published.queries.reference[1]).size[0] <= 3
    )
    (tmp_path / 'coco/val2017/000000000002.jpg').unlink()
    part = load_composition(root, **PUBLISHED_COMPOSITION)
    assert len(part) == 1 and 'partial' in str(part.protocol) and '1 of 2 queries left out' in part.protocol.extra


def test_pictures_may_lie_in_a_tar(tmp_path):
    root = write(tmp_path)
    picture = io.BytesIO()
    Image.new('RGB', (W // 2, H // 2)).save(picture, 'JPEG')
    with tarfile.open(root / 'coco/all.tar', 'w') as t:
        for name in ('val2017/000000000001.jpg', 'train2017/000000000002.jpg', '../val2017/000000000003.jpg'):
            info = tarfile.TarInfo(name)
            info.size = len(picture.getvalue())
            t.addfile(info, io.BytesIO(picture.getvalue()))
    c = read_instances(root)
    assert (
        list(c.places) == ['000000000001.jpg']
        and c.left_out.counts() == {'tar member named outside its folder': 1}
        and '1 files left out' in load_composition(root).protocol.extra
        and load_composition(root).load('000000000001.jpg').size == (W // 2, H // 2)
    )


@pytest.mark.e2e
def test_the_same_queries_in_another_process(tmp_path):
    code = '''
import sys
from cis_nb.benchmarks.object_composition import load_composition
for seed in range(5):
    b = load_composition(sys.argv[1], seed=seed, literal=True)
    print(b.queries.values.tolist(), b.protocol.hash)
'''
    root = write(tmp_path, pictures=(1, 2))
    one, two = (
        subprocess.run(
            [sys.executable, '-c', code, str(root)],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ, PYTHONHASHSEED=seed),
        ).stdout
        for seed in '12'
    )
    assert one == two and '000000000001.jpg@' in one


@real
def test_real_coco_holds_what_the_chapter_prints():
    nb = json.loads((ROOT / 'nbs/02b_benchmarks/07_object_composition.ipynb').read_text())
    cell = next(''.join(c['source']) for c in nb['cells'] if 'sample = [' in ''.join(c['source']))
    space = {}
    exec(cell.split('\nshow_table')[0], dict(NOTHING=NOTHING, ALONE=ALONE, SIZE=SIZE), space)
    for split, column in (('val', 1), ('train', 2)):
        assert list(audit_instances(read_instances(data, split)).itertuples(index=False, name=None)) == [
            (row[0], row[column]) for row in space['sample']
        ]


@real
def test_real_crops_can_be_cut():
    for split in ('val', 'train'):
        b = load_composition(data, split, literal=True)
        for i in b.queries.reference:
            im = b.load(i)
            assert im.size[0] == im.size[1] >= 1 and im.mode == 'RGB'
        o = [np.asarray(b.load(i)) for i in load_composition(data, split).queries.reference]
        assert all(0.03 < (a < 250).any(-1).mean() for a in o)  # no mask is empty
