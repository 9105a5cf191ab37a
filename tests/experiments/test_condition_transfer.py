"Conditions in words: requests that nothing satisfies, galleries with their own text, held-out words."

import pytest
import torch
from PIL import Image

from cis_nb import api
from cis_nb.backbones.conditional_vit import conditional_vit
from cis_nb.backbones.loading import load_backbone
from cis_nb.experiments import condition_transfer as ct
from cis_nb.experiments.entries import Entry
from cis_nb.methods.condvit import CondViTMethod
from cis_nb.world.cloth import CONTRASTING
from cis_nb.world.wardrobe import Product

pytestmark = pytest.mark.usefixtures('store')
P = dict(data='world', queries=12, world_seed=0, distractors=6)


def test_another_colour_is_far_from_the_worn_one_and_goes_with_the_second():
    for number in range(200):
        p = Product(number)
        other = ct.recoloured(p)
        assert other.colors[0] in CONTRASTING[p.colors[0]] and other.colors[1:] == p.colors[1:]
        assert other.colors[0] not in p.colors and (other.subtype, other.detail) == (p.subtype, p.detail)


@pytest.mark.parametrize('address', ['photo.jpg', 'world://lrvsf/complex/4-5.1', 'world://lrvsf/thing/7'])
def test_only_images_of_one_product_show_a_product(address):
    assert ct.named_product(address) is None
    assert ct.named_product('world://lrvsf/simple/4711.3').id == 4711


def test_words_of_no_query_or_of_all_are_refused():
    for words in ([], ['kimono'], ['a']):
        with pytest.raises(ValueError, match='held_out: .* must be in the captions of some queries'):
            ct.transfer_benchmark(P | dict(held_out=words))


def test_a_blank_image_keeps_its_size():
    blank = ct.blank_like(Image.new('L', (3, 5)))
    assert blank.size == (3, 5) and blank.getextrema() == ((255, 255),) * 3


@pytest.mark.e2e
def test_what_the_gallery_shows_is_counted_beside_what_comes_first():
    model = load_backbone('tiny_xs', device='cpu')
    torch.manual_seed(0)
    net = conditional_vit(model, condition='text', text_width=model.D).eval()
    entry = Entry(CondViTMethod(name='condvit', title='CondViT', backbone=model, net=net))
    task = api.get('benchmark', 'lrvsf').load('world', 12, 0, distractors=6).tasks['text']
    lines = ct.probe(entry, task, ct.absent_requests(task))
    mine = lines[lines.method == ct.PROBES['absent']['asked']]
    for line in mine.itertuples():
        assert line.score == 0 or line.gallery > 0  # what comes first is in the gallery
    own = ct.own_text_lines(entry, task)
    assert set(own.method) == set(ct.OWN_TEXT) and set(own.gallery_size) == {12}
