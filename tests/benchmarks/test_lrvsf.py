"LRVS-F: files written by hand in every published layout, slow references for every number, bad input."

import io
import json
import os
import pickle
import tarfile
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from cis_nb import api
from cis_nb.benchmarks import lrvsf
from cis_nb.benchmarks.lrvsf import (
    DISTRACTOR_CATEGORIES,
    LRVSF_CATEGORIES,
    BootstrapIds,
    LRVSFBenchmark,
    ParquetImages,
    bootstrap_scores,
    bootstrap_summary,
    check_conditions,
    convert_bootstrap,
    count_simple_images,
    distractor_steps,
    draw_bootstrap,
    encode_task,
    growing_gallery_rows,
    lrvsf_task,
    rank_growing_gallery,
    read_bootstrap,
    read_distractors,
    read_lrvsf,
    read_products,
    shard_samples,
    tar_images,
    training_images,
    resized_white_square,
)
from cis_nb.methods.baselines import FusionMethod
from cis_nb.retrieval.protocol import evaluate, evaluate_benchmark
from cis_nb.world.lrvsf import lrvsf_root

CATEGORY_OF = ('Bags', 'Feet', 'Bags', 'Head', 'Bags', 'Neck')


def jpeg(n, side=24):
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
        self.files = {r['URL']: jpeg(n) for n, r in enumerate(rows)}

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


def write_tar(path, members):
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


@pytest.fixture
def data(tmp_path):
    return read_lrvsf(Hand().write(tmp_path / 'lrvsf'))


# Layouts


def test_the_published_layout_is_read(tmp_path):
    h = Hand()
    data = read_lrvsf(h.write(tmp_path / 'lrvsf').parent)
    assert data.pairs['product'].tolist() == [r['PRODUCT_ID'] for r in h.simple]
    assert data.pairs.caption1.tolist() == [r['blip2_caption1'] for r in h.simple]
    assert data.distractors.image.tolist() == [r['URL'] for r in h.distractors]
    for i in ('s3', 'c2', 'd8'):
        expected = Image.open(io.BytesIO(h.files[i])).convert('RGB')
        assert np.array_equal(np.asarray(data.source.load(i)), np.asarray(expected))


def test_metadata_by_split_and_numbers_as_product_ids_are_read(tmp_path):
    h, folder = Hand(), tmp_path / 'data/test'
    for r in (*h.simple, *h.complex):
        r['PRODUCT_ID'] = int(r['PRODUCT_ID'])
    h.write(tmp_path / 'x')
    folder.mkdir(parents=True)
    for name in ('products_simple', 'products_complex'):
        os.rename(tmp_path / f'x/{name}_metadata.parquet', folder / f'{name}_metadata.parquet')
    os.rename(tmp_path / 'x/distractors_test_metadata.parquet', folder / 'distractors_metadata.parquet')
    os.rename(tmp_path / 'x/TEST', tmp_path / 'TEST')
    data = read_lrvsf(tmp_path)
    assert data.pairs['product'].tolist() == [str(100 + n) for n in range(6)] and len(data.present) == 21


def test_val_is_read_from_tars(tmp_path):
    h, folder = Hand(split='val'), tmp_path / 'lrvsf'
    h.write(folder)
    h.tar(folder / 'VALID/prods.tar')
    for part, rows in enumerate((h.distractors[:5], h.distractors[5:])):
        members = {}
        for r in rows:
            key = r['URL'][1:]
            members |= {f'{key}.jpg': h.files[r['URL']], f'{key}.json': json.dumps(r).encode()}
        write_tar(folder / f'VALID/dist_{part}.tar', members)
    data = read_lrvsf(folder, 'val')
    assert data.distractors.image.tolist() == [f'd{n}' for n in range(9)]
    assert data.distractors.id.tolist() == [str(n) for n in range(9)] and len(data.present) == 21
    assert len(lrvsf_task(data, ks=(1,))) == 6 and data.source.load('d7').size == (24, 24)


def test_the_later_test_pack_is_read_with_and_without_categories(tmp_path):
    h = Hand()
    rows = [
        dict(SIMPLE_IMG=h.files[s['URL']], COMPLEX_IMG=h.files[c['URL']], CATEGORY=s['CATEGORY'], blip2_caption1='x y')
        for s, c in zip(h.simple, h.complex)
    ]
    pd.DataFrame(rows).to_parquet(tmp_path / 'products.parquet')
    (tmp_path / 'distractors').mkdir()
    for part in range(2):
        table = pd.DataFrame(dict(jpg=[h.files[f'd{4 * part + n}'] for n in range(4)]))
        table.to_parquet(tmp_path / f'distractors/{part}.parquet')
    data = read_lrvsf(tmp_path)
    assert len(data.pairs) == 6 and len(data.distractors) == 8 == len(set(data.distractors.image))
    task = lrvsf_task(data, ks=(1,))
    _, rows = evaluate_benchmark(dots(), LRVSFBenchmark('lrvsf', dict(category=task)))
    assert set(rows.metric) == {'recall'}  # no categories, no Cat@1
    lines = rank_growing_gallery(encode_task(dots(), task), [0, 8])
    assert lines.category_hit.isna().all() and 'cat_acc' not in set(growing_gallery_rows(lines, task.protocol).metric)
    with pytest.raises(ValueError, match='images of unknown category, so it cannot be filtered'):
        rank_growing_gallery(encode_task(dots(), task), [0], filtered=True)
    for part in range(2):
        table = pd.read_parquet(tmp_path / f'distractors/{part}.parquet')
        table.assign(CATEGORY='NonClothing').to_parquet(tmp_path / f'distractors/{part}.parquet')
    assert set(read_lrvsf(tmp_path).distractors.category) == {'NonClothing'}


def test_shards_are_streamed_and_packed_once(tmp_path, store):
    h = Hand(split='train')
    shard = h.tar(tmp_path / 'lrvsf/TRAIN/0.tar')
    assert [s['__key__'] for s in shard_samples(shard)] == [str(100 + n) for n in range(6)]
    t = training_images(tmp_path, size=12)
    assert training_images(tmp_path, size=12).folder == t.folder
    assert len(t) == 6 and t.squares.shape == (12, 3, 12, 12) and not t.skipped
    row = t.table.index[t.table.image == 's4'].item()
    assert np.array_equal(t.squares[row], resized_white_square(Image.open(io.BytesIO(h.files['s4'])), 12))
    simple, worn = t.draw(range(6), np.random.default_rng(0))
    assert (t.table.type[simple] == 'SIMPLE').all() and (t.table.type[worn] != 'SIMPLE').all()
    assert t.table['product'][simple].tolist() == t.table['product'][worn].tolist() == t.products
    assert t.table.category[simple].tolist() == list(CATEGORY_OF)


def test_row_groups_come_and_go(tmp_path):
    h = Hand(40, 0)
    folder = h.write(tmp_path / 'lrvsf')
    images = ParquetImages(groups=2)
    ids = images.add(folder / 'TEST/prods.parquet')
    order = np.random.default_rng(0).permutation(ids)
    assert all(images.read(i) == h.files[i] for i in order) and len(images.kept) == 2


@pytest.mark.parametrize('w, h', [(5, 5), (4, 9), (9, 4)])
def test_white_padding_puts_the_odd_pixel_right_or_below(w, h):
    a = resized_white_square(Image.new('RGB', (w, h), (0, 0, 0)), 9 if w != h else 5)[0]
    black = np.argwhere(a == 0)
    (top, left), (bottom, right) = black.min(0), black.max(0) + 1
    side = len(a)
    assert (right - left, bottom - top) == (w, h) and len(black) == w * h
    assert (left, top) == ((side - w) // 2, (side - h) // 2)


def test_simple_images_are_counted_by_category_and_split(tmp_path):
    h = Hand()
    h.simple.append(dict(h.simple[0], SPLIT='train', URL='x', PRODUCT_ID='7'))
    h.complex.append(dict(h.complex[0], SPLIT='train', URL='y', PRODUCT_ID='7'))
    t = count_simple_images(h.write(tmp_path / 'lrvsf')).set_index('category')
    assert t.loc['Bags'].tolist() == [1, 0, 3, 1] and t.loc['Total'].tolist() == [1, 0, 6, 9]


# Bad input


def refused(tmp_path, change, match, read=read_lrvsf):
    h = Hand()
    change(h)
    with pytest.raises(ValueError, match=match):
        read(h.write(tmp_path / 'lrvsf'))


def test_a_product_without_a_simple_image_is_refused(tmp_path):
    refused(
        tmp_path, lambda h: h.simple.pop(2), r"products_complex_metadata.*product '102' has no simple image \(1 such"
    )


def test_a_product_without_a_complex_image_is_refused(tmp_path):
    refused(tmp_path, lambda h: h.complex.pop(2), "product '102' has no complex image")


def test_a_shard_with_a_product_without_a_simple_image_is_refused(tmp_path, store):
    h = Hand(split='train')
    h.simple[3]['TYPE'] = 'COMPLEX'
    h.tar(tmp_path / 'TRAIN/0.tar')
    with pytest.raises(ValueError, match="0.tar: product '103' has no simple image"):
        training_images(tmp_path, size=8)


@pytest.mark.parametrize('table', ['simple', 'distractors'])
def test_an_unknown_category_is_refused(tmp_path, table):
    match = f"{table}.*CATEGORY is 'Shoes'; allowed: Bags, Feet"
    refused(tmp_path, lambda h: getattr(h, table)[1].update(CATEGORY='Shoes'), match)


def test_nonclothing_is_for_distractors_alone(tmp_path):
    refused(tmp_path, lambda h: h.simple[1].update(CATEGORY='NonClothing'), "CATEGORY is 'NonClothing'; allowed: Bags")
    assert 'NonClothing' in set(read_lrvsf(Hand().write(tmp_path / 'sound')).distractors.category) | {'NonClothing'}


def test_an_unknown_category_in_a_shard_is_refused(tmp_path, store):
    h = Hand(split='train')
    h.simple[3]['CATEGORY'] = 'Shoes'
    h.tar(tmp_path / 'TRAIN/0.tar')
    with pytest.raises(ValueError, match="0.tar, product '103', image 1: CATEGORY is 'Shoes'; allowed: Bags"):
        training_images(tmp_path, size=8)


def test_an_unknown_type_is_refused(tmp_path):
    refused(tmp_path, lambda h: h.complex[1].update(TYPE='WORN'), "TYPE is 'WORN'; allowed: COMPLEX, PARTIAL_COMPLEX")


@pytest.mark.parametrize('table, kind', [('simple', 'simple'), ('complex', 'complex')])
def test_duplicate_product_ids_are_refused(tmp_path, table, kind):
    def change(h):
        rows = getattr(h, table)
        rows.append(dict(rows[1], URL='again'))

    refused(tmp_path, change, f"product '101' has two {kind} images")


def test_a_product_of_two_shards_is_refused(tmp_path, store):
    h = Hand(split='train')
    h.tar(tmp_path / 'TRAIN/0.tar')
    h.tar(tmp_path / 'TRAIN/1.tar')
    with pytest.raises(ValueError, match="1.tar: product '100' was in 0.tar already"):
        training_images(tmp_path, size=8)


def test_a_product_of_two_splits_is_refused(tmp_path):
    def change(h):
        h.complex.append(dict(h.complex[0], SPLIT='train', URL='again'))

    refused(tmp_path, change, "product '100' is in test and train; splits must not share a product")


def test_an_address_that_is_used_twice_is_refused(tmp_path):
    refused(tmp_path, lambda h: h.simple[1].update(URL='s0'), "URL 's0' is in two rows")


@pytest.mark.parametrize('name', ['../100.0.jpg', '/tmp/100.0.jpg', 'a/../../100.0.jpg'])
def test_a_tar_member_outside_its_folder_is_refused(tmp_path, store, name):
    shard = Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', lambda members: members.update({name: b'x'}))
    for read in (lambda: training_images(tmp_path, size=8), lambda: tar_images(shard)):
        with pytest.raises(ValueError, match='0.tar.*outside its folder'):
            read()
    assert not (tmp_path.parent / '100.0.jpg').exists()


def test_a_tar_that_was_cut_is_refused(tmp_path, store):
    shard = Hand(split='train').tar(tmp_path / 'TRAIN/0.tar')
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(ValueError, match='0.tar: tar cut short or damaged'):
        training_images(tmp_path, size=8)
    with pytest.raises(ValueError, match='0.tar: tar cut short or damaged'):
        tar_images(shard)


def test_a_corrupt_jpeg_in_a_shard_is_skipped_and_counted(tmp_path, store):
    def change(members):
        members['102.1.jpg'] = members['102.1.jpg'][:90]
        members['104.0.jpg'] = b'no image'

    Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', change)
    t = training_images(tmp_path, size=8)
    assert len(t) == 4 and not {'102', '104'} & set(t.products)
    assert t.skipped['damaged or missing image'] == ['s2', 'c4']
    assert t.skipped['product without a readable simple and complex image'] == ['102', '104']
    assert len(t.squares) == len(t.table) == 8


def test_a_corrupt_jpeg_in_the_gallery_is_skipped_and_counted(tmp_path, store):
    from cis_nb.backbones.loading import load_backbone

    h = Hand()
    h.files['d3'], h.files['s1'] = b'no image', h.files['s1'][:80]
    task = lrvsf_task(read_lrvsf(h.write(tmp_path / 'lrvsf')), ks=(1,))
    e = encode_task(FusionMethod(name='i', fuse=lambda r, c: r, backbone=load_backbone('tiny')), task)
    assert set(e.features.skipped.id) == {'d3', 's1'}
    assert 'partial' in str(e.task.protocol) and len(e.task) == 5 and len(e.task.shared_gallery) == 13
    lines = rank_growing_gallery(e, [0, 4, 9])
    assert lines.groupby('distractors').gallery_size.first().tolist() == [5, 8, 13]  # d3 is one of the first four


def test_a_gallery_smaller_than_k_is_refused(data):
    with pytest.raises(ValueError, match='a gallery of 8 has no R@9; use smaller ks'):
        evaluate(dots(), lrvsf_task(data, distractors=2, ks=(1, 9)))
    lines = rank_growing_gallery(encode_task(dots(), lrvsf_task(data, ks=(1,))), [0, 2, 9])
    rows = growing_gallery_rows(lines, lrvsf_task(data).protocol, ks=(1, 7, 15))
    recall = rows[rows.metric == 'recall'].groupby('distractors').k.apply(list)
    assert recall.to_dict() == {0: [1], 2: [1, 7], 9: [1, 7, 15]}


@pytest.mark.parametrize('column, value', [('PRODUCT_ID', '103'), ('URL', 's3'), ('URL', 'c3')])
def test_a_distractor_that_is_a_product_of_the_queries_is_refused(tmp_path, column, value):
    match = f"distractors_test_metadata.*{column} '{value}' belongs to a product of the queries; 1 such"
    refused(tmp_path, lambda h: h.distractors[4].update({column: value}), match)


def test_conditions_of_the_other_task_are_refused(data):
    swapped = data.pairs.rename(columns=dict(category='caption1', caption1='category'))
    data.pairs = swapped
    with pytest.raises(
        ValueError, match="condition 'caption 0' in the task category; allowed: Bags.*belong to the task t"
    ):
        lrvsf_task(data, 'category')
    with pytest.raises(ValueError, match="condition 'Bags' in the task text is the name of a category"):
        lrvsf_task(data, 'text')
    with pytest.raises(ValueError, match='the condition is None; each query needs a text'):
        check_conditions('text', [None], 'here')
    with pytest.raises(ValueError, match="condition: 'colour' is none of category, text"):
        lrvsf_task(data, 'colour')


def test_a_file_that_is_none_or_lacks_a_column_is_named(tmp_path):
    folder = Hand().write(tmp_path / 'lrvsf')
    path = folder / 'products_simple_metadata.parquet'
    pd.read_parquet(path).drop(columns='blip2_caption1').to_parquet(path)
    with pytest.raises(ValueError, match="column 'blip2_caption1' is missing; needed: URL"):
        read_products(folder)
    path.write_bytes(b'PAR1 or not')
    with pytest.raises(ValueError, match='products_simple_metadata.parquet is no Parquet file'):
        read_products(folder)
    path.unlink()
    with pytest.raises(FileNotFoundError, match='huggingface.co/datasets/Slep'):
        read_products(folder)


def test_images_that_are_missing_make_the_task_partial(tmp_path):
    h = Hand()
    del h.files['d5'], h.files['c0']
    task = lrvsf_task(read_lrvsf(h.write(tmp_path / 'lrvsf')), ks=(1,))
    assert len(task) == 5 and len(task.shared_gallery) == 14 and 'partial' in str(task.protocol)


def test_too_many_distractors_are_refused(data):
    with pytest.raises(ValueError, match='distractors = 10; the test split has 9; 0 takes all'):
        lrvsf_task(data, distractors=10)


# The curve


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_the_curve_is_that_of_each_gallery_alone(seed, filtered):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        task = lrvsf_task(read_lrvsf(Hand(8, 25).write(Path(folder) / 'lrvsf')), ks=(1,))
    e = encode_task(dots(seed), task)
    steps = [0, 1, 7, 25]
    lines = rank_growing_gallery(e, steps, filtered).set_index(['distractors', 'query_id'])
    feats = MadeUp(seed)
    for n in steps:
        gallery = task.shared_gallery[: 8 + n]
        for q, (t,), v in zip(task.queries.query_id, task.queries.targets, e.q.numpy()):
            mine = [i for i in gallery if not filtered or task.category_of[i] == task.category_of[t]]
            scores = np.array([v @ feats.draw(i) for i in mine])
            rank, first = slow_rank(scores, mine.index(t))
            line = lines.loc[n, q]
            assert (line['rank'], line.gallery_size) == (rank, len(mine))
            assert line.category_hit == (task.category_of[mine[first]] == task.category_of[t])


def test_the_gallery_is_embedded_and_read_once(data):
    task, reads = lrvsf_task(data, ks=(1,)), []
    e = encode_task(dots(), task)

    class Counting:
        shape, dtype = e.features.array.shape, e.features.array.dtype

        def __getitem__(self, which):
            reads.extend(np.arange(len(whole))[which].tolist())
            return whole[which]

    whole = e.features.array
    e.features.array = Counting()
    e.method.backbone = None  # whoever embedded again would fail
    lines = rank_growing_gallery(e, [0, 2, 5, 9])
    assert len(lines) == 24 and sorted(reads) == sorted(e.rows(range(15)).tolist())


def test_the_last_step_is_the_benchmark(data):
    task = lrvsf_task(data, ks=(1, 3))
    per_query, rows = evaluate_benchmark(dots(), LRVSFBenchmark('lrvsf', dict(category=task)))
    lines = rank_growing_gallery(encode_task(dots(), task), [9])
    assert lines['rank'].tolist() == per_query['rank'].tolist()
    curve = growing_gallery_rows(lines, task.protocol, ks=(1, 3), method='dots')
    both = rows.merge(curve, on=['task', 'metric', 'k', 'method', 'protocol'])
    assert len(both) == len(rows) == 3
    assert np.allclose(both[['value_x', 'ci_low_x', 'ci_high_x']], both[['value_y', 'ci_low_y', 'ci_high_y']])


def test_steps_are_the_published_ones():
    published = [0, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 2_000_014]
    assert distractor_steps(2_000_014) == published
    assert distractor_steps(5000) == [0, 1000, 2000, 5000] and distractor_steps(0) == [0]


# The bootstrap


def slow_bootstrap(e, ids, ks):
    "The published evaluation, written out: unique products, repeated distractors, metrics repeated by weight."
    task, feats, out = e.task, e.method.backbone, []
    target = dict(zip(task.queries.query_id, task.queries.targets.str[0]))
    q = dict(zip(task.queries.query_id, e.q.numpy()))
    image = dict(zip(task.distractor_ids, task.distractors))
    for n, folds in {0: [[]] * len(ids.products), **ids.distractors}.items():
        for fold, (drawn, others) in enumerate(zip(ids.products, folds)):
            unique = [i for i in task.queries.query_id if i in set(drawn)]
            gallery = [target[i] for i in unique] + [image[i] for i in others]
            found = []
            for j, i in enumerate(unique):
                scores = np.array([q[i] @ feats.draw(g) for g in gallery])
                rank, first = slow_rank(scores, j)
                hit = task.category_of[gallery[first]] == task.category_of[target[i]]
                found += [(rank, hit)] * drawn.count(i)
            assert len(found) == len(drawn)
            for k in ks:
                out.append((n, fold, 'recall', k, 100 * np.mean([rank <= k for rank, _ in found])))
            out.append((n, fold, 'cat_acc', 1, 100 * np.mean([hit for _, hit in found])))
    return out


@pytest.mark.parametrize('seed', range(6))
def test_the_bootstrap_weighs_as_published(tmp_path, seed):
    task = lrvsf_task(read_lrvsf(Hand(12, 30).write(tmp_path / 'lrvsf')), ks=(1,))
    e = encode_task(dots(seed), task)
    ids = draw_bootstrap(task, sizes=(4, 40), folds=5, n=10, seed=seed)  # 40 of 30: some are drawn twice
    found = [*bootstrap_scores(e, ids, ks=(1, 2)).itertuples(index=False, name=None)]
    slow = slow_bootstrap(e, ids, (1, 2))
    assert [f[:4] for f in found] == [s[:4] for s in slow]
    assert np.allclose([f[4] for f in found], [s[4] for s in slow])
    summary = bootstrap_summary(bootstrap_scores(e, ids, ks=(1, 2)))
    first = [s[4] for s in slow if s[:1] == (4,) and s[2:4] == ('recall', 1)]
    line = summary[(summary.distractors == 4) & (summary.metric == 'recall') & (summary.k == 1)].iloc[0]
    assert np.allclose([line['mean'], line['std']], [np.mean(first), np.std(first, ddof=1)]) and line.folds == 5


def test_a_repeated_distractor_counts_twice_and_a_repeated_product_once(data):
    e = encode_task(dots(3), lrvsf_task(data, ks=(1,)))
    first = e.task.queries.query_id[0]
    q = e.q[0].numpy()
    target = q @ e.method.backbone.draw('s0')
    better = [n for n in range(9) if q @ e.method.backbone.draw(f'd{n}') >= target]
    worse = sorted(set(range(9)) - set(better))
    assert better and worse, 'the seed has to give both'

    def recall(products, distractors, k):
        ids = BootstrapIds([products], {len(distractors): [[str(d) for d in distractors]]})
        s = bootstrap_scores(e, ids, ks=(k,))
        return s[(s.metric == 'recall') & (s.distractors > 0)].value.item()

    assert recall([first], better[:1] + worse[:1], 2) == 100
    assert recall([first], better[:1] * 2, 2) == 0
    assert recall([first] * 3, worse[:1], 1) == 100


def test_ids_of_another_data_set_are_refused(data):
    e = encode_task(dots(), lrvsf_task(data, ks=(1,)))
    with pytest.raises(ValueError, match="distractor '77' is not in the task; are they of another split"):
        bootstrap_scores(e, BootstrapIds([['100']], {1: [['77']]}))
    with pytest.raises(ValueError, match='none of the 2 products of fold 0 is in the task'):
        bootstrap_scores(e, BootstrapIds([['1', '2']], {}))


SUBSETS = dict(test_subsets=[['100', '100', '103'], ['101', '102', '102']], dist_2_subsets=[['0', '0'], ['1', '4']])


@pytest.mark.parametrize('protocol', [2, 4, 5])
@pytest.mark.parametrize('form', ['lists', 'numbers', 'arrays', 'objects'])
def test_a_pickle_is_refused_and_converted(tmp_path, form, protocol):
    def shaped(some):
        if form == 'lists':
            return some
        if form == 'numbers':
            return [int(i) for i in some]
        return np.array(
            some if form == 'objects' else [int(i) for i in some], dtype=object if form == 'objects' else int
        )

    path = tmp_path / 'bootstrap_IDs.pkl'
    path.write_bytes(pickle.dumps({k: [shaped(s) for s in v] for k, v in SUBSETS.items()}, protocol=protocol))
    with pytest.raises(ValueError, match=r"is a pickle, .*; convert_bootstrap\('.*pkl'\) reads only lists of ids"):
        read_bootstrap(path)
    ids = read_bootstrap(convert_bootstrap(path))
    assert ids.products == SUBSETS['test_subsets'] and ids.distractors == {2: SUBSETS['dist_2_subsets']}


class Evil:
    "A pickle that would make a folder."

    def __reduce__(self):
        return os.mkdir, ('made-by-a-pickle',)


@pytest.mark.parametrize('value', [Evil(), dict(test_subsets=[[Evil()]]), [['1']], dict(test_subsets=[[1.5]]), 'text'])
def test_nothing_but_ids_is_read_from_a_pickle(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / 'ids.pkl'
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(ValueError, match='ids.pkl is no pickle of bootstrap ids: it (names|holds)'):
        convert_bootstrap(path)
    assert [p.name for p in tmp_path.iterdir()] == ['ids.pkl']


def test_a_pickle_under_another_name_is_refused(tmp_path):
    (tmp_path / 'ids.json').write_bytes(pickle.dumps(SUBSETS))
    with pytest.raises(ValueError, match='ids.json is a pickle'):
        read_bootstrap(tmp_path / 'ids.json')


@pytest.mark.parametrize(
    'found', [[], {'dist_2_subsets': []}, {**SUBSETS, 'dist_2_subsets': [['1']]}, {'test_subsets': [[], []]}]
)
def test_damaged_subsets_are_named(tmp_path, found):
    (tmp_path / 'ids.json').write_text(json.dumps(found))
    with pytest.raises(ValueError, match='ids.json: (expected a dict|.* must be .* lists of ids)'):
        read_bootstrap(tmp_path / 'ids.json')


# The world


def test_the_world_is_read_like_the_published_files(store):
    root = lrvsf_root(test=20, distractors=40, train=12, val=4, seed=3)
    for split in ('val', 'test'):
        p, data = read_products(root, split), read_lrvsf(root, split)
        assert len(data.pairs) == len(p.simple) == len(p.complex) and data.present == set(data.source.ids)
        assert {data.source.load(i).size for i in data.source.ids[::7]} == {(96, 96)}
    assert len(read_distractors(root, read_products(root))) == 40
    t = training_images(root, size=16)
    assert len(t) == 12 and not t.skipped and set(t.table.category.dropna()) <= set(LRVSF_CATEGORIES)
    ids = read_bootstrap(root / 'lrvsf/bootstrap_IDs.json')
    assert len(ids.products) == 10 and {len(some) for some in ids.products} == {10}


def test_the_registered_benchmark_takes_any_number_of_distractors(store):
    plugin = api.get('benchmark', 'lrvsf')
    few, more = (plugin.load('world', 6, distractors=n, ks=(1,)) for n in (10, 25))
    few, more = few.tasks['text'], more.tasks['text']
    assert more.distractors[:10] == few.distractors and more.queries.equals(few.queries)
    assert lrvsf.LRVSFPlugin.main['lrvsf'].task in plugin.load('world', 6, distractors=10, ks=(1,)).tasks


def test_drawn_distractors_become_features_and_a_stop_costs_a_block(store, monkeypatch):
    from cis_nb.backbones import features
    from cis_nb.backbones.loading import load_backbone

    task, drawn = api.get('benchmark', 'lrvsf').load('world', 6, distractors=40, ks=(1,)).tasks['category'], []
    load, model, stop = task.source.load, load_backbone('tiny'), [30]

    def counting(i):
        if len(drawn) == stop[0]:
            raise KeyboardInterrupt
        drawn.append(i)
        return load(i)

    def encode():
        return features.image_features(model, task.source.ids, counting, task.source.key, block=8)

    monkeypatch.setattr(os, 'cpu_count', lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        encode()
    stop[0] = -1
    before = len(drawn)
    found = encode()
    assert len(found) == 52 and len(drawn) == before + 52 - 24  # three blocks of eight were kept
    again = features.image_features(model, task.source.ids[:9], load, 'other')
    assert np.allclose(found.array[:9], again.array, atol=1e-5)
