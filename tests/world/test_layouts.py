"The drawn world in the official layouts of COCO and VAW."

import json

import numpy as np
from PIL import Image

from cis_nb.world.layouts import write_coco, write_vaw


def test_coco_layout(tmp_path):
    write_coco(tmp_path, 5)
    panoptic = json.loads((tmp_path / 'annotations/panoptic_val2017.json').read_text())
    names = {c['id'] for c in panoptic['categories']}
    for image, note in zip(panoptic['images'], panoptic['annotations']):
        assert Image.open(tmp_path / 'val2017' / image['file_name']).size == (image['width'], image['height'])
        m = np.asarray(Image.open(tmp_path / 'panoptic_val2017' / note['file_name'])).astype(int)
        ids = m[..., 0] + 256 * m[..., 1] + 65536 * m[..., 2]
        for s in note['segments_info']:
            ys, xs = np.nonzero(ids == s['id'])
            assert s['category_id'] in names and s['area'] == len(ys) and s['iscrowd'] == 0
            assert s['bbox'] == [xs.min(), ys.min(), xs.max() - xs.min() + 1, ys.max() - ys.min() + 1]
        assert set(np.unique(ids)) == {s['id'] for s in note['segments_info']}


def test_vaw_layout(tmp_path):
    write_vaw(tmp_path, 20)
    kinds = json.loads((tmp_path / 'vaw/attribute_types.json').read_text())
    known = {v for values in kinds.values() for v in values}
    entries = [
        e for split in ('train', 'val', 'test') for e in json.loads((tmp_path / f'vaw/{split}.json').read_text())
    ]
    assert len({e['instance_id'] for e in entries}) == len(entries)
    for e in entries:
        assert set(e['positive_attributes']) | set(e['negative_attributes']) <= known
        assert not set(e['positive_attributes']) & set(e['negative_attributes'])
        x, y, w, h = e['instance_bbox']
        assert (
            0 <= x
            and 0 <= y
            and w > 0
            and h > 0
            and x + w <= 128
            and y + h <= 128
            and (tmp_path / f"vg/{e['image_id']}.jpg").is_file()
        )
