"The run store: kills, races, full disks, damaged folders."

import tracemalloc
import hashlib
import ast
import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
from process_trees import left_after, processes_of, wait_for
from projects import ROOT
from cis_nb.backbones.conditional_vit import CondViT, ViTShape, write_condvit
from cis_nb.backbones.denoiser import Denoiser, DenoiserShape, write_denoiser
from cis_nb.backbones.loading import export_clip, load_backbone
from cis_nb.core import store as core
from cis_nb.core.code import path_hash
from cis_nb.core.store import _finished, fingerprint, manifest, stored
from cis_nb.methods.combiner import Combiner, export_combiner
from cis_nb.methods.pseudo_words import export_published, make_net

posix = pytest.mark.skipif(os.name != 'posix', reason='kill -9 and file limits need a POSIX system')
FILES = 6


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    "Every test has a store of its own."
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    for k in ('CIS_REPORT', 'CIS_EXPERIMENT', 'CIS_PROFILE', 'CIS_DATA'):
        monkeypatch.delenv(k, raising=False)
    return tmp_path / 'store'


@pytest.fixture(scope='module')
def server():
    "Child processes that have the library loaded already."
    ctx = multiprocessing.get_context('forkserver')
    ctx.set_forkserver_preload(['cis_nb.core', 'pytest'])
    return ctx


def content(i):
    return f'file {i} ' * 2000


def build(folder):
    "Six files, each written in two halves, one of them in a folder below; goes on where an earlier attempt stopped."
    for i in range(FILES):
        path = folder / ('deep' if i == 3 else '.') / f'{i}.txt'
        if path.exists() and path.read_text() == content(i):
            continue
        path.parent.mkdir(exist_ok=True)
        with open(path, 'w') as f:
            f.write(content(i)[:7000])
            f.flush()
            time.sleep(float(os.environ['PAUSE']))  # seconds; not a part of the key
            f.write(content(i)[7000:])
        with open(folder.parent.parent / 'log', 'a') as f:
            f.write(f'{i}\n')


def ask(store, resume=False, pause=0.004):
    os.environ.update(CIS_STORE=str(store), PAUSE=str(pause))
    return stored('runs', 'six files', dict(n=FILES), build, resume=resume)


def right(folder):
    return _finished(folder) and all(
        (folder / ('deep' if i == 3 else '.') / f'{i}.txt').read_text() == content(i) for i in range(FILES)
    )


def seen(store):
    "What a person or a program finds in the store: folders under a finished name."
    runs = store / 'runs'
    return [p for p in runs.iterdir() if not p.name.startswith('.')] if runs.exists() else []


def wipe(store):
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()


def killed_after(server, store, seconds, **kw):
    "Start a build in another process and kill it; True if it was still at work."
    child = server.Process(target=ask, args=(store,), kwargs=kw)
    child.start()
    deadline = time.monotonic() + 20
    while not (store / 'runs').exists() and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(seconds)
    child.kill()
    child.join()
    return child.exitcode == -signal.SIGKILL


@pytest.mark.e2e
@posix
def test_kill_at_random_moments(server, store):
    "At least 30 builds are killed at work; nothing unfinished ever looks finished; asking again always ends well."
    store.mkdir()
    ask(store)
    start = time.monotonic()
    wipe(store)
    ask(store)
    usual = time.monotonic() - start
    rng, kills = random.Random(0), 0
    for _ in range(200):
        wipe(store)
        kills += killed_after(server, store, rng.uniform(0, 1.2 * usual))
        assert all(right(p) for p in seen(store))
        done = ask(store, pause=0)
        assert right(done) and seen(store) == [done] and not list(done.parent.glob('.partial-*'))
        if kills >= 30:
            break
    assert kills >= 30


@pytest.mark.e2e
@posix
def test_kill_and_resume(server, store):
    "A resumable build that is killed again and again arrives; no finished file is written twice but after a kill."
    store.mkdir()
    kills = 0
    while not seen(store) and kills < 100:
        kills += killed_after(server, store, 0.012, resume=True)
        assert all(right(p) for p in seen(store))
    done = ask(store, resume=True)
    assert right(done) and kills > 0
    written = [int(n) for n in (store / 'log').read_text().split()]  # a kill between a file and its line loses the line
    assert len(written) == len(set(written)) and len(set(range(FILES)) - set(written)) <= kills


def die_in(store, where):
    "A build whose process dies inside one given step."

    def die(*a, **k):
        os.kill(os.getpid(), signal.SIGKILL)

    real = core._write_json

    def half(path, obj):
        Path(path).write_text(json.dumps(obj, default=str)[:40])
        die()

    def whole(path, obj):
        real(path, obj)
        die()

    if where == 'half a manifest':
        core._write_json = half
    if where == 'after the manifest':
        core._write_json = whole
    if where == 'at the renaming':
        os.replace = die
    if where == 'after the renaming':
        rename = os.replace

        def renamed(*a):
            rename(*a)
            die()

        os.replace = renamed
    ask(store, pause=0)


@pytest.mark.e2e
@posix
@pytest.mark.parametrize('where', ['half a manifest', 'after the manifest', 'at the renaming', 'after the renaming'])
@pytest.mark.parametrize('resume', [False, True])
def test_kill_in_the_last_steps(server, store, where, resume):
    child = server.Process(target=die_in, args=(store, where))
    store.mkdir()
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    assert len(seen(store)) == (where == 'after the renaming') and all(right(p) for p in seen(store))
    assert right(ask(store, resume=resume, pause=0))


def ask_together(store, barrier, answers):
    barrier.wait()
    answers.put(str(ask(store, pause=0.02)))


@pytest.mark.e2e
@posix
def test_two_processes_do_the_work_once(server, store):
    store.mkdir()
    barrier, answers = server.Barrier(3), server.Queue()
    children = [server.Process(target=ask_together, args=(store, barrier, answers)) for _ in range(3)]
    for c in children:
        c.start()
    found = {answers.get(timeout=60) for _ in children}
    for c in children:
        c.join()
    assert len(found) == 1 and right(Path(found.pop()))
    assert len((store / 'log').read_text().split()) == FILES


@pytest.mark.e2e
@posix
def test_waiting_process_takes_over_after_a_kill(server, store):
    "The lock of a dead process opens: the one that waits builds."
    store.mkdir()
    first = server.Process(target=ask, args=(store,), kwargs=dict(pause=0.5))
    first.start()
    while not list(store.glob('runs/.partial-*')):
        time.sleep(0.005)
    second = server.Process(target=ask, args=(store,))
    second.start()
    time.sleep(0.1)
    first.kill()
    first.join()
    second.join(30)
    assert second.exitcode == 0 and all(right(p) for p in seen(store)) and len(seen(store)) == 1


def limited(store, answers):
    "A build in a process that may not write files above 4 kB: the system itself refuses."
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        ask(store, pause=0)
    except OSError as e:
        answers.put((e.errno, str(e)))


@pytest.mark.e2e
@posix
def test_file_limit_of_the_system(server, store):
    store.mkdir()
    answers = server.Queue()
    child = server.Process(target=limited, args=(store, answers))
    child.start()
    code, text = answers.get(timeout=30)
    child.join()
    assert (
        code == errno.ENOSPC
        and 'disk full while building' in text
        and str(store / 'runs' / 'six-files-') in text
        and 'CIS_STORE' in text
    )
    assert seen(store) == [] and not list((store / 'runs').glob('.partial-*'))
    assert right(ask(store, pause=0))


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='needs /dev/full')
def test_full_disk_in_the_middle(store):
    def fill(folder):
        (folder / 'one').write_text('x')
        with open('/dev/full', 'w') as f:
            f.write('y')

    with pytest.raises(OSError, match='disk full while building .*free some space'):
        stored('runs', 'big', {}, fill)
    assert seen(store) == [] and not list((store / 'runs').glob('.partial-*'))


@pytest.mark.parametrize(
    'error',
    [
        OSError(errno.ENOSPC, 'No space left on device'),
        RuntimeError('I/O error: No space left on device (os error 28)'),
    ],
)
@pytest.mark.parametrize('moment', ['build', 'manifest'])
def test_full_disk_in_words(store, monkeypatch, error, moment):
    "Also in the very last write, and also where a library hides the error number."

    def fail(*a):
        raise error

    if moment == 'manifest':
        monkeypatch.setattr(core, '_write_json', fail)
    with pytest.raises(OSError, match='disk full') as e:
        stored('runs', 'big', {}, fail if moment == 'build' else lambda f: None)
    assert e.value.errno == errno.ENOSPC and seen(store) == []


READ_ONLY = """
import sys
from cis_nb.core.store import stored

try:
    stored(*('runs', 'small', dict(n=int(sys.argv[1]))), lambda folder: (folder / 'x').write_text('x'))
    print('done')
except OSError as e:
    print(type(e).__name__, e.errno, e)
"""


def namespaces() -> bool:
    "Can this user mount a file system that only its own processes see?"
    command = ['unshare', '-rm', 'mount', '-t', 'tmpfs', 'none', '/mnt']
    return bool(shutil.which('unshare')) and subprocess.run(command, capture_output=True).returncode == 0


def alone(folder, mount: str, code: str, *arguments) -> str:
    "What a program prints in a process that has its own mounts; `mount` is a shell's line with `folder` as $0."
    command = ['unshare', '-rm', 'sh', '-c', mount, str(folder), sys.executable, '-c', code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout + done.stderr


SMALL_DISK = 'mount -t tmpfs -o size=256k none "$0" && exec "$@"'


@pytest.mark.skipif(not namespaces(), reason='needs the right to mount, as `unshare -rm` gives it')
def test_read_only_disk(store):
    "What was finished stays usable, new work ends with the remedy: a real file system without the right to write."

    def said(number: int, *before) -> str:
        done = subprocess.run([*before, sys.executable, '-c', READ_ONLY, str(number)], capture_output=True, text=True)
        return done.stdout + done.stderr

    assert said(0) == 'done\n'
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    read_only = ['unshare', '-rm', 'sh', '-c', mounted, str(store)]
    assert said(0, *read_only) == 'done\n'
    new = said(1, *read_only)
    assert f'disk is read-only while building {store}' in new and 'set CIS_STORE' in new
    assert new.startswith(f'StorageFault {errno.EROFS}')


TEMPORARY = """
import os, sys, tempfile
from cis_nb.core.store import fresh_pool, temporary_folder

def large(folder):
    (folder / 'x').write_bytes(bytes(1 << 20))

try:
    if sys.argv[1] == 'chosen before':  # the disk has become read-only since, or full
        tempfile.tempdir = os.environ['TMPDIR']
    else:
        tempfile._candidate_tempdir_list = lambda: [os.environ['TMPDIR']]
    if sys.argv[2] == 'pool':
        fresh_pool(1)
    else:
        with temporary_folder('example') as folder:
            large(folder)
    print('done')
except OSError as e:
    print(type(e).__name__, e.errno, e)
"""


@pytest.mark.skipif(not namespaces(), reason='needs the right to mount, as `unshare -rm` gives it')
@pytest.mark.parametrize('what', ['folder', 'pool'])
@pytest.mark.parametrize('moment', ['chosen before', 'chosen now'])
def test_read_only_temporary_files(tmp_path, monkeypatch, what, moment):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    mounted = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    said = alone(tmp_path, mounted, TEMPORARY, moment, what)
    assert said.startswith(f'StorageFault {errno.EROFS}') and 'or TMPDIR (temporary files) to a folder' in said
    assert ('disk is read-only while using temporary files' if 'before' in moment else 'No usable temporary') in said
    assert alone(tmp_path, 'exec "$@"', TEMPORARY, moment, 'folder') == 'done\n'


@pytest.mark.skipif(not namespaces(), reason='needs the right to mount, as `unshare -rm` gives it')
def test_full_disk_of_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    said = alone(tmp_path, SMALL_DISK, TEMPORARY, 'chosen now', 'folder')
    assert said.startswith(f'StorageFault {errno.ENOSPC}') and 'disk full while using temporary files' in said


CHECKPOINTS = """
import os, sys
from pathlib import Path
import torch
from cis_nb.core.store import stored
from cis_nb.training.checkpoints import last_checkpoint, load_checkpoint, save_checkpoint

def build(folder):
    for step, width in enumerate((4, int(sys.argv[1]))):
        net = torch.nn.Linear(width, width)
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.ones(1, width)).sum().backward()
        optimizer.step()
        save_checkpoint(folder, dict(net=net), optimizer, dict(step=step))

try:
    stored('runs', 'x', {}, build, resume=True)
except OSError as e:
    print(type(e).__name__, e.errno, e)
net = torch.nn.Linear(4, 4)
(left,) = Path(os.environ['CIS_STORE']).glob('runs/.partial-*')
print(load_checkpoint(last_checkpoint(left), dict(net=net), torch.optim.AdamW(net.parameters())))
"""


@pytest.mark.skipif(not namespaces(), reason='needs the right to mount, as `unshare -rm` gives it')
@pytest.mark.parametrize('width', [400, 160])
def test_full_disk_in_a_checkpoint(store, width):
    "The fault is named, and the checkpoint before it stays whole; of the smaller net the weights have room."
    store.mkdir()
    said, state = alone(store, SMALL_DISK, CHECKPOINTS, str(width)).splitlines()
    assert said.startswith(f'StorageFault {errno.ENOSPC}') and f'disk full while building {store}' in said
    assert state == "{'step': 0}"


ARRAYS = """
import numpy as np
from PIL import Image
from cis_nb.core.store import stored
from cis_nb.data.image_sources import ImageSource
from cis_nb.data.products import white_squares
from cis_nb.retrieval.search import clustered_files, vector_files

images = ImageSource(['a', 'b'], lambda i: Image.new('RGB', (9, 9)), 'key')
large = np.zeros((1000, 100), np.float32)
for name, write in {
    'squares': lambda: images.pixels(512),
    'white squares': lambda: white_squares(images, 512),
    'clustered': lambda: clustered_files(1000, 100, 10),
    'vectors': lambda: vector_files('x', large, large[:1]),
    'saved': lambda: stored('runs', 'x', {}, lambda folder: np.save(folder / 'x.npy', large)),
}.items():
    try:
        print(name, write())
    except OSError as e:
        print(name, type(e).__name__, e.errno, 'disk full while building' in str(e))
"""


@pytest.mark.e2e
@pytest.mark.skipif(not namespaces(), reason='needs the right to mount, as `unshare -rm` gives it')
def test_full_disk_in_an_array(store):
    "A file that is mapped takes its space at once; without it the system would kill the process."
    store.mkdir()
    said = alone(store, SMALL_DISK, ARRAYS).splitlines()
    names = ('squares', 'white squares', 'clustered', 'vectors', 'saved')
    assert said == [f'{name} StorageFault {errno.ENOSPC} True' for name in names], said


EXPORTS = """
import os
from pathlib import Path
from types import SimpleNamespace
import pandas as pd
from cis_nb.backbones.conditional_vit import CondViT, ViTShape, write_condvit
from cis_nb.backbones.denoiser import Denoiser, DenoiserShape, write_denoiser
from cis_nb.backbones.loading import export_clip, load_backbone
from cis_nb.core.report import keep_table, this_run
from cis_nb.methods.combiner import Combiner, export_combiner
from cis_nb.methods.pseudo_words import export_published, make_net

folder, phi, combiner = Path(os.environ['CIS_STORE']), make_net('phi', D=64, W=64, hidden=512), Combiner(64, 64, 512)
phi, vit = SimpleNamespace(phi=phi, unit_input=False), CondViT(ViTShape(64, 32, 64, 2, 32).build())
clip = load_backbone('tiny', 'none', device='cpu')
denoiser = Denoiser(DenoiserShape(64, 2, 4, 4, 16, 64, 16))
for name, write in {
    'phi.pt': lambda path: export_published(phi, path),
    'phi.safetensors': lambda path: export_published(phi, path),
    'combiner.pt': lambda path: export_combiner(combiner, path),
    'vit.safetensors': lambda path: write_condvit(vit, path),
    'clip.pt': lambda path: export_clip(clip, path),
    'clip.safetensors': lambda path: export_clip(clip, path),
    'denoiser.safetensors': lambda path: write_denoiser(denoiser, path),
    'kept.csv': lambda path: keep_table(pd.DataFrame(dict(n=range(50000))), this_run(), path),
}.items():
    (folder / name).write_text('before')
    try:
        write(folder / name)
    except OSError as e:
        print(name, type(e).__name__, e.errno, f'disk full while writing {folder / name}' in str(e))
    print((folder / name).read_text(), [p.name for p in folder.iterdir() if 'tmp' in p.name])
"""


@pytest.mark.parametrize('export', ['phi', 'combiner', 'clip', 'condvit', 'denoiser'])
def test_an_export_has_its_ending_and_its_folder(tmp_path, monkeypatch, export):
    "Nothing is written before the name is known to be right, and nothing is left after it."
    monkeypatch.chdir(tmp_path)
    phi = SimpleNamespace(phi=make_net('phi', D=8, W=6, hidden=12), unit_input=False)
    write = dict(
        phi=lambda path: export_published(phi, path),
        combiner=lambda path: export_combiner(Combiner(8, 8, 12), path),
        clip=lambda path: export_clip(load_backbone('tiny', device='cpu'), path),
        condvit=lambda path: write_condvit(CondViT(ViTShape(64, 32, 64, 1, 32).build()), path),
        denoiser=lambda path: write_denoiser(Denoiser(DenoiserShape(8, 1, 2, 2, 4, 8, 2)), path),
    )[export]
    for name in ('p.npz', 'p', '', '.', 'p.safetensors.txt', str(tmp_path)):
        with pytest.raises(ValueError, match='cannot be written: give a name that ends in .safetensors'):
            write(name)
    for name in ('missing/p.safetensors', tmp_path / 'missing' / 'p.safetensors'):
        with pytest.raises(FileNotFoundError, match='cannot be written: there is no folder .*missing'):
            write(name)
    assert not list(tmp_path.iterdir())
    Path('f.safetensors').mkdir()
    with pytest.raises(ValueError, match='f.safetensors cannot be written: it is a folder'):
        write('f.safetensors')
    assert write('p.safetensors').is_file() and [*Path('f.safetensors').iterdir()] == []


@pytest.mark.e2e
@pytest.mark.skipif(not namespaces(), reason='needs the right to mount, as `unshare -rm` gives it')
def test_full_disk_in_an_export(store):
    "The file of before stays, and nothing else is left."
    store.mkdir()
    said = alone(store, SMALL_DISK, EXPORTS).splitlines()
    names = ('phi.pt', 'phi.safetensors', 'combiner.pt', 'vit.safetensors', 'clip.pt', 'clip.safetensors')
    names += ('denoiser.safetensors', 'kept.csv')
    assert said == [line for name in names for line in (f'{name} StorageFault {errno.ENOSPC} True', 'before []')], said


@pytest.mark.parametrize(
    'fault, full',
    [
        (OSError('1600 requested and 800 written'), True),  # of NumPy
        (RuntimeError('[enforce fail at inline_container.cc:664] . unexpected pos 128 vs 22'), True),  # of PyTorch
        (RuntimeError('the position is unexpected'), False),
        (OSError(errno.EIO, 'No space left for this word'), False),
    ],
)
def test_a_full_disk_is_known_by_the_words_of_libraries(store, fault, full):
    def build(folder):
        raise fault

    with pytest.raises(core.StorageFault if full else type(fault)) as e:
        stored('runs', 'x', {}, build)
    assert isinstance(e.value, core.StorageFault) == full


def test_full_disk_keeps_what_can_be_resumed(store):
    def in_two_parts(folder):
        if (folder / 'checkpoint').exists():
            (folder / 'was').write_text((folder / 'checkpoint').read_text())
        else:
            (folder / 'checkpoint').write_text('step 7')
            raise OSError(errno.ENOSPC, 'No space left on device')

    with pytest.raises(OSError, match='disk full'):
        stored('runs', 'x', {}, in_two_parts, resume=True)
    done = stored('runs', 'x', {}, in_two_parts, resume=True)
    assert (done / 'was').read_text() == 'step 7'


def test_an_error_keeps_its_type_and_names_the_folder(store):
    def wrong(folder):
        (folder / 'half').write_text('h')
        raise KeyError('color')

    with pytest.raises(KeyError) as e:
        stored('runs', 'x', {}, wrong)
    if hasattr(e.value, '__notes__'):
        assert f'while building {store}' in e.value.__notes__[0]
    assert seen(store) == [] and not list((store / 'runs').glob('.partial-*'))


def no_manifest(f):
    (f / 'manifest.json').unlink()


def half_manifest(f):
    (f / 'manifest.json').write_text((f / 'manifest.json').read_text()[:50])


def empty_manifest(f):
    (f / 'manifest.json').write_text('')


def other_json(f):
    (f / 'manifest.json').write_text('[1, 2]')


def other_hash(f):
    (f / 'manifest.json').write_text(json.dumps(manifest(f) | dict(hash='0' * 16)))


def not_text(f):
    (f / 'manifest.json').write_bytes(b'\xff\xfe\x00')


def lost_file(f):
    (f / 'deep' / '3.txt').unlink()


def cut_file(f):
    (f / '1.txt').write_text('file 1')


def moved_bytes(f):
    "As many files and bytes as before."
    (f / '1.txt').write_text(content(1)[:-1])
    (f / '2.txt').write_text(content(2) + '2')


def longer_file(f):
    (f / '1.txt').write_text(content(1) * 2)


def other_file(f):
    "One is lost, and a longer one of another name is there."
    (f / '1.txt').unlink()
    (f / 'more.txt').write_text(content(1) * 2)


def changed_manifest(f, **changes):
    (f / 'manifest.json').write_text(json.dumps(manifest(f) | changes))


def counts_of_nothing(f):
    (f / '1.txt').unlink()
    changed_manifest(f, files=0, bytes=0)


def fewer_sizes(f):
    (f / '1.txt').unlink()
    changed_manifest(f, sizes={k: v for k, v in manifest(f)['sizes'].items() if k != '1.txt'})


def impossible_name(f):
    changed_manifest(f, sizes=dict(manifest(f)['sizes'], **{'%00': 0}), files=FILES + 1)


def no_sizes(f):
    "A manifest of an older version."
    (f / 'manifest.json').write_text(json.dumps({k: v for k, v in manifest(f).items() if k != 'sizes'}))


def folder_for_file(f):
    (f / '1.txt').unlink()
    (f / '1.txt').mkdir()


DAMAGES = [
    no_manifest,
    half_manifest,
    empty_manifest,
    other_json,
    other_hash,
    not_text,
    lost_file,
    cut_file,
    moved_bytes,
]
DAMAGES += [longer_file, other_file, counts_of_nothing, fewer_sizes, impossible_name, no_sizes, folder_for_file]


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_folder_is_told_and_built_again(store, damage):
    store.mkdir()
    done = ask(store, pause=0)
    damage(done)
    with pytest.warns(UserWarning, match='six-files-.* is incomplete or damaged: building it again'):
        again = ask(store, pause=0)
    assert again == done and right(done)


NAMES = [b'caf\xe9', 'ü ber'.encode(), b'a%20b', b'%', b'line\nbreak', b'below/manifest.json']


@posix
@pytest.mark.parametrize('name', NAMES)
def test_files_of_any_name_are_known_by_their_sizes(store, name):
    "A name that is no text, or none without escapes, and one that the manifest itself has, in a folder below."

    def write(folder):
        path = folder / os.fsdecode(name)
        path.parent.mkdir(exist_ok=True)
        path.write_text('x')

    done = stored('runs', 'names', {}, write)
    assert list(manifest(done)['sizes'].values()) == [1] and _finished(done)
    (done / os.fsdecode(name)).unlink()
    assert not _finished(done)


def test_older_manifests_can_be_read(store):
    "A run of an older version has no sizes: it is shown and loaded, and made again where it is asked for."
    store.mkdir()
    done = ask(store, pause=0)
    no_sizes(done)
    assert manifest(done)['params'] == dict(n=FILES) and not _finished(done)


def test_finished_work_that_cannot_be_verified_is_told(store, monkeypatch):
    "It stands in the list, and the folders after it are verified too."
    lost, unreadable, same = (stored('runs', n, {}, lambda f: (f / n).write_text(n)) for n in 'abc')  # noqa: B023
    (store / 'runs' / 'notes').mkdir()  # of the reader, as files are
    (store / 'contents').mkdir()
    (store / 'contents' / f'a-{"0" * 16}').write_text('x')
    no_manifest(lost)

    def path_hash_of_a_bad_disk(path):
        if path.parent == unreadable:
            raise OSError(errno.EIO, 'Input/output error', str(path))
        return path_hash(path)

    monkeypatch.setattr(core, 'path_hash', path_hash_of_a_bad_disk)
    said = dict(core.verified_work())
    assert list(said) == [lost, unreadable, same] and said[same] == ''
    assert said[lost] == 'has no manifest.json: delete it, and it is made again'
    assert 'Input/output error' in said[unreadable] and str(unreadable / 'b') in said[unreadable]


def test_manifest_says_what_is_wrong(store):
    store.mkdir()
    done = ask(store, pause=0)
    assert manifest(done)['params'] == dict(n=FILES) and manifest(done)['files'] == FILES
    for damage, words in [
        (half_manifest, 'broken'),
        (other_json, 'is list, not an object; delete the folder'),
        (no_manifest, 'not a finished run'),
    ]:
        damage(done)
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            manifest(done)


def test_a_folder_that_is_missing_is_told_with_what_lies_beside_it(store):
    for name in ('05_train.lincir', '05_train.c.1', '05_train.c.2', '05_train.cirr'):
        (store / name).mkdir(parents=True)
    for given, near in {'linci': 'lincir', 'lincri': 'lincir', 'c.': 'c.2 or {}c.1'}.items():
        said = f'is no folder; runs are in {store}/run; did you mean {{}}{near}?'.format(*[store / '05_train.'] * 2)
        with pytest.raises(FileNotFoundError) as e:
            manifest(store / f'05_train.{given}')
        assert str(e.value).endswith(said)
    for missing in ('zzz', 'zzz/05_train.lincir'):
        with pytest.raises(FileNotFoundError, match='runs are in .*/run$'):
            manifest(store / missing)


def test_more_files_do_no_harm(store):
    "Notes laid into a finished folder do not spoil it."
    store.mkdir()
    done = ask(store, pause=0)
    (done / 'note').write_text('mine')
    assert ask(store) == done and (done / 'note').exists()


def test_names_stay_inside_the_store(store):
    for name in ('../../out', 'a/b', 'ü ber', 'x' * 300, ''):
        assert stored('runs', name, {}, lambda f: None).parent == store / 'runs'


@pytest.mark.e2e
def test_fingerprints_do_not_depend_on_the_process(tmp_path):
    things = "dict(b=[1, 2.5, None, True], a='ü', c=dict(z=1e-5, y=np.arange(3.)))"
    program = f'import numpy as np; from cis_nb.core.store import fingerprint; print(fingerprint({things}))'
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    prints = {
        subprocess.run(
            [sys.executable, '-c', program],
            env=os.environ | dict(PYTHONHASHSEED=s, PYTHONPATH=path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for s in '12'
    }
    assert prints == {fingerprint(eval(things))} == {'fdead22e89775cad'}


def test_fingerprint_of_a_folder(tmp_path, store):
    a, b = tmp_path / 'a', tmp_path / 'b'
    for f in (a, b):
        (f / 'x').mkdir(parents=True)
        (f / 'x' / '1').write_text('one')
        (f / '2').write_text('two')
    assert fingerprint(a) == fingerprint(b) != fingerprint(str(a))
    (b / '2').write_text('owt')
    assert fingerprint(a) != fingerprint(b)
    run = stored('runs', 'r', {}, lambda f: (f / 'big').write_text('x'))
    assert fingerprint(run) == fingerprint({'content': manifest(run)['hash']})
    assert fingerprint(np.array(3.0)) != fingerprint(np.array([3.0]))


def test_every_part_of_the_key_counts(store):
    ranks, measures = (getattr(import_module('cis_nb.retrieval.metrics'), name) for name in ('ranks', 'measures'))
    scramble = import_module('cis_nb.world.cloth').scramble

    def nothing(folder):
        return 1

    def something(folder):
        return 2

    def asked(kind='k', variant='v', params=dict(a=1), build=nothing, **kw):
        return stored(kind, variant, params, build, **kw)

    folders = [
        asked(),
        asked(kind='l'),
        asked(variant='w'),
        asked(params=dict(a=2)),
        asked(params=dict(a=1.0)),
        asked(inputs=['abc']),
        asked(build=something),
        asked(build=path_hash),  # of this library: no file of tests counts
        asked(build=path_hash, code=[ranks]),
        asked(build=path_hash, code=[scramble]),
    ]
    assert len(set(folders)) == len(folders)
    assert asked() == folders[0]
    assert asked(build=path_hash, code=[measures]) == asked(build=path_hash, code=[ranks])  # two of one module
    with pytest.raises(TypeError, match='with readable code'):
        asked(code=['cis_nb.core.store'])


STARTERS = {'ProcessPoolExecutor', 'Pool', 'Process', 'DataLoader', 'get_context'}


def test_no_module_starts_processes_as_copies_of_itself():
    "A copy of a process that has used a GPU or has threads may hang."
    starts = {}
    for file in (ROOT / 'cis_nb').rglob('*.py'):
        for node in ast.walk(ast.parse(file.read_text(encoding='utf-8'))):
            name = isinstance(node, ast.Call) and getattr(node.func, 'attr', getattr(node.func, 'id', ''))
            if name in STARTERS:
                starts.setdefault(file.stem, []).append(ast.unparse(node))
    assert starts.pop('store') == ["get_context('forkserver')"] + [
        'ProcessPoolExecutor(workers, fresh_processes(*preload), end_with_parent)'
    ]
    assert set(starts) == {'throughput'} and all(call.startswith('fresh.') for call in starts['throughput'])


SLOW_START = """
import concurrent.futures, os, sys
sys.path.insert(0, sys.argv[1])
from cis_nb.core.store import fresh_pool
with fresh_pool(1, 'begins_slowly') as pool:
    print(pool.submit(os.getpid).result())
"""


@posix
@pytest.mark.skipif(not Path('/proc').exists(), reason='needs /proc')
def test_a_server_that_begins_slowly_ends_with_who_has_asked_for_it(tmp_path):
    "A kill while the server imports for a minute: it is gone within some seconds."
    (tmp_path / 'begins_slowly.py').write_text("import time; open('begun', 'w').close(); time.sleep(60)")
    store, script = tmp_path / 'of its own', [sys.executable, '-c', SLOW_START, str(tmp_path)]
    p = subprocess.Popen(script, cwd=tmp_path, env=os.environ | dict(CIS_STORE=str(store)))
    wait_for(tmp_path / 'begun', p, 60)
    assert len(processes_of(store)) >= 2
    p.kill()
    p.wait()
    assert left_after(store, 10) == {}


def test_fresh_processes_import_what_they_run():
    with core.fresh_pool(1) as pool:
        assert pool.submit(fingerprint, ['a']).result() == fingerprint(['a'])
        assert pool.submit(os.getppid).result() != os.getpid()


def test_the_fingerprint_of_an_array_on_disk_takes_no_copy_of_it(tmp_path):
    "A packed set of images may be larger than the memory; the digest is that of the array's bytes."
    a = np.lib.format.open_memmap(tmp_path / 'a.npy', 'w+', np.uint8, (64, 1 << 20))
    a[:] = 7
    tracemalloc.start()
    found = fingerprint(a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    digest = hashlib.sha256(bytes([7]) * a.size).hexdigest()
    text = json.dumps({'array': ['|u1', [64, 1 << 20], digest]}, sort_keys=True, separators=(',', ':'))
    assert found == hashlib.sha256(text.encode()).hexdigest()[:16] and peak < 1 << 20
    assert fingerprint(np.zeros((0, 3))) != fingerprint(np.zeros((3, 0)))
