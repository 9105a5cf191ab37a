"Decoding: nearest images by hand, bad embeddings, folders of weights that are missing, damaged, pickled or others."

import json
import shutil
import sys

import numpy as np
import pytest
import torch

from cis_nb.backbones.features import Features
from cis_nb.methods import decoding as D

WIDTH = 6


def gallery(n=12, seed=0):
    "Features in an order of rows of their own, one row skipped."
    array = np.random.default_rng(seed).standard_normal((n, WIDTH)).astype(np.float32)
    array[3] = np.nan
    ids = [f'i{k}' for k in range(n) if k != 3]
    return Features(array, ids, {i: int(i[1:]) for i in ids})


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    return D.write_random_unclip(tmp_path_factory.mktemp('weights') / 'unclip', WIDTH)


@pytest.fixture
def copied(weights, tmp_path):
    return shutil.copytree(weights, tmp_path / 'unclip')


# --- nearest images


def test_the_nearest_images_by_hand():
    f, q = gallery(), torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)) * 3
    left_out = ['i0', None, 'i5', 'nobody', 'i3', 'i11', None]
    near = D.nearest_images(q, f, 4, left_out, block=3)
    for row in range(7):
        unit = q[row].numpy() / np.linalg.norm(q[row])
        cosines = {i: float(unit @ (v := f.array[f.index[i]]) / np.linalg.norm(v)) for i in f.ids}
        cosines.pop(left_out[row], None)
        best = sorted(cosines, key=cosines.get, reverse=True)[:4]
        assert near.ids[row] == best
        np.testing.assert_allclose(near.cosines[row], [cosines[i] for i in best], atol=1e-5)


def test_equal_images_are_in_the_order_of_the_gallery():
    f = Features(np.ones((4, WIDTH), np.float32), list('dcba'), {i: n for n, i in enumerate('dcba')})
    assert D.nearest_images(torch.ones(1, WIDTH), f, 3).ids == [['d', 'c', 'b']]
    assert D.nearest_images(torch.ones(1, WIDTH), f, 3, ['c']).ids == [['d', 'b', 'a']]


def test_no_embedding_has_no_neighbours():
    near = D.nearest_images(torch.zeros(0, WIDTH), gallery(), 2)
    assert near.ids == [] and near.cosines.shape == (0, 2)


@pytest.mark.parametrize('k', [0, 12])
def test_a_number_of_neighbours_that_a_gallery_does_not_have(k):
    with pytest.raises(ValueError, match=f'k: {k} of a gallery of 11 images'):
        D.nearest_images(torch.ones(1, WIDTH), gallery(), k)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('read', ['nearest', 'length', 'decoder'])
def test_an_embedding_that_is_not_finite_is_named(weights, read, value):
    x = torch.ones(3, WIDTH)
    x[2, 0] = value
    readers = dict(
        nearest=lambda: D.nearest_images(x, gallery()),
        length=lambda: D.as_image_features(x, gallery()),
        decoder=lambda: D.UnclipDecoder(weights, 'cpu', 2, 2)(x),
    )
    with pytest.raises(ValueError, match=r'rows \[2\] hold NaN or infinite values; encode these queries again'):
        readers[read]()


@pytest.mark.parametrize('shape', [(2, WIDTH + 1), (WIDTH,), (1, 2, WIDTH)])
def test_an_embedding_of_another_width_names_the_remedy(weights, shape):
    decoder, x = D.UnclipDecoder(weights, 'cpu', 2, 2), torch.ones(shape)
    for reads in (decoder, lambda x: D.nearest_images(x, gallery()), lambda x: D.as_image_features(x, gallery())):
        with pytest.raises(ValueError, match=rf'\(B,{WIDTH}\).*use a method over a backbone of width {WIDTH}'):
            reads(x)


def test_lengths_are_those_of_the_gallery_without_its_gaps():
    f = gallery()
    lengths = [np.linalg.norm(f.array[f.index[i]]) for i in f.ids]
    found = D.as_image_features(torch.randn(3, WIDTH) * 100, f)
    torch.testing.assert_close(found.norm(dim=1), torch.full((3,), float(np.median(lengths))))
    with pytest.raises(ValueError, match=r'rows \[0, 1\] are zero'):
        D.as_image_features(torch.zeros(2, WIDTH), f)


# --- folders of weights


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_DATA', str(tmp_path))
    with pytest.raises(FileNotFoundError, match="decoder 'karlo': no such folder; give a folder that diffusers"):
        D.UnclipDecoder('karlo')


def test_a_name_below_the_data_folder(copied, monkeypatch):
    monkeypatch.setenv('CIS_DATA', str(copied.parent))
    assert D.unclip_folder('unclip') == copied.resolve()


@pytest.mark.parametrize('text, said', [('{', 'is no JSON object'), ('[1]', 'is no JSON object')])
def test_a_damaged_index(copied, text, said):
    (copied / 'model_index.json').write_text(text)
    with pytest.raises(ValueError, match=f'model_index.json: {said}'):
        D.UnclipDecoder(copied, 'cpu')


def test_another_pipeline_is_named(copied):
    index = json.loads((copied / 'model_index.json').read_text())
    (copied / 'model_index.json').write_text(json.dumps(index | dict(_class_name='StableDiffusionPipeline')))
    with pytest.raises(ValueError, match='is a StableDiffusionPipeline, and images are decoded by a UnCLIPImage'):
        D.UnclipDecoder(copied, 'cpu')


@pytest.mark.parametrize('part', D.UNCLIP_PARTS)
def test_weights_that_are_pickles_are_never_read(copied, part, monkeypatch):
    "Not even where safetensors of the other parts are there; no file is opened by torch.load."
    for file in (copied / part).glob('*.safetensors'):
        torch.save({}, file.with_suffix('.bin'))
        file.unlink()
    monkeypatch.setattr(torch, 'load', lambda *a, **k: pytest.fail('a pickle was read'))
    with pytest.raises(FileNotFoundError, match=rf'{part}/\*.safetensors is missing \(.*.bin is a pickle'):
        D.UnclipDecoder(copied, 'cpu')


def test_a_truncated_file_of_weights_is_an_error(copied):
    file = next((copied / 'decoder').glob('*.safetensors'))
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match='decoder .*unclip: a part cannot be read'):
        D.UnclipDecoder(copied, 'cpu')


def test_without_the_package_the_error_names_the_extra(weights, monkeypatch):
    monkeypatch.setitem(sys.modules, 'diffusers', None)
    with pytest.raises(ImportError, match=r"pip install 'cis_nb\[synthesis\]'"):
        D.UnclipDecoder(weights, 'cpu')


# --- the decoder


def test_an_image_depends_on_its_embedding_and_its_seed_alone(weights):
    decode, x = D.UnclipDecoder(weights, 'cpu', 2, 2), torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(3))
    together = [np.asarray(im, int) for im in decode(x, [4, 5, 6])]
    for row, seed in enumerate([4, 5, 6]):
        alone = np.asarray(decode(x[row : row + 1], [seed])[0], int)
        assert np.abs(alone - together[row]).max() <= 1
    assert np.abs(np.asarray(decode(x[:1], [5])[0], int) - together[0]).max() > 1
    other = np.asarray(decode(-x[:1], [4])[0], int)
    assert np.abs(other - together[0]).max() > 1
    assert decode(torch.zeros(0, WIDTH)) == []


def test_the_seeds_are_one_an_embedding(weights):
    with pytest.raises(ValueError, match='seeds: must be one an embedding, 2, got 3'):
        D.UnclipDecoder(weights, 'cpu', 2, 2)(torch.ones(2, WIDTH), [1, 2, 3])


def test_the_guidance_weighs_the_embedding(weights):
    x, images = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(3)), []
    for guidance in (1.0, 8.0):
        images.append(np.asarray(D.UnclipDecoder(weights, 'cpu', 2, 2, guidance)(x, [1])[0], int))
    assert np.abs(images[0] - images[1]).max() > 1
