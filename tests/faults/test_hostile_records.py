"Weights, checkpoints and records of the store, each file changed in every way."

import io
import json
import re
import shutil
import warnings
from base64 import b64encode
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from hostile import attack, byte_changes, json_changes, remove, replaced, text_changes, value_changes
from markupsafe import escape
from projects import receipt_of
from safetensors.torch import load, save

from cis_nb.backbones.conditional_vit import conditional_vit
from cis_nb.backbones.denoiser import Denoiser, DenoiserShape
from cis_nb.backbones.loading import load_backbone, save_backbone
from cis_nb.backbones.weights import weights_file
from cis_nb.book import runner, site
from cis_nb.core.experiment_files import (
    RECORDS,
    defaults,
    experiments,
    optional_names,
    read_notebook,
    read_record,
    trained_weights,
)
from cis_nb.core.store import manifest, stored
from cis_nb.data.roots import WORLD
from cis_nb.methods.artemis import Artemis, load_artemis
from cis_nb.methods.combiner import Combiner, load_combiner, save_combiner
from cis_nb.methods.combiner_products import load_product_combiner
from cis_nb.methods.compodiff import load_compodiff
from cis_nb.methods.condvit import load_condvit
from cis_nb.methods.contrastive import ContrastivePlugin
from cis_nb.methods.pseudo_words import (
    Phi,
    PseudoWord,
    export_published,
    load_pseudo_word,
    make_net,
    read_published_net,
    save_phi,
)
from cis_nb.mining.captions import is_complete_shard, read_relations, relation_shards, write_shard
from cis_nb.mining.corpora import Corpus, corpus_folder
from cis_nb.retrieval.search import SearchIndex, build_index
from cis_nb.training.checkpoints import load_checkpoint, save_checkpoint
from cis_nb.training.validation import run_folder, write_net

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures('store')]
JSON_VALUES = (json_changes, value_changes)
JSON = (*JSON_VALUES, text_changes)


def test_manifests(tmp_path):
    folder = stored('kind', 'name', {}, lambda to: (to / 'a.txt').write_text('a'))
    read = lambda: (manifest(folder)['hash'], {})  # noqa: E731
    other = 'hash: (empty text|text zzz)'  # of other work, `stored` compares it
    assert attack('records', folder / 'manifest.json', read, JSON, names=[folder.name], valid_too=other) == []


def test_finished_work_is_made_again(tmp_path):
    "Whatever lies in the place of its manifest."
    build = lambda: stored('kind', 'name', {}, lambda to: (to / 'a.txt').write_text('a'))  # noqa: E731
    read = lambda: ((build() / 'a.txt').read_text(), {})  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        assert attack('finished work', build() / 'manifest.json', read, JSON) == []


VERDICTS = {'reproduced': 3}
RECORD = receipt_of(params=dict(method='lincir', n=2), runs=['run/a'], counts=VERDICTS, versions=dict(python='3'))
RECORD |= dict(experiment='09_honest', inputs=dict(notebook='x'), seconds=1.5, reasons=['x'], traceback=['y'])
ANY_TEXT = r'experiment|headline|versions.python|machine.\w+|reasons.0|traceback.0|created'
ANY_VALUE = r'params|params.n|inputs|inputs.notebook|counts|versions|evidence|comparisons'
OTHER_RECORD = rf'({ANY_TEXT}): (text|empty text)|(runs|traceback): empty list|runs.0: text zzz|({ANY_VALUE}): |'
OTHER_RECORD += '(runs|params.method|versions.python): missing|'
OTHER_RECORD += r'(counts.reproduced|seconds|rows|machine.cores): '


@pytest.mark.parametrize('name', RECORDS)
def test_records_of_experiments(tmp_path, name):
    "A damaged record is an error where it is needed, and counts as none where it is not."
    path = tmp_path / name
    fields = [*RECORDS[name].model_fields]
    path.write_text(json.dumps({k: v for k, v in RECORD.items() if k in fields}))

    def read():
        found, wrong = read_record(path)
        if wrong or not found:
            raise ValueError(f'{path}: {wrong or "there is none"}')
        return found, {}

    assert attack('records', path, read, JSON, valid_too=f'{name}, ({OTHER_RECORD})') == []


def test_weights_that_a_receipt_names(tmp_path, monkeypatch):
    "No record that counts as valid leads out of the store or to an error without its name."
    monkeypatch.setenv('CIS_BOOK', str(tmp_path))
    path = tmp_path / '05_train.x' / 'receipt.json'
    path.parent.mkdir()
    record = RECORD | dict(experiment='05_train.x')
    path.write_text(json.dumps(record))

    def named_runs(data: bytes):
        for run in ('', '.', '/etc', '../../etc', 'run/../../a', 'a\0b'):
            yield f'run {run}', json.dumps(record | dict(runs=[run])).encode()

    def foreign(data: bytes):
        for name in ('', '05_train.y', '05_train'):
            yield f'a receipt of {name}', json.dumps(record | dict(experiment=name)).encode()

    read = lambda: (trained_weights('05_train.x'), {})  # noqa: E731
    changes, names = (*JSON, named_runs, foreign), ['05_train.x']
    assert attack('records', path, read, changes, names=names, valid_too='runs.0: text zzz') == []
    assert attack('records', path, lambda: (run_folder(path.parent), {}), [named_runs], places=False) == []


def write_report(project, e, **more) -> dict:  # name -> record
    "The report of a finished experiment; all records, that of a failure too."
    records = {n: {k: v for k, v in RECORD.items() if k in kind.model_fields} for n, kind in RECORDS.items()}
    records['run.json']['inputs'] = json.loads(json.dumps(runner.depends(e)))
    records['receipt.json'] |= more
    for name in ('receipt.json', 'run.json'):
        project.write(f'reports/quick/{e.name}/{name}', json.dumps(records[name]))
    shutil.copy(e.notebook, e.folder / 'notebook.ipynb')
    pd.DataFrame(dict(value=[1.0, 2.0, 3.0])).to_parquet(e.folder / 'results.parquet')
    return records


@pytest.mark.parametrize('name', RECORDS)
def test_the_front_page(project, name):
    "It has every record that counts as valid, and tells of the others."
    project.chapter('09_honest')
    found = experiments('quick')
    (e,) = found.values()
    records, state = write_report(project, e), 'done'
    if name == 'failed.json':
        project.write(f'reports/quick/{e.name}/{name}', json.dumps(records[name]))
        state = 'failed'

    def read():
        states = site.experiment_states(found)
        text = site.front_page('quick', found, states, [e.name], project.home)
        page = site._experiment_page(e, states[e.name], {e.name: e.name})
        word, why = states[e.name]
        assert word != 'missing' or escape(site.state_sentence(word, why)) in text
        if word != state:
            raise ValueError(f'{name}: {why}')
        return (text, page), {}

    assert attack('front page', e.folder / name, read, JSON_VALUES, places=False, valid_too=OTHER_RECORD) == []


def test_reports_of_trainings(tmp_path):
    path = tmp_path / 'receipt.json'
    path.write_text(json.dumps(dict(runs=['run/a'], params={})))
    away = 'gone|a pipe|a folder|a link|an endless device'  # a run has no receipt
    bad = attack('records', path, lambda: (run_folder(tmp_path), {}), JSON, valid_too=f'{away}|params|runs.0: text')
    assert bad == []


def shown(output_type, **fields) -> dict:
    return dict(output_type=output_type, **fields)


def test_notebooks(tmp_path):
    "What is read of a notebook by the runner and by the pages."
    png = b64encode(b'an image').decode()
    outputs = [
        shown('stream', name='stderr', text=['a.py:3: UserWarning: too small\n']),
        shown('display_data', data={'image/png': png, 'text/html': ['<td>1</td>']}, metadata={}),
        shown('execute_result', data={'text/markdown': '`a<b`', 'text/plain': '3'}, metadata={}, execution_count=1),
        shown('error', ename='ValueError', evalue='no', traceback=['a', 'b']),
    ]
    code = dict(cell_type='code', metadata=dict(tags=['parameters']), execution_count=1)
    path = tmp_path / 'a.ipynb'

    def read():
        nb = read_notebook(path)
        known = defaults(nb, str(path))
        made = runner.audit_cells(nb, {}), runner.heading(nb), optional_names(nb) if known else ()
        return (nb, known, made, site.notebook_page(nb, {}), site.warnings_of(nb), site.card_figure(nb)), {}

    other = r'source(\.0)?: (text|empty)|(name|text|evalue|ename|traceback|image/png|html|markdown|plain)(\.0)?: |'
    other += r'(metadata|outputs|data|tags|execution_count|nbformat\w*|tags\.0): |cell_type: '
    for output in outputs:  # of a list, only the first entry is changed
        cell = dict(code, source=['n = 1  # a number'], outputs=[output])
        path.write_text(json.dumps(dict(cells=[cell], metadata={}, nbformat=4, nbformat_minor=5)))
        assert attack('notebooks', path, read, JSON_VALUES, places=False, valid_too=other) == []
    assert attack('notebooks', path, read, [text_changes], valid_too=other) == []


@pytest.mark.parametrize(
    'source', ['n = = 1', 'n = (', 'x' * 10 + ' = ' + '(' * 5000, 'n = 1\0', '  n = 1', 'n = 0777']
)
def test_a_typing_error_in_the_parameters_names_the_notebook(project, source):
    project.chapter('01_honest')
    path = project.home / 'nbs' / '01_honest.ipynb'
    nb = read_notebook(path)
    nb['cells'][1]['source'] = source
    path.write_text(json.dumps(nb))
    with pytest.raises(ValueError, match='nbs/01_honest.ipynb: a cell is not Python') as e:
        experiments('quick')
    assert type(e.value) is ValueError


@pytest.mark.parametrize('name', runner.FILES_READ)
def test_files_of_a_finished_experiment(project, name):
    "Where one is damaged, the experiment has no result, and the pages are made and say why."
    project.chapter('09_honest')
    found = experiments('quick')
    (e,) = found.values()
    write_report(project, e, rows=3)

    def read():
        states = site.experiment_states(found)
        page, table = site._experiment_page(e, states[e.name], {e.name: e.name}), site.results(found, states)
        text = site.front_page('quick', found, states, [e.name], project.home)
        word, why = states[e.name]
        if not runner.done(e):
            assert escape(site.state_sentence('missing', why)) in text and str(project.home) not in why
            raise ValueError(f'{word}: {why}')
        return (page, table), {}

    assert attack('reports', e.folder / name, read, [byte_changes]) == []


def test_lists_of_relations(tmp_path):
    path = tmp_path / 'captions.txt'
    path.write_text('a red ball on the sand\n' * 3)
    folder = relation_shards(str(path), 'world', processes=1)
    read = lambda: (read_relations(folder), {})  # noqa: E731
    about = 'parser|rules|captions|attributes|per_shard|split|limit|counts|skipped'  # the table is in the shards
    other = f'({about})(\\.[\\w ]+)?: |shards.0.(captions|relations|different captions|captions without a relation): '
    assert attack('shards', folder / 'shards.json', read, JSON, names=[folder.name], valid_too=other) == []


def test_records_of_shards(tmp_path):
    "A shard whose record cannot be read is not complete, and is made again."
    path = tmp_path / 'relations-00000.parquet'
    rows = [(str(i), 'train', 'a red ball on the sand') for i in range(3)]

    def read():
        if not is_complete_shard(path):
            remove(path.with_suffix('.json'))
            write_shard((str(path), rows, 'world', False, 'own'))
        return is_complete_shard(path), {}

    write_shard((str(path), rows, 'world', False, 'own'))
    assert attack('shards', path.with_suffix('.json'), read, JSON) == []


def test_records_of_corpora(tmp_path):
    path = tmp_path / 'captions.txt'
    path.write_text('a red ball on the sand\n' * 3)
    folder = corpus_folder(path, WORLD, processes=1)
    read = lambda: (len(Corpus(folder)), Corpus(folder).about)  # noqa: E731
    assert attack('corpora', folder / 'corpus.json', read, JSON, names=[folder.name]) == []


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
    note = path.parent / 'backbone.json'  # it may be absent
    assert attack('weights', note, read, JSON, names=['run'], valid_too='gone') == []


def test_records_of_trained_backbones(tmp_path):
    save_backbone(load_backbone('tiny_xs', device='cpu'), tmp_path)

    def read():
        m = ContrastivePlugin().load(tmp_path, 'cpu')
        return (m.backbone.name, m.backbone.fingerprint), {}

    assert attack('weights', tmp_path / 'backbone.json', read, JSON) == []


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
    export_published(SimpleNamespace(phi=phi, unit_input=False), path)

    def read():
        return {k: v for k, v in read_published_net(path, 'phi', 8, 6).state_dict().items()}, {}

    assert attack('weights', path, read, [published_changes, byte_changes]) == []


def tensor_changes(data: bytes):
    "(name, bytes): other tensors of a layer."
    tensors = load(data)
    yield 'another shape', save(tensors | {k: torch.atleast_1d(t)[:1] for k, t in tensors.items()})
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


def save_pseudo_word(folder, backbone):
    phi = Phi(backbone.D, backbone.W, hidden=4).eval()
    save_phi(folder, PseudoWord(name='lincir', title='LinCIR', backbone=backbone, phi=phi))


def save_small_combiner(folder, backbone):
    save_combiner(folder, Combiner(backbone.D, 4, 4).eval(), backbone)


def save_product_combiner(folder, backbone):
    save_combiner(folder, Combiner(backbone.D, 4, 4).eval(), backbone, condition='category')


def save_condvit(folder, backbone):
    net = conditional_vit(backbone, condition='category', categories=['Bags', 'Feet'])
    known = dict(backbone=backbone.name, pretrained='default', fingerprint=backbone.fingerprint)
    write_net(folder, 'condvit', net, dict(condvit=net.settings, text_model='backbone', reader='', **known))


def save_compodiff(folder, backbone):
    shape = DenoiserShape(D=backbone.D, depth=1, heads=2, cross_heads=2, head_dim=4, text_width=backbone.W)
    about = dict(shape=vars(shape), stage='1', padding='masked', sampling=dict(steps=2, w_text=4.0, eta=None))
    about |= dict(backbone=backbone.name, pretrained='default', fingerprint=backbone.fingerprint)
    write_net(folder, 'compodiff', Denoiser(shape), about | dict(text_encoder='', reader=backbone.fingerprint))


def save_artemis(folder, backbone):
    known = dict(backbone=backbone.name, pretrained='default', fingerprint=backbone.fingerprint)
    write_net(folder, 'artemis', Artemis(backbone.D), dict(D=backbone.D, **known))


NETWORKS = dict(  # name of the files, how they are written and read
    pseudo_word=('phi', save_pseudo_word, load_pseudo_word),
    combiner=('combiner', save_small_combiner, load_combiner),
    product_combiner=('combiner', save_product_combiner, load_product_combiner),
    condvit=('condvit', save_condvit, load_condvit),
    compodiff=('compodiff', save_compodiff, load_compodiff),
    artemis=('artemis', save_artemis, load_artemis),
)
NOT_SAID = 'target_pad|text_encoder|reader'  # by runs of earlier versions
OTHER_NETWORK = rf'json, ((method|title|prompt): text|({NOT_SAID}): missing|sampling|condvit.categories)'


@pytest.mark.parametrize('name', NETWORKS)
def test_networks_of_runs(tmp_path, name):
    file, write, load = NETWORKS[name]
    write(tmp_path, load_backbone('tiny_xs', device='cpu'))

    def read():
        m = load(tmp_path, 'cpu')
        return (m.name, m.title, m.run, m.settings()), {}

    changes = dict(safetensors=(tensor_changes, byte_changes), json=JSON)
    for suffix, kinds in changes.items():
        names = [f'{file}.safetensors', str(tmp_path)]
        found = attack('networks', tmp_path / f'{file}.{suffix}', read, kinds, names=names, valid_too=OTHER_NETWORK)
        assert found == []


@pytest.mark.parametrize(
    'name, field, value',
    [
        ('combiner', 'backbone', 'zzz'),
        ('artemis', 'pretrained', ''),
        ('pseudo_word', 'title', ''),
        ('condvit', 'condvit.text_width', -1),
        ('compodiff', 'shape.depth', 2**63 - 1),
        ('compodiff', 'sampling.steps', 0),
        ('compodiff', 'text_encoder', 'tiny_xs+zzz'),
    ],
)
def test_a_description_with_a_wrong_value_is_named(tmp_path, name, field, value):
    file, write, load = NETWORKS[name]
    write(tmp_path, load_backbone('tiny_xs', device='cpu'))
    path, field = tmp_path / f'{file}.json', field.split('.')
    path.write_text(json.dumps(replaced(json.loads(path.read_text()), field, value)))
    said = rf"{file}.safetensors or its .json is damaged \(.*{field[-1]}\b.*{re.escape(repr(value))}.*train again"
    with pytest.raises(ValueError, match=said):
        load(tmp_path, 'cpu')
