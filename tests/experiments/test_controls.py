"Controls: bad input at every control, answers by brute force, folders of images, callbacks, and a run in JupyterLab."

import io
import json
import os
import socket
import subprocess
import sys
import time
from datetime import datetime, timezone

import numpy as np
import pandas as pd
import pytest
import torch
from browser import CHROMIUM, Browser
from PIL import Image
from projects import ROOT

from cis_nb.backbones.denoiser import Denoiser, DenoiserShape
from cis_nb.backbones.loading import load_backbone
from cis_nb.core.experiment_files import code_cells, read_notebook
from cis_nb.experiments import controls as C
from cis_nb.methods.artemis import Artemis, ArtemisMethod
from cis_nb.methods.baselines import method as baseline
from cis_nb.methods.compodiff import CompoDiffMethod
from cis_nb.retrieval.search import INDEX_KINDS


def effects_of(**moved) -> pd.DataFrame:
    "Cosines with the text of 30 queries: each change adds a mean, and 0.01 more or less in turn."
    by = dict.fromkeys(moved, 0.01) | {'as it is': 0.0}
    about = [dict(query=n, change=c, text=0.2 + moved.get(c, 0.0) + by[c] * (-1) ** n) for n in range(30) for c in by]
    return pd.DataFrame(about)


@pytest.mark.parametrize(
    'moved, said',
    [
        (dict(a=0.0038), ['as expected']),
        (dict(a=0.0038, b=0.1), ['as expected', 'as expected']),  # the smaller p-value is corrected first
        (dict(a=0.0038, b=0.0038), ['undecided by Holm', 'undecided by Holm']),
        (dict(a=0.0, b=-0.1), ['undecided', 'the other way']),
    ],
)
def test_effects_of_controls_are_corrected_together(moved, said):
    changes = [C.ControlChange(name, nearer_to='text') for name in moved]
    assert C.effect_comparisons(effects_of(**moved), changes).verdict.tolist() == said


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    torch.set_num_threads(1)


def png(image) -> bytes:
    out = io.BytesIO()
    image.save(out, 'PNG')
    return out.getvalue()


def noise(n, size=(48, 40)):
    return Image.fromarray(np.random.default_rng(n).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Images at two depths, one of them damaged, and a file that is none."
    root = tmp_path_factory.mktemp('images')
    (root / 'deeper').mkdir()
    for n in range(60):
        noise(n).save(root / ('deeper' if n % 2 else '.') / f'{n:02}.png')
    (root / 'cut.png').write_bytes(png(noise(99))[:200])
    (root / 'notes.txt').write_text('no image')
    return root


@pytest.fixture(scope='module')
def methods():
    torch.manual_seed(0)
    b = load_backbone('tiny_xs', device='cpu')
    net = Denoiser(DenoiserShape(D=b.D, text_width=b.W, depth=1, heads=2, cross_heads=2, head_dim=8)).eval()
    with torch.no_grad():
        for weights in net.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    diffusion = CompoDiffMethod(name='compodiff', title='CompoDiff', backbone=b, net=net, steps=2)
    names = ('image_text', 'text_only', 'image_only')
    return {'CompoDiff': diffusion} | {baseline(n).title: baseline(n, b) for n in names}


@pytest.fixture(scope='module')
def search(folder, methods, tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_STORE', str(tmp_path_factory.mktemp('store')))
        yield C.ControlSearch(methods, C.control_collection(str(folder)))


@pytest.fixture
def panel(search):
    return C.ControlPanel(search)


def upload(widget, name, data):
    "Choose a file."
    now = datetime.now(timezone.utc)
    widget.value = (dict(name=name, type='', size=len(data), content=memoryview(data), last_modified=now),)


# --- a folder of images


def test_a_folder_is_searched_with_its_index(search, methods):
    ids = search.collection.source.ids
    assert 'deeper/01.png' in ids and 'cut.png' in ids and 'notes.txt' not in ids
    index = search.indexes['CompoDiff']
    assert len(index) == 60 and 'cut.png' not in index.ids  # the damaged image is left out
    assert (index.folder / 'index.faiss').is_file()
    query = C.ControlQuery('02.png', 'a red boat', 'a dog', C.rectangle_mask(0, 0, 0.5, 1))
    settings = C.ControlSettings(k=5, steps=3)
    gallery = search.collection.source.features(methods['CompoDiff'].backbone)
    for a in C.answer(search, query, settings):
        method = C._with_settings(methods[a.title], settings)
        source = search.collection.source
        asked = C.Queries(
            ['query'], [['a red boat']], ['02.png'], source, ['a dog'], torch.from_numpy(query.mask[None])
        )
        q = method.encode_queries(asked)
        cosines = {i: float(C.cosine_scores(q, gallery[[i]])) for i in gallery.ids if i != '02.png'}
        best = sorted(cosines, key=cosines.get, reverse=True)[:5]
        np.testing.assert_allclose(a.scores, [cosines[i] for i in best], atol=1e-4)
        assert set(a.ids) == set(best)


@pytest.mark.parametrize('kind', INDEX_KINDS)
def test_every_kind_of_index_answers(search, methods, kind):
    other = C.ControlSearch(methods, search.collection, kind)
    (a,) = C.answer(other, C.ControlQuery('02.png', 'a boat'), titles=['Image only'])
    assert len(a.ids) == 10 and '02.png' not in a.ids and a.scores == sorted(a.scores, reverse=True)


def test_a_folder_that_is_not_there_or_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match='nowhere'):
        C.control_collection(str(tmp_path / 'nowhere'))
    with pytest.raises(FileNotFoundError, match='no folder with images'):
        C.control_collection(str(tmp_path))


@pytest.fixture(scope='module')
def scorer(methods):
    "An ARTEMIS-like scorer with random weights: a query has four times the width of an image."
    torch.manual_seed(1)
    backbone = methods['Text only'].backbone
    return ArtemisMethod(name='artemis', title='Mine', backbone=backbone, net=Artemis(backbone.D).eval())


def by_own_score(scorer, search, ids) -> dict:
    "Images and their scores for one query, one image at a time."
    source = search.collection.source
    q = scorer.encode_queries(C.Queries(['query'], [['a red boat']], ['02.png'], source))
    gallery = source.features(scorer.backbone)
    return {i: float(scorer.score(q, gallery[[i]])) for i in ids if i != '02.png'}


def test_a_method_with_a_score_of_its_own_ranks_the_whole_of_a_small_gallery(search, methods, scorer):
    both = C.ControlSearch(methods | {'Mine': scorer}, search.collection)
    (a,) = C.answer(both, C.ControlQuery('02.png', 'a red boat', 'a dog'), C.ControlSettings(k=7), ['Mine'])
    scores = by_own_score(scorer, both, both.indexes['Mine'].ids)
    assert a.ids == sorted(scores, key=scores.get, reverse=True)[:7] and a.note == 'reads no negative text'
    np.testing.assert_allclose(a.scores, [scores[i] for i in a.ids], atol=1e-5)


@pytest.mark.parametrize('kind', ['flat', 'hnsw'])
def test_in_a_large_gallery_it_orders_the_first_images_of_the_index(search, methods, scorer, kind, monkeypatch):
    monkeypatch.setattr(C, 'SCORED', 20)
    monkeypatch.setattr(C, 'RERANKED', 12)
    both = C.ControlSearch(methods | {'Mine': scorer}, search.collection, kind)
    query, settings = C.ControlQuery('02.png', 'a red boat'), C.ControlSettings(k=12)
    mine, found = C.answer(both, query, settings, ['Mine', 'Image + Text'])
    assert set(mine.ids) == set(found.ids) and mine.note == 'orders the first 12 images of Image + Text'
    scores = by_own_score(scorer, both, found.ids)
    assert mine.ids == sorted(scores, key=scores.get, reverse=True) != found.ids
    assert not both.reranks('Image + Text') and found.note == ''


def test_fewer_images_than_results(search, methods, tmp_path):
    for n in range(3):
        noise(n).save(tmp_path / f'{n}.png')
    few = C.ControlSearch(methods, C.control_collection(str(tmp_path)))
    assert all(len(a.ids) == 2 for a in C.answer(few, C.ControlQuery('1.png', 'a boat')))
    assert len(C.answer(few, C.ControlQuery(text='a boat'))[0].ids) == 3


# --- bad input


@pytest.mark.parametrize(
    'query, said',
    [
        (C.ControlQuery(), 'text: is empty, and there is no reference'),
        (C.ControlQuery(None, ' \t'), 'text: is empty, and there is no reference'),
        (C.ControlQuery(None, 'a boat', ' A Boat'), "negative text: 'A Boat' is the text itself"),
        (C.ControlQuery('02.jpg', 'a boat'), "reference '02.jpg': .*did you mean '02.png'"),
        (C.ControlQuery('cut.png', 'a boat'), "reference 'cut.png': cannot be read"),
        (C.ControlQuery(None, 'a boat', mask=np.ones((64, 64), bool)), 'mask: there is no reference'),
        (C.ControlQuery('02.png', 'a boat', mask=np.ones((32, 32), bool)), r'mask: must be \(64, 64\) of bool'),
    ],
)
def test_a_query_that_cannot_be_answered(search, query, said):
    with pytest.raises(C.ControlFault, match=said):
        C.answer(search, query)


@pytest.mark.parametrize('data', [b'', b'hello', b'\x89PNG\r\n', png(noise(1))[:100], b'<svg onload="x()"></svg>'])
def test_an_upload_that_is_no_image(data):
    with pytest.raises(C.ControlFault, match="reference 'x.png': is no image that can be read .*choose a PNG"):
        C.uploaded_image(data, 'x.png')


def test_an_upload_that_is_too_large(monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 100)
    with pytest.raises(C.ControlFault, match='DecompressionBomb'):
        C.uploaded_image(png(noise(1)), 'large.png')


@pytest.mark.parametrize('mode', ['L', 'RGBA', 'P', '1'])
def test_uploads_of_other_modes(search, mode):
    image = C.uploaded_image(png(noise(2).convert(mode)), 'x.png')
    assert image.mode == 'RGB' and len(C.answer(search, C.ControlQuery(image, 'a boat'))[0].ids) == 10


def test_an_upload_of_an_image_of_the_collection_finds_it(search, folder):
    image = C.uploaded_image((folder / '02.png').read_bytes(), '02.png')
    (a,) = C.answer(search, C.ControlQuery(image), titles=['Image only'])
    assert a.ids[0] == '02.png' and abs(a.scores[0] - 1) < 1e-5


def test_a_mask_is_cut_with_its_reference():
    mask = Image.new('L', (90, 60))
    mask.paste(255, (15, 0, 45, 60))  # the left half of the middle square
    found = C.uploaded_mask(png(mask), 'm.png', noise(0, (90, 60)))
    assert found[:, :31].all() and not found[:, 33:].any()


# --- callbacks


def test_the_panel_answers_once_for_each_change(panel, monkeypatch):
    asked, real = [], C.answer
    monkeypatch.setattr(C, 'answer', lambda *a: asked.append(a[1:3]) or real(*a))
    panel.text.value = 'a red boat'
    panel.w_text.value, panel.w_image.value, panel.steps.value, panel.seed.value = 2.0, 0.5, 3, 7
    panel.another.click()
    panel.reference.value = '08.png'
    query, settings = asked[-1]
    assert len(asked) == 7 and (query.reference, query.text) == ('08.png', 'a red boat')
    assert (settings.w_image, settings.w_text, settings.steps, settings.seed) == (0.5, 2.0, 3, 7)


def test_results_follow_the_controls_and_old_ones_do_not_stay(panel):
    panel.text.value = 'a red boat'
    first = panel.result.value
    assert first.count('<img ') == 22
    panel.seed.value = 5
    assert panel.result.value != first
    panel.negative.value = 'a red boat'
    assert panel.result.value == '' and 'is the text itself' in panel.message.value
    panel.negative.value = ''
    panel.seed.value = 0
    assert panel.result.value == first and 'is the text itself' not in panel.message.value


def test_no_reference_is_text_to_image(panel):
    panel.text.value = 'a red boat'
    panel.reference.value = ''
    assert panel.query().reference is None and len(panel.answers[0].ids) == 10
    panel.compare.value = 'Image only'
    assert 'reads the reference alone' in panel.result.value
    panel.text.value = ''
    assert 'text: is empty' in panel.message.value and panel.result.value == ''


def test_uploads_through_the_panel(panel):
    upload(panel.file, 'mine.png', png(noise(5)))
    assert panel.query().reference.size == (48, 40) and panel.reference.value == '' and panel.answers
    upload(panel.mask_file, 'm.png', png(Image.new('L', (20, 20), 255)))
    assert 'has 20 × 20 pixels and the reference 48 × 40' in panel.message.value and not panel.query().masked
    upload(panel.mask_file, 'm.png', png(Image.new('L', (48, 40), 255)))
    assert panel.query().mask.all() and panel.answers
    upload(panel.file, 'bad.png', b'no image')
    assert 'is no image that can be read' in panel.message.value and panel.result.value == ''
    panel.reference.value = '04.png'
    assert panel.query().reference == '04.png' and not panel.query().masked and panel.answers


def test_a_mask_without_a_reference(panel):
    panel.text.value = 'a boat'
    panel.reference.value = ''
    upload(panel.mask_file, 'm.png', png(Image.new('L', (20, 20), 255)))
    assert 'mask: there is no reference' in panel.message.value


def test_a_stroke_is_drawn_and_cleared(panel):
    panel.brush.value = 0.2
    before = panel.answers[0].scores
    panel._moved(10, 10)  # no button is down
    assert not panel.mask.any()
    panel._pressed(128, 128)
    panel._moved(200, 128)
    assert panel.answers[0].scores == before  # answered where the stroke ends
    panel._released(200, 128)
    assert panel.mask[32, 32] and panel.mask[32, 50] and not panel.mask[5, 5]
    assert panel.answers[0].scores != before
    panel.clear.click()
    assert panel.answers[0].scores == before


def test_a_defect_is_shown_and_raised(panel, monkeypatch):
    monkeypatch.setattr(C, 'answer', lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        panel.refresh()
    assert 'ZeroDivisionError: division by zero' in panel.message.value and panel.result.value == ''


def test_what_is_typed_is_no_markup(panel):
    panel.reference.value = '<script>alert(1)</script>'
    assert '<script>' not in panel.message.value and '&lt;script&gt;' in panel.message.value


# --- JupyterLab

NOTEBOOK = '''
import torch
from cis_nb.backbones.denoiser import Denoiser, DenoiserShape
from cis_nb.backbones.loading import load_backbone
from cis_nb.experiments.controls import ControlPanel, ControlSearch, control_collection
from cis_nb.methods.baselines import method
from cis_nb.methods.compodiff import CompoDiffMethod

b = load_backbone('tiny_xs', device='cpu')
net = Denoiser(DenoiserShape(D=b.D, text_width=b.W, depth=1, heads=2, cross_heads=2, head_dim=8)).eval()
found = {{'CompoDiff': CompoDiffMethod(name='compodiff', title='CompoDiff', backbone=b, net=net, steps=2)}}
found['Image + Text'] = method('image_text', b)
panel = ControlPanel(ControlSearch(found, control_collection({folder!r})))
panel.box
'''


def write_page(path, folder):
    code = NOTEBOOK.format(folder=str(folder)).strip()
    cell = dict(cell_type='code', id='panel', metadata={}, source=code, outputs=[], execution_count=None)
    kernel = dict(kernelspec=dict(name='python3', display_name='python3', language='python'))
    path.write_text(json.dumps(dict(cells=[cell], metadata=kernel, nbformat=4, nbformat_minor=5)))


@pytest.fixture
def lab(tmp_path, folder):
    "The address of a JupyterLab with a page that shows a panel."
    if not CHROMIUM:
        pytest.skip('no Chromium on this machine: apt-get install chromium')
    pytest.importorskip('jupyterlab', reason='no JupyterLab here: make')
    write_page(tmp_path / 'page.ipynb', folder)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    news = tmp_path / 'settings/@jupyterlab/apputils-extension/notification.jupyterlab-settings'
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    own = {f'JUPYTER_{k}_DIR': str(tmp_path / k) for k in ('CONFIG', 'RUNTIME')}
    own |= dict(IPYTHONDIR=str(tmp_path / 'ipy'), JUPYTERLAB_SETTINGS_DIR=str(tmp_path / 'settings'))
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    env = os.environ | own | dict(CIS_STORE=str(tmp_path / 'store'), PYTHONPATH=paths)
    options = ['--no-browser', '--allow-root', '--expose-app-in-browser', f'--ServerApp.root_dir={tmp_path}']
    options += [f'--ServerApp.port={port}', '--ServerApp.port_retries=0', '--IdentityProvider.token=']
    log = open(tmp_path / 'lab.log', 'w')
    server = subprocess.Popen([sys.executable, '-m', 'jupyterlab', *options], env=env, stdout=log, stderr=log)
    for _ in range(600):
        with socket.socket() as s:
            if s.connect_ex(('127.0.0.1', port)) == 0:
                break
        if server.poll() is not None:
            pytest.fail(f'JupyterLab ended: {(tmp_path / "lab.log").read_text()[-600:]}')
        time.sleep(0.1)
    yield f'http://127.0.0.1:{port}/doc/tree/page.ipynb?reset'
    server.terminate()
    server.wait(30)
    log.close()


def until(b, condition: str, seconds: int = 120):
    "Wait until JavaScript says yes."
    for _ in range(5 * seconds):
        if b.js(condition):
            return
        time.sleep(0.2)
    raise TimeoutError(f'{condition}: {b.js("document.body.innerText")[-600:]}')


def drag(b, box: list, start: tuple, end: tuple):
    "Move the pressed mouse over a part of a box, in shares of its sides."
    places = [[box[0] + x * box[2], box[1] + y * box[3]] for x, y in (start, start, end, end)]
    for n, (kind, (x, y)) in enumerate(zip(('mouseMoved', 'mousePressed', 'mouseMoved', 'mouseReleased'), places)):
        held = dict(button='left', buttons=0 if kind == 'mouseReleased' else 1, clickCount=1) if n else {}
        b.call(
            'Input.dispatchMouseEvent',
            type=kind,
            x=x,
            y=y,
            **({} if kind == 'mouseMoved' and (x, y) == tuple(places[0]) else held),
        )
        time.sleep(0.3)


SOURCES = 'Array.from(document.querySelectorAll("img[title]")).map(i => i.src).join()'


@pytest.mark.browser
@pytest.mark.e2e
def test_the_panel_in_jupyterlab(lab, tmp_path):
    "Results are there, a stroke of the mouse changes them, and a text that contradicts itself shows a fault."
    with Browser(hosts=('127.0.0.1',)) as b:
        b.picture(tmp_path / 'empty.png', 1300, 1400)
        b.open_address(lab, 'Boolean(window.jupyterapp && document.querySelector(".jp-Notebook"))')
        until(b, 'jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status == "idle"')
        b.js('void jupyterapp.commands.execute("notebook:run-all-cells")')
        until(b, 'document.querySelectorAll("img[title]").length == 22')
        first = b.js(SOURCES)
        b.js('document.querySelector(".jp-OutputArea canvas").scrollIntoView({block: "center"})')
        place = 'document.querySelector(".jp-OutputArea canvas").getBoundingClientRect()'
        box = b.js(f'(r => [r.x, r.y, r.width, r.height])({place})')
        drag(b, box, (0.2, 0.5), (0.8, 0.5))
        until(b, f'{SOURCES} != {json.dumps(first)} && document.querySelectorAll("img[title]").length == 22')
        for name, text in (('text', 'a boat'), ('negative text', 'a boat')):
            field = f'Array.from(document.querySelectorAll(".widget-text")).find(w => w.innerText.trim() == "{name}")'
            b.js(f'{field}.querySelector("input").focus()')
            b.call('Input.insertText', text=text)
            b.js(f'{field}.querySelector("input").blur()')
        until(b, 'document.body.innerText.includes("is the text itself")')
        assert b.js('document.querySelectorAll("img[title]").length') == 0
        b.picture(tmp_path / 'panel.png', 1300, 1400)
        assert not [said for said in b.said if 'ipycanvas' in said]


def test_the_chapter_uses_the_panel():
    "The page in the book shows what is tested here."
    code = '\n'.join(c['source'] for c in code_cells(read_notebook(ROOT / 'nbs/06_evaluation/controls.ipynb')))
    assert 'shown_panel(lambda: ControlPanel(search, settings), in_report())' in code
