"Construction of GeneCIS: its rules, readers of VAW and COCO, real photographs."

import hashlib
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

from cis_nb.benchmarks.genecis import (
    TASKS,
    gallery_size,
    image_key,
    keys_of,
    load_genecis,
    write_templates,
)
from cis_nb.benchmarks.genecis_construction import (
    AttributeInstances,
    Rules,
    Scenes,
    build_attribute,
    build_genecis,
    build_object,
    mask_areas,
    find_neighbours,
    read_panoptic,
    read_vaw,
    violations,
)
from annotations import random_scenes, random_instances, coco_root, vaw_root

seeds = st.integers(0, 10**6)
quiet = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def real(name):
    root = os.environ.get('CIS_DATA')
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f'{name} is not here (set CIS_DATA to the folder that holds it)')
    return Path(root)


# --- random annotations


small = st.sampled_from([Rules(6, 4, 1), Rules(5, 3, 1), Rules(6, 4, 2), Rules(7, 5, 0), Rules(6, 3, 0, 0.02)])


@settings(max_examples=40, **quiet)
@given(seeds, small, st.sampled_from(TASKS[2:]))
def test_object_rules(seed, rules, task):
    scenes = random_scenes(seed)
    b = build_object(task, scenes, 40, rules, seed)
    S = {
        int(i): {scenes.names[c] for c in range(len(scenes.names)) if s[c] > rules.share}
        for i, s in zip(scenes.ids, scenes.share)
    }
    seen = set()
    for t in b.templates:
        R, T, G = t['reference']['val_image_id'], t['target']['val_image_id'], [g['val_image_id'] for g in t['gallery']]
        o = t['condition']
        assert len(G) == 14 and len({R, T, *G}) == 16 and (R, T, o) not in seen
        seen.add((R, T, o))
        assert len(S[R]) >= rules.min_categories and len(S[R] & S[T]) >= rules.min_shared and not S[R] <= S[T]
        assert o in S[T] and (o in S[R]) == (task == 'focus_object')
        for g in G[:9]:
            assert o not in S[g] and len(S[R] & S[g]) >= rules.min_shared and not S[R] <= S[g]
        for g in G[9:]:
            assert o in S[g] and len((S[R] & S[g]) - {o}) <= rules.far
        # one positive: nothing else in the gallery is a similar scene that shows the object
        assert [g for g in G if o in S[g] and len(S[R] & S[g]) >= rules.min_shared] == []
    assert violations(b, scenes, rules) == {}
    assert len(b.templates) + b.dropped['templates not built: every choice is taken'] == 40


@settings(max_examples=15, **quiet)
@given(seeds, small)
def test_change_object_takes_the_most_similar_first(seed, rules):
    scenes = random_scenes(seed)
    b = build_object('change_object', scenes, 30, rules, seed)
    near = find_neighbours(scenes, rules, False)
    row, first = {int(scenes.ids[r]): k for k, r in enumerate(near.refs)}, set()
    for t, d in zip(b.templates, b.details.itertuples()):
        k = row[t['reference']['val_image_id']]
        if k in first:
            continue
        first.add(k)
        usable = near.close[k] & (near.present & near.fillable[k]).any(1)
        assert d.shared == near.shared[k][usable].max()


@settings(max_examples=15, **quiet)
@given(seeds, small)
def test_nothing_fillable_is_missed(seed, rules):
    "When the construction gives up, every (reference, target, condition) that the rules allow has been used."
    scenes = random_scenes(seed, n=50)
    for task in TASKS[2:]:
        b = build_object(task, scenes, 10**4, rules, seed)
        S = [{c for c in range(24) if s[c] > rules.share} for s in scenes.share]
        allowed = 0
        for R in S:
            close = [s for s in S if len(s & R) >= rules.min_shared and not R <= s]
            for o in range(24):
                ok = (
                    len(R) >= rules.min_categories
                    and (o in R) == (task == 'focus_object')
                    and sum(o not in s for s in close) >= 9
                )
                if ok and sum(o in s and len((s & R) - {o}) <= rules.far for s in S) >= 5:
                    allowed += sum(o in s for s in close)
        assert len(b.templates) == allowed


@settings(max_examples=25, **quiet)
@given(seeds, st.sampled_from(TASKS[:2]), st.sampled_from([0, 0.1, 0.4]))
@pytest.mark.e2e
def test_attribute_rules(seed, task, messy):
    x, rules = random_instances(seed, messy=messy), Rules()
    b = build_attribute(task, x, 40, rules, seed)
    yes, no = (x.labels[x.labels.positive == p].groupby('instance').attribute.agg(set).to_dict() for p in (True, False))
    at = {image_key(dict(image_id=r.image_id, instance_bbox=r.instance_bbox)): r for r in x.table.itertuples()}
    pos, neg = (lambda i: yes.get(i.Index, set())), (lambda i: no.get(i.Index, set()))
    for t, d in zip(b.templates, b.details.itertuples()):
        (kR, kT, kG, c), a = keys_of(t), d.attribute
        assert len({kR, kT, *kG}) == len(kG) + 2 == gallery_size(task) + 1
        R, T, G = at[kR], at[kT], [at[k] for k in kG]
        assert R.object_name == T.object_name == d.object and a in pos(T) and a in x.types[d.type]
        assert R.image_id != T.image_id and not {g.image_id for g in G} & {R.image_id, T.image_id}
        if task == 'focus_attribute':
            assert c == d.type and c not in rules.exclude_types and a in pos(R)
            for g in G:
                assert g.object_name == R.object_name and a in neg(g)  # an unknown is not a no
        else:
            assert c == a and a not in pos(R) and pos(R) & set(x.types[d.type])
            for g in G[:9]:
                assert g.object_name != R.object_name and a in pos(g)
            for g in G[9:]:
                assert g.object_name == R.object_name and a in neg(g)
        assert [g for g in G if g.object_name == R.object_name and a in pos(g)] == []  # one positive
    assert violations(b, x, rules) == {}
    if b.templates and not any(n for why, n in b.dropped.items() if why.startswith('types without')):
        counts = b.details.type.value_counts()
        assert counts.max() - counts.min() <= 1


@settings(max_examples=4, **quiet)
@given(seeds)
def test_unlabelled_is_never_a_no(seed):
    "Without negative labels there is no template, however many things are unlabelled."
    x = random_instances(seed)
    for task in TASKS[:2]:
        assert (
            build_attribute(
                task, AttributeInstances(x.table, x.labels[x.labels.positive], x.types, {}), 5, Rules(), seed
            ).templates
            == []
        )


@settings(max_examples=3, **quiet)
@given(seeds)
def test_the_seed_decides(seed):
    scenes, things = random_scenes(seed), random_instances(seed)
    for task in TASKS:
        build, source = (build_object, scenes) if 'object' in task else (build_attribute, things)
        one, two, other = (build(task, source, 15, Rules(6, 4), s).templates for s in (seed, seed, seed + 1))
        assert one == two
        assert other != one or not one


def test_a_target_need_not_have_the_largest_overlap():
    b = build_object('focus_object', random_scenes(0), 100, Rules(6, 4), 0)
    assert (b.details.shared < b.details.most).mean() > 0.3


def test_focus_is_symmetric_and_change_is_not():
    from dataclasses import replace

    x = random_instances(3)
    for task, broken in (('focus_attribute', 0), ('change_attribute', 60)):
        b = build_attribute(task, x, 60, Rules(), 0)
        back = replace(b, templates=[dict(t, reference=t['target'], target=t['reference']) for t in b.templates])
        assert violations(back, x, Rules()).get('the target lacks the attribute', 0) == broken


@pytest.mark.parametrize('rules', [dict(min_shared=2), dict(min_categories=5), dict(far=5)])
def test_thresholds_that_contradict_each_other(rules):
    with pytest.raises(ValueError, match='min_shared'):
        Rules(**rules)


def test_one_percent_is_not_more_than_one_percent():
    s = random_scenes(1)
    share = np.where(s.share > 0, 0.01, 0)
    assert build_object('focus_object', Scenes(s.ids, s.names, share, {}), 5, Rules(6, 4)).templates == []
    assert build_object(
        'focus_object', Scenes(s.ids, s.names, share + (share > 0) * 1e-6, {}), 5, Rules(6, 4)
    ).templates


# --- readers


def test_vaw_comes_back(tmp_path):
    x = random_instances(0)
    entries = vaw_root(tmp_path, x)
    got = read_vaw(tmp_path)
    assert len(got.table) == len(entries) and sum(got.notes.values()) == 0
    sets = got.labels.groupby(['instance', 'positive']).attribute.agg(set).to_dict()
    by_key = {image_key(e): e for e in entries}
    for r in got.table.itertuples():
        e = by_key[image_key(dict(image_id=r.image_id, instance_bbox=r.instance_bbox))]
        assert (
            r.object_name == e['object_name']
            and sets.get((r.Index, True), set()) == set(e['positive_attributes'])
            and sets.get((r.Index, False), set()) == set(e['negative_attributes'])
        )
    assert len(read_vaw(tmp_path, ['val']).table) == len(entries[1::3])


@pytest.mark.data
def test_the_public_taxonomy():
    root = real('vaw')
    types = json.loads((root / 'vaw/attribute_types.json').read_text())
    index = json.loads((root / 'vaw/attribute_index.json').read_text())
    assert len(types) == 42 and all(isinstance(v, list) for v in types.values())
    assert (
        len(index) == 620 and len(set(index) & {a for v in types.values() for a in v}) > 580
    )  # a few attributes have no type


@pytest.mark.parametrize(
    'field, value',
    [
        ('image_id', None),
        ('instance_bbox', 'x'),
        ('object_name', 3),
        ('positive_attributes', None),
        ('negative_attributes', 'red'),
    ],
)
def test_a_broken_vaw_entry_is_named(tmp_path, field, value):
    entries = vaw_root(tmp_path, random_instances(0, n=30))
    (tmp_path / 'vaw/val.json').write_text(json.dumps([entries[0], dict(entries[1], **{field: value})]))
    with pytest.raises(ValueError, match=f'val.json, entry 1: {field}'):
        read_vaw(tmp_path)


def test_panoptic_from_masks_and_json(tmp_path):
    scenes = random_scenes(0, n=6)
    data = coco_root(tmp_path, scenes)
    (tmp_path / 'panoptic_val2017').mkdir()
    for a in data['annotations']:
        ids = np.zeros(10_000 * 8, np.int64)
        at = 0
        for s in a['segments_info']:
            ids[at : at + s['area']] = s['id']
            at += s['area']
        ids = ids.reshape(-1, 100) if at <= 80_000 else ids
        Image.fromarray(np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)).save(
            tmp_path / 'panoptic_val2017' / a['file_name']
        )
    assert np.allclose(read_panoptic(tmp_path).share, read_panoptic(tmp_path, count_pixels=True).share)


def first_segment(data):
    return data['annotations'][0]['segments_info'][0]


PANOPTIC_FAULTS = {  # what the message says -> change
    r'image 3, segments_info\[1\]: the id 1 was used before; get the file again': lambda d: d['annotations'][0][
        'segments_info'
    ].append(first_segment(d)),
    r'segments of image 3 sum up to 10,001 pixels, the image has 10,000 .*; get': lambda d: d['annotations'][0][
        'segments_info'
    ].append(dict(first_segment(d), id=2, area=9_801)),
    'segments of image 3 sum up to 9,223,372,036,854,775,808 pixels': lambda d: d['annotations'][0][
        'segments_info'
    ].extend([dict(first_segment(d), id=2, area=2**63 - 202), dict(first_segment(d), id=3, area=2)]),
    'annotations: no image has a segment .*; get': lambda d: d['annotations'].clear(),
    r'images\[0\]: width is 9223372036854775807: .*; get it again': lambda d: d['images'][0].update(width=2**63 - 1),
    r"categories: 1 and 3 are one condition, 'dog' \(names 'dog' and 'dog-other'\); give": lambda d: d[
        'categories'
    ].append(dict(id=3, name='dog-other', isthing=1)),
    r'categories\[0\]: isthing is 7: .*; get it again': lambda d: d['categories'][0].update(isthing=7),
    r'annotations\[0\]: segments_info\[0\].iscrowd is 7: .*; get it again': lambda d: first_segment(d).update(
        iscrowd=7
    ),
    r'image 3, segments_info\[0\]: bbox \[-1, 0, 5, 5\] is not inside the image of 100 x 100; get': lambda d: (
        first_segment(d).update(bbox=[-1, 0, 5, 5])
    ),
    r'bbox \[96, 0, 5, 5\] is not inside': lambda d: first_segment(d).update(bbox=[96, 0, 5, 5]),
}


@pytest.mark.parametrize('message', PANOPTIC_FAULTS)
def test_panoptic_labels_that_do_not_fit_are_refused(tmp_path, message):
    found = dict(id=1, category_id=1, area=200, iscrowd=1, bbox=[95, 0, 5, 100])
    data = dict(
        images=[dict(id=3, width=100, height=100)],
        annotations=[dict(image_id=3, file_name='3.png', segments_info=[found])],
        categories=[dict(id=1, name='dog', isthing=1), dict(id=2, name='sky', isthing=0)],
    )
    path = tmp_path / 'a.json'
    path.write_text(json.dumps(data))
    assert read_panoptic(path).share.tolist() == [[0.02, 0]]
    PANOPTIC_FAULTS[message](data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f'a.json, {message}|a.json: the areas of the {message}|a.json, .*{message}'):
        read_panoptic(path)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))


def test_a_mask_of_too_many_pixels_or_with_too_long_a_text_is_named(tmp_path):
    def write(side, *chunks):
        header = chunk(b'IHDR', struct.pack('>IIBBBBB', side, side, 8, 2, 0, 0, 0))
        pixels = chunk(b'IDAT', zlib.compress(bytes(4 * 13)))  # of a side of 4
        (tmp_path / 'm.png').write_bytes(
            b'\x89PNG\r\n\x1a\n' + header + b''.join(chunks) + pixels + chunk(b'IEND', b'')
        )

    write(4)
    assert mask_areas(tmp_path / 'm.png') == {0: 16}
    write(30_000)
    with pytest.raises(ValueError, match='m.png is no readable mask .*pixels.*; get it again'):
        mask_areas(tmp_path / 'm.png')
    write(4, chunk(b'zTXt', b'a\0\0' + zlib.compress(bytes(2 << 20))))
    with pytest.raises(ValueError, match='m.png is no readable mask .*; get it again'):
        mask_areas(tmp_path / 'm.png')


def extract(tar, to):
    with tarfile.open(tar) as t:
        t.extractall(to, filter='data')


@pytest.mark.data
@pytest.mark.parametrize('split', ['train2017', 'val2017'])
def test_real_panoptic_areas_are_pixel_counts(tmp_path, split):
    root = real('coco_panoptic') / 'coco_panoptic'
    extract(root / 'coco128_panoptic_masks.tar', tmp_path)
    data = json.loads((root / f'coco128_panoptic_{split}.json').read_text())
    for a in data['annotations'][:25]:
        counted = mask_areas(tmp_path / f'panoptic_{split}' / a['file_name'])
        assert {s['id'] for s in a['segments_info']} == set(counted) - {0}
        assert all(counted[s['id']] == s['area'] for s in a['segments_info'])
    (tmp_path / 'annotations').mkdir()
    (tmp_path / 'annotations' / f'panoptic_{split}.json').write_text(json.dumps(data))
    path = tmp_path / 'annotations' / f'panoptic_{split}.json'
    assert np.allclose(read_panoptic(path).share, read_panoptic(path, count_pixels=True).share)


@pytest.mark.data
def test_the_official_panoptic_sample():
    root = real('coco_panoptic') / 'coco_panoptic/panopticapi/sample_data'
    s = read_panoptic(root / 'panoptic_examples.json')
    assert list(s.ids) == [142238, 439180] and s.share.sum(1).max() <= 1
    for a in json.loads((root / 'panoptic_examples.json').read_text())['annotations']:
        counted = mask_areas(root / 'panoptic_examples' / a['file_name'])
        assert set(counted) - {0} == {x['id'] for x in a['segments_info']}


def real_scenes(root):
    parts = [read_panoptic(root / f'coco_panoptic/coco128_panoptic_{s}.json') for s in ('train2017', 'val2017')]
    assert parts[0].names == parts[1].names
    return Scenes(np.r_[parts[0].ids, parts[1].ids], parts[0].names, np.r_[parts[0].share, parts[1].share], {})


@pytest.mark.data
@pytest.mark.parametrize('task', TASKS[2:])
def test_construction_on_real_photographs(task, tmp_path):
    root = real('coco_panoptic')
    scenes, rules = real_scenes(root), Rules(min_categories=5, min_shared=3, far=1)  # 200 photographs only
    b = build_object(task, scenes, 60, rules, 0)
    assert len(b.templates) >= 20, b.dropped
    assert violations(b, scenes, rules) == {}
    extract(root / 'coco_panoptic/coco128_images_256px.tar', tmp_path)
    (tmp_path / 'both').mkdir()
    (tmp_path / 'both/val2017').mkdir()
    (tmp_path / 'both/genecis').mkdir()
    for p in [*(tmp_path / 'train2017').glob('*.jpg'), *(tmp_path / 'val2017').glob('*.jpg')]:
        p.rename(tmp_path / 'both/val2017' / p.name)
    write_templates(tmp_path / f'both/genecis/{task}.json', b.templates)
    bench = load_genecis(tmp_path / 'both', task)
    assert len(bench) == len(b.templates) and bench.protocol.coverage == 1
    assert all(max(bench.load(i).size) <= 256 for i in bench.images[:20])


# --- the whole way, with the feature store


def test_the_same_annotations_give_the_same_folder(built):
    root, folder = built
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (folder / 'genecis').iterdir()}
    assert build_genecis(root, n=6, rules=Rules(6, 4), seed=1) == folder
    assert build_genecis(root, n=6, rules=Rules(6, 4), seed=2) != folder
    for p in folder.rglob('*'):
        if p.is_file():
            p.unlink()
    with pytest.warns(UserWarning):
        build_genecis(root, n=6, rules=Rules(6, 4), seed=1)
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (folder / 'genecis').iterdir()} == before
