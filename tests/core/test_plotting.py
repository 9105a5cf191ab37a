"Figures."

import io
from types import SimpleNamespace

import pytest
from matplotlib.text import Text
from figures import texts_outside
from PIL import Image

from cis_nb.core import plotting as show
from cis_nb.experiments.pseudo_words import fusion_figure


pytestmark = pytest.mark.usefixtures('store')


# --- pictures


def test_a_figure_without_images_says_what_it_needs():
    with pytest.raises(ValueError, match='show_grid: rows: no image in 2 rows; give at least one image'):
        show.show_grid([dict(images=[]), dict(images=[])])


def test_pictures_are_as_wide_as_a_column():
    images = [Image.new('RGB', (60, 40)), Image.new('L', (30, 90)), Image.new('RGBA', (5, 5))]
    for fig, width in (
        (show.show_strip(images, ['a', 'b' * 80, 'c'], ['target', None, 'red'], 'row'), 800),
        (show.forest([('x', 1, 0.5, 2)]), 539),
        (show.page()[0], 800),
    ):
        assert Image.open(io.BytesIO(fig.png())).width == width


@pytest.mark.parametrize('label', ['a', 'a long name of a method − another long name of a method, before training'])
def test_a_forest_fits_a_phone_with_letters_that_can_be_read(label):
    fig = show.forest([(label, 3.0, 1.0, 5.0), ('worse', -2.0, -3.0, -1.0)], 'points', label)
    fig.png()
    shown = [t for t in fig.findobj(Text) if t.get_text()]
    shrunk = 366 / (fig.get_figwidth() * show.DPI)  # to the width of a page on a screen of 400 pixels
    assert min(t.get_fontsize() for t in shown) / 72 * show.DPI * shrunk >= 9
    width = fig.get_figwidth() * show.DPI
    texts = [t.get_window_extent() for t in fig.axes[0].texts]  # label and numbers of each row
    assert all(0 <= t.x0 and t.x1 <= width for t in texts)
    assert not any(a.overlaps(b) for i, a in enumerate(texts) for b in texts[i + 1 :])


LONG = 'LRVS-F R@1 under the category: CondViT (category) minus the nearest five of its many rivals and controls, seeds'


@pytest.mark.parametrize('label', ['a', LONG, 'W' * 90, LONG + ' | ' + LONG])
def test_no_text_of_a_figure_leaves_it(label, monkeypatch):
    small = Image.new('RGB', (60, 40))
    for fig in (
        show.forest([(label, 3.0, 1.0, 5.0), (label, -12.0, -13.5, -11.0)], label, label, ' points'),
        show.show_strip([small] * 8, [label] * 8, row_title=label),
    ):
        assert not texts_outside(fig, monkeypatch)


def test_a_text_that_leaves_a_figure_is_seen(monkeypatch):
    fig, ax = show.page()
    ax.set_title(LONG)
    assert texts_outside(fig, monkeypatch) == [LONG]


def test_four_panels_of_weights_keep_their_labels_whole(monkeypatch):
    tasks = ['full', 'subset', 'circo', 'states']
    curve = {round(0.1 * n, 1): 10.0 + n for n in range(11)}
    tuned = SimpleNamespace(settings={t: curve for t in tasks}, weights={t: 0.5 for t in tasks})
    assert not texts_outside(fusion_figure(tuned, {t: t for t in tasks}), monkeypatch)
