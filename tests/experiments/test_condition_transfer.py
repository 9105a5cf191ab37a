"Conditions in words: requests that nothing satisfies, galleries with their own text, held-out words."

from types import SimpleNamespace

import pandas as pd
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


GALLERY = ['world://lrvsf/simple/3.0', 'world://lrvsf/simple/13.0', 'world://lrvsf/simple/4.0', 'world://lrvsf/thing/7']
ABSENT = dict(task='absent', query_id='q', reference='world://lrvsf/complex/3-5.1', condition='a caption')


@pytest.mark.parametrize('first, shown, asked, worn', [(0, 100, 0, 100), (1, 100, 0, 0), (2, 0, 100, 0), (3, 0, 0, 0)])
def test_what_comes_first_is_compared_with_a_gallery_of_known_shares(monkeypatch, first, shown, asked, worn):
    """A person wears products 3 and 5; the gallery holds 3, another product of its category, one of the asked category
    and an image of no product."""
    monkeypatch.setattr(ct, 'first_images', lambda *_: [(GALLERY[first],)])
    task, entry = SimpleNamespace(shared_gallery=GALLERY, source=None), SimpleNamespace(method=None, seed=0)
    request = ABSENT | dict(shown=Product(3).category, asked=Product(4).category)
    lines = ct.probe(entry, task, pd.DataFrame([request])).set_index('method')
    names = [*ct.PROBES['absent'].values(), ct.WORN]
    assert lines.score[names].tolist() == [shown, asked, worn]
    assert lines.gallery[names].tolist() == [50, 25, 25]


def test_the_colour_of_what_comes_first_is_its_main_colour(monkeypatch):
    monkeypatch.setattr(ct, 'first_images', lambda *_: [(GALLERY[1],)])
    task, entry = SimpleNamespace(shared_gallery=GALLERY[:3], source=None), SimpleNamespace(method=None, seed=0)
    colours = [Product(n).colors[0] for n in (3, 13, 4)]
    request = ABSENT | dict(task='other colour', shown=colours[0], asked=colours[1])
    lines = ct.probe(entry, task, pd.DataFrame([request])).set_index('method')
    names = ct.PROBES['other colour']
    assert lines.score[names['asked']] == 100
    assert lines.gallery[names['asked']] == pytest.approx(100 * colours.count(colours[1]) / 3)
    assert lines.gallery[names['shown']] == pytest.approx(100 * colours.count(colours[0]) / 3)


@pytest.mark.e2e
def test_a_gallery_of_targets_alone_is_encoded_in_every_way():
    model = load_backbone('tiny_xs', device='cpu')
    torch.manual_seed(0)
    net = conditional_vit(model, condition='text', text_width=model.D).eval()
    entry = Entry(CondViTMethod(name='condvit', title='CondViT', backbone=model, net=net))
    own = ct.own_text_lines(entry, api.get('benchmark', 'lrvsf').load('world', 12, 0, distractors=6).tasks['text'])
    assert set(own.method) == set(ct.OWN_TEXT) and set(own.gallery_size) == {12}


def test_captions_without_a_sub_type_have_no_trainings_by_noun():
    with_nouns, without = ct.transfer_variants(['scarf'], 9), ct.transfer_variants(['scarf'], 9, nouns=False)
    assert set(with_nouns) - set(without) == {ct.NOUN, ct.NOUN_ALL}
    left_out = {name: v.change.get('held_out') for name, v in with_nouns.items()}
    assert {name for name, words in left_out.items() if not words} == {ct.TEXT_ALL, ct.NOUN_ALL}
    assert {with_nouns[name].change['samples'] for name in (ct.TEXT_ALL, ct.NOUN_ALL)} == {9}


def test_text_alone_is_a_rival_of_every_training_by_words():
    assert all({ct.START_TEXT, ct.TUNED} <= set(rivals) for rivals in ct.TRANSFER_RIVALS.values())
    assert all(
        ct.START_TEXT in rivals and set(rivals) <= set(ct.TRANSFER_RIVALS[own]) for own, rivals in ct.HEADLINE.items()
    )


def test_late_fusions_of_the_start_are_set_on_queries_without_held_out_words():
    p = dict(training='condvit_category', shorter=dict(samples=20, val_samples=30, distractors=5), seeds=[0])
    p |= dict(backbone='tiny_xs', pretrained='default', device='cpu', held_out=['scarf', 'coat'])
    tuned, by_product = ct.start_fusions(p, load_backbone('tiny_xs', device='cpu'))
    assert (tuned.name, by_product.name) == (ct.TUNED, ct.PRODUCT)
    seen = [tuned.validation(SimpleNamespace(task=by)) for by in ('text', 'noun')]
    captions, nouns = (t.queries.condition.tolist() for t in (seen[0], seen[-1]))
    assert 0 < len(captions) == len(nouns) < 30 and set(captions).isdisjoint(nouns)
    assert not any(ct.has_words(c, p['held_out']) for c in [*captions, *nouns])
    assert all('/simple/' in t for (t,) in seen[0].queries.targets)
