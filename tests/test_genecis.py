"GeneCIS: the released files, the rules of the construction, crops, readers and loading."
import gzip, hashlib, json, os, tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from PIL import Image

from cis_nb.benchmarks.genecis import (KINDS, TASKS, Instances, Rules, Scenes, audit, build_attribute, build_genecis, build_object, census, condition_name,
                                       crop, crop_box, gallery_size, image_key, keys_of, load_genecis, mask_areas, neighbours, parse_key, read_built,
                                       read_panoptic, read_templates, read_vaw, templates_file, violations, write_templates)
from cis_nb.benchmarks.templates import check_templates

seeds = st.integers(0, 10**6)
quiet = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def real(name):
    root = os.environ.get('CIS_DATA')
    if not root or not (Path(root)/name).is_dir(): pytest.skip(f'{name} is not here (set CIS_DATA to the folder that holds it)')
    return Path(root)


# --- the released files

FLAWS = {'focus_attribute': {'the target is in the gallery too': 1, 'the reference is in the gallery': 0, 'an image stands in the gallery twice': 6, 'the same query was asked before': 8},
         'change_attribute': {'the target is in the gallery too': 0, 'the reference is in the gallery': 79, 'an image stands in the gallery twice': 5, 'the same query was asked before': 74},
         'focus_object': {'the target is in the gallery too': 0, 'the reference is in the gallery': 0, 'an image stands in the gallery twice': 0, 'the same query was asked before': 427},
         'change_object': {'the target is in the gallery too': 1, 'the reference is in the gallery': 0, 'an image stands in the gallery twice': 0, 'the same query was asked before': 167}}
CENSUS = {'focus_attribute': (2000, 40, 13348), 'change_attribute': (2112, 400, 15058), 'focus_object': (1960, 97, 2198), 'change_object': (1960, 109, 2739)}


@pytest.mark.parametrize('task', TASKS)
def test_released_file_comes_out_byte_for_byte(task, tmp_path):
    data = gzip.decompress((real('genecis')/f'genecis/{task}.json.gz').read_bytes())
    (tmp_path/'in.json').write_bytes(data)
    write_templates(tmp_path/'out.json', read_templates(tmp_path/'in.json'))
    assert (tmp_path/'out.json').read_bytes() == data
    write_templates(tmp_path/'out.json.gz', read_templates(real('genecis')/f'genecis/{task}.json.gz'))
    assert gzip.decompress((tmp_path/'out.json.gz').read_bytes()) == data


@pytest.mark.parametrize('task', TASKS)
def test_audit_finds_the_known_flaws(task):
    templates = read_templates(templates_file(real('genecis'), task))
    found = audit(templates).set_index('flaw').templates
    assert {f: found[f] for f in FLAWS[task]} == FLAWS[task]
    assert found['reference and target are the same image'] == found['the condition is empty'] == found['the gallery has another size'] == 0
    if 'attribute' in task:
        assert found['a distractor comes from the photograph of reference or target'] == dict(focus_attribute=39, change_attribute=50)[task]
        assert found['reference and target come from one photograph'] == dict(focus_attribute=0, change_attribute=1)[task]
    c = census(templates)
    assert (c['templates'], c['conditions'], c['photographs']) == CENSUS[task]
    assert {len(t['gallery'])+1 for t in templates} == {gallery_size(task)}
    keys = {k for t in templates for k in (keys_of(t)[0], keys_of(t)[1], *keys_of(t)[2])}
    some = set(sorted(keys)[::2])
    assert census(templates, some)['present'] == len(some)
    with_missing = audit(templates, some).set_index('flaw').templates['an image is missing']
    assert with_missing == sum(not {R, T, *G} <= some for R,T,G,_ in map(keys_of, templates))


def test_released_conditions_are_the_category_names():
    root = real('genecis')
    real('coco_panoptic')
    names = [condition_name(c['name']) for c in json.loads((root/'coco_panoptic/coco128_panoptic_val2017.json').read_text())['categories']]
    assert len(names) == len(set(names)) == 133
    for task in TASKS[2:]: assert {t['condition'] for t in read_templates(templates_file(root, task))} <= set(names)


def test_loading_the_released_files_without_their_pictures(tmp_path):
    root = real('genecis')
    with pytest.raises(FileNotFoundError, match='val2017.zip'): load_genecis(root, 'focus_object')
    with pytest.raises(FileNotFoundError, match='visualgenome'): load_genecis(root, 'focus_attribute')
    (tmp_path/'val2017').mkdir()
    templates = read_templates(templates_file(root, 'focus_object'))
    for i in sorted(parse_key(k)[0] for k in {k for R,T,G,_ in map(keys_of, templates[:30]) for k in (R, T, *G)}): Image.new('RGB', (8, 6)).save(tmp_path/f'val2017/{i}.jpg')
    b = load_genecis(tmp_path, 'focus_object', root)
    assert len(b) >= 30 and set(b.queries.query_id) >= {f'focus_object-{i:04d}' for i in range(30)}
    assert 'partial' in str(b.protocol) and 'released templates' in b.protocol.extra and f'{1960-len(b)} of 1960 queries left out' in b.protocol.extra
    (tmp_path/'val2017'/f'{templates[0]["gallery"][5]["val_image_id"]:012d}.jpg').unlink()
    assert 'focus_object-0000' not in set(load_genecis(tmp_path, 'focus_object', root).queries.query_id)


# --- random annotations

def random_scenes(seed, n=160, c=24):
    r = np.random.default_rng(seed)
    usual = np.full((r.integers(2, 5), c), .06)
    for row in usual: row[r.choice(c, r.integers(7, 12), replace=False)] = .8
    there = r.random((n, c)) < usual[r.integers(len(usual), size=n)]
    return Scenes(r.permutation(10**5)[:n], [f'c{i}' for i in range(c)], np.where(there, r.choice([.002, .0099, .0101, .05, .3], (n, c), p=[.1, .1, .2, .3, .3]), 0), {})


def random_instances(seed, n=400, messy=.1):
    r = np.random.default_rng(seed)
    types = {f't{i}': [f'a{i}.{j}' for j in range(r.integers(2, 5))] for i in range(3)} | dict(twice=['a0.0', 'a1.0'], state=['on', 'off'])
    every = sorted({a for v in types.values() for a in v})
    labels, rows = [], []
    for i in range(n):
        rows.append(dict(image_id=str(r.integers(n//2)), instance_bbox=[float(i), 1., 2.5, 3], object_name=f'o{r.integers(5)}'))
        true = {str(r.choice(v)) for v in types.values()} | {a for a in every if r.random() < messy}
        for a in every:
            if r.random() < .6: labels.append((i, a, a in true))
    return Instances(pd.DataFrame(rows), pd.DataFrame(labels, columns=['instance', 'attribute', 'positive']), types, {})


small = st.sampled_from([Rules(6, 4, 1), Rules(5, 3, 1), Rules(6, 4, 2), Rules(7, 5, 0), Rules(6, 3, 0, .02)])


@settings(max_examples=40, **quiet)
@given(seeds, small, st.sampled_from(TASKS[2:]))
def test_object_rules(seed, rules, task):
    scenes = random_scenes(seed)
    b = build_object(task, scenes, 40, rules, seed)
    S = {int(i): {scenes.names[c] for c in range(len(scenes.names)) if s[c] > rules.share} for i,s in zip(scenes.ids, scenes.share)}
    seen = set()
    for t in b.templates:
        R, T, G = t['reference']['val_image_id'], t['target']['val_image_id'], [g['val_image_id'] for g in t['gallery']]
        o = t['condition']
        assert len(G) == 14 and len({R, T, *G}) == 16 and (R, T, o) not in seen
        seen.add((R, T, o))
        assert len(S[R]) >= rules.min_categories and len(S[R] & S[T]) >= rules.min_shared and not S[R] <= S[T]
        assert o in S[T] and (o in S[R]) == (task=='focus_object')
        for g in G[:9]: assert o not in S[g] and len(S[R] & S[g]) >= rules.min_shared and not S[R] <= S[g]
        for g in G[9:]: assert o in S[g] and len((S[R] & S[g])-{o}) <= rules.far
        # one positive: nothing else in the gallery is a similar scene that shows the object
        assert [g for g in G if o in S[g] and len(S[R] & S[g]) >= rules.min_shared] == []
    assert violations(b, scenes, rules) == {}
    assert len(b.templates) + b.dropped['templates asked for, but every choice is taken'] == 40


@settings(max_examples=15, **quiet)
@given(seeds, small)
def test_change_object_takes_the_most_similar_first(seed, rules):
    scenes = random_scenes(seed)
    b = build_object('change_object', scenes, 30, rules, seed)
    near = neighbours(scenes, rules, False)
    row, first = {int(scenes.ids[r]): k for k,r in enumerate(near.refs)}, set()
    for t,d in zip(b.templates, b.details.itertuples()):
        k = row[t['reference']['val_image_id']]
        if k in first: continue
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
                ok = len(R) >= rules.min_categories and (o in R) == (task=='focus_object') and sum(o not in s for s in close) >= 9
                if ok and sum(o in s and len((s & R)-{o}) <= rules.far for s in S) >= 5: allowed += sum(o in s for s in close)
        assert len(b.templates) == allowed


@settings(max_examples=25, **quiet)
@given(seeds, st.sampled_from(TASKS[:2]), st.sampled_from([0, .1, .4]))
def test_attribute_rules(seed, task, messy):
    x, rules = random_instances(seed, messy=messy), Rules()
    b = build_attribute(task, x, 40, rules, seed)
    yes, no = (x.labels[x.labels.positive==p].groupby('instance').attribute.agg(set).to_dict() for p in (True, False))
    at = {image_key(dict(image_id=r.image_id, instance_bbox=r.instance_bbox)): r for r in x.table.itertuples()}
    pos, neg = (lambda i: yes.get(i.Index, set())), (lambda i: no.get(i.Index, set()))
    for t,d in zip(b.templates, b.details.itertuples()):
        (kR, kT, kG, c), a = keys_of(t), d.attribute
        assert len({kR, kT, *kG}) == len(kG)+2 == gallery_size(task)+1
        R, T, G = at[kR], at[kT], [at[k] for k in kG]
        assert R.object_name == T.object_name == d.object and a in pos(T) and a in x.types[d.type]
        assert R.image_id != T.image_id and not {g.image_id for g in G} & {R.image_id, T.image_id}
        if task=='focus_attribute':
            assert c == d.type and c not in rules.exclude_types and a in pos(R)
            for g in G: assert g.object_name == R.object_name and a in neg(g)          # an unknown is not a no
        else:
            assert c == a and a not in pos(R) and pos(R) & set(x.types[d.type])
            for g in G[:9]: assert g.object_name != R.object_name and a in pos(g)
            for g in G[9:]: assert g.object_name == R.object_name and a in neg(g)
        assert [g for g in G if g.object_name==R.object_name and a in pos(g)] == []    # one positive
    assert violations(b, x, rules) == {}
    if b.templates and not any(n for why,n in b.dropped.items() if why.startswith('types without')):
        counts = b.details.type.value_counts()
        assert counts.max()-counts.min() <= 1


@settings(max_examples=4, **quiet)
@given(seeds)
def test_unlabelled_is_never_a_no(seed):
    "Without negative labels there is no template, however many things are unlabelled."
    x = random_instances(seed)
    for task in TASKS[:2]:
        assert build_attribute(task, Instances(x.table, x.labels[x.labels.positive], x.types, {}), 5, Rules(), seed).templates == []


@settings(max_examples=3, **quiet)
@given(seeds)
def test_the_seed_decides(seed):
    scenes, things = random_scenes(seed), random_instances(seed)
    for task in TASKS:
        build, source = (build_object, scenes) if 'object' in task else (build_attribute, things)
        one, two, other = (build(task, source, 15, Rules(6, 4), s).templates for s in (seed, seed, seed+1))
        assert one == two
        assert other != one or not one


def test_a_target_need_not_have_the_largest_overlap():
    b = build_object('focus_object', random_scenes(0), 100, Rules(6, 4), 0)
    assert (b.details.shared < b.details.most).mean() > .3


def test_focus_is_symmetric_and_change_is_not():
    from dataclasses import replace
    x = random_instances(3)
    for task, broken in (('focus_attribute', 0), ('change_attribute', 60)):
        b = build_attribute(task, x, 60, Rules(), 0)
        back = replace(b, templates=[dict(t, reference=t['target'], target=t['reference']) for t in b.templates])
        assert violations(back, x, Rules()).get('the target lacks the attribute', 0) == broken


@pytest.mark.parametrize('rules', [dict(min_shared=2), dict(min_categories=5), dict(far=5)])
def test_thresholds_that_contradict_each_other(rules):
    with pytest.raises(ValueError, match='min_shared'): Rules(**rules)


def test_one_percent_is_not_more_than_one_percent():
    s = random_scenes(1)
    share = np.where(s.share>0, .01, 0)
    assert build_object('focus_object', Scenes(s.ids, s.names, share, {}), 5, Rules(6, 4)).templates == []
    assert build_object('focus_object', Scenes(s.ids, s.names, share+(share>0)*1e-6, {}), 5, Rules(6, 4)).templates


# --- crops

@settings(max_examples=300, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.floats(-50, 350), st.floats(-50, 350), st.floats(.01, 400), st.floats(.01, 400), st.sampled_from(['official', 'symmetric']))
def test_crop_box(W, H, x, y, w, h, mode):
    try: l, t, r, b = crop_box((W, H), (x, y, w, h), mode=mode)
    except ValueError as e:
        assert 'lies outside' in str(e) or 'less than a pixel' in str(e)
        return
    assert 0 <= l < r <= W and 0 <= t < b <= H
    if mode=='official':
        left, top = max(0, x-.7*w), max(0, y-.7*h)
        assert (l, t, r, b) == tuple(int(round(v)) for v in (left, top, min(W, left+1.7*w), min(H, top+1.7*h)))
    im = crop(Image.new('RGB', (W, H), 'white'), (x, y, w, h), mode=mode)
    assert im.size == (max(r-l, b-t),)*2 and np.asarray(im).any(-1).sum() == (r-l)*(b-t)


@pytest.mark.parametrize('box', [(5, 5, 0, 9), (5, 5, 9, -1), (5, 5, float('nan'), 9), (float('inf'), 5, 9, 9), (400, 5, 9, 9), (-90, 5, 9, 9)])
def test_boxes_that_show_nothing(box):
    with pytest.raises(ValueError, match='box'): crop_box((100, 80), box)


@pytest.mark.parametrize('mode', ['RGB', 'L', 'P', 'CMYK', '1', 'LA', 'RGBA', 'I;16'])
def test_any_kind_of_image_becomes_a_square_rgb(mode):
    im = crop(Image.new(mode, (60, 40)), (10, 10, 20, 10))
    assert im.mode == 'RGB' and im.size == (34, 34)


# --- readers

def coco_root(path, scenes, with_area=True):
    n, c = scenes.share.shape
    data = dict(images=[dict(id=int(i), width=100, height=100, file_name=f'{i:012d}.jpg') for i in scenes.ids], categories=[dict(id=j+1, name=f'c{j}') for j in range(c)],
                annotations=[dict(image_id=int(i), file_name=f'{i:012d}.png', segments_info=[dict(id=int(j)+1, category_id=int(j)+1, area=round(s[j]*10000)) for j in np.flatnonzero(s)]) for i,s in zip(scenes.ids, scenes.share)])
    (path/'annotations').mkdir(parents=True, exist_ok=True)
    (path/'annotations/panoptic_val2017.json').write_text(json.dumps(data))
    return data


def vaw_root(path, x):
    (path/'vaw').mkdir(parents=True, exist_ok=True)
    sets = x.labels.groupby(['instance', 'positive']).attribute.agg(list).to_dict()
    entries = [dict(image_id=r.image_id if r.Index%2 else int(r.image_id), instance_id=str(r.Index), instance_bbox=r.instance_bbox, instance_polygon=None, object_name=r.object_name,
                    positive_attributes=sets.get((r.Index, True), []), negative_attributes=sets.get((r.Index, False), [])) for r in x.table.itertuples()]
    for k,s in enumerate(('train', 'val', 'test')): (path/f'vaw/{s}.json').write_text(json.dumps(entries[k::3]))
    (path/'vaw/attribute_types.json').write_text(json.dumps(x.types))
    return entries


def test_vaw_comes_back(tmp_path):
    x = random_instances(0)
    entries = vaw_root(tmp_path, x)
    got = read_vaw(tmp_path)
    assert len(got.table) == len(entries) and sum(got.notes.values()) == 0
    sets = got.labels.groupby(['instance', 'positive']).attribute.agg(set).to_dict()
    by_key = {image_key(e): e for e in entries}
    for r in got.table.itertuples():
        e = by_key[image_key(dict(image_id=r.image_id, instance_bbox=r.instance_bbox))]
        assert r.object_name == e['object_name'] and sets.get((r.Index, True), set()) == set(e['positive_attributes']) and sets.get((r.Index, False), set()) == set(e['negative_attributes'])
    assert len(read_vaw(tmp_path, ['val']).table) == len(entries[1::3])


def test_the_public_taxonomy():
    root = real('vaw')
    types = json.loads((root/'vaw/attribute_types.json').read_text())
    index = json.loads((root/'vaw/attribute_index.json').read_text())
    assert len(types) == 42 and all(isinstance(v, list) for v in types.values())
    assert len(index) == 620 and len(set(index) & {a for v in types.values() for a in v}) > 580   # a few attributes have no type


@pytest.mark.parametrize('field, value', [('image_id', None), ('instance_bbox', 'x'), ('object_name', 3), ('positive_attributes', None), ('negative_attributes', 'red')])
def test_a_broken_vaw_entry_is_named(tmp_path, field, value):
    entries = vaw_root(tmp_path, random_instances(0, n=30))
    (tmp_path/'vaw/val.json').write_text(json.dumps([entries[0], dict(entries[1], **{field: value})]))
    with pytest.raises(ValueError, match=f'val.json, entry 1: {field}'): read_vaw(tmp_path)


def test_panoptic_from_masks_and_json(tmp_path):
    scenes = random_scenes(0, n=6)
    data = coco_root(tmp_path, scenes)
    (tmp_path/'panoptic_val2017').mkdir()
    for a in data['annotations']:
        ids = np.zeros(10_000*8, np.int64)
        at = 0
        for s in a['segments_info']: ids[at:at+s['area']] = s['id']; at += s['area']
        ids = ids.reshape(-1, 100) if at <= 80_000 else ids
        Image.fromarray(np.stack([ids & 255, ids >> 8 & 255, ids >> 16], -1).astype(np.uint8)).save(tmp_path/'panoptic_val2017'/a['file_name'])
    assert np.allclose(read_panoptic(tmp_path).share, read_panoptic(tmp_path, count_pixels=True).share)


def extract(tar, to):
    with tarfile.open(tar) as t: t.extractall(to, filter='data')


@pytest.mark.parametrize('split', ['train2017', 'val2017'])
def test_real_panoptic_areas_are_pixel_counts(tmp_path, split):
    root = real('coco_panoptic')/'coco_panoptic'
    extract(root/'coco128_panoptic_masks.tar', tmp_path)
    data = json.loads((root/f'coco128_panoptic_{split}.json').read_text())
    for a in data['annotations'][:25]:
        counted = mask_areas(tmp_path/f'panoptic_{split}'/a['file_name'])
        assert {s['id'] for s in a['segments_info']} == set(counted)-{0}
        assert all(counted[s['id']] == s['area'] for s in a['segments_info'])
    (tmp_path/'annotations').mkdir()
    (tmp_path/'annotations'/f'panoptic_{split}.json').write_text(json.dumps(data))
    path = tmp_path/'annotations'/f'panoptic_{split}.json'
    assert np.allclose(read_panoptic(path).share, read_panoptic(path, count_pixels=True).share)


def test_the_official_panoptic_sample():
    root = real('coco_panoptic')/'coco_panoptic/panopticapi/sample_data'
    s = read_panoptic(root/'panoptic_examples.json')
    assert list(s.ids) == [142238, 439180] and s.share.sum(1).max() <= 1
    for a in json.loads((root/'panoptic_examples.json').read_text())['annotations']:
        counted = mask_areas(root/'panoptic_examples'/a['file_name'])
        assert set(counted)-{0} == {x['id'] for x in a['segments_info']}


def real_scenes(root):
    parts = [read_panoptic(root/f'coco_panoptic/coco128_panoptic_{s}.json') for s in ('train2017', 'val2017')]
    assert parts[0].names == parts[1].names
    return Scenes(np.r_[parts[0].ids, parts[1].ids], parts[0].names, np.r_[parts[0].share, parts[1].share], {})


@pytest.mark.parametrize('task', TASKS[2:])
def test_construction_on_real_photographs(task, tmp_path):
    root = real('coco_panoptic')
    scenes, rules = real_scenes(root), Rules(min_categories=5, min_shared=3, far=1)    # 200 photographs only
    b = build_object(task, scenes, 60, rules, 0)
    assert len(b.templates) >= 20, b.dropped
    assert violations(b, scenes, rules) == {}
    extract(root/'coco_panoptic/coco128_images_256px.tar', tmp_path)
    (tmp_path/'both').mkdir()
    (tmp_path/'both/val2017').mkdir(); (tmp_path/'both/genecis').mkdir()
    for p in [*(tmp_path/'train2017').glob('*.jpg'), *(tmp_path/'val2017').glob('*.jpg')]: p.rename(tmp_path/'both/val2017'/p.name)
    write_templates(tmp_path/f'both/genecis/{task}.json', b.templates)
    bench = load_genecis(tmp_path/'both', task)
    assert len(bench) == len(b.templates) and bench.protocol.coverage == 1
    assert all(max(bench.load(i).size) <= 256 for i in bench.images[:20])


# --- hostile files

junk = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda c: st.lists(c, max_size=4) | st.dictionaries(st.sampled_from(['val_image_id', 'image_id', 'instance_bbox', 'reference', 'gallery', 'x']), c, max_size=4), max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(junk, st.sampled_from(['reference', 'target', 'gallery', 'condition', None]))
def test_junk_templates_give_a_clear_error(value, field):
    good = dict(reference=dict(val_image_id=1), target=dict(val_image_id=2), gallery=[dict(val_image_id=3)], condition='x')
    templates = [good, dict(good, **{field: value})] if field else value
    try: check_templates(templates, 'file.json')
    except ValueError as e: assert 'file.json' in str(e)
    else: [keys_of(t) for t in templates]


@pytest.mark.parametrize('data', [b'', b'[', b'\xff\xfe{}', b'{"a": 1}', b'null', b'[1]'])
def test_files_that_are_no_templates(tmp_path, data):
    (tmp_path/'t.json').write_bytes(data)
    with pytest.raises(ValueError, match='t.json'): read_templates(tmp_path/'t.json')
    (tmp_path/'t.json.gz').write_bytes(data)
    with pytest.raises(ValueError, match='t.json.gz'): read_templates(tmp_path/'t.json.gz')


# --- the whole way, with the feature store

@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path/'store'))
    scenes, things = random_scenes(5), random_instances(5)
    coco_root(tmp_path, scenes); vaw_root(tmp_path, things)
    r = np.random.default_rng(0)
    for sub, ids in (('val2017', [f'{i:012d}' for i in scenes.ids]), ('vg', sorted(set(things.table.image_id)))):
        (tmp_path/sub).mkdir()
        for i in ids: Image.fromarray(r.integers(0, 255, (20, 800, 3), dtype=np.uint8)).save(tmp_path/sub/f'{i}.jpg')
    return tmp_path, build_genecis(tmp_path, n=6, rules=Rules(6, 4), seed=1)


def test_from_annotations_to_ranks(built):
    root, folder = built
    from cis_nb.benchmarks.protocol import evaluate
    from cis_nb.models.backbone import load_backbone
    from cis_nb.models.baselines import methods
    backbone = load_backbone('tiny', pretrained='none')
    for task in TASKS:
        bench = load_genecis(root, task, folder)
        assert len(bench) == 6 == len(read_built(folder, task).templates)
        assert ('rebuilt' in bench.protocol.extra) and (bench.protocol.crop != 'whole image') == ('attribute' in task)
        ranked, rows = evaluate(methods()['image_text'], bench, backbone)
        assert len(ranked) == 6 and set(ranked.gallery_size) == {gallery_size(task)} and list(rows.k) == [1, 2, 3]
        again, _ = evaluate(methods()['image_text'], bench, backbone)
        assert again['rank'].tolist() == ranked['rank'].tolist()


def test_a_truncated_photograph_costs_its_queries(built):
    root, folder = built
    from cis_nb.benchmarks.protocol import evaluate
    from cis_nb.models.backbone import load_backbone
    from cis_nb.models.baselines import methods
    bench = load_genecis(root, 'focus_object', folder)
    bad = bench.queries.gallery[0][3]
    path = root/f'val2017/{bad}.jpg'
    path.write_bytes(path.read_bytes()[:300])
    bench = load_genecis(root, 'focus_object', folder)
    ranked, rows = evaluate(methods()['image_only'], bench, load_backbone('tiny', pretrained='none'))
    hit = [bad in (r.reference, *r.gallery) for r in bench.queries.itertuples()]
    assert len(ranked) == 6-sum(hit) < 6 and set(ranked.protocol) != {bench.protocol.id}


def test_boxes_outside_their_photograph_cost_their_queries(built):
    root, folder = built
    from cis_nb.benchmarks.protocol import evaluate
    from cis_nb.models.backbone import load_backbone
    from cis_nb.models.baselines import methods
    templates = read_templates(folder/'genecis/change_attribute.json')
    templates[0]['target']['instance_bbox'] = [5000, 1, 10, 10]
    templates[1]['gallery'][2]['instance_bbox'] = [1, 1, 0, 10]
    (root/'genecis').mkdir()
    write_templates(root/'genecis/change_attribute.json', templates)
    bench = load_genecis(root, 'change_attribute')
    assert len(bench) == 5 and 'partial' in str(bench.protocol)
    ranked, _ = evaluate(methods()['image_only'], bench, load_backbone('tiny', pretrained='none'))
    assert len(ranked) == 4


def test_the_same_annotations_give_the_same_folder(built):
    root, folder = built
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (folder/'genecis').iterdir()}
    assert build_genecis(root, n=6, rules=Rules(6, 4), seed=1) == folder
    assert build_genecis(root, n=6, rules=Rules(6, 4), seed=2) != folder
    for p in folder.rglob('*'):
        if p.is_file(): p.unlink()
    with pytest.warns(UserWarning): build_genecis(root, n=6, rules=Rules(6, 4), seed=1)
    assert {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (folder/'genecis').iterdir()} == before
