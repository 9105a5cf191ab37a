"Packed images: any mode, damaged files, kills, full disks, two processes."

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image
from torchvision import transforms as T
from projects import DATA, needs_data
from cis_nb.data import packed
from cis_nb.data.packed import PACK_CHUNK, CaptionedImages, center_square, open_image, pack, packed_folder
from cis_nb.data.image_folders import Place, read_photos
from photo_folders import image, write_tar, side_by_side, folder

quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
coco_mini = DATA / 'coco_mini'


pytestmark = pytest.mark.usefixtures('store')


# ---- images


def bomb(side=12_000):
    buf = io.BytesIO()
    Image.new('1', (side, side)).save(buf, 'PNG')
    return buf.getvalue()


@pytest.mark.parametrize(
    'mode, fmt',
    [
        ('L', 'JPEG'),
        ('CMYK', 'JPEG'),
        ('RGBA', 'PNG'),
        ('P', 'PNG'),
        ('LA', 'PNG'),
        ('1', 'PNG'),
        ('I;16', 'PNG'),
        ('RGB', 'WEBP'),
        ('RGB', 'BMP'),
        ('P', 'GIF'),
    ],
)
def test_every_kind_of_picture_becomes_rgb(mode, fmt):
    img = (
        Image.fromarray(np.arange(40 * 30, dtype=np.uint16).reshape(30, 40))
        if mode == 'I;16'
        else Image.open(io.BytesIO(image(1))).convert(mode)
    )
    buf = io.BytesIO()
    img.save(buf, fmt)
    assert center_square(open_image(buf.getvalue()), 16).shape == (3, 16, 16)


def test_a_portrait_stands_upright():
    exif = Image.Exif()
    exif[0x112] = 6
    buf = io.BytesIO()
    Image.new('RGB', (40, 20)).save(buf, 'JPEG', exif=exif)
    assert open_image(buf.getvalue()).size == (20, 40)


def test_bad_images_are_skipped_by_reason(tmp_path):
    root = folder(
        tmp_path / 'r', 7, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(7))
    )
    for i, data in enumerate(
        [image(0)[:300], b'<html>', bomb(), b'', image(4)[:-2], Image.MAX_IMAGE_PIXELS.to_bytes(4, 'big')]
    ):
        (root / f'{i:03}.jpg').write_bytes(data)
    packed_ = read_photos(root), packed_folder(root, 16)
    about = json.loads((packed_[1] / 'about.json').read_text())
    assert {k: len(v) for k, v in about['skipped'].items()}['file that is no image'] == 3
    assert (
        len(about['skipped']['damaged image']) >= 1
        and len(about['skipped'][f'image of more than {Image.MAX_IMAGE_PIXELS:,} pixels']) == 1
    )


def test_no_photo_at_all_can_be_opened(tmp_path):
    root = folder(tmp_path / 'r', 2, 'captions.csv', 'image,caption\n000.jpg,a\n001.jpg,b\n')
    for i in range(2):
        (root / f'{i:03}.jpg').write_bytes(b'no image')
    with pytest.raises(ValueError, match='none of 2 images could be opened'):
        CaptionedImages(root)
    assert not list((tmp_path / 'store').rglob('manifest.json'))


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 80))
def test_the_square_is_clips(w, h, size):
    img = Image.open(io.BytesIO(image(w * 1000 + h, (w, h), fmt='PNG'))).convert('RGB')
    two = np.asarray(T.CenterCrop(size)(T.Resize(size, T.InterpolationMode.BICUBIC)(img))).transpose(2, 0, 1)
    assert np.array_equal(center_square(img, size), two)


def test_a_strip_does_not_explode():
    start = time.perf_counter()
    assert center_square(Image.new('RGB', (2_000_000, 3)), 224).shape == (
        3,
        224,
        224,
    )  # resized whole it would be 33 billion pixels
    assert time.perf_counter() - start < 20


@quick
@given(st.binary(max_size=200), st.integers(0, 3000))
def test_any_bytes_as_an_image(tmp_path_factory, noise, cut):
    d = tmp_path_factory.mktemp('img')
    (d / 'a').write_bytes(noise)
    (d / 'b').write_bytes(image(2)[:cut] + noise)
    (note,) = pack([Place(str(d / 'a')), Place(str(d / 'b'))], d / 'x.npy', 16, workers=1)
    assert '0' in note['failed']


# ---- packing


def test_workers_and_chunks_change_nothing(tmp_path):
    torch.ones(300, 300) @ torch.ones(300, 300)  # threads exist before the processes do
    root = folder(
        tmp_path / 'r', 23, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(23))
    )
    (root / '007.jpg').write_bytes(b'x')
    places = [Place(*p) for p in read_photos(root).table[list(Place._fields)].itertuples(index=False)]
    made = [
        (pack(places, tmp_path / f'{w}{c}.npy', 16, workers=w, chunk=c), np.load(tmp_path / f'{w}{c}.npy'))
        for w, c in [(1, 256), (1, 5), (2, 4), (3, 1)]
    ]
    for notes, rows in made:
        assert {k: v for n in notes for k, v in n['failed'].items()} == {'7': 'file that is no image'}
        assert np.array_equal(rows, made[0][1])


def test_packed_once_and_again_when_a_file_changes(tmp_path):
    write_tar(tmp_path / 'x.tar', side_by_side(9))
    root = tmp_path / 'root'
    root.mkdir()
    (tmp_path / 'x.tar').rename(root / 'x.tar')
    a, b = CaptionedImages(root, 'train', 16), CaptionedImages(root, 'test', 16)
    assert (
        a.folder == b.folder and a.key == b.key and len(a) + len(CaptionedImages(root, 'val', 16)) == 12
    )  # val is cut out of train by hash
    os.utime(root / 'x.tar', (1, 1))
    c = CaptionedImages(root, 'train', 16)
    assert c.folder == a.folder and c.key == a.key  # touched: same content, nothing is packed again
    write_tar(root / 'x.tar', side_by_side(8))
    assert CaptionedImages(root, 'train', 16).key != a.key


def test_pairs_are_all_pairs_once(tmp_path):
    rows = [
        dict(image=f'{i:03}.jpg', split='train' if i else 'val', captions=[f'{i}.{k}' for k in range(1 + i % 3)])
        for i in range(7)
    ]
    p = CaptionedImages(folder(tmp_path / 'r', 7, 'captions.jsonl', '\n'.join(map(json.dumps, rows))), 'train', 16)
    images, texts = p.batch(range(len(p)))
    assert sorted(texts) == sorted(c for r in rows[1:] for c in r['captions']) and images.shape == (
        len(texts),
        3,
        16,
        16,
    )
    assert len(set(p.owner[:6])) == 6 and [t.split('.')[0] for t in texts] == [str(o + 1) for o in p.owner]
    again = p.batch(np.array([3, 1]))
    assert again[1] == [texts[3], texts[1]] and torch.equal(again[0], images[[3, 1]])


def child(code, tmp_path, **kw):
    return subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(code)],
        env=dict(os.environ, CIS_STORE=str(tmp_path / 'store'), PYTHONPATH=os.pathsep.join(sys.path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kw,
    )


@pytest.mark.e2e
def test_a_killed_packing_goes_on_where_it_was(tmp_path, monkeypatch):
    "The kill comes in the second portion; the first is not made again, and the result is as without a kill."
    n = PACK_CHUNK + 5
    root = folder(
        tmp_path / 'r', n, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(n))
    )
    p = child(
        f'''
        import time, cis_nb.data.packed as d
        square, made = d.center_square, []
        def slow(img, size):
            made.append(1)
            return square(img, size) if len(made) <= {PACK_CHUNK} else print('packing', flush=True) or time.sleep(60)
        d.center_square = slow
        d.packed_folder({str(root)!r}, 16, workers=1)''',
        tmp_path,
    )
    assert p.stdout.readline() == 'packing\n'
    notes = lambda: list((tmp_path / 'store').rglob('images.jsonl'))  # noqa: E731
    while not notes() or not notes()[0].read_text().endswith('\n'):
        time.sleep(0.05)
    p.send_signal(signal.SIGKILL)
    p.wait()
    assert not list((tmp_path / 'store').rglob('manifest.json'))
    made, square = [], packed.center_square
    monkeypatch.setattr(packed, 'center_square', lambda img, size: made.append(1) or square(img, size))
    after = CaptionedImages(root, 'train', 16, workers=1)
    assert len(made) == 5
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'another'))
    whole = CaptionedImages(root, 'train', 16, workers=1)
    assert len(made) == 5 + n and after.key == whole.key
    assert (after.folder / 'images.npy').read_bytes() == (whole.folder / 'images.npy').read_bytes()


def test_a_note_that_was_cut_does_not_count(tmp_path):
    root = folder(tmp_path / 'r', 6, 'captions.csv', 'image,caption\n')
    places = [Place(str(root / f'{i:03}.jpg')) for i in range(6)]
    notes = pack(places, tmp_path / 'x.npy', 16, chunk=2)
    rows = np.load(tmp_path / 'x.npy')
    (tmp_path / 'x.jsonl').write_bytes((tmp_path / 'x.jsonl').read_bytes()[:-9])
    np.load(tmp_path / 'x.npy', mmap_mode='r+')[4:] = 0
    assert pack(places, tmp_path / 'x.npy', 16, chunk=2) == notes
    assert np.array_equal(np.load(tmp_path / 'x.npy'), rows)


@pytest.mark.e2e
@pytest.mark.skipif(not hasattr(os, 'posix_fallocate'), reason='no posix_fallocate here')
def test_a_full_disk_is_an_error_with_a_remedy(tmp_path):
    root = folder(
        tmp_path / 'r', 60, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(60))
    )
    p = child(
        f'''
        import resource, signal, cis_nb.data.packed as d
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        d.packed_folder({str(root)!r}, 64, workers=1)''',
        tmp_path,
    )
    err = p.communicate()[1]
    assert p.returncode == 1 and 'CIS_STORE' in err and 'disk full' in err
    assert not list((tmp_path / 'store').rglob('manifest.json')) and not list((tmp_path / 'store').rglob('*.npy'))


@pytest.mark.e2e
def test_two_processes_pack_once(tmp_path):
    root = folder(
        tmp_path / 'r', 8, 'captions.csv', 'image,caption\n' + ''.join(f'{i:03}.jpg,thing {i}\n' for i in range(8))
    )
    code = f'import cis_nb.data.packed as d; print(d.packed_folder({str(root)!r}, 16, workers=1))'
    runs = [child(code, tmp_path) for _ in range(2)]
    said = [r.communicate()[0].strip() for r in runs]
    assert said[0] == said[1] and len(list((tmp_path / 'store').rglob('manifest.json'))) == 1


@needs_data('coco_mini')
def test_coco_mini_is_read_and_packed():
    p = CaptionedImages(coco_mini, 'val', 32)
    assert p.layout == 'COCO captions' and p.splits == dict(train=80, val=79) and len(p) == 395
    assert p.skipped.counts() == {'image without a caption': 80}
    assert p.batch([0])[0].float().std() > 10


@pytest.mark.parametrize('size', [0, -1, 2.5, '64'])
def test_a_size_that_is_no_whole_number_above_zero_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match='size: must be an integer of at least 1'):
        packed_folder(tmp_path, size)
