"Sources of images with broken, missing and doubled images."

import os
import sys

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError
from photo_folders import refuse
from cis_nb.backbones.loading import load_backbone
from cis_nb.data.image_sources import ImageSource, image_files, image_folder, union


def plain(level):
    return Image.new('RGB', (6, 4), (level, 0, 0))


def test_squares_are_made_once_from_images_of_any_mode(store):
    loaded = []
    images = dict(grey=Image.new('L', (9, 5), 70), alpha=Image.new('RGBA', (5, 9), (70, 70, 70, 0)), one=plain(70))

    def load(i):
        loaded.append(i)
        return images[i]

    source = ImageSource(list(images), load, 'key', 'modes')
    for _ in range(2):
        array, index = source.pixels(4)
    assert loaded == ['grey', 'alpha', 'one'] and array.shape == (3, 3, 4, 4)
    assert array[index['grey']].tolist() == np.full((3, 4, 4), 70).tolist()


def test_an_image_that_cannot_be_read_leaves_no_squares_behind(store):
    def load(i):
        if i == 'bad':
            raise OSError('truncated')
        return plain(1)

    with pytest.raises(OSError, match='truncated'):
        ImageSource(['good', 'bad'], load, 'key').pixels(4)
    array, _ = ImageSource(['good', 'bad'], lambda i: plain(9), 'key').pixels(4)  # made anew, not what was left
    assert array[0, 0].max() == 9


def test_a_selection_keeps_the_squares_of_all(store):
    source = ImageSource(['a', 'b'], lambda i: plain(1), 'key', packed_squares=lambda size: (size, {'a': 0, 'b': 1}))
    assert source.only(('b',)).ids == ['b'] and source.only(['b']).pixels(4) == (4, {'a': 0, 'b': 1})


@pytest.mark.parametrize('content', [b'', b'no image', b'\xff\xd8\xff\xe0cut'])
def test_a_file_that_is_no_image_raises(tmp_path, content):
    (tmp_path / 'a.jpg').write_bytes(content)
    with pytest.raises(OSError):
        image_files(['a'], {'a': tmp_path / 'a.jpg'}, None, 'files').load('a')


def test_an_image_is_opened_by_no_other_program(tmp_path):
    "A PostScript file with the name of an image would be drawn by Ghostscript."
    (tmp_path / 'a.png').write_bytes(b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n')
    with pytest.raises(UnidentifiedImageError):
        image_files(['a'], {'a': tmp_path / 'a.png'}, None, 'files').load('a')


def test_the_key_of_files_follows_names_and_content_not_their_order(tmp_path):
    for name in 'ab':
        plain(1).save(tmp_path / f'{name}.png')
    paths = {name: tmp_path / f'{name}.png' for name in 'ab'}

    def key(paths):
        return image_files(list(paths), paths, None, 'files').key

    assert key(paths) == key(dict(reversed(paths.items())))
    assert key(paths) != key({'a': paths['a']}) and key(paths) != key({'a': paths['a'], 'c': paths['b']})


def test_an_id_of_several_sources_is_loaded_from_the_last_and_listed_once():
    first, last = (ImageSource(ids, lambda i, n=n: plain(n), f'k{n}') for n, ids in ((1, ['a', 'b']), (2, ['b', 'c'])))
    both = union([first, last])
    assert both.ids == ['a', 'b', 'c']
    assert [both.load(i).getpixel((0, 0))[0] for i in both.ids] == [1, 2, 2]
    with pytest.raises(KeyError):
        both.load('d')


def test_the_order_and_the_ids_of_sources_are_in_the_key_of_their_union():
    first, last = (ImageSource(['a', 'b'], lambda i, n=n: plain(n), f'k{n}') for n in (1, 2))
    unions = [[first, last], [last, first], [first, last.only(['a'])], [first, last]]
    keys = [union(sources).key for sources in unions]
    assert keys[0] == keys[-1] and len(set(keys)) == 3


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems refuse such names themselves')
def test_names_that_are_no_text_are_kept(tmp_path, store):
    "A file with bytes of another encoding in its name is an image as any other, also where it cannot be read."
    folder, good, bad = tmp_path / 'images', os.fsdecode(b'caf\xe9.png'), os.fsdecode(b'cr\xe8me.png')
    folder.mkdir()
    for name in ('a.png', good):
        plain(1).save(folder / name)
    assert image_folder(folder).pixels(4)[1] == {'a.png': 0, good: 1}
    (folder / bad).write_bytes(b'no image')
    found = load_backbone('tiny_xs', device='cpu').features(image_folder(folder))
    assert found.ids == ['a.png', good] and found.skipped.id.tolist() == [bad]


def test_a_folder_of_images_follows_links_and_tells_what_it_leaves_out(tmp_path, monkeypatch):
    for place in ('root', 'root/shut', 'more'):
        (tmp_path / place).mkdir()
        plain(1).save(tmp_path / place / 'a.png')
    (tmp_path / 'root' / 'link').symlink_to(tmp_path / 'more')
    (tmp_path / 'root' / 'loop').symlink_to('.')
    monkeypatch.setattr(os, 'scandir', refuse('shut'))
    with pytest.warns(UserWarning) as told:
        assert image_folder(tmp_path / 'root').ids == ['a.png', 'link/a.png']
    assert [str(w.message).partition('left out: ')[2] for w in told] == [
        '1 × folder that cannot be read (Permission denied), such as shut',
        '1 × folder that is listed under another name, such as loop',
    ]
