"LRVS-F: files written by hand in every published layout, and bad input."

import io
import json
import os
import re
import shutil
import tarfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lrvsf_files import Hand, dots, write_tar
from PIL import Image

from cis_nb import api
from cis_nb.benchmarks import lrvsf
from cis_nb.benchmarks.lrvsf import (
    LRVSFBenchmark,
    ParquetImages,
    check_conditions,
    count_simple_images,
    lrvsf_task,
    parquet_columns,
    read_distractors,
    read_lrvsf,
    read_products,
    training_captions,
)
from cis_nb.benchmarks.lrvsf_search import (
    encode_task,
    growing_gallery_rows,
    rank_growing_gallery,
    read_bootstrap,
)
from cis_nb.benchmarks.lrvsf_training import lrvsf_training_images
from cis_nb.data.products import LRVSF_CATEGORIES, resized_white_square
from cis_nb.retrieval.protocol import NoQueries, evaluate_benchmark
from cis_nb.world.lrvsf import lrvsf_root, split_products
from cis_nb.world.wardrobe import product_captions

pytestmark = pytest.mark.usefixtures('store')  # reading a split keeps which files it has compared


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
    h = Hand(split='val')
    folder = h.write_val(tmp_path / 'lrvsf')
    data = read_lrvsf(folder, 'val')
    assert data.distractors.image.tolist() == [f'd{n}' for n in range(9)]
    assert data.distractors.id.tolist() == [str(n) for n in range(9)] and len(data.present) == 21
    assert len(lrvsf_task(data, ks=(1,))) == 6 and data.source.load('d7').size == (24, 24)


@pytest.mark.parametrize('splits', [('test', 'test'), ('val', 'test')])
def test_distractors_are_numbered_over_all_files(tmp_path, splits):
    h = Hand()
    folder = h.write(tmp_path / 'lrvsf')
    (folder / 'distractors_test_metadata.parquet').unlink()
    for part, (split, rows) in enumerate(zip(splits, (h.distractors[:5], h.distractors[5:]))):
        (folder / f'data/{part}').mkdir(parents=True)
        table = pd.DataFrame(rows).assign(SPLIT=f'{split}_gallery')
        table.to_parquet(folder / f'data/{part}/distractors_metadata.parquet')
    rows = read_distractors(folder, read_products(folder))
    images = [f'd{n}' for n in range(5 * splits.count('val'), 9)]
    assert rows.id.tolist() == [str(n) for n in range(len(images))] and rows.image.tolist() == images


def write_pack(h, folder):
    "The later test pack: four distractors in each of two files."
    rows = [
        dict(SIMPLE_IMG=h.files[s['URL']], COMPLEX_IMG=h.files[c['URL']], CATEGORY=s['CATEGORY'], blip2_caption1='x y')
        for s, c in zip(h.simple, h.complex)
    ]
    pd.DataFrame(rows).to_parquet(folder / 'products.parquet')
    (folder / 'distractors').mkdir()
    for part in range(2):
        table = pd.DataFrame(dict(jpg=[h.files[f'd{4 * part + n}'] for n in range(4)]))
        table.to_parquet(folder / f'distractors/{part}.parquet')
    return folder


def test_the_later_test_pack_is_no_validation_split(tmp_path):
    with pytest.raises(ValueError, match=r'later test pack \(products.parquet\) has no val split; add VALID/'):
        read_lrvsf(write_pack(Hand(), tmp_path), 'val')
    folder = Hand(split='val').write_val(tmp_path / 'both' / 'lrvsf')
    write_pack(Hand(), folder)
    assert (read_lrvsf(folder, 'val').split, read_lrvsf(folder).split) == ('val', 'test')


def test_the_later_test_pack_is_read_with_and_without_categories(tmp_path, store):
    data = read_lrvsf(write_pack(Hand(), tmp_path))
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
        tmp_path,
        lambda h: h.simple.pop(2),
        r"products_complex_metadata.*product '102' has no simple image \(1 such.*: leave its rows out",
    )


@pytest.mark.parametrize('column', ['SIMPLE_IMG', 'COMPLEX_IMG'])
def test_a_product_of_the_later_pack_without_an_image_is_refused(tmp_path, column):
    h = Hand()
    about = [dict(CATEGORY=s['CATEGORY'], blip2_caption1='x', SIMPLE_IMG=b'1', COMPLEX_IMG=b'2') for s in h.simple]
    about[3][column] = None
    pd.DataFrame(about).to_parquet(tmp_path / 'products.parquet')
    with pytest.raises(ValueError, match=f'products.parquet: 1 rows have no {column}; .*: leave these rows out'):
        read_lrvsf(tmp_path)


def test_a_product_without_a_complex_image_is_refused(tmp_path):
    refused(tmp_path, lambda h: h.complex.pop(2), "product '102' has no complex image")


@pytest.mark.parametrize('table', ['simple', 'distractors'])
def test_an_unknown_category_is_refused(tmp_path, table):
    match = f"{table}.*CATEGORY is 'Shoes'; allowed: Bags, Feet"
    refused(tmp_path, lambda h: getattr(h, table)[1].update(CATEGORY='Shoes'), match)


def test_nonclothing_is_for_distractors_alone(tmp_path):
    refused(tmp_path, lambda h: h.simple[1].update(CATEGORY='NonClothing'), "CATEGORY is 'NonClothing'; allowed: Bags")
    assert 'NonClothing' in set(read_lrvsf(Hand().write(tmp_path / 'sound')).distractors.category)


def test_an_unknown_type_is_refused(tmp_path):
    refused(tmp_path, lambda h: h.complex[1].update(TYPE='WORN'), "TYPE is 'WORN'; allowed: COMPLEX, PARTIAL_COMPLEX")


@pytest.mark.parametrize('table, kind', [('simple', 'simple'), ('complex', 'complex')])
def test_duplicate_product_ids_are_refused(tmp_path, table, kind):
    def change(h):
        rows = getattr(h, table)
        rows.append(dict(rows[1], URL='again'))

    match = f"products_simple_metadata.parquet, test split: PRODUCT_ID '101' has two {kind} images.*an id of its own"
    refused(tmp_path, change, match)


def test_a_product_of_two_splits_is_refused(tmp_path):
    def change(h):
        h.complex.append(dict(h.complex[0], SPLIT='train', URL='again'))

    refused(tmp_path, change, "product '100' is in test and train; splits must not share a product")


def test_an_address_that_is_used_twice_is_refused(tmp_path):
    refused(tmp_path, lambda h: h.simple[1].update(URL='s0'), "URL 's0' is in two rows")


@pytest.mark.parametrize('column, value', [('PRODUCT_ID', '103'), ('URL', 's3'), ('URL', 'c3')])
def test_a_distractor_that_is_a_product_of_the_queries_is_refused(tmp_path, column, value):
    match = f"distractors_test_metadata.*{column} '{value}' belongs to a product of the queries; 1 such"
    refused(tmp_path, lambda h: h.distractors[4].update({column: value}), match)


@pytest.mark.parametrize('split', ['test', 'val'])
@pytest.mark.parametrize('image', ['s3', 'c0'])
def test_a_distractor_with_the_file_of_a_query_image_is_refused(tmp_path, split, image):
    h = Hand(split=split)
    h.files['d6'] = h.files[image]
    folder = (h.write if split == 'test' else h.write_val)(tmp_path / 'lrvsf')
    for _ in range(2):  # the second time from the store
        with pytest.raises(ValueError, match=f"lrvsf: distractor 'd6' is the same file as '{image}' of the queries; 1"):
            read_lrvsf(folder, split)


def test_files_are_compared_once_in_their_order_and_again_after_a_change(tmp_path, monkeypatch):
    h, opened, read = Hand(4, 40), [], ParquetImages.read
    h.distractors.sort(key=lambda r: r['URL'][::-1])  # not the order of the file
    folder = h.write(tmp_path / 'lrvsf')

    def watched(self, i):
        opened.append(i)
        return read(self, i)

    monkeypatch.setattr(ParquetImages, 'read', watched)
    read_lrvsf(folder)
    assert opened[8:] == [f'd{n}' for n in range(40)] and set(opened[:8]) == {f'{c}{n}' for c in 'sc' for n in range(4)}
    read_lrvsf(folder)
    assert len(opened) == 48
    h.files['d7'] = h.files['c2']
    table = pd.DataFrame(
        dict(jpg=[h.files[f'd{n}'] for n in range(40)]), pd.Index([f'd{n}' for n in range(40)], name='url')
    )
    table.to_parquet(folder / 'TEST/dist_0.parquet')
    with pytest.raises(ValueError, match="distractor 'd7' is the same file as 'c2'"):
        read_lrvsf(folder)


def test_images_without_a_file_or_with_an_empty_one_are_no_copies(tmp_path):
    h = Hand()
    h.files |= dict(s1=b'', c2=b'', d3=b'')
    del h.files['d4']
    assert len(read_lrvsf(h.write(tmp_path / 'lrvsf')).present) == 20


@pytest.mark.parametrize('split', ['test', 'val'])
def test_blanks_at_the_ends_of_addresses_and_ids_are_no_part_of_them(tmp_path, split):
    h = Hand(split=split)
    for r in (h.simple[1], h.complex[2], h.distractors[3]):
        r['URL'] = f' {r["URL"]}\n'
    h.complex[4]['PRODUCT_ID'] += ' '
    h.files = {f'{u}\t': f for u, f in h.files.items()}
    if split == 'val':
        h.files = {r['URL']: h.files[f'{r["URL"].strip()}\t'] for r in (*h.simple, *h.complex, *h.distractors)}
    data = read_lrvsf((h.write if split == 'test' else h.write_val)(tmp_path / 'lrvsf'), split)
    assert data.pairs.simple[1] == 's1' and data.pairs.complex[2] == 'c2' and data.distractors.image[3] == 'd3'
    assert len(data.present) == 21 and data.source.load('d3').size == (24, 24)


@pytest.mark.parametrize('column, value', [('PRODUCT_ID', '103 '), ('URL', ' s3'), ('URL', 'c3\n')])
def test_a_distractor_that_hides_a_query_behind_a_blank_is_refused(tmp_path, column, value):
    match = f"{column} '{value.strip()}' belongs to a product of the queries; 1 such"
    refused(tmp_path, lambda h: h.distractors[4].update({column: value}), match)


def test_a_distractor_of_val_that_is_a_product_of_the_queries_is_refused(tmp_path):
    "Its id may be a number, and the first distractor may have none."
    h = Hand(split='val')
    for n, r in enumerate(h.distractors):
        r['PRODUCT_ID'] = 103 if n == 4 else 900 + n
    del h.distractors[0]['PRODUCT_ID']
    with pytest.raises(ValueError, match="VALID, image 'd4': PRODUCT_ID '103' belongs to a product of the queries"):
        read_lrvsf(h.write_val(tmp_path / 'lrvsf'), 'val')


@pytest.mark.parametrize('value', [None, float('nan'), '', ' '])
@pytest.mark.parametrize(
    'table, column', [('simple', 'PRODUCT_ID'), ('complex', 'PRODUCT_ID'), ('simple', 'URL'), ('simple', 'SPLIT')]
)
def test_a_missing_product_or_address_is_refused(tmp_path, table, column, value):
    match = rf'products_{table}_metadata.parquet, row 2 \(from 0\): {column} is missing; 1 such rows'
    refused(tmp_path, lambda h: getattr(h, table)[2].update({column: value}), match)


@pytest.mark.parametrize('value', [b'a', ['a'], {'a': 1}, True])
@pytest.mark.parametrize('column', ['URL', 'SPLIT', 'CATEGORY', 'blip2_caption1', 'PRODUCT_ID'])
def test_metadata_of_another_kind_are_refused(tmp_path, column, value):
    match = f'products_simple_metadata.parquet: {column} has values of the kind .*; write them as text'
    refused(tmp_path, lambda h: [r.update({column: value}) for r in h.simple], match)


def test_a_missing_id_among_numbers_is_refused_and_a_distractor_needs_none(tmp_path):
    def change(h):
        for r in h.simple:
            r['PRODUCT_ID'] = float(r['PRODUCT_ID'])
        h.simple[5]['PRODUCT_ID'] = float('nan')

    refused(tmp_path / 'x', change, 'products_simple_metadata.parquet, row 5 .*PRODUCT_ID is missing')
    h = Hand()
    h.distractors[2]['PRODUCT_ID'] = None
    assert len(read_lrvsf(h.write(tmp_path / 'lrvsf')).distractors) == 9


def test_an_address_in_two_files_of_images_is_refused(tmp_path):
    folder = Hand().write(tmp_path / 'lrvsf')
    again = pd.read_parquet(folder / 'TEST/dist_0.parquet').iloc[[5]]
    again.to_parquet(folder / 'TEST/dist_1.parquet')
    with pytest.raises(ValueError, match="TEST/dist_1.parquet: url 'd5' is also in .*TEST/dist_0.parquet; leave one"):
        read_lrvsf(folder)
    again.rename(index={'d5': None}).to_parquet(folder / 'TEST/dist_1.parquet')
    with pytest.raises(ValueError, match=r'TEST/dist_1.parquet, row 0 \(from 0\): url is missing; 1 such rows'):
        read_lrvsf(folder)


def test_a_name_twice_in_a_tar_of_val_is_refused(tmp_path):
    folder, twice = Hand(split='val').write_val(tmp_path / 'lrvsf'), io.BytesIO(b'12')
    with tarfile.open(folder / 'VALID/dist_0.tar', 'a') as tar:
        info = tarfile.TarInfo('3.jpg')
        info.size = 2
        tar.addfile(info, twice)
    with pytest.raises(ValueError, match="dist_0.tar: member '3.jpg' is there twice; leave one of them out"):
        read_lrvsf(folder, 'val')


@pytest.mark.parametrize('image, name', [('s3', 'products/3/simple'), ('c0', 'products/0/complex')])
def test_a_distractor_of_the_later_pack_that_is_a_product_of_the_queries_is_refused(tmp_path, store, image, name):
    h = Hand()
    h.files['d6'] = h.files[image]
    write_pack(h, tmp_path)
    for _ in range(2):  # the second time from the store
        with pytest.raises(ValueError, match=f"distractor 'distractors/1/2' is the same file as '{name}'.*1 such"):
            read_lrvsf(tmp_path)


@pytest.mark.parametrize('name', ['products.parquet', 'distractors/1.parquet'])
def test_a_file_of_the_later_pack_that_was_cut_is_named(tmp_path, store, name):
    path = write_pack(Hand(), tmp_path) / name
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=f'{name} is no Parquet file .*it may be cut off: get it again'):
        read_lrvsf(tmp_path)


def test_a_cut_file_of_test_images_or_distractors_is_named(tmp_path):
    for name in ('TEST/dist_0.parquet', 'distractors_test_metadata.parquet'):
        path = Hand().write(tmp_path / name.replace('/', '_')) / name
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(ValueError, match=f'{name} is no Parquet file'):
            read_lrvsf(tmp_path / name.replace('/', '_'))


@pytest.mark.parametrize(
    'data, match',
    [
        (b'{"URL"', '4.json is not JSON'),
        (b'[]', '4.json holds list, not an object'),
        (b'{}', '4.json has no URL for 4'),
    ],
)
def test_metadata_of_val_that_is_no_record_is_refused(tmp_path, data, match):
    folder = Hand(split='val').write_val(tmp_path / 'lrvsf', lambda members: members.update({'4.json': data}))
    with pytest.raises(ValueError, match=f'dist_0.tar: {match}'):
        read_lrvsf(folder, 'val')


def test_distractors_of_val_with_one_id_are_refused(tmp_path):
    h = Hand(split='val')
    folder = h.write_val(tmp_path / 'lrvsf')
    members = {'4.jpg': h.files['d8'], '4.json': json.dumps(dict(h.distractors[8], URL='new')).encode()}
    write_tar(folder / 'VALID/dist_2.tar', members)
    with pytest.raises(ValueError, match="distractor '4' is there twice"):
        read_lrvsf(folder, 'val')


def test_a_product_without_a_caption_is_named(tmp_path):
    h = Hand()
    h.simple[2]['blip2_caption1'] = None
    data = read_lrvsf(h.write(tmp_path / 'lrvsf'))
    with pytest.raises(ValueError, match="LRVS-F test, product '102': the caption1 is empty .*leave the product out"):
        lrvsf_task(data, 'text')
    assert len(lrvsf_task(data, 'category').queries) == 6


@pytest.mark.parametrize('split, files', [('test', 'TEST/*.parquet'), ('val', 'VALID/*.tar')])
def test_metadata_without_images_are_an_error_with_the_place_of_the_images(split, files, tmp_path):
    folder = Hand(split=split).write_val(tmp_path / 'lrvsf')
    for place in ('TEST', 'VALID'):
        shutil.rmtree(folder / place)
    said = f'{folder}: none of the 6 products of the {split} split has both of its images in {files}; metadata alone'
    with pytest.raises(NoQueries, match=f'{re.escape(said)} .*Get it from https://huggingface.co/.*at the addresses'):
        read_lrvsf(folder, split)


def test_conditions_of_the_other_task_are_refused(data):
    swapped = data.pairs.rename(columns=dict(category='caption1', caption1='category'))
    data.pairs = swapped
    with pytest.raises(
        ValueError, match="condition 'caption 0' in the task category; allowed: Bags.*belong to the task t"
    ):
        lrvsf_task(data, 'category')
    with pytest.raises(ValueError, match="condition 'Bags' in the task text is the name of a category"):
        lrvsf_task(data, 'text')
    with pytest.raises(
        ValueError, match="here, product 'a': the caption1 is empty \\(None\\); each query needs a text"
    ):
        check_conditions('text', ['a'], [None], 'here')
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


def test_metadata_of_more_rows_than_bytes_are_refused_before_they_are_read(tmp_path, monkeypatch):
    folder = Hand().write(tmp_path / 'lrvsf')
    path = folder / 'distractors_test_metadata.parquet'
    row = pd.read_parquet(path)[:1]
    row.loc[row.index.repeat(200_000)].to_parquet(path)
    monkeypatch.setattr('pyarrow.parquet.read_table', lambda given, **kw: pytest.fail(f'{given} is read'))
    with pytest.raises(ValueError, match='distractors_test_metadata.parquet: 200,000 rows cannot differ in [0-9,]+ b'):
        parquet_columns(path, ['URL', 'SPLIT'])


def test_a_repeated_text_of_a_parquet_file_takes_its_memory_once(tmp_path):
    "Once for each row, it would take 400 MB."
    path, rows, pool = tmp_path / 'long.parquet', 400, pa.default_memory_pool()
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(['x' * 1_000_000]))
    table = pa.table(dict(URL=[f'http://a/{i}.jpg' for i in range(rows)], blip2_caption1=texts, PRODUCT_ID=range(rows)))
    pq.write_table(table, path, store_schema=False)
    before = pool.max_memory()
    found = parquet_columns(path, ['URL', 'blip2_caption1', 'PRODUCT_ID'])
    assert pool.max_memory() - before < 100_000_000
    assert len({id(t) for t in found.blip2_caption1}) == 1 and found.PRODUCT_ID.tolist() == list(range(rows))
    assert found.dtypes[['URL', 'blip2_caption1']].tolist() == [object, object]


def test_images_that_are_missing_make_the_task_partial(tmp_path):
    h = Hand()
    del h.files['d5'], h.files['c0']
    task = lrvsf_task(read_lrvsf(h.write(tmp_path / 'lrvsf')), ks=(1,))
    assert len(task) == 5 and len(task.shared_gallery) == 14 and 'partial' in str(task.protocol)


def test_too_many_distractors_are_refused(data):
    with pytest.raises(ValueError, match='distractors = 10; the test split has 9; 0 takes all'):
        lrvsf_task(data, distractors=10)


# The world


def test_the_world_is_read_like_the_published_files(store):
    root = lrvsf_root(test=20, distractors=40, train=12, val=4, seed=3)
    for split in ('val', 'test'):
        p, data = read_products(root, split), read_lrvsf(root, split)
        assert len(data.pairs) == len(p.simple) == len(p.complex) and data.present == set(data.source.ids)
        assert {data.source.load(i).size for i in data.source.ids[::7]} == {(96, 96)}
    assert len(read_distractors(root, read_products(root))) == 40
    t = lrvsf_training_images(root, size=16)
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


def test_captions_of_training_products_are_lines_of_a_file(store):
    hand = Hand(products=4, split='train')
    hand.simple[1]['blip2_caption2'] = None
    hand.simple[2]['blip2_caption1'] = 'two\nlines'
    folder = str(hand.write(store / 'data'))
    lines = training_captions(folder, 3).read_text().splitlines()
    assert lines == ['caption 0', 'other 0', 'caption 1', 'two lines', 'other 2']
    drawn = training_captions('world', 5).read_text().splitlines()
    assert set(drawn) == {c for i in split_products('train', 5) for c in product_captions(i.product)}
