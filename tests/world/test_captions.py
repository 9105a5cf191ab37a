"Captions of the drawn world: true, and the same bytes everywhere."

import random
import tarfile

from hypothesis import given, settings, strategies as st

from cis_nb.world.captions import WorldPairs, probes, relation_sentence, scene_captions
from cis_nb.world.layouts import write_captions
from cis_nb.world.scenes import (
    ATTRIBUTES,
    COLORS,
    PATTERNS,
    draw_scene,
)

seeds = st.integers(0, 10**9)


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_captions_tell_the_truth(seed):
    r = random.Random(seed)
    scene = draw_scene(r)
    for text in scene_captions(scene, r, 6):
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
    text = relation_sentence(scene, r, p, ())
    if ' to the left of ' in text:
        assert p.x < q.x
    if ' to the right of ' in text:
        assert p.x > q.x
    if ' above ' in text:
        assert p.y < q.y
    if ' below ' in text:
        assert p.y > q.y


def test_twins_differ_in_one_fact():
    stream = WorldPairs(100, split='val', twins=1.0)
    for i in range(0, 100, 2):
        (_, a, k, fact), (_, b, _, _) = stream.item(i), stream.item(i + 1)
        others = [n for n in range(len(a.things)) if n != k]
        assert all(a.things[n] == b.things[n] for n in others)
        assert getattr(a.things[k], fact[0]) != getattr(b.things[k], fact[0])
        assert sum(getattr(a.things[k], f) != getattr(b.things[k], f) for f in ('category', *ATTRIBUTES)) == 1


def test_caption_shards_are_the_same_bytes(tmp_path):
    for name in 'ab':
        write_captions(tmp_path / name, 20)
    files = sorted(p.name for p in (tmp_path / 'a/captions').iterdir())
    assert all((tmp_path / 'a/captions' / f).read_bytes() == (tmp_path / 'b/captions' / f).read_bytes() for f in files)
    with tarfile.open(tmp_path / 'a/captions/world-train-00000.tar') as tar:
        assert len(tar.getnames()) == 32 and {(m.mtime, m.uname, m.gname) for m in tar} == {(0, '', '')}


def test_probes_have_known_answers():
    for p in probes(30):
        assert len(p.images) == len(p.labels) == 30
        assert p.labels.shape == (30, len(p.prompts)) if p.name == 'presence' else p.labels.max() < len(p.prompts)
