"The drawn wardrobe: the same pixels everywhere, correct boxes, clear errors."

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cis_nb.world import outfits as o
from cis_nb.world.cloth import CLOTH_PATTERNS, FIGURE_POSES, cut_pieces
from cis_nb.world.wardrobe import (
    PRODUCT_CATEGORIES,
    SUBTYPES,
    Product,
    ClothCache,
    product_captions,
    subtypes_of,
    draw_products,
    simple_image,
)

GOLDEN = {  # outfits_hash(6, size)
    64: '198ab4427acabc6eeafb43ee0ff26cb1c65b647f4e0af5ee2c60032049786bad',
    100: '1d641149d7c07ad31c4c47b8b7fdaad335d440080de0677d53fe388136f81732',
    128: 'c7d11298d5a9d418a01c1a70a417002daadb5937e7cb5749b2e7b57fdd634bee',
}
ROOT = Path(o.__file__).resolve().parents[2]


def foreground(image):
    "Pixels of a simple image that are neither paper nor shadow."
    return np.abs(np.asarray(image).astype(int) - 255).max(2) > 40


@pytest.mark.parametrize('size', GOLDEN)
def test_golden(size):
    assert o.outfits_hash(6, size) == GOLDEN[size]


@pytest.mark.e2e
@pytest.mark.parametrize(
    'env', [dict(PYTHONHASHSEED='7', OMP_NUM_THREADS='1'), dict(PYTHONHASHSEED='8', OMP_NUM_THREADS='2', LC_ALL='C')]
)
def test_golden_in_another_process(env, tmp_path):
    code = 'from cis_nb.world.outfits import outfits_hash; print(outfits_hash(6, 64))'
    done = subprocess.run(
        [sys.executable, '-c', code],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT), **env},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == GOLDEN[64], done.stderr


def test_order_and_shelves_do_not_matter(monkeypatch):
    "Images do not depend on what was drawn before, nor on what is still kept."
    first = [o.complex_image(o.draw_outfit(i), 64, i)[0].tobytes() for i in range(8)]
    for name in ('flat_cloth', 'worn_cloth', 'body_cloth', 'prop_cloth'):
        shelf = getattr(o, name)
        monkeypatch.setattr(o, name, ClothCache(shelf.make, shelf.nbytes, room=1))
    again = [o.complex_image(o.draw_outfit(i), 64, i)[0].tobytes() for i in reversed(range(8))]
    assert again[::-1] == first
    assert len(o.worn_cloth.kept) == 1


def test_shelf_keeps_within_its_room():
    made = []
    shelf = ClothCache(lambda k: made.append(k) or bytes(k), len, room=10)
    assert [len(shelf(k)) for k in (4, 5, 4, 6)] == [4, 5, 4, 6]
    assert made == [4, 5, 6] and list(shelf.kept) == [(6,)] and shelf.used == 6


def test_ten_categories_of_lrvsf():
    assert PRODUCT_CATEGORIES == (
        'Bags',
        'Feet',
        'Hands',
        'Head',
        'Lower Body',
        'Neck',
        'Outwear',
        'Upper Body',
        'Waist',
        'Whole Body',
    )
    assert all(len(subtypes_of(c)) >= 4 for c in PRODUCT_CATEGORIES)


@pytest.mark.parametrize('name', SUBTYPES)
def test_every_cut_and_detail_shows(name):
    "Every condition of a sub-type changes its simple image, and everything can be worn in every pose."
    s, p = SUBTYPES[name], Product(3, subtype=name, colors=('red', 'white'), pattern='plain')
    images = {(c, d): simple_image(p.but(cut=c, detail=d)).tobytes() for c in s.cuts or ('',) for d in ('', *s.details)}
    assert len(set(images.values())) == len(images)
    for pose in FIGURE_POSES:
        image, boxes = o.complex_image([p], 64, 5, 'street', pose)
        assert boxes[0] is not None


@pytest.mark.parametrize('name', SUBTYPES)
def test_simple_images_fill_the_frame(name):
    "At least 20 pixels of 64 in both directions, nothing cut off, white around."
    for seed in range(6):
        a = simple_image(Product(11, subtype=name), 64, seed)
        rows, cols = np.nonzero(np.abs(np.asarray(a).astype(int) - 255).max(2) > 8)
        assert rows.min() > 0 and cols.min() > 0 and rows.max() < 63 and cols.max() < 63
        assert min(np.ptp(rows), np.ptp(cols)) + 1 >= 20 and max(np.ptp(rows), np.ptp(cols)) + 1 >= 44


@pytest.mark.e2e
def test_subtypes_look_different():
    "Alike in colour, no two sub-types have nearly the same image."
    names = list(SUBTYPES)
    a = np.stack(
        [
            np.asarray(
                simple_image(Product(2, subtype=n, colors=('teal', 'orange'), pattern='plain', detail='', lot=0))
            ).astype(int)
            for n in names
        ]
    )
    gap = np.abs(a[:, None] - a[None]).mean((2, 3, 4)) + 99 * np.eye(len(a))
    i, j = np.unravel_index(gap.argmin(), gap.shape)
    assert gap.min() > 6, (names[i], names[j], gap.min())


def test_every_pattern_shows_at_64_pixels():
    p = Product(9, subtype='T-shirt', colors=('blue', 'white'), detail='')
    images = {
        (n, s): np.asarray(simple_image(p.but(pattern=n, scale=s))).astype(int)
        for n in CLOTH_PATTERNS
        for s in (('small', 'large') if n != 'plain' else ('small',))
    }
    keys = list(images)
    assert min(np.abs(images[a] - images[b]).mean() for i, a in enumerate(keys) for b in keys[:i]) > 3


def test_boxes_hold_what_can_be_seen():
    "A box shrinks to the pixels that change when the product is dyed anew."
    for seed in range(25):
        look = o.draw_outfit(seed)
        image, boxes = o.complex_image(look, 64, seed)
        for i, (p, box) in enumerate(zip(look, boxes)):
            l, t, r, b = box
            assert 0 <= l < r <= 64 and 0 <= t < b <= 64
            changed = (
                look[:i]
                + [p.but(colors=('green',) if p.colors[0] != 'green' else ('red',), pattern='plain')]
                + look[i + 1 :]
            )
            other = (
                np.abs(np.asarray(o.complex_image(changed, 64, seed)[0]).astype(int) - np.asarray(image)).max(2) > 24
            )
            rows, cols = np.nonzero(other)
            assert rows.min() >= t - 1 and rows.max() < b + 1 and cols.min() >= l - 1 and cols.max() < r + 1, (
                seed,
                p,
                box,
            )


def test_looks_can_be_worn():
    for seed in range(500):
        worn = [p.category for p in o.draw_outfit(seed)]
        assert 3 <= len(worn) <= 6 and len(set(worn)) == len(worn) and 'Feet' in worn
        assert ('Whole Body' in worn) != ('Lower Body' in worn and 'Upper Body' in worn)
        assert not {'Outwear', 'Waist'} <= set(worn)


def test_what_stands_in_front_leaves_enough():
    for seed in range(120):
        for box in o.complex_image(o.draw_outfit(seed), 64, seed)[1]:
            assert box is not None


def test_products_are_many_and_repeatable():
    many = draw_products(3000, 4)
    assert many == draw_products(3000, 4) and many[:10] == draw_products(10, 4) and many[:10] != draw_products(10, 5)
    assert len(set(many)) >= 2999 and len({p.id for p in many}) == 3000 and max(p.id for p in many) < 2**63
    assert {p.category for p in many} == set(PRODUCT_CATEGORIES) and {p.pattern for p in many} == set(CLOTH_PATTERNS)
    assert {p.category for p in draw_products(50, 1, ['Neck', 'Bags'])} == {'Neck', 'Bags'}
    assert Product(10**40).caption and Product(np.int64(7)) == Product(7)


def test_details_are_words_and_captions_name_them():
    for p in draw_products(400, 8):
        for text in product_captions(p):
            assert (
                p.subtype in text
                and p.colors[0] in text
                and all(c in text for c in p.colors)
                and all(d in text for d in p.details)
            )
            assert '  ' not in text and text[-1].isalpha()
    words = {w for p in draw_products(2000, 2) for t in product_captions(p) for w in t.replace(',', '').split()}
    assert len(words) < 200
    text = o.look_caption(o.draw_outfit(3), 3)
    assert all(p.subtype in text for p in o.draw_outfit(3)) and o.OUTFIT_PLACES[o.place_of(3)].phrase in text


@pytest.mark.parametrize('size', [16, 33, 64, 96, 128, 256])
def test_any_size_shows_the_same(size):
    "An image reduced from 256 pixels resembles the small one."
    p = Product(77, subtype='coat', pattern='plain')
    small, large = simple_image(p, size), simple_image(p, 256).resize((size, size), 4)
    assert small.size == (size, size)
    assert np.abs(np.asarray(small).astype(int) - np.asarray(large)).mean() < 16
    look = o.draw_outfit(6)
    image, boxes = o.complex_image(look, size, 6)
    assert image.size == (size, size) and len(boxes) == len(look)


def test_seeds_are_other_photographs():
    p = Product(12)
    assert len({simple_image(p, 64, s).tobytes() for s in range(12)}) >= 10
    assert len({o.complex_image([p], 64, s)[0].tobytes() for s in range(12)}) == 12


def test_errors_say_what_is_there():
    for call, words in (
        (lambda: Product(-3), 'integer ≥ 0'),
        (lambda: Product(1.5), 'integer ≥ 0'),
        (lambda: Product(1, colour='red'), "'colour' is none of category"),
        (lambda: Product(1, subtype='toga'), "sub-type: 'toga' is none of"),
        (lambda: draw_products(3, categories=['Legs']), "category: 'Legs' is none of"),
        (lambda: simple_image(Product(1), 8), 'from 16 to 2048'),
        (lambda: simple_image(Product(1), 64.0), 'from 16 to 2048'),
        (lambda: o.complex_image([Product(1)], place='moon'), "place: 'moon' is none of"),
        (lambda: o.complex_image([Product(1)], pose='dead'), "pose: 'dead' is none of"),
        (lambda: o.complex_image([Product(1), Product(21)]), 'one product of a category'),
        (lambda: cut_pieces('a square 1,1 2,2'), "verb: 'square' in the line"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
