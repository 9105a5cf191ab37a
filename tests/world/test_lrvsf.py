"The drawn LRVS-F: the same pixels in any order and process, splits that share nothing, official files."

import hashlib
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
from projects import ROOT

from cis_nb.world.lrvsf import (
    DRAWN,
    LRVSF_SIDE,
    SPLIT_EIGHTHS,
    THINGS_ON_WHITE,
    distractor_row,
    drawn_image,
    drawn_jpeg,
    lrvsf_root,
    parse_address,
    product_rows,
    product_split,
    split_products,
    thing_image,
    visible_boxes_of,
    worn_address,
)
from cis_nb.world.wardrobe import PRODUCT_CATEGORIES, Product


def addresses():
    rows = [distractor_row(i, 'test', 5) for i in range(30)]
    for item in split_products('train', 12, 5):
        simple, worn = product_rows(item, 'train', 5)
        rows += simple + worn
    return [r['URL'] for r in rows]


def pixels_hash(urls):
    return hashlib.sha256(b''.join(np.asarray(drawn_image(u)).tobytes() for u in urls)).hexdigest()


@pytest.mark.e2e
def test_images_are_the_same_in_any_order_thread_and_process():
    urls = addresses()
    shuffled = random.Random(0).sample(urls, len(urls))
    with ThreadPoolExecutor(6) as pool:
        parallel = dict(zip(shuffled, pool.map(drawn_jpeg, shuffled)))
    assert all(parallel[u] == drawn_jpeg(u) for u in urls)
    code = 'import sys; from cis_nb.world.lrvsf import *; sys.stdout.write(repr([drawn_jpeg(u) for u in sys.argv[1:]]))'
    env = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONHASHSEED='7')
    other = subprocess.run([sys.executable, '-c', code, *urls[:8]], env=env, capture_output=True, text=True, check=True)
    assert other.stdout == repr([drawn_jpeg(u) for u in urls[:8]])


def test_splits_share_no_product_whatever_their_seeds():
    looks = {}
    for split in ('train', 'val', 'test'):
        items = [i for seed in (0, 1, 2) for i in split_products(split, 60, seed)]
        looks[split] = {p.visible for i in items for p in i.outfit}
    rows = [distractor_row(i, s, seed) for i in range(80) for s in ('test', 'val') for seed in (0, 1)]
    numbers = [n for r in rows if 'thing' not in r['URL'] for n in parse_address(r['URL']).numbers]
    looks['distractors'] = {Product(n).visible for n in numbers}
    assert set(looks) == set(SPLIT_EIGHTHS) and sum(SPLIT_EIGHTHS.values()) == 8
    assert sum(map(len, looks.values())) == len(set.union(*looks.values()))


def test_equal_products_of_different_numbers_have_one_split():
    p = next(i.product for i in split_products('test', 1))
    fixed = dict(subtype=p.subtype, cut=p.cut, detail=p.detail, pattern=p.pattern, scale=p.scale, colors=p.colors)
    twin = Product(p.id + 10, lot=p.lot, **fixed)
    assert twin == p and product_split(twin) == product_split(p) == 'test'


def test_more_products_and_distractors_follow_the_same_first_ones():
    few, more = split_products('val', 9, 2), split_products('val', 40, 2)
    assert [i.product.id for i in few] == [i.product.id for i in more[:9]] and split_products('val', 0) == []
    assert {i.product.category for i in more} > {'Feet', 'Lower Body'} and len({i.product for i in more}) == 40
    assert any(len([j for j in more if j.outfit == i.outfit]) > 1 for i in more), 'products that are worn together'


def test_a_distractor_depends_on_its_own_number():
    assert [distractor_row(i) for i in (5, 3, 9)] == [[distractor_row(i) for i in range(12)][n] for n in (5, 3, 9)]
    assert distractor_row(3) != distractor_row(3, 'val') != distractor_row(3, 'test', 1)
    shares = pd.Series([distractor_row(i)['CATEGORY'] for i in range(600)]).value_counts(normalize=True)
    assert set(shares.index) <= {*PRODUCT_CATEGORIES, 'NonClothing'} and 0.15 < shares['Feet'] < 0.3
    assert 0.02 < shares['NonClothing'] < 0.12


@pytest.mark.parametrize('number', range(0, 60, 7))
def test_a_thing_is_centred_and_whole(number):
    a = np.asarray(thing_image(number, 64)).astype(int)
    assert (np.concatenate([a[0], a[-1], a[:, 0], a[:, -1]]) == 255).all(), 'nothing is cut off'
    assert 0.03 < (a < 200).any(-1).mean() < 0.8
    assert len(THINGS_ON_WHITE) == 16


def test_the_target_is_visible_in_the_reference():
    for item in split_products('test', 40, 4):
        (row,) = product_rows(item, 'test', 4)[1]
        if row['TYPE'] == 'COMPLEX':
            box = visible_boxes_of(row['URL'])[item.product.id]
            assert box is not None and (box[2] - box[0]) * (box[3] - box[1]) >= 20
        assert drawn_image(row['URL']).size == (LRVSF_SIDE, LRVSF_SIDE)


def test_the_boxes_of_a_part_are_those_of_the_whole_image_seen_closer():
    for item in split_products('test', 30, 4):
        which = item.outfit.index(item.product)
        boxes = visible_boxes_of(worn_address(item.outfit, 3, which), 64)
        whole = visible_boxes_of(worn_address(item.outfit, 3), 128)
        own, full = boxes[item.product.id], whole[item.product.id]
        if full is None:
            assert own is None
            continue
        assert 0 <= own[0] < own[2] <= 64 and 0 <= own[1] < own[3] <= 64
        width, height = full[2] - full[0], full[3] - full[1]
        scale = 64 / min(128, max(64, 3 * max(width, height) // 2))
        assert 0 <= own[2] - own[0] - scale * width < 2 and 0 <= own[3] - own[1] - scale * height < 2


@pytest.mark.parametrize(
    'wrong', ['', 'http://x/simple/1.2', DRAWN, f'{DRAWN}simple/1', f'{DRAWN}complex/1-2', f'{DRAWN}x/1.2']
)
def test_an_address_of_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match='is no address of a drawn image; allowed: world://lrvsf/simple'):
        drawn_image(wrong)


@pytest.mark.parametrize('change', [dict(test=0), dict(distractors=0), dict(train=-1), dict(val=-2)])
def test_sizes_out_of_range_are_refused(store, change):
    with pytest.raises(ValueError, match=f'{next(iter(change))} = .*; allowed: test and distractors ≥ 1'):
        lrvsf_root(**change)


def test_two_writes_are_the_same_bytes(store, monkeypatch):
    found = []
    for place in ('a', 'b'):
        monkeypatch.setenv('CIS_STORE', str(store / place))
        root = lrvsf_root(test=4, distractors=6, train=5, val=2) / 'lrvsf'
        found.append({p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob('*') if p.is_file()})
    assert found[0] == found[1] and 'TRAIN/00000.tar' in found[0] and 'VALID/dist_0.tar' in found[0]
    assert not any('dist' in name and name.startswith('TEST') for name in found[0]), 'distractors have no files'
