"Drawn scenes: the same pixels everywhere, visible objects, splits without shared images."

import hashlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cis_nb.world.captions import WorldPairs
from cis_nb.world.scenes import (
    DOMAINS,
    PLACES,
    draw_scene,
    scenes_hash,
    is_held_out,
    render,
    visible_boxes,
)

GOLDEN = dict(
    scenes='e9ee4640f85c51d03365157e8f392b1ebb79c5604f39e27998620d069105ed0f',
    pairs='d221b5e1c99dfc3786fb47765bbcee7cc42f3b2f0edad2fb36a80227d1e86215',
)
seeds = st.integers(0, 10**9)


def stream_hash():
    images, texts = WorldPairs(10**7, seed=3).batch(range(500_000, 500_064))
    return hashlib.sha256(images.numpy().tobytes() + '\n'.join(texts).encode()).hexdigest()


def test_golden_hashes():
    assert scenes_hash() == GOLDEN['scenes'], 'the world has changed: every number of the book changes with it'
    assert stream_hash() == GOLDEN['pairs'], (
        'the stream of pairs has changed: the shipped backbone was trained on another one'
    )


@pytest.mark.e2e
@pytest.mark.parametrize('hash_seed', ['0', '77'])
def test_the_same_in_another_process(hash_seed):
    code = 'from cis_nb.world.scenes import scenes_hash; print(scenes_hash())'
    out = subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONHASHSEED': hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.strip() == scenes_hash()


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
    seen = visible_boxes(render(scene, 64, with_segments=True)[1])
    assert set(seen) == set(range(1, len(scene.things) + 1))
    assert all(area > 20 for area, _ in seen.values())


def test_training_never_sees_a_held_out_pair():
    stream = WorldPairs(4000, seed=1)
    shown = {(t.color, t.category) for i in range(0, 4000, 3) for t in stream.item(i)[1].things}
    assert not [pair for pair in shown if is_held_out(*pair)] and len(shown) > 200


def test_splits_share_no_picture():
    seen = [
        {render(s, 32).tobytes() for i in range(150) for s in [WorldPairs(150, split=split).item(i)[1]]}
        for split in ('train', 'val', 'test')
    ]
    assert not seen[0] & seen[1] and not seen[0] & seen[2] and not seen[1] & seen[2]
