"Crops: boxes at the border, several texts for one reference, true boxes of partial images, bad input."

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from cis_nb import api
from cis_nb.api import MethodByTask, Queries, Unsolved
from cis_nb.backbones.loading import load_backbone
from cis_nb.benchmarks.lrvsf_training import product_pairs
from cis_nb.data.image_sources import ImageSource
from cis_nb.methods import detector_crop as D
from cis_nb.methods.condvit import product_task
from cis_nb.world.lrvsf import drawn_image, product_rows, split_products

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))


class Halves:
    "A detector that knows left and right."

    name, fingerprint = 'halves', 'halves'

    def locate(self, image, texts):
        w, h = image.size
        return np.array([[0, 0, w / 2, h] if t == 'left' else [w / 2, 0, w, h] for t in texts])


class Brightness:
    "A method whose embedding of an image is its mean colour and size."

    name, title, fingerprint, backbone = 'brightness', 'Brightness', 'brightness', SimpleNamespace(name='none')

    def encode_queries(self, queries):
        seen = [queries.images.load(r) for r in queries.references]
        return torch.tensor([[*np.asarray(x).mean((0, 1)), *x.size] for x in seen])

    def encode_gallery(self, images):
        return images

    def score(self, q, gallery):
        return q @ gallery.T


def halves():
    "One image, black on its left half."
    array = np.full((20, 20, 3), 255, np.uint8)
    array[:, :10] = 0
    return ImageSource(['a'], lambda _: Image.fromarray(array), 'halves')


def test_two_texts_of_one_reference_are_two_crops():
    m = D.CroppedReference(name='m', title='M', method=Brightness(), detector=Halves())
    q = m.encode_queries(Queries(['1', '2'], [['left'], ['right']], ['a', 'a'], halves()))
    assert q[:, 0].tolist() == [255 / 2, 255]  # a crop of ten columns on a white square of twenty
    assert q[:, 3:].tolist() == [[20, 20]] * 2


def test_several_texts_of_a_query_are_read_as_one():
    asked = []

    class Listens(Halves):
        def locate(self, image, texts):
            asked.extend(texts)
            return super().locate(image, texts)

    D.detected_boxes(Listens(), Queries(['1'], [['left', 'dark']], ['a'], halves()))
    assert asked == ['left, dark']


@pytest.mark.parametrize(
    'box', [(-3, -3, 5, 5), (15, 15, 40, 40), (19.5, 0, 19.6, 0.1), (0, 0, 0, 0), (20, 20, 20, 20)]
)
def test_a_box_at_the_border_shows_at_least_a_pixel(box):
    crop = D.cropped(Image.new('RGB', (20, 20)), np.clip(np.array(box, float), 0, 20))
    assert 1 <= crop.width == crop.height <= 20


def test_true_boxes_hold_the_product_in_whole_and_in_partial_images():
    rows, ids = [], []
    for item in split_products('test', 40, 3):
        rows += [product_rows(item, 'test', 3)[1][0]]
        ids += [str(item.product.id)]
    assert {r['TYPE'] for r in rows} == {'COMPLEX', 'PARTIAL_COMPLEX'}
    images = ImageSource([r['URL'] for r in rows], drawn_image, 'drawn')
    boxes = D.true_boxes(Queries(ids, [['x']] * len(ids), images.ids, images))
    share = np.array([np.nanprod(b[2:] - b[:2]) / 96**2 for b in boxes])
    partial = np.array([r['TYPE'] == 'PARTIAL_COMPLEX' for r in rows])
    assert np.nanmedian(share[partial]) > 2 * np.nanmedian(share[~partial])


@pytest.mark.parametrize('reference', [None, 'photographs/1.jpg'])
def test_a_reference_that_is_not_drawn_has_no_true_box(reference):
    with pytest.raises(ValueError, match=f'query 7: true boxes are known for drawn images only, not for {reference!r}'):
        D.true_boxes(Queries(['7'], [['Bags']], [reference]))


def test_crops_are_methods_by_name_and_say_which_is_an_upper_bound():
    backbone = SimpleNamespace(fingerprint='b', name='b', D=3)
    true = api.get('method', 'true_box_crop').untrained(backbone)
    assert isinstance(true, MethodByTask) and 'upper bound' in true.title
    task = api.get('benchmark', 'lrvsf').load('world', 2, distractors=1).tasks['category']
    assert true.for_task(task).method is true.method
    photographs = replace(task, queries=task.queries.assign(reference='1.jpg'))
    with pytest.raises(Unsolved, match='2 references are no drawn images .*use detector_crop'):
        true.for_task(photographs)
    assert all('upper bound' in s.title for n, s in api.method_styles().items() if 'true_box' in n)


def test_a_missing_detector_says_where_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match='owlv2-base-patch16-ensemble'):
        api.get('method', 'detector_crop').untrained(SimpleNamespace(), detector=str(tmp_path), device='cpu')


def test_learned_windows_overlap_the_products_of_other_outfits_more_than_plain_and_random_windows():
    backbone = load_backbone('tiny_products', device='cpu')
    learned, plain = D.learned_windows(backbone, 40), D.crop_detector('windows', backbone)
    other = product_pairs('world', 'val', 24, backbone.image_size, 1, 1)  # of another world
    asked = product_task(other, 'category').as_queries()
    truth = D.true_boxes(asked)
    seen = ~np.isnan(truth[:, 0])
    of = {name: D.overlap(D.detected_boxes(d, asked), truth)[seen] for name, d in (('l', learned), ('p', plain))}
    windows = learned.window_boxes(asked.images.load(asked.references[0]))
    random = np.array([D.overlap(windows, box).mean() for box in truth[seen]])  # the mean over all windows
    assert of['l'].mean() > 1.2 * of['p'].mean() and of['l'].mean() > 2 * random.mean()


def test_learned_windows_refuse_a_text_that_is_no_category():
    windows = D.LearnedWindows(load_backbone('tiny_xs', device='cpu'))
    with pytest.raises(ValueError, match="-learned-windows: 'boots' is no category; allowed: "):
        windows.locate(Image.new('RGB', (96, 96)), ['boots'])
