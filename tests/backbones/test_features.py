"The feature store: images of any mode, damaged images, kills, full disks."

import copy
import io
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from PIL import Image
from cis_nb.backbones.loading import load_backbone
from cis_nb.backbones.features import TextMemory, image_features, text_features
from cis_nb.data.image_sources import ImageSource
from cis_nb.data.products import packed_source, white_squares
from projects import ROOT

torch.set_num_threads(1)


@pytest.fixture(scope='session')
def b():
    return load_backbone('tiny', 'none', device='cpu')


def picture(i):
    return Image.fromarray(np.random.default_rng(i).integers(0, 256, (64, 64, 3), np.uint8))


# --- the feature store


@pytest.mark.parametrize('mode', ['L', 'P', 'RGBA', 'CMYK', 'LA', '1', 'I;16', 'F'])
def test_pictures_of_any_mode(b, store, mode):
    image = (
        Image.fromarray(np.full((50, 80), 300, np.uint16))
        if mode == 'I;16'
        else picture(0).convert('L' if mode == 'F' else mode).convert(mode)
    )
    assert image_features(b, ['x'], lambda i: image, mode).counts == dict(encoded=1, skipped=0)


def bomb(side):
    f = io.BytesIO()
    Image.new('1', (side, side)).save(f, 'png')
    return f.getvalue()


def test_bad_pictures_are_skipped_counted_listed(b, store):
    ok = io.BytesIO()
    picture(1).save(ok, 'png')
    files = dict(
        good=ok.getvalue(), cut=ok.getvalue()[:3000], empty=b'', page=b'<html>', large=bomb(9500), huge=bomb(14000)
    )
    f = image_features(b, list(files) * 3, lambda i: Image.open(io.BytesIO(files[i])), 'bad')
    assert f.ids == ['good'] and f.counts == dict(encoded=1, skipped=5)
    reason = dict(zip(f.skipped.id, f.skipped.reason))
    assert (
        'DecompressionBomb' in reason['large'] and 'DecompressionBomb' in reason['huge'] and np.isnan(f.array[1:]).all()
    )


def test_any_id(b, store):
    ids = [('a', 1), ('a', 2), ('a', 1)]
    f = image_features(b, ids, lambda i: picture(i[1]), 'tuples')
    assert f.index == {('a', 1): 0, ('a', 2): 1} and f[[('a', 2)]].shape == (1, 160)
    assert len(text_features(b, ['a', 'b', 'a'])) == 2


def encode_fifty(b, seen: list, at_most: int):
    "Features of fifty images; the process is killed when it loads more than `at_most`."

    def load(i):
        seen.append(i)
        if len(seen) > at_most:
            os.kill(os.getpid(), signal.SIGKILL)
        return picture(i)

    return image_features(b, list(range(50)), load, 'kill', block=8)


@pytest.mark.e2e
def test_kill_9_leaves_nothing_finished_and_work_goes_on(b, store):
    p = multiprocessing.get_context('fork').Process(target=encode_fifty, args=(b, [], 30))
    p.start()
    p.join(120)
    assert p.exitcode == -signal.SIGKILL
    assert not list((store / 'store' / 'features').glob('tiny-*'))
    seen = []
    f = encode_fifty(b, seen, 50)
    assert min(seen) == 24 and len(seen) == 26
    with torch.no_grad():
        torch.testing.assert_close(
            f[[0, 23, 24, 49]], b.encode_image([picture(i) for i in (0, 23, 24, 49)]), atol=1e-5, rtol=1e-4
        )


def test_full_disk_is_an_error_and_work_goes_on(b, store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match='disk full.*CIS_STORE'):
            image_features(b, list(range(50)), picture, 'full', block=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert image_features(b, list(range(50)), picture, 'full', block=8).counts == dict(encoded=50, skipped=0)


def test_not_finite_features_are_an_error(b, store):
    bad = copy.deepcopy(b)
    with torch.no_grad():
        bad.model.visual.head.proj.weight[0, 0] = float('inf')
    with pytest.raises(ValueError, match='not finite'):
        image_features(bad, [1, 2], picture, 'nan')


def test_a_text_is_read_once():
    read = []
    r = TextMemory(SimpleNamespace(D=1, encode_text=lambda ts: read.append(list(ts)) or torch.ones(len(ts), 1)))
    assert r(['a', 'b', 'a']).shape == (3, 1) and r(['b']).shape == (1, 1)
    assert read == [['a', 'b']] and r([]).shape == (0, 1)


# --- the code of a loader is part of the key


def upright(i):
    return picture(i)


def turned(i):
    return picture(i).rotate(180)


def source(load):
    return ImageSource([0, 1], lambda i: load(i), 'pictures')


KEPT = dict(
    features=lambda s, b: image_features(b, s.ids, s.load, s.key).array,
    pixels=lambda s, b: s.pixels(16)[0],
    white_squares=lambda s, b: white_squares(s, 16)[0],
    packed_source=lambda s, b: packed_source(s, 64).features(b).array,
)


@pytest.mark.parametrize('what', KEPT)
def test_another_loader_of_the_same_images_gives_another_result(what, b, store):
    one, again, other = (np.array(KEPT[what](source(load), b)) for load in (upright, upright, turned))
    assert (one == again).all() and not (one == other).all()


CROP = '''
from cis_nb.benchmarks.genecis import _loader
from cis_nb.core.code import loader_version

print(loader_version(_loader({}, 'official')))
'''


@pytest.mark.e2e
def test_the_crop_of_a_benchmark_is_part_of_the_key(tmp_path):
    ignore = shutil.ignore_patterns('__pycache__', 'tiny*')
    package = shutil.copytree(ROOT / 'cis_nb', tmp_path / 'cis_nb', ignore=ignore)
    file = package / 'benchmarks/genecis.py'

    def version():
        env = dict(os.environ, PYTHONPATH=str(tmp_path))
        run = subprocess.run([sys.executable, '-c', CROP], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert not run.returncode, run.stderr
        return run.stdout

    before, text = version(), file.read_text()
    assert version() == before and 'd=0.7' in text
    file.write_text(text.replace('d=0.7', 'd=0.9'))
    assert version() != before
