"Weights, checkpoints and records of the store, each file changed in every way."

import io
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hostile import attack, byte_changes, json_changes, text_changes
from safetensors.torch import load, save

from cis_nb.backbones.loading import load_backbone
from cis_nb.backbones.weights import weights_file
from cis_nb.core.experiment_files import RECORDS, read_notebook, read_record
from cis_nb.core.store import manifest, stored
from cis_nb.methods.pseudo_words import export_published, make_net, read_published_net
from cis_nb.retrieval.search import SearchIndex, build_index
from cis_nb.training.checkpoints import load_checkpoint, save_checkpoint
from cis_nb.training.validation import read_net, run_folder, write_net

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures('store')]
JSON = (json_changes, text_changes)


def test_manifests(tmp_path):
    folder = stored('kind', 'name', {}, lambda to: (to / 'a.txt').write_text('a'))
    read = lambda: (manifest(folder)['hash'], {})  # noqa: E731
    assert attack('records', folder / 'manifest.json', read, JSON, names=[folder.name]) == []


def test_finished_work_is_made_again(tmp_path):
    "Whatever lies in the place of its manifest."
    build = lambda: stored('kind', 'name', {}, lambda to: (to / 'a.txt').write_text('a'))  # noqa: E731
    read = lambda: ((build() / 'a.txt').read_text(), {})  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert attack('finished work', build() / 'manifest.json', read, JSON) == []


RECORD = dict(
    experiment='a', headline='b', params={}, runs=['run/a'], counts={}, created='c', versions={}, machine={}, inputs={}
)


@pytest.mark.parametrize('name', RECORDS)
def test_records_of_experiments(tmp_path, name):
    "A damaged record is an error where it is needed, and counts as none where it is not."
    path = tmp_path / name
    path.write_text(json.dumps(RECORD | dict(seconds=1.5, reasons=['x'], traceback=[])))
    fields = [*RECORDS[name]]

    def read():
        found, wrong = read_record(path)
        if wrong or not found:
            raise ValueError(f'{path}: {wrong or "there is none"}')
        return [found[f] for f in fields], {}

    others = rf'(?!({"|".join(fields)})\b)\w+: |(params|runs|inputs|counts|versions|machine)\.|runs|reasons|seconds|'
    assert attack('records', path, read, JSON, valid_too=f'{name}, ({others}\\w+: text)') == []


def test_reports_of_trainings(tmp_path):
    path = tmp_path / 'receipt.json'
    path.write_text(json.dumps(dict(runs=['run/a'], params={})))
    away = 'gone|a pipe|a folder|a link|an endless device'  # a run has no receipt
    bad = attack('records', path, lambda: (run_folder(tmp_path), {}), JSON, valid_too=f'{away}|params|runs.0: text')
    assert bad == []


def test_notebooks(tmp_path):
    cell = dict(cell_type='code', source=['1'], metadata={}, outputs=[])
    path = tmp_path / 'a.ipynb'
    path.write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
    free = r'source|metadata|outputs|cell_type|nbformat'  # another notebook
    assert attack('notebooks', path, lambda: (read_notebook(path), {}), JSON, valid_too=free) == []


def test_search_index(tmp_path):
    x = np.eye(8, dtype=np.float32)
    at = build_index(x, [f'i{k}' for k in range(8)], 'made-up', kind='flat').folder

    def read():
        index = SearchIndex(at)
        return index.search(x[:2], 2), {}

    assert attack('search index', at / 'index.json', read, JSON) == []
    assert attack('search index', at / 'index.faiss', read, [byte_changes]) == []


def weights_changes(data: bytes):
    "(name, bytes): other tensors, other numbers."

    def changed(change):
        tensors = load(data)
        change(tensors)
        return save(tensors)

    first = 'logit_scale'
    yield 'a key is missing', changed(lambda t: t.pop(first))
    yield 'a key more', changed(lambda t: t.update(more=torch.zeros(1)))
    yield 'another shape', changed(lambda t: t.update({first: torch.zeros(3)}))
    yield 'integers', changed(lambda t: t.update({first: torch.zeros((), dtype=torch.int32)}))
    yield 'no tensors', changed(lambda t: t.clear())
    yield 'a length beyond the file', (2**62).to_bytes(8, 'little') + data[8:]
    yield 'a header that is no JSON', data[:8] + b'x' * 50 + data[58:]


def test_weights(tmp_path):
    path = tmp_path / 'run' / 'model.safetensors'
    path.parent.mkdir()
    path.write_bytes(weights_file('tiny_xs', 'default').read_bytes())
    (path.parent / 'backbone.json').write_text(json.dumps(dict(backbone='tiny_xs')))

    def read():
        loaded = load_backbone('tiny_xs', pretrained=str(path.parent), device='cpu')
        return loaded.fingerprint, {}

    assert attack('weights', path, read, [weights_changes, byte_changes], names=['run']) == []
    note, free = path.parent / 'backbone.json', 'gone|a pipe|a folder|a link|an endless device'  # it may be absent
    assert attack('weights', note, read, JSON, valid_too=free) == []


class Runs:
    "A pickle that would run code."

    def __reduce__(self):
        return (exec, ('raise SystemExit("code has run")',))


def published_changes(data: bytes):
    "(name, bytes): other files of PyTorch."

    def saved(thing):
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        return buffer.getvalue()

    tensors = torch.load(io.BytesIO(data), weights_only=True)['Phi']
    first = next(iter(tensors))
    yield 'code', saved(Runs())
    yield 'code beside tensors', saved(dict(Phi=tensors, run=Runs()))
    yield 'a list', saved([1, 2])
    yield 'a number', saved(3)
    yield 'nothing', saved({})
    yield 'numbers for tensors', saved(dict(Phi={k: 1 for k in tensors}))
    yield 'a key is missing', saved(dict(Phi={k: t for k, t in tensors.items() if k != first}))
    yield 'another shape', saved(dict(Phi=tensors | {first: torch.zeros(2)}))
    yield 'integers', saved(dict(Phi=tensors | {first: tensors[first].int()}))
    yield 'another method', saved(dict(state_dict_img2text=tensors))


def test_published_weights(tmp_path):
    path = tmp_path / 'phi.pt'
    phi = make_net('phi', D=8, W=6, hidden=12)
    export_published(SimpleNamespace(phi=phi), path)

    def read():
        return {k: v for k, v in read_published_net(path, 'phi', 8, 6).state_dict().items()}, {}

    assert attack('weights', path, read, [published_changes, byte_changes]) == []


def tensor_changes(data: bytes):
    "(name, bytes): other tensors of a layer."
    tensors = load(data)
    yield 'another shape', save(tensors | {k: t[:1] for k, t in tensors.items()})
    yield 'integers', save({k: t.int() for k, t in tensors.items()})
    yield 'a key is missing', save(dict([*tensors.items()][1:]))
    yield 'no tensors', save({})


def state_changes(data: bytes):
    "(name, bytes): other states of a training."
    saved = torch.load(io.BytesIO(data), weights_only=True)
    for name, thing in {
        'code': Runs(),
        'a list': [1],
        'nothing': {},
        'no optimizer': dict(state=saved['state']),
        'no state': dict(optimizer=saved['optimizer']),
        'another optimizer': dict(saved, optimizer=dict(state={}, param_groups=[])),
        'a list for the optimizer': dict(saved, optimizer=[1]),
    }.items():
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        yield name, buffer.getvalue()


def layer(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 3)


def test_checkpoints(tmp_path):
    net = layer()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    at = save_checkpoint(tmp_path, dict(net=net), optimizer, dict(step=7))

    def read():
        other = layer(1)
        state = load_checkpoint(at, dict(net=other), torch.optim.AdamW(other.parameters()))
        return (state, other.state_dict()), {}

    for name, changes in {'model.safetensors': tensor_changes, 'state.pt': state_changes}.items():
        assert attack('checkpoints', at / name, read, [changes, byte_changes], names=[at.name]) == []


def test_networks_of_runs(tmp_path):
    write_net(tmp_path, 'phi', layer(), dict(inputs=2, backbone='tiny_xs', fingerprint='x'))

    def read():
        net, about = read_net(tmp_path, 'phi', lambda a: torch.nn.Linear(a['inputs'], 3), 'a run')
        return (net.state_dict(), about), {}

    changes = dict(safetensors=(tensor_changes, byte_changes), json=JSON)
    for suffix, kinds in changes.items():
        assert attack('networks', tmp_path / f'phi.{suffix}', read, kinds, names=['phi.safetensors']) == []
