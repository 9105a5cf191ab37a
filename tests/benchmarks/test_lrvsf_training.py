"Training products of LRVS-F: shards written by hand, bad input, the world."

import io
import json
import signal
import subprocess
import sys
import tarfile
import textwrap

import numpy as np
import pytest
from lrvsf_files import CATEGORY_OF, Hand
from PIL import Image

from cis_nb.benchmarks import lrvsf_training as m
from cis_nb.benchmarks.lrvsf import (
    tar_images,
)
from cis_nb.benchmarks.lrvsf_training import ProductCaptions, lrvsf_training_images, product_pairs, shard_samples
from cis_nb.data.products import LRVSF_CATEGORIES, packed_source, resized_white_square, white_squares


def test_shards_are_streamed_and_packed_once(tmp_path, store):
    h = Hand(split='train')
    shard = h.tar(tmp_path / 'lrvsf/TRAIN/0.tar')
    assert [s['__key__'] for s in shard_samples(shard)] == [str(100 + n) for n in range(6)]
    t = lrvsf_training_images(tmp_path, size=12)
    assert lrvsf_training_images(tmp_path, size=12).folder == t.folder
    assert len(t) == 6 and t.squares.shape == (12, 3, 12, 12) and not t.skipped
    row = t.table.index[t.table.image == 's4'].item()
    assert np.array_equal(t.squares[row], resized_white_square(Image.open(io.BytesIO(h.files['s4'])), 12))
    simple, worn = t.draw(range(6), np.random.default_rng(0))
    assert (t.table.type[simple] == 'SIMPLE').all() and (t.table.type[worn] != 'SIMPLE').all()
    assert t.table['product'][simple].tolist() == t.table['product'][worn].tolist() == t.products
    assert t.table.category[simple].tolist() == list(CATEGORY_OF)


@pytest.mark.e2e
def test_a_killed_packing_goes_on_behind_the_last_whole_shard(tmp_path, store, monkeypatch):
    whole = Hand(12, split='train')
    for k in range(3):
        part = Hand(split='train')
        part.files, part.simple, part.complex = whole.files, whole.simple[4 * k :][:4], whole.complex[4 * k :][:4]
        part.tar(tmp_path / f'lrvsf/TRAIN/{k}.tar')
    code = f"""
        import os, signal, cis_nb.benchmarks.lrvsf_training as m
        square, made = m.resized_white_square, []
        def some(image, size):
            made.append(1)
            return square(image, size) if len(made) < 12 else os.kill(os.getpid(), signal.SIGKILL)
        m.resized_white_square = some
        m.lrvsf_training_images({str(tmp_path)!r}, size=12)"""
    killed = subprocess.run([sys.executable, '-c', textwrap.dedent(code)])
    assert killed.returncode == -signal.SIGKILL and not list(tmp_path.rglob('manifest.json'))
    made = []
    monkeypatch.setattr(m, 'resized_white_square', lambda *a: made.append(1) or resized_white_square(*a))
    t = lrvsf_training_images(tmp_path, size=12)
    assert len(made) == 16  # the second shard was not whole
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'another'))
    undisturbed = lrvsf_training_images(tmp_path, size=12)
    assert t.table.equals(undisturbed.table) and np.array_equal(t.squares, undisturbed.squares)
    assert len(t) == 12 and len(t.squares) == 24


@pytest.mark.parametrize(
    'field, value, message',
    [
        ('TYPE', 'COMPLEX', "0.tar: product '103' has no simple image"),
        ('CATEGORY', 'Shoes', "0.tar, product '103', image 1: CATEGORY is 'Shoes'; allowed: Bags"),
    ],
)
def test_a_product_that_cannot_be_paired_is_refused(tmp_path, store, field, value, message):
    h = Hand(split='train')
    h.simple[3][field] = value
    h.tar(tmp_path / 'TRAIN/0.tar')
    with pytest.raises(ValueError, match=message):
        lrvsf_training_images(tmp_path, size=8)


def test_a_product_of_two_shards_is_refused(tmp_path, store):
    h = Hand(split='train')
    h.tar(tmp_path / 'TRAIN/0.tar')
    h.tar(tmp_path / 'TRAIN/1.tar')
    with pytest.raises(ValueError, match="1.tar: product '100' was in 0.tar already"):
        lrvsf_training_images(tmp_path, size=8)


@pytest.mark.parametrize('again', ['103.0.jpg', '103.json', '103.0.JPG', '105.1.jpg'])
def test_a_name_that_is_in_a_shard_twice_is_refused(tmp_path, store, again):
    shard = Hand(split='train').tar(tmp_path / 'TRAIN/0.tar')
    with tarfile.open(shard, 'a') as tar:
        tar.addfile(tarfile.TarInfo(again))
    with pytest.raises(ValueError, match=f"TRAIN/0.tar: member '{again}' is there twice.*; leave one of them out, or"):
        lrvsf_training_images(tmp_path, size=8)


def test_links_in_a_shard_are_left_out_and_counted(tmp_path, store):
    shard = Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', lambda members: members.pop('101.0.jpg') and None)
    with tarfile.open(shard, 'a') as tar:
        for name, kind in (('101.0.jpg', tarfile.SYMTYPE), ('9.0.jpg', tarfile.LNKTYPE), ('folder', tarfile.DIRTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, '100.0.jpg'
            tar.addfile(info)
    t = lrvsf_training_images(tmp_path, size=8)
    assert t.skipped['tar member that is not a plain file'] == ['0.tar: 101.0.jpg', '0.tar: 9.0.jpg']
    assert t.skipped['damaged or missing image'] == ['c1'] and t.products == ['100', '102', '103', '104', '105']


@pytest.mark.parametrize('value, fits', [('999', False), (999, False), (103.0, True), (103, True), (None, True)])
def test_metadata_of_another_product_is_refused(tmp_path, store, value, fits):
    def change(members):
        about = json.loads(members['103.json'])
        about['1']['PRODUCT_ID'] = value
        members['103.json'] = json.dumps(about).encode()

    Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', change)
    if fits:
        assert len(lrvsf_training_images(tmp_path, size=8)) == 6
    else:
        with pytest.raises(ValueError, match="0.tar, product '103', image 1: PRODUCT_ID is '999'; needed: '103', as"):
            lrvsf_training_images(tmp_path, size=8)


@pytest.mark.parametrize('name', ['../100.0.jpg', '/tmp/100.0.jpg', 'a/../../100.0.jpg'])
def test_a_tar_member_outside_its_folder_is_refused(tmp_path, store, name):
    shard = Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', lambda members: members.update({name: b'x'}))
    for read in (lambda: lrvsf_training_images(tmp_path, size=8), lambda: tar_images(shard)):
        with pytest.raises(ValueError, match='0.tar.*outside its folder'):
            read()
    assert not (tmp_path.parent / '100.0.jpg').exists()


def test_a_tar_that_was_cut_is_refused(tmp_path, store):
    shard = Hand(split='train').tar(tmp_path / 'TRAIN/0.tar')
    shard.write_bytes(shard.read_bytes()[:3000])
    with pytest.raises(ValueError, match='0.tar: tar cut short or damaged'):
        lrvsf_training_images(tmp_path, size=8)
    with pytest.raises(ValueError, match='0.tar: tar cut short or damaged'):
        tar_images(shard)


def test_a_corrupt_jpeg_in_a_shard_is_skipped_and_counted(tmp_path, store):
    def change(members):
        members['102.1.jpg'] = members['102.1.jpg'][:90]
        members['104.0.jpg'] = b'no image'

    Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', change)
    t = lrvsf_training_images(tmp_path, size=8)
    assert len(t) == 4 and not {'102', '104'} & set(t.products)
    assert t.skipped['damaged or missing image'] == ['s2', 'c4']
    assert t.skipped['product without a readable simple and complex image'] == ['102', '104']
    assert len(t.squares) == len(t.table) == 8


def test_metadata_in_a_shard_that_is_no_record_is_refused(tmp_path, store):
    Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', lambda members: members.update({'102.json': b'{"0": '}))
    with pytest.raises(ValueError, match='0.tar: 102.json is not JSON'):
        lrvsf_training_images(tmp_path, size=8)


def test_corrupt_images_of_the_validation_are_skipped_and_counted(tmp_path, store):
    h = Hand(split='val')
    h.files['c4'] = h.files['c4'][:200]

    def change(members):
        members['2.jpg'] = b'no image'

    h.write_val(tmp_path / 'lrvsf', change)
    pairs = product_pairs(str(tmp_path), 'val', 6, 12, distractors=9)
    assert pairs.products == ['100', '101', '102', '103', '105']
    assert pairs.distractors == [f'd{n}' for n in range(9) if n != 2]
    assert pairs.skipped['damaged image'] == ['c4', 'd2']
    assert pairs.skipped['product without a readable simple and complex image'] == ['104']
    for source in (pairs.images, packed_source(pairs.images, 12), packed_source(pairs.images, 16)):
        assert {'c4', 'd2'}.isdisjoint(source.ids) and all(source.load(i) for i in source.ids)


def test_a_distractor_of_the_validation_without_a_file_is_skipped_and_counted(tmp_path, store):
    h = Hand(split='val')
    h.write_val(tmp_path / 'lrvsf', lambda members: members.pop('4.jpg'))
    pairs = product_pairs(str(tmp_path), 'val', 6, 12, distractors=6)
    assert pairs.distractors == ['d0', 'd1', 'd2', 'd3', 'd5', 'd6']
    assert pairs.skipped == {'image without a file': ['d4']}


def test_what_a_shard_skips_is_said_by_its_pairs(tmp_path, store):
    Hand(split='train').tar(tmp_path / 'TRAIN/0.tar', lambda members: members.update({'102.1.jpg': b'x'}))
    assert product_pairs(str(tmp_path), 'train', 6, 12).skipped.counts()['damaged or missing image'] == 1


def test_the_world_gives_pairs_like_the_published_files(store):
    pairs, held_out = product_pairs('world', 'train', 12, 16, 3), product_pairs('world', 'val', 4, 16, 3, 12)
    assert (len(pairs), len(held_out), len(held_out.distractors)) == (12, 4, 12)
    assert set(pairs.simple.category) <= set(LRVSF_CATEGORIES) and not set(pairs.products) & set(held_out.products)
    squares, rows = white_squares(pairs.images, 16)
    p = pairs.pair(7)
    assert np.array_equal(np.asarray(pairs.images.load(p.reference)), squares[rows[p.reference]].transpose(1, 2, 0))
    assert product_pairs('world', 'val', 4, 16, 3, 5).distractors == held_out.distractors[:5]
    assert product_pairs('world', 'train', 12, 16, 4).key != pairs.key == product_pairs('world', 'train', 12, 16, 3).key


def test_pairs_of_shards_take_the_first_products(tmp_path, store):
    Hand(split='train').tar(tmp_path / 'lrvsf/TRAIN/0.tar')
    few, more = (product_pairs(str(tmp_path), 'train', n, 12) for n in (2, 20))
    assert few.products == ['100', '101'] and len(more) == 6 and few.key != more.key
    assert few.pair(1) == more.pair(1) and few.simple.captions[0] == ['caption 0', 'other 0']


def test_images_are_paired_with_their_captions_or_text(tmp_path, store):
    h = Hand(split='train')
    h.complex[0]['ENG_TEXT'] = 'a look with a bag'
    h.tar(tmp_path / 'lrvsf/TRAIN/0.tar')
    few, all_of_them = ProductCaptions(str(tmp_path), 'train', 2, 12), ProductCaptions(str(tmp_path), 'train', 9, 12)
    assert few.key != all_of_them.key and len(few) < len(all_of_them)
    t = all_of_them.images.table
    texts = dict(zip(all_of_them.row, all_of_them.texts))
    worn = t.index[t.type != 'SIMPLE']
    assert [texts[row] for row in worn if row in texts] == ['a look with a bag']  # those without a text are left out
    images, texts = all_of_them.validation(4)['pairs']
    assert len(images) == len(texts) == 4 and texts == t[t.type == 'SIMPLE'].caption1.tolist()[:4]


def test_products_without_captions_are_refused(tmp_path, store):
    h = Hand(split='train')
    for row in h.simple:
        row['blip2_caption1'] = row['blip2_caption2'] = ''
    h.tar(tmp_path / 'lrvsf/TRAIN/0.tar')
    with pytest.raises(ValueError, match='split train: no image of 3 products has a text'):
        ProductCaptions(str(tmp_path), 'train', 3, 12)
