"Folders and archives of images, their tables and the images themselves, each changed in every way."

import gzip
import json
import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hostile import COUNTS, attack, byte_changes, call, gz_changes, json_changes, outcome, text_changes, value_changes
from lrvsf_files import Hand
from photo_folders import folder, image, refuse, side_by_side, write_tar

from cis_nb.backbones.features import image_features
from cis_nb.benchmarks.circo import load_circo
from cis_nb.benchmarks.fashioniq import load_fashioniq
from cis_nb.benchmarks.genecis import load_genecis
from cis_nb.benchmarks.grocery import read_grocery
from cis_nb.benchmarks.lrvsf import read_lrvsf
from cis_nb.benchmarks.lrvsf_training import lrvsf_training_images
from cis_nb.benchmarks.mit_states import load_mitstates
from cis_nb.data.image_folders import read_photos
from cis_nb.data.packed import packed_folder
from cis_nb.retrieval.protocol import NoQueries
from cis_nb.world.grocery import grocery_root

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures('store')]
JSON = (json_changes, value_changes, text_changes)


def photos_of(root):
    "What a folder of images holds, and what was left out."

    def read():
        found = read_photos(root)
        return found.table.drop(columns=['start', 'size']), found.skipped.counts()

    return read


# a file that is gone was never part of the folder; a word may be the name of a split, and a text one caption
FREE = r'gone|split: (text|null|missing|empty text)|captions: text|caption(s\.0)?: text zzz'


def attack_photos(root, name, changes) -> list:
    return attack('image folders', root / name, photos_of(root), changes, names=['photos'], valid_too=FREE)


TABLES = {
    'captions.jsonl': ''.join(
        json.dumps(dict(image=f'{i:03}.jpg', captions=[f'a {i}'], split='train')) + '\n' for i in range(4)
    ),
    'captions.csv': 'image,caption\n' + ''.join(f'{i:03}.jpg,a {i}\n' for i in range(4)),
    'captions.txt': ''.join(f'{i:03}.jpg\ta {i}\n' for i in range(4)),
}


@pytest.mark.parametrize('table', TABLES)
def test_tables_of_captions(tmp_path, table):
    root = folder(tmp_path / 'photos', 4, table, TABLES[table])
    assert attack_photos(root, table, [text_changes]) == []


def table_changes(data: bytes):
    "(name, bytes): quotes that are not closed, columns of one name."
    head, *lines = data.decode().splitlines(keepends=True)
    for k, line in enumerate(lines):
        for old, new in ((',', ',"'), (line, '"' + line)):
            yield (
                f'quote {new[:2]} in line {k + 2}',
                ''.join([head, *lines[:k], line.replace(old, new), *lines[k + 1 :]]),
            )
    yield 'a quote in the head', '"' + data.decode()
    for column in ('image', 'caption'):
        more = ''.join(line.replace(',', ',x,') for line in lines)
        yield f'{column} twice', f'image,{column},caption\n' + more
        yield f'{column} twice, the last', f'image,caption,{column}\n' + more


def test_lines_and_columns_of_tables(tmp_path):
    root = folder(tmp_path / 'photos', 4, 'captions.csv', TABLES['captions.csv'])
    changes = lambda data: ((name, text.encode()) for name, text in table_changes(data))  # noqa: E731
    bad = attack('image folders', root / 'captions.csv', photos_of(root), [changes], False, ['captions.csv'])
    assert bad == []


def coco_changes(data: bytes):
    "(name, bytes): an id, a file name or both of the second image are those of the first."
    for keys in (['id'], ['file_name'], ['id', 'file_name']):
        doc = json.loads(data)
        doc['images'][1].update({k: doc['images'][0][k] for k in keys})
        yield f'{" and ".join(keys)} twice', json.dumps(doc).encode()
    doc = json.loads(data)
    doc['images'].append(dict(doc['images'][0], id=99))
    doc['annotations'].append(dict(id=99, image_id=99, caption='another'))
    yield 'the first image again', json.dumps(doc).encode()


def test_packed_tables_of_captions(tmp_path):
    data = gzip.compress(TABLES['captions.jsonl'].encode(), mtime=0)
    root = folder(tmp_path / 'photos', 4, 'captions.jsonl.gz', data)
    assert attack_photos(root, 'captions.jsonl.gz', [gz_changes]) == []


def test_coco_folders(tmp_path):
    images = [dict(id=i, file_name=f'{i:03}.jpg') for i in range(4)]
    text = json.dumps(dict(images=images, annotations=[dict(id=i, image_id=i, caption=f'a {i}') for i in range(4)]))
    root = folder(tmp_path / 'photos', 4, 'captions_train2017.json', text)
    assert attack_photos(root, 'captions_train2017.json', (*JSON, coco_changes)) == []


def test_captions_beside_images(tmp_path):
    root = tmp_path / 'photos'
    root.mkdir()
    for name, data in side_by_side(4):
        (root / name).write_bytes(data)
    assert attack_photos(root, '000.json', JSON) == []


def put_link(folder, away):
    folder.rename(away)
    folder.symlink_to(away)


def put_loop(folder, away):
    (folder / 'loop').symlink_to('..')


def put_link_to_nowhere(folder, away):
    folder.rename(away)
    folder.symlink_to(folder.parent / 'nowhere')


def put_second_name(folder, away):
    (folder.parent / 'again').symlink_to(folder.name)


@pytest.mark.parametrize('put', [put_link, put_loop, put_link_to_nowhere, put_second_name])
def test_linked_folders(tmp_path, put):
    assert folder_case(tmp_path, lambda: put(tmp_path / 'photos/more', tmp_path / 'away')) in ('handled', 'counted')


def test_folders_that_cannot_be_read(tmp_path, monkeypatch):
    assert folder_case(tmp_path, lambda: monkeypatch.setattr(os, 'scandir', refuse('more'))) == 'counted'


def folder_case(tmp_path, change) -> str:
    "The outcome of a change to a folder within a folder of photographs; it is counted."
    root = folder(tmp_path / 'photos', 4, 'captions.csv', TABLES['captions.csv'])
    (root / 'more').mkdir()
    (root / '000.jpg').rename(root / 'more/000.jpg')
    valid = call(photos_of(root))
    change()
    said = outcome(call(photos_of(root)), valid, {'photos'})
    COUNTS.setdefault('image folders', Counter())[said] += 1
    return said


def test_tars_of_images(tmp_path):
    root = tmp_path / 'photos'
    root.mkdir()
    write_tar(root / 'a.tar', side_by_side(4))
    assert attack_photos(root, 'a.tar', [byte_changes, member_changes]) == []


def member_changes(data: bytes):
    "(name, bytes): other members of a tar."
    for name in ('../out.jpg', '/out.jpg', 'a/../../out.jpg', 'C:\\out.jpg', 'a\udce9.jpg', '000.jpg'):
        yield f'a member {ascii(name)}', tar_of([*side_by_side(4), (name, image(9))])
    yield 'a tar in a tar', tar_of([*side_by_side(4), ('b.tar', data)])
    yield 'nothing at its end', data[: data.rindex(b'number 3')]
    yield 'packed', gzip.compress(data, mtime=0)


def tar_of(files) -> bytes:
    with tempfile.NamedTemporaryFile() as f:
        write_tar(f.name, files)
        return Path(f.name).read_bytes()


def image_changes(data: bytes):
    "(name, bytes): images that are none, too large, or of another kind."
    yield from byte_changes(data)
    yield 'cut at the end', data[:-40]
    header = bytearray(image(0, fmt='PNG'))
    header[16:24] = (200_000).to_bytes(4, 'big') * 2
    yield 'an image of 40 gigapixels', bytes(header)
    yield 'a pdf', b'%PDF-1.7' + bytes(200)
    yield 'html', b'<html><body>404</body></html>'


class Backbone:
    "Features of two numbers, without a network."

    name, D, fingerprint, dtype = 'made-up', 2, 'x', torch.float32

    def preprocess(self, im):
        return torch.tensor(np.asarray(im.convert('RGB').resize((4, 4)), np.float32)).permute(2, 0, 1)

    def encode_image(self, x):
        return x.flatten(1)[:, :2]


def test_images(tmp_path):
    root = folder(tmp_path / 'photos', 4, 'captions.csv', TABLES['captions.csv'])

    def packed():
        at = packed_folder(root, 16)
        about = json.loads((at / 'about.json').read_text())
        table = pd.read_parquet(at / 'images.parquet')
        pixels = np.load(at / 'images.npy')[table.row]
        return (list(table.key), pixels), {k: len(v) for k, v in about['skipped'].items()}

    assert attack('images', root / '001.jpg', packed, [image_changes], names=['photos']) == []


def item(number) -> dict:
    return dict(val_image_id=number)


def circo_entry(number, *targets) -> dict:
    texts = dict(relative_caption='is red', shared_concept='a dog', semantic_aspects=[])
    return dict(id=number, reference_img_id=0, target_img_id=targets[0], gt_img_ids=targets, **texts)


BENCHMARKS = {  # annotations, images of which the last is attacked, reader
    'genecis': (
        {
            'genecis/change_object.json': [
                dict(reference=item(0), target=item(t), gallery=[item(2)], condition='dog') for t in (1, 3)
            ]
        },
        [f'val2017/{i:012}.jpg' for i in (0, 2, 3, 1)],
        lambda root: load_genecis(root, 'change_object'),
    ),
    'circo': (
        {
            'circo/annotations/val.json': [circo_entry(0, 1, 2), circo_entry(1, 3)],
            'circo/annotations/image_info_unlabeled2017.json': dict(
                images=[dict(id=i, file_name=f'{i}.jpg') for i in range(4)]
            ),
        },
        [f'circo/unlabeled2017/{i}.jpg' for i in (0, 2, 3, 1)],
        load_circo,
    ),
    'fashioniq': (
        {
            'fashioniq/captions/cap.dress.val.json': [
                dict(candidate='0', target=t, captions=['is red', 'is long']) for t in ('1', '2')
            ],
            'fashioniq/image_splits/split.dress.val.json': ['0', '1', '2'],
        },
        [f'fashioniq/images/{i}.jpg' for i in (0, 2, 1)],
        load_fashioniq,
    ),
    'mitstates': (
        {},
        [f'mit-states/images/{state} fish/{i}.jpg' for state in ('raw', 'big') for i in (0, 1)],
        load_mitstates,
    ),
}


@pytest.mark.parametrize('name', BENCHMARKS)
def test_images_of_benchmarks(tmp_path, name):
    annotations, images, load = BENCHMARKS[name]
    for path in map(tmp_path.joinpath, (*annotations, *images)):
        path.parent.mkdir(parents=True, exist_ok=True)
    for file, content in annotations.items():
        (tmp_path / file).write_text(json.dumps(content))
    for i, file in enumerate(images):
        (tmp_path / file).write_bytes(image(i))

    def read():
        task = load(tmp_path)
        found = image_features(Backbone(), task.images, task.load, task.key)
        features = [found.array[found.index[i]] for i in found.ids]
        return features, [found.counts, task.protocol.coverage, task.protocol.extra]

    free = 'gone' if name == 'mitstates' else ''  # its folders may hold any number of images
    path = tmp_path / images[-1]
    assert attack('images', path, read, [image_changes], names=[path.parent.name], valid_too=free) == []
    assert not COUNTS['images']['clear error']  # the others are read


PARTS = ('products_simple_metadata.parquet', 'products_complex_metadata.parquet', 'distractors_test_metadata.parquet')


def test_metadata_of_lrvsf(tmp_path):
    root = Hand().write(tmp_path / 'lrvsf')

    def read():
        found = read_lrvsf(root, 'test')
        return (found.pairs, found.distractors), {}

    for name in PARTS:
        assert attack('LRVS-F', root / name, read, [byte_changes], names=['lrvsf']) == []


def test_tars_of_lrvsf(tmp_path):
    root = Hand(split='val').write_val(tmp_path / 'lrvsf')

    def read():
        found = read_lrvsf(root, 'val')
        return (found.pairs, found.distractors), {}

    free = 'dist_0.tar, gone'  # there may be any number of these
    for name in ('VALID/prods.tar', 'VALID/dist_0.tar'):
        told = dict(names=['lrvsf'], valid_too=free, errors=[NoQueries])  # no product has both of its images
        assert attack('LRVS-F', root / name, read, [byte_changes], **told) == []


def test_shards_of_products(tmp_path):
    hand = Hand(split='train')
    path = tmp_path / 'lrvsf/TRAIN/0.tar'

    def members(change):
        buffer = tmp_path / 'changed.tar'
        hand.tar(buffer, change)
        return buffer.read_bytes()

    def changes(data):
        about = json.dumps({'0': hand.complex[0], '1': hand.simple[0]}).encode()
        for name, changed in (*json_changes(about), *value_changes(about)):

            def change(found, changed=changed):
                found['100.json'] = changed

            yield f'100.json: {name}', members(change)

    hand.tar(path)

    def read():
        found = lrvsf_training_images(tmp_path, 'train', 8)
        return found.table, found.skipped.counts()

    free = r'(WIDTH|HEIGHT|SPLIT|URL|caption\d|CATEGORY|PRODUCT_ID|TYPE): (null|missing|text|empty text)'
    assert attack('LRVS-F', path, read, [changes, byte_changes], names=['TRAIN'], valid_too=free) == []


def test_grocery(tmp_path):
    root = tmp_path / 'grocery'
    shutil.copytree(grocery_root(1, 1, 1), root)

    def read():
        found = read_grocery(root)
        return (found.products, found.photos), found.skipped.counts()

    for name in ('classes.csv', 'natural.csv'):
        half = 'cut in half'  # a smaller table
        assert attack('grocery', root / name, read, [text_changes], names=['.csv'], valid_too=half) == []
