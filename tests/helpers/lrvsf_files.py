"LRVS-F written by hand, a backbone of whole numbers, and ranks by definition."

import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
from PIL import Image

from cis_nb.data.products import DISTRACTOR_CATEGORIES
from cis_nb.methods.baselines import FusionMethod

CATEGORY_OF = ('Bags', 'Feet', 'Bags', 'Head', 'Bags', 'Neck')


def noise_jpeg(n, side=24):
    "An image of its own for every number."
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(n).integers(0, 255, (side, side, 3), dtype=np.uint8)).save(buffer, 'JPEG')
    return buffer.getvalue()


class Hand:
    "The rows of a data set by hand; a test changes them before `write`."

    def __init__(self, products=6, distractors=9, split='test'):
        g, q = ('train', 'train') if split == 'train' else (f'{split}_gallery', f'{split}_query')
        self.split, self.files, self.simple, self.complex, self.distractors = split, {}, [], [], []
        for n in range(products):
            about = dict(PRODUCT_ID=str(100 + n), WIDTH=24, HEIGHT=24)
            words = dict(CATEGORY=CATEGORY_OF[n % 6], blip2_caption1=f'caption {n}', blip2_caption2=f'other {n}')
            self.simple.append(dict(about, URL=f's{n}', TYPE='SIMPLE', SPLIT=g, **words))
            self.complex.append(dict(about, URL=f'c{n}', TYPE=('COMPLEX', 'PARTIAL_COMPLEX')[n % 2], SPLIT=q))
        for n in range(distractors):
            category = DISTRACTOR_CATEGORIES[(3 * n) % 11]
            self.distractors.append(dict(URL=f'd{n}', PRODUCT_ID=f'{900 + n}', CATEGORY=category, SPLIT=g))
        rows = [*self.simple, *self.complex, *self.distractors]
        self.files = {r['URL']: noise_jpeg(n) for n, r in enumerate(rows)}

    def write(self, folder):
        "The published layout of the test split."
        (folder / 'TEST').mkdir(parents=True)
        tables = dict(products_simple=self.simple, products_complex=self.complex, distractors_test=self.distractors)
        for name, rows in tables.items():
            pd.DataFrame(rows).to_parquet(folder / f'{name}_metadata.parquet')
        for name, start in (('prods', 'sc'), ('dist_0', 'd')):
            some = {u: f for u, f in self.files.items() if u[0] in start}
            table = pd.DataFrame(dict(jpg=list(some.values())), index=pd.Index(some, name='url'))
            table.to_parquet(folder / f'TEST/{name}.parquet', row_group_size=4)
        return folder

    def tar(self, path, change=None):
        "A shard: `{PRODUCT_ID}.{i}.jpg` and `{PRODUCT_ID}.json`; `change` alters its members."
        members = {}
        for s, c in zip(self.simple, self.complex):
            key = s['PRODUCT_ID']
            members |= {f'{key}.0.jpg': self.files[c['URL']], f'{key}.1.jpg': self.files[s['URL']]}
            members[f'{key}.json'] = json.dumps({'0': c, '1': s}).encode()
        return write_tar(path, change(members) or members if change else members)

    def write_val(self, folder, change=None):
        "The published layout of the val split, distractors in two tars; `change` alters the members of the first one."
        self.write(folder)
        self.tar(folder / 'VALID/prods.tar')
        for part, rows in enumerate((self.distractors[:5], self.distractors[5:])):
            members = {}
            for r in rows:
                key = r['URL'][1:]
                members |= {f'{key}.jpg': self.files[r['URL']], f'{key}.json': json.dumps(r).encode()}
            if change and not part:
                change(members)
            write_tar(folder / f'VALID/dist_{part}.tar', members)
        return folder


def write_tar(path, members):
    "A tar: name -> bytes."
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, 'w') as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


class MadeUp:
    "A backbone whose features are small whole numbers, drawn by the id or the text: many ties, exact products."

    fingerprint = name = 'made-up'

    def __init__(self, seed=0, levels=2, dim=5):
        self.seed, self.levels, self.dim = seed, levels, dim

    def draw(self, word):
        r = np.random.default_rng([self.seed, *str(word).encode()])
        return r.integers(-self.levels, self.levels + 1, self.dim).astype(np.float32)

    def features(self, images):
        array = np.stack([self.draw(i) for i in images.ids])
        return SimpleNamespace(array=array, index={i: j for j, i in enumerate(images.ids)})

    def encode_text(self, texts):
        return torch.tensor(np.stack([self.draw(t) for t in texts]))


class Dots(FusionMethod):
    "A method whose scores are the products of raw features."

    def score(self, q, gallery):
        return (q[:, None] * gallery).sum(-1) if gallery.ndim == 3 else q @ gallery.T


def dots(seed=0):
    return Dots(name='dots', fuse=torch.add, backbone=MadeUp(seed))


def slow_rank(scores, target):
    "How many score as high as the target, the target included; and the first image, a target after its equals."
    others = [(-s, i == target, i) for i, s in enumerate(scores)]
    return int((scores >= scores[target]).sum()), min(others)[2]
