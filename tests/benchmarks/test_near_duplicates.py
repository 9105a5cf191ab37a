"Near-duplicates: LSH and FAISS against comparing all pairs, groups, real photographs."

import builtins
import io
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from lrvsf_files import noise_jpeg
from PIL import Image
from projects import DATA, needs_data

from cis_nb.backbones.features import l2_normalize
from cis_nb.benchmarks import lrvsf_construction as lc
from cis_nb.benchmarks import near_duplicates as nd
from cis_nb.core.experiment_files import experiments
from cis_nb.data.packed import open_image
from cis_nb.world.wardrobe import draw_products

seeds = st.integers(0, 10**6)
quiet = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def needs_package(name):
    "Marks a test that uses a package of the extra `dedup`."
    return pytest.mark.skipif(find_spec(name) is None, reason=f'the package {name} is not installed')


needs_lsh, needs_hashes = needs_package('datasketch'), needs_package('imagehash')


def near_hashes(seed, n=40, bits=64):
    "Random hashes, some of them again with a few bits changed."
    rng = np.random.default_rng(seed)
    first = rng.random((n, bits)) < 0.5
    return np.r_[first, first[: n // 2] ^ (rng.random((n // 2, bits)) < rng.random((n // 2, 1)) * 0.4)]


@needs_lsh
@given(seeds, st.integers(0, 32))
@settings(max_examples=40, **quiet)
def test_lsh_equals_the_definition(seed, most):
    hashes = near_hashes(seed)
    pairs = nd.hash_pairs(hashes, most)
    np.testing.assert_array_equal(pairs, nd.hash_pairs_slow(hashes, most))
    assert set(map(tuple, pairs)) <= set(map(tuple, nd.hash_candidates(hashes, most)))


@needs_lsh
def test_lsh_compares_few_pairs():
    hashes = np.random.default_rng(0).random((400, 64)) < 0.5
    assert len(nd.hash_candidates(hashes, 3)) < 0.01 * len(nd.all_pairs(400))


@pytest.mark.parametrize('most', [-1, 33, 64])
def test_bounds_of_the_hash_threshold(most):
    with pytest.raises(ValueError, match=f'most = {most}: must be from 0 to 32 of 64 bits'):
        nd.hash_pairs(near_hashes(0), most)


@given(seeds, st.floats(0.05, 1), st.integers(1, 40))
@settings(max_examples=40, **quiet)
def test_the_embedding_index_equals_the_definition(seed, least, block):
    rng = np.random.default_rng(seed)
    x = np.asarray(l2_normalize(rng.normal(size=(30, 4))), np.float32)
    x[15:25] = x[:10]
    np.testing.assert_array_equal(nd.embedding_pairs(x, least, block), nd.embedding_pairs_slow(x, least))


def test_a_pair_at_the_threshold_is_found():
    x = np.array([[1, 0], [0.6, 0.8], [0.6, 0.8]], np.float32)
    exact = nd.pair_cosines(x, np.array([[0, 1]]))[0]
    assert len(nd.embedding_pairs(x, exact)) == 3
    assert nd.embedding_pairs(x, np.nextafter(exact, 1)).tolist() == [[1, 2]]


@pytest.mark.parametrize('least', [0, -1, 1.5, float('nan')])
def test_bounds_of_the_cosine_threshold(least):
    with pytest.raises(ValueError, match='a cosine above 0 and at most 1'):
        nd.embedding_pairs(np.eye(3), least)


@pytest.mark.parametrize('x', [2 * np.eye(3), np.full((2, 3), np.nan), np.zeros((2, 3))])
def test_embeddings_must_have_length_one(x):
    with pytest.raises(ValueError, match='length one'):
        nd.embedding_pairs(x, 0.9)


@needs_lsh
def test_both_tests_in_either_order_give_the_same_pairs():
    rng = np.random.default_rng(4)
    hashes, x = near_hashes(4), np.asarray(l2_normalize(rng.normal(size=(60, 3))), np.float32)
    pairs = nd.near_duplicates(hashes, x, 12, 0.3)
    by_cosine = nd.embedding_pairs(x, 0.3)
    other = by_cosine[nd.hamming_distances(hashes, by_cosine) <= 12]
    assert len(pairs) and pairs.tolist() == other.tolist()


@needs_lsh
@pytest.mark.parametrize('n', [0, 1])
def test_no_pairs_among_no_rows(n):
    assert nd.hash_pairs(np.zeros((n, 64), bool), 4).shape == (0, 2)
    assert nd.embedding_pairs(np.eye(2)[:n], 0.5).shape == (0, 2)


@needs_hashes
def test_perceptual_hashes_do_not_see_size_and_compression():
    image = lc.worn_product(draw_products(1, 5)[0], 3, 128)[0]
    small, poor = image.resize((90, 90)), Image.open(io.BytesIO(lc.shop_jpeg(image, 30)))
    other = lc.worn_product(draw_products(1, 6)[0], 40, 128)[0]
    hashes = nd.perceptual_hashes([image, small, poor, other])
    d = nd.hamming_distances(hashes, np.array([[0, 1], [0, 2], [0, 3]]))
    assert hashes.shape == (4, 64) and max(d[:2]) <= 6 < 12 < d[2]


@pytest.mark.parametrize('package, use', [('imagehash', 'perceptual_hashes'), ('datasketch', 'hash_candidates')])
def test_an_extra_that_is_not_installed_is_named(package, use, monkeypatch):
    real = builtins.__import__

    def without(name, *a, **kw):
        if name.split('.')[0] == package:
            raise ImportError(name)
        return real(name, *a, **kw)

    monkeypatch.setattr(builtins, '__import__', without)
    given_ = ([],) if use == 'perceptual_hashes' else (np.zeros((2, 64), bool), 2)
    with pytest.raises(ImportError, match=rf'package {package} \(the extra dedup\): pip install .?{package}'):
        getattr(nd, use)(*given_)


def test_copies_within_a_product_and_across_products_are_kept_apart():
    groups = nd.duplicate_groups(6, [(0, 1), (2, 1), (4, 5)])
    assert groups[0] == groups[1] == groups[2] != groups[3] and groups[4] == groups[5] != groups[3]
    reasons = nd.duplicate_reasons(groups, ['a', 'a', 'b', 'a', 'c', 'c'])
    assert list(reasons) == ['', nd.WITHIN, nd.ACROSS, '', '', nd.WITHIN]


@given(seeds)
@settings(max_examples=40, **quiet)
def test_one_row_of_each_group_stays(seed):
    rng = np.random.default_rng(seed)
    pairs = rng.integers(0, 20, (rng.integers(0, 25), 2))
    groups = nd.duplicate_groups(20, pairs[pairs[:, 0] != pairs[:, 1]])
    reasons = nd.duplicate_reasons(groups, rng.choice(list('abc'), 20))
    stays = pd.Series(reasons == '').groupby(groups).agg(['sum', 'first'])
    assert (stays['sum'] == 1).all() and stays['first'].all()
    for i, j in pairs:
        assert groups[i] == groups[j]


def test_a_folder_without_the_table_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match='clothing.csv is missing'):
        nd.read_clothing(tmp_path)


@pytest.mark.parametrize(
    'table, message',
    [
        (b'', 'has no line below the heading'),
        (b'image,sender_id,label\n\xff\xfe,1,Shirt\n', 'is no CSV file in UTF-8'),
        (b'image,sender_id,label\n"x,1,Shirt\n', 'line 2: is no CSV'),
        (b'image,sender_id,label\n0,x,1,Shirt\n', 'line 2: has 4 cells, the heading 3'),
        (b'image,sender_id,label\nx,1\n', 'line 2: has 2 cells, the heading 3'),
        (b'image,sender_id,label,label\nx,1,Shirt,Hat\n', "'label' is the name of two columns"),
        (b'image,sender_id,label\n', 'has no line below the heading'),
        (b'image,label\nx,Shirt\n', "column 'sender_id' is missing; needed: image, sender_id, label"),
    ],
)
def test_a_damaged_clothing_table_is_named(tmp_path, table, message):
    (tmp_path / 'clothing.csv').write_bytes(table)
    with pytest.raises(ValueError, match=f'{tmp_path}: clothing.csv[:,]? {message}'):
        nd.read_clothing(tmp_path)


def test_what_is_left_out_of_the_clothing_folder_is_counted(tmp_path):
    (tmp_path / 'clothing.csv').write_text('image,sender_id,label\nx,1,Shirt\n')
    (tmp_path / 'clothing.tar').write_bytes(b'no tar')
    with (
        pytest.warns(UserWarning, match='left out: 1 × tar cut short or damaged, such as .*clothing.tar'),
        pytest.warns(UserWarning, match='left out: 1 × missing image, such as x'),
        pytest.raises(ValueError, match='none of the images of clothing.csv is there'),
    ):
        nd.read_clothing(tmp_path)


def test_reading_the_clothing_layout(tmp_path):
    (tmp_path / 'images').mkdir()
    for name in ('a', 'b'):
        (tmp_path / 'images' / f'{name}.jpg').write_bytes(noise_jpeg(0))
    text = 'image,sender_id,label\na,7,Shirt\nb,007,Pants\nc,8,Shirt\na,9,Skip\n'
    (tmp_path / 'clothing.csv').write_text(text)
    with (
        pytest.warns(UserWarning, match='left out: 1 × missing image, such as c'),
        pytest.warns(UserWarning, match='left out: 1 × image of an earlier line, such as a'),
    ):
        found = nd.read_clothing(tmp_path)
    assert found[['name', 'sender', 'label']].to_numpy().tolist() == [['a', '7', 'Shirt'], ['b', '007', 'Pants']]
    assert found.image[0] == noise_jpeg(0)
    (tmp_path / 'clothing.csv').write_text('\n'.join(text.split('\n')[:3]))
    assert len(nd.read_clothing(tmp_path, 1)) == 1


@needs_lsh
@needs_hashes
@needs_data('clothing')
def test_lsh_equals_the_definition_on_photographs():
    clothes = nd.read_clothing(DATA / 'clothing', 500)
    hashes = nd.perceptual_hashes([open_image(data) for data in clothes.image])
    for most in (4, 8):
        np.testing.assert_array_equal(nd.hash_pairs(hashes, most), nd.hash_pairs_slow(hashes, most))
    assert len(nd.hash_pairs(hashes, 10)) > 0


def test_pairs_that_were_looked_at_are_listed_once():
    pairs = nd.checked_pairs()
    assert list(pairs) == ['image', 'other', 'garment', 'drawn']
    assert set(pairs.garment) == {'same', 'another'} and set(pairs.drawn) == {'all', 'sample'}
    assert len({frozenset(p) for p in zip(pairs.image, pairs.other)}) == len(pairs)


@needs_lsh
@needs_hashes
@needs_data('clothing')
def test_all_near_pairs_of_photographs_were_looked_at():
    clothes = nd.read_clothing(DATA / 'clothing')
    hashes = nd.perceptual_hashes([open_image(data) for data in clothes.image])
    found = nd.hash_pairs(hashes, 8)
    bits = dict(zip(map(frozenset, clothes.name.to_numpy()[found]), nd.hamming_distances(hashes, found)))
    pairs = nd.checked_pairs()
    looked_at = {drawn: {frozenset(p) for p in zip(some.image, some.other)} for drawn, some in pairs.groupby('drawn')}
    assert looked_at['all'] == {pair for pair, b in bits.items() if b <= 6}
    assert {bits[pair] for pair in looked_at['sample']} == {8}


def test_the_profile_photos_takes_weights_of_photographs():
    page = experiments('photos')['02b_benchmarks/14_near_duplicates']
    assert page.params['pretrained'] == '05_train.photos' and page.needs == ('05_train.photos',)
