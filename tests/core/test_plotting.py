"Figures."

import pytest
from PIL import Image
from cis_nb.core import plotting as show


pytestmark = pytest.mark.usefixtures('store')


# --- pictures


def test_a_figure_without_images_says_what_it_needs():
    with pytest.raises(ValueError, match='show_grid: rows: no image in 2 rows; give at least one image'):
        show.show_grid([dict(images=[]), dict(images=[])])


def test_pictures_are_as_wide_as_a_column():
    images = [Image.new('RGB', (60, 40)), Image.new('L', (30, 90)), Image.new('RGBA', (5, 5))]
    for fig in (
        show.show_strip(images, ['a', 'b' * 80, 'c'], ['target', None, 'red'], 'row'),
        show.forest([('x', 1, 0.5, 2)]),
        show.page()[0],
    ):
        import io

        assert Image.open(io.BytesIO(fig.png())).width == 800
