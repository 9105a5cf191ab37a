"Random annotations of scenes and objects, and the same as files of COCO and VAW."

import json

import numpy as np
import pandas as pd

from cis_nb.benchmarks.genecis_construction import AttributeInstances, Scenes


def random_scenes(seed, n=160, c=24):
    r = np.random.default_rng(seed)
    usual = np.full((r.integers(2, 5), c), 0.06)
    for row in usual:
        row[r.choice(c, r.integers(7, 12), replace=False)] = 0.8
    there = r.random((n, c)) < usual[r.integers(len(usual), size=n)]
    return Scenes(
        r.permutation(10**5)[:n],
        [f'c{i}' for i in range(c)],
        np.where(there, r.choice([0.002, 0.0099, 0.0101, 0.03, 0.04], (n, c), p=[0.1, 0.1, 0.2, 0.3, 0.3]), 0),
        {},
    )


def random_instances(seed, n=400, messy=0.1):
    r = np.random.default_rng(seed)
    types = {f't{i}': [f'a{i}.{j}' for j in range(r.integers(2, 5))] for i in range(3)} | dict(
        twice=['a0.0', 'a1.0'], state=['on', 'off']
    )
    every = sorted({a for v in types.values() for a in v})
    labels, rows = [], []
    for i in range(n):
        rows.append(
            dict(
                image_id=str(r.integers(n // 2)), instance_bbox=[float(i), 1.0, 2.5, 3], object_name=f'o{r.integers(5)}'
            )
        )
        true = {str(r.choice(v)) for v in types.values()} | {a for a in every if r.random() < messy}
        for a in every:
            if r.random() < 0.6:
                labels.append((i, a, a in true))
    return AttributeInstances(
        pd.DataFrame(rows), pd.DataFrame(labels, columns=['instance', 'attribute', 'positive']), types, {}
    )


def segment(number, area):
    return dict(id=number, category_id=number, area=area, iscrowd=number % 2, bbox=[0, 0, 100, 100])


def coco_root(path, scenes, with_area=True):
    n, c = scenes.share.shape
    data = dict(
        images=[dict(id=int(i), width=100, height=100, file_name=f'{i:012d}.jpg') for i in scenes.ids],
        categories=[dict(id=j + 1, name=f'c{j}', isthing=j % 2) for j in range(c)],
        annotations=[
            dict(
                image_id=int(i),
                file_name=f'{i:012d}.png',
                segments_info=[segment(int(j) + 1, round(s[j] * 10000)) for j in np.flatnonzero(s)],
            )
            for i, s in zip(scenes.ids, scenes.share)
        ],
    )
    (path / 'annotations').mkdir(parents=True, exist_ok=True)
    (path / 'annotations/panoptic_val2017.json').write_text(json.dumps(data))
    return data


def vaw_root(path, x):
    (path / 'vaw').mkdir(parents=True, exist_ok=True)
    sets = x.labels.groupby(['instance', 'positive']).attribute.agg(list).to_dict()
    entries = [
        dict(
            image_id=r.image_id if r.Index % 2 else int(r.image_id),
            instance_id=str(r.Index),
            instance_bbox=r.instance_bbox,
            instance_polygon=None,
            object_name=r.object_name,
            positive_attributes=sets.get((r.Index, True), []),
            negative_attributes=sets.get((r.Index, False), []),
        )
        for r in x.table.itertuples()
    ]
    for k, s in enumerate(('train', 'val', 'test')):
        (path / f'vaw/{s}.json').write_text(json.dumps(entries[k::3]))
    (path / 'vaw/attribute_types.json').write_text(json.dumps(x.types))
    return entries
