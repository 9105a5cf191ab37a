"GeneCIS on random annotations."

import numpy as np
import pytest
from annotations import coco_root, random_instances, random_scenes, vaw_root
from PIL import Image

from cis_nb.benchmarks.genecis_construction import Rules, build_genecis


@pytest.fixture
def built(tmp_path, store):
    "Annotations with images of noise, and the templates built from them."
    scenes, things = random_scenes(5), random_instances(5)
    coco_root(tmp_path, scenes)
    vaw_root(tmp_path, things)
    r = np.random.default_rng(0)
    for sub, ids in (('val2017', [f'{i:012d}' for i in scenes.ids]), ('vg', sorted(set(things.table.image_id)))):
        (tmp_path / sub).mkdir()
        for i in ids:
            Image.fromarray(r.integers(0, 255, (20, 800, 3), dtype=np.uint8)).save(tmp_path / sub / f'{i}.jpg')
    return tmp_path, build_genecis(tmp_path, n=6, rules=Rules(6, 4), seed=1)
