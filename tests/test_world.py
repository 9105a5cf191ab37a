"The world: the same everywhere, never lying, in the layouts it claims."
import hashlib, json, os, random, subprocess, sys, tarfile

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

from cis_nb.world.captions import PLACE_WORDS, WorldPairs, caption, captions, draw_closeup, everything, probes, related
from cis_nb.world.layouts import world_root, write_captions, write_coco, write_vaw
from cis_nb.world.scenes import ATTRIBUTES, COLORS, DOMAINS, PATTERNS, PLACES, STUFF, THINGS, draw_scene, golden_hash, held_out, render, visible

GOLDEN = dict(scenes='e9ee4640f85c51d03365157e8f392b1ebb79c5604f39e27998620d069105ed0f',
              pairs='d221b5e1c99dfc3786fb47765bbcee7cc42f3b2f0edad2fb36a80227d1e86215')
seeds = st.integers(0, 10**9)


def stream_hash():
    images, texts = WorldPairs(10**7, seed=3).batch(range(500_000, 500_064))
    return hashlib.sha256(images.numpy().tobytes() + '\n'.join(texts).encode()).hexdigest()


def test_golden_hashes():
    assert golden_hash() == GOLDEN['scenes'], 'the world has changed: every number of the book changes with it'
    assert stream_hash() == GOLDEN['pairs'], 'the stream of pairs has changed: the shipped backbone was trained on another one'


@pytest.mark.parametrize('hash_seed', ['0', '77'])
def test_the_same_in_another_process(hash_seed):
    code = 'from cis_nb.world.scenes import golden_hash; print(golden_hash())'
    out = subprocess.run([sys.executable, '-c', code], env={**os.environ, 'PYTHONHASHSEED': hash_seed}, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == golden_hash()


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(sorted(DOMAINS)), st.sampled_from([32, 64, 96, 128]))
def test_any_scene_renders(seed, domain, size):
    scene = draw_scene(random.Random(seed), domain=domain)
    picture, segments = render(scene, size, with_segments=True)
    assert picture.shape == (size, size, 3) and picture.dtype == np.uint8
    assert segments.min() >= -len(PLACES[scene.place][0]) and segments.max() <= len(scene.things)
    assert len({t.category for t in scene.things}) == len(scene.things)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_things_are_seen(seed):
    scene = draw_scene(random.Random(seed), n_things=random.Random(seed).randrange(1, 7))
    seen = visible(render(scene, 64, with_segments=True)[1])
    assert set(seen) == set(range(1, len(scene.things)+1))
    assert all(area > 20 for area, _ in seen.values())


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_captions_tell_the_truth(seed):
    r = random.Random(seed)
    scene = draw_scene(r)
    for text in captions(scene, r, 6):
        words = set(text.replace(',', ' ').replace('green meadow', 'meadow').split())
        assert words & set(COLORS) <= {t.color for t in scene.things}
        assert words & set(PATTERNS) <= {t.pattern for t in scene.things}
        assert not (words & {'striped', 'dotted'}) - {t.pattern for t in scene.things}


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_relations_are_true(seed):
    r = random.Random(seed)
    scene = draw_scene(r, n_things=2)
    p, q = scene.things
    text = related(scene, r, p, ())
    if ' to the left of ' in text: assert p.x < q.x
    if ' to the right of ' in text: assert p.x > q.x
    if ' above ' in text: assert p.y < q.y
    if ' below ' in text: assert p.y > q.y


def test_training_never_sees_a_held_out_pair():
    stream = WorldPairs(4000, seed=1)
    shown = {(t.color, t.category) for i in range(0, 4000, 3) for t in stream.item(i)[1].things}
    assert not [pair for pair in shown if held_out(*pair)] and len(shown) > 200


def test_twins_differ_in_one_fact():
    stream = WorldPairs(100, split='val', twins=1.)
    for i in range(0, 100, 2):
        (_, a, k, fact), (_, b, _, _) = stream.item(i), stream.item(i+1)
        others = [n for n in range(len(a.things)) if n != k]
        assert all(a.things[n] == b.things[n] for n in others)
        assert getattr(a.things[k], fact[0]) != getattr(b.things[k], fact[0])
        assert sum(getattr(a.things[k], f) != getattr(b.things[k], f) for f in ('category', *ATTRIBUTES)) == 1


def test_splits_share_no_picture():
    seen = [{render(s, 32).tobytes() for i in range(150) for s in [WorldPairs(150, split=split).item(i)[1]]} for split in ('train', 'val', 'test')]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]


def test_coco_layout(tmp_path):
    write_coco(tmp_path, 5)
    panoptic = json.loads((tmp_path/'annotations/panoptic_val2017.json').read_text())
    names = {c['id'] for c in panoptic['categories']}
    for image, note in zip(panoptic['images'], panoptic['annotations']):
        assert Image.open(tmp_path/'val2017'/image['file_name']).size == (image['width'], image['height'])
        m = np.asarray(Image.open(tmp_path/'panoptic_val2017'/note['file_name'])).astype(int)
        ids = m[..., 0] + 256*m[..., 1] + 65536*m[..., 2]
        for s in note['segments_info']:
            ys, xs = np.nonzero(ids == s['id'])
            assert s['category_id'] in names and s['area'] == len(ys) and s['iscrowd'] == 0
            assert s['bbox'] == [xs.min(), ys.min(), xs.max()-xs.min()+1, ys.max()-ys.min()+1]
        assert set(np.unique(ids)) == {s['id'] for s in note['segments_info']}


def test_vaw_layout(tmp_path):
    write_vaw(tmp_path, 20)
    kinds = json.loads((tmp_path/'vaw/attribute_types.json').read_text())
    known = {v for values in kinds.values() for v in values}
    entries = [e for split in ('train', 'val', 'test') for e in json.loads((tmp_path/f'vaw/{split}.json').read_text())]
    assert len({e['instance_id'] for e in entries}) == len(entries)
    for e in entries:
        assert set(e['positive_attributes']) | set(e['negative_attributes']) <= known
        assert not set(e['positive_attributes']) & set(e['negative_attributes'])
        x, y, w, h = e['instance_bbox']
        assert 0 <= x and 0 <= y and w > 0 and h > 0 and x+w <= 128 and y+h <= 128 and (tmp_path/f"vg/{e['image_id']}.jpg").is_file()


def test_caption_shards_are_the_same_bytes(tmp_path):
    for name in 'ab': write_captions(tmp_path/name, 20)
    files = sorted(p.name for p in (tmp_path/'a/captions').iterdir())
    assert all((tmp_path/'a/captions'/f).read_bytes() == (tmp_path/'b/captions'/f).read_bytes() for f in files)
    with tarfile.open(tmp_path/'a/captions/world-train-00000.tar') as tar: assert len(tar.getnames()) == 32


def test_probes_have_known_answers():
    for p in probes(30):
        assert len(p.images) == len(p.labels) == 30
        assert p.labels.shape == (30, len(p.prompts)) if p.name == 'presence' else p.labels.max() < len(p.prompts)
