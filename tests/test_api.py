"What is registered keeps the contracts of `cis_nb.api`: methods train, load and rank; benchmarks ask and aggregate."

from zlib import crc32

import numpy as np
import pandas as pd
import pytest
from cis_nb.backbones.features import Features
import torch
from matplotlib.colors import is_color_like
from PIL import Image

from cis_nb import api
from cis_nb.backbones.features import image_features, text_features
from cis_nb.backbones.loading import load_backbone, text_backbone
from cis_nb.backbones.weights import BACKBONES
from cis_nb.benchmarks.genecis_construction import Rules
from cis_nb.core.plotting import color
from cis_nb.core.report import finish
from cis_nb.core.store import fingerprint, manifest
from cis_nb.data.image_sources import ImageSource
from cis_nb.data.roots import dataset_root
from cis_nb.experiments.composed_retrieval import load_sets
from cis_nb.experiments.entries import Entry, read_cached
from cis_nb.experiments.matrix import rank_entries
from cis_nb.methods.baselines import method
from cis_nb.retrieval.protocol import RESULT_COLUMNS, Benchmark, Protocol, Task
from cis_nb.retrieval.protocol import evaluate_benchmark, result_rows, task_methods
from cis_nb.retrieval.ranking import cosine_scores
from cis_nb.train import load_method, make_objective, settings, train_or_load

# small values of the parameters that a configuration may have
SMALL = dict(
    steps=1,
    batch_size=4,
    samples=40,
    val_samples=8,
    eval_every=0,
    world_images=30,
    cirr=36,
    width=16,
    projection=8,
    hidden=8,
    search_steps=2,
    phrases=2,
    num_concepts_inversion=2,
    num_concepts_distillation=4,
    num_inverted_images=6,
    depth=1,
    heads=2,
    cross_heads=2,
    head_dim=8,
    sampling_steps=2,
    device='cpu',
    dtype='float32',
)
# small versions of the world's benchmarks, and cut-offs for their galleries
OPTIONS = dict(
    genecis=dict(size=150, n=4, rules=Rules(min_categories=6, min_shared=4)),
    cirr=dict(size=36, ks=(1, 3)),
    circo=dict(size=16, ks=(1, 5)),
    fashioniq=dict(size=10, ks=(1, 3)),
    mit_states=dict(size=1),
    domain_conversion=dict(size=1, ks=(1, 5)),
    object_composition=dict(size=16),
    coco_captions=dict(size=12),
    lrvsf=dict(size=12, distractors=30, ks=(1, 5)),
    grocery=dict(size=1, ks=(1, 5)),
)


@pytest.fixture(scope='module', autouse=True)
def store(tmp_path_factory):
    with pytest.MonkeyPatch.context() as m:
        m.setenv('CIS_STORE', str(tmp_path_factory.mktemp('store')))
        yield


class MadeUp:
    "A backbone whose features are drawn by the id of an image or by a text."

    name = fingerprint = 'made-up'
    D = W = 8

    def draw(self, word):
        return np.random.default_rng([*str(word).encode()]).normal(size=8).astype(np.float32)

    def features(self, images):
        array = np.stack([self.draw(i) for i in images.ids])
        return Features(array, images.ids, {i: j for j, i in enumerate(images.ids)})

    def encode_text(self, texts):
        return torch.tensor(np.stack([self.draw(t) for t in texts]))


def images(n=3):
    "Images of one colour each."

    def load(i):
        return Image.new('RGB', (32, 32), (80 * int(i), 40, 200))

    return ImageSource([str(i) for i in range(n)], load, 'contracts')


TRAINED = [n for n in api.names('method') if api.get('method', n).trains]


@pytest.mark.parametrize('name', TRAINED)
def test_a_configuration_says_what_every_parameter_is(name):
    plugin = api.get('method', name)
    assert plugin.name == name and plugin.title and issubclass(plugin.Config, api.TrainingConfig)
    assert [k for k, _, help in api.config_rows(plugin.Config()) if not help] == []
    with pytest.raises(ValueError, match='unknown parameter .stepz.; did you mean .steps.'):
        api.configure(plugin.Config, dict(stepz=3))
    for workers in (0, api.MAX_WORKERS + 1):
        with pytest.raises(ValueError, match='workers'):
            api.configure(plugin.Config, dict(workers=workers))


@pytest.mark.parametrize('name', TRAINED)
@pytest.mark.e2e
def test_a_method_trains_is_loaded_and_scores(name):
    fields = api.get('method', name).Config.model_fields
    config = settings({k: v for k, v in SMALL.items() if k in fields} | dict(method=name))
    objective = make_objective(config)
    assert isinstance(objective, api.Objective) and len(objective.data) > 0
    assert any(p.requires_grad for m in objective.modules.values() for p in m.parameters())
    run = train_or_load(config)
    assert train_or_load(config) == run
    in_panels = {n for names in objective.panels.values() for n in names.values()}
    assert in_panels <= {*pd.read_csv(run / 'history.csv').columns}
    pieces = api.get('method', name).pieces(make_objective(config), config)
    assert all(manifest(folder)['seconds'] >= 0 for folder in pieces.values())
    m = load_method(run, 'cpu')
    assert m.fingerprint == load_method(run, 'cpu').fingerprint
    check_method(m)


def test_a_run_is_kept_under_the_code_of_its_backbone(monkeypatch):
    kept = []
    monkeypatch.setattr('cis_nb.train.begin_with', lambda *a: MadeUp())
    monkeypatch.setattr('cis_nb.train.stored', lambda *a, code, **kw: kept.extend(code))
    monkeypatch.setattr(api.get('method', 'combiner'), 'inputs', lambda backbone, config: [], raising=False)
    train_or_load(settings(dict(method='combiner')))
    assert kept == [api.get('method', 'combiner'), MadeUp]


UNTRAINED = sorted({*api.names('method')} - {*TRAINED})
BY_TASK = [n for n in UNTRAINED if isinstance(api.get('method', n).untrained(MadeUp()), api.MethodByTask)]


@pytest.mark.parametrize('name', UNTRAINED)
def test_a_method_that_learns_nothing_is_made_and_scores(name):
    plugin = api.get('method', name)
    m = plugin.untrained(MadeUp())
    assert plugin.name == m.name == name and plugin.title == m.title
    assert m.fingerprint == plugin.untrained(MadeUp()).fingerprint
    assert isinstance(m, api.Method) != isinstance(m, api.MethodByTask)
    if isinstance(m, api.Method):
        check_method(m)
    with pytest.raises(ValueError, match=f"method: '{name}' has no training; methods with a training: contrastive"):
        settings(dict(method=name))


@pytest.mark.parametrize('name', BY_TASK)
@pytest.mark.e2e
def test_a_method_by_task_solves_some_tasks_and_refuses_the_others_with_a_reason(name):
    m, solved = api.get('method', name).untrained(load_backbone('tiny', device='cpu')), 0
    for b in map(small, api.names('benchmark')):
        methods, unsolved = task_methods(m, b)
        assert {*methods, *unsolved} == set(b.tasks) and all(unsolved.values())
        solved += len(methods)
        for task, of_task in methods.items():
            assert isinstance(of_task, api.Method) and (of_task.name, of_task.title) == (m.name, m.title)
            assert of_task.fingerprint == m.for_task(b.tasks[task]).fingerprint
        if methods:
            per_query, rows = evaluate_benchmark(m, b)
            assert set(rows.method) == {m.name}
            assert set(per_query.task) == {t for name in methods for t in b.tasks[name].queries.task}
            assert len(per_query) == sum(len(b.tasks[task]) for task in methods)
        else:
            with pytest.raises(api.Unsolved, match=f'{m.name} can solve no task of {b.name}: '):
                evaluate_benchmark(m, b)
    assert solved


def test_a_method_that_has_to_be_trained_says_so():
    with pytest.raises(TypeError, match='lincir needs a training: name an experiment'):
        api.get('method', 'lincir').untrained(MadeUp())


def test_every_method_and_variant_has_a_title_and_a_colour_of_its_own_or_grey():
    styles = api.method_styles()
    assert set(api.names('method')) < set(styles)
    assert len({s.title for s in styles.values()}) == len(styles)
    assert all(is_color_like(color(name)) for name in styles)
    assert all(api.method_style(name) == style for name, style in styles.items())
    assert api.method_style('of_nobody') == api.Style('Of nobody')


def check_method(m):
    "Where a method has no score of its own, queries and gallery have one space; its scores are finite numbers."
    source = images()
    assert isinstance(m, api.Method)
    features = m.encode_gallery(source)
    gallery = torch.tensor(np.asarray(features.array[[features.index[i] for i in source.ids]]))
    q = m.encode_queries(api.Queries(['a', 'b'], [['is red'], ['is red', 'on a meadow']], ['0', '1'], source))
    if m.score is cosine_scores:
        assert q.shape == (2, gallery.shape[1]) and torch.allclose(q.norm(dim=-1), torch.ones(2), atol=1e-4)
    shared, own = m.score(q, gallery), m.score(q, torch.stack([gallery, gallery]))
    assert shared.shape == own.shape == (2, 3) and torch.allclose(shared, own, atol=1e-5)
    assert torch.isfinite(shared).all()


def small(name) -> Benchmark:
    "A small version of a benchmark."
    return api.get('benchmark', name).load('world', seed=1, **OPTIONS.get(name, {}))


@pytest.mark.parametrize('name', api.names('benchmark'))
def test_a_benchmark_asks_and_aggregates(name):
    plugin = api.get('benchmark', name)
    assert plugin.name == name and plugin.title
    b = small(name)
    assert isinstance(b, Benchmark) and b.tasks and not set(b.tasks) & set(b.missing)
    assert isinstance(b, api.Benchmark)
    for task in b.tasks.values():
        assert isinstance(task, api.Task) and isinstance(task.source, api.ImageSource)
        assert isinstance(task, Task) and isinstance(task.protocol, Protocol) and len(task) > 0
        assert task.ks and list(task.ks) == sorted(set(task.ks)) and task.source.key == task.key != ''
        assert task.source.load(task.images[0]).mode == 'RGB' and set(task.images) <= set(task.source.ids)
        assert all(texts and all(isinstance(t, str) for t in texts) for texts in task.as_queries().texts)
    for m in plugin.tasks:
        assert m.metric in b.tasks[m.task].metrics and m.title and m.task_title
    per_query, rows = evaluate_benchmark(method('image_text', MadeUp()), b)
    assert {(m.task, m.metric) for m in plugin.main.values()} <= set(zip(rows.task, rows.metric))
    assert list(rows.columns) == RESULT_COLUMNS and set(per_query.task) <= set(rows.task)
    assert len(per_query) == sum(map(len, b.tasks.values()))
    assert ((0 <= rows.ci_low) & (rows.ci_low <= rows.value) & (rows.value <= rows.ci_high)).all()
    assert not rows.duplicated(['task', 'metric', 'k']).any()


class Colours:
    "Two queries over images of one colour; has what the contract of a task lists, and nothing else."

    name, task, metrics, ks, root, fingerprint = 'listed', 'colours', ('recall',), (1, 2), None, 'colours'
    protocol, source = Protocol('listed', reference='removed'), images()

    def __init__(self, shared: bool):
        about = dict(query_id=['a', 'b'], task='colours', reference=['0', None], condition=['is red', 'is blue'])
        self.queries = pd.DataFrame(about | dict(targets=[['1'], ['0', '2']], excluded=[[], ['1']]))
        self.shared_gallery = ['0', '1', '2'] if shared else None
        if not shared:
            self.queries['gallery'] = [['1', '2'], ['0', '2']]

    def __len__(self):
        return 2

    def restrict(self, present):
        return self

    def as_queries(self):
        return api.Queries(['a', 'b'], [['is red'], ['is blue']], ['0', None], self.source)


class ColoursBenchmark:
    "One task; has what the contract of a benchmark lists, and nothing else."

    name, missing, draw = 'listed', {}, 0

    def __init__(self, shared: bool):
        self.tasks = dict(colours=Colours(shared))

    def aggregate(self, per_query, seed=0, **labels):
        return result_rows(per_query, (1, 2), ('recall',), seed, **labels)


@pytest.mark.parametrize('shared', [True, False])
def test_what_the_contracts_of_task_and_benchmark_list_is_enough_to_be_evaluated(shared):
    b = ColoursBenchmark(shared)
    for thing, contract in ((b, api.Benchmark), (b.tasks['colours'], api.Task)):
        listed = {n for n in (*contract.__annotations__, *vars(contract)) if n[0] != '_'}
        assert isinstance(thing, contract) and {n for n in dir(thing) if n[0] != '_'} == listed
    m = method('text_only', MadeUp())
    per_query, rows = evaluate_benchmark(m, b)
    assert [r.gallery_size for r in per_query.itertuples()] == [2, 2] and list(per_query.query_id) == ['a', 'b']
    assert rows.value.between(0, 100).all() and rows[rows.k == 2].value.tolist() == [100.0]
    (folder,) = rank_entries([Entry(m)], dict(listed=b))
    assert read_cached([folder])['rank'].tolist() == per_query['rank'].tolist()


def test_a_task_belongs_to_one_benchmark():
    tasks = [m.task for name in api.names('benchmark') for m in api.get('benchmark', name).tasks]
    assert len(tasks) == len(set(tasks)) == len(api.task_metrics()) > 3


NO_SERVER = api.BenchmarkPlugin.submission
SERVERS = [n for n in api.names('benchmark') if type(api.get('benchmark', n)).submission is not NO_SERVER]
SERVER_SIZES = dict(circo=60)  # CIRCO's server wants fifty images of each query; else the size in OPTIONS


@pytest.mark.parametrize('name', SERVERS)
def test_a_submission_is_written_counted_and_scored(name, tmp_path):
    size = SERVER_SIZES.get(name) or OPTIONS[name]['size']
    sent = api.get('benchmark', name).submission(dataset_root(name, size=size))
    assert fingerprint(sent.made_from)
    sent.write(method('image_text', MadeUp()), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len({sent.count(f) for f in files}) == 1 and sent.count(files[0]) > 0
    assert all(0 <= value <= 100 for f in files for value in sent.scores(f).values())
    assert all(sent.scores(f) for f in files)  # the world knows the targets of its test splits
    files[0].write_text('{}')
    with pytest.raises(ValueError, match=files[0].name):
        sent.count(files[0])


@pytest.mark.parametrize('name', sorted({*api.names('benchmark')} - {*SERVERS}))
def test_a_benchmark_without_a_server_says_so(name, tmp_path):
    with pytest.raises(TypeError, match=f'{name}: the plugin has no server'):
        api.get('benchmark', name).submission(tmp_path)


def test_pages_that_have_its_parameters_can_ask_for_a_benchmark_from_outside(monkeypatch):
    source = images()
    queries = pd.DataFrame(dict(query_id=['0', '1'], reference=['0', '1'], condition='is red', targets=[['1'], ['2']]))
    protocol = Protocol('mine', reference='kept', split='test')

    class Mine(api.BenchmarkPlugin):
        name = title = 'mine'
        tasks = (api.MainMetric('Mine R@1', 'mine', 'recall', 1, 'My task'),)
        parameters = dict(limit='my_queries')

        def load(self, data='world', size=0, seed=0, limit=0):
            few = Task('mine', 'mine', queries[:limit], source.load, protocol, source.ids, source.ids, 'contracts')
            return Benchmark('mine', dict(mine=few))

    monkeypatch.setitem(api._in_this_process['benchmark'], 'mine', Mine())
    page = dict(data='world', world_seed=0, sets=['mine'])
    found, missing = load_sets(page | dict(my_queries=1))
    assert [len(t) for t in found['mine'].tasks.values()] == [1] and not missing
    assert (api.task_title('mine'), api.task_metrics()['mine'].title) == ('My task', 'Mine R@1')
    with pytest.raises(ValueError, match="sets: 'mine' is none of"):
        load_sets(page)


@pytest.mark.parametrize('name', api.names('backbone'))
def test_a_backbone_is_registered_by_its_name_and_names_the_method_that_makes_it(name):
    plugin = api.get('backbone', name)
    assert isinstance(plugin, api.BackbonePlugin) and plugin.name == name
    assert plugin.made_by == '' or plugin.made_by in TRAINED
    config = settings(dict(backbone=name))
    assert config.backbone == name and config.method == (plugin.made_by or 'lincir')
    assert config.pretrained == ('none' if plugin.made_by else 'default')


def test_every_row_of_weights_is_registered():
    assert {*api.names('backbone')} == {*BACKBONES, 'blip'}


def backbone_at_hand(name):
    "A backbone with the weights that the book ships, else random ones; skipped where it needs a download."
    if name in BACKBONES and BACKBONES[name].gigabytes > 1:
        return text_backbone(name, device='cpu')  # random weights of both towers take minutes and gigabytes
    if name == 'blip':
        pytest.skip('blip has no random weights, its folder must be downloaded; tests/backbones/test_blip.py makes one')
    return load_backbone(name, 'default' if api.get('backbone', name).made_by else 'none', device='cpu')


LARGE = [n for n in BACKBONES if BACKBONES[n].gigabytes > 0.1]


@pytest.mark.parametrize(
    'name', [pytest.param(n, marks=pytest.mark.e2e if n in LARGE else ()) for n in api.names('backbone')]
)
def test_a_backbone_keeps_its_contract(name):
    b = backbone_at_hand(name)
    assert isinstance(b, api.Backbone) and isinstance(b, api.TokenBackbone) and b.name == name
    ids = b.tokenize(['a boat', 'a red boat at night'])
    word, nowhere = torch.zeros(2, b.W), torch.zeros(ids.shape, dtype=torch.bool)
    assert torch.equal(b.encode_ids(ids), b.inject(ids, nowhere, word)) and b.logit_scale.ndim == 0
    states, mask = b.text_states(['a boat', 'a red boat at night'])
    assert states.shape == (2, mask.shape[1], b.W) and mask.sum(1).tolist() == [4, 7]
    assert b.encode_text(['a boat']).shape == b.encode_pseudo(['a $'], torch.zeros(1, b.W)).shape == (1, b.D)


class Projections:
    "Random projections of pixels and of hashed words; has what the contract lists, and nothing else."

    name, D, W, image_size, fingerprint = 'projections', 8, 4, 6, 'projections'
    device, dtype = torch.device('cpu'), torch.float32
    record = dict(backbone='projections', weights='random', activation='none', dtype='float32', preprocess='6 pixels')

    def _drawn(self, what, *shape):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(crc32(what.encode())))

    def preprocess(self, image):
        return self.normalise(np.array(image.convert('RGB').resize((6, 6)))[None])[0]

    def normalise(self, pixels):
        pixels = torch.as_tensor(pixels).float() / 255 - 0.5
        return pixels.permute(0, 3, 1, 2) if pixels.shape[-1] == 3 else pixels

    def encode_image(self, images):
        return images.flatten(1) @ self._drawn('pixels', 3 * 6 * 6, 8)

    def text_states(self, texts):
        rows = [torch.stack([self._drawn(w, 4) for w in t.split()]) for t in texts]
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return states, torch.arange(states.shape[1]) < torch.tensor([[len(r)] for r in rows])

    def encode_text(self, texts):
        return self.text_states(texts)[0].sum(1) @ self._drawn('words', 4, 8)

    def encode_pseudo(self, prompts, words):
        return self.encode_text(prompts) + words @ self._drawn('words', 4, 8)

    def features(self, images):
        return image_features(self, images.ids, images.load, images.key)


class ProjectionsPlugin(api.BackbonePlugin):
    name = 'projections'

    def load(self, *_, **__):
        return Projections()


def test_what_the_contract_of_a_backbone_lists_is_enough_to_be_ranked(monkeypatch):
    monkeypatch.setitem(api._in_this_process['backbone'], 'projections', ProjectionsPlugin())
    b, listed = load_backbone('projections'), {*api.Backbone.__annotations__, *vars(api.Backbone)}
    assert isinstance(b, api.Backbone)
    assert {n for n in dir(b) if n[0] != '_'} == {n for n in listed if n[0] != '_'}
    texts = ['a red boat', 'is red']
    assert torch.equal(text_features(b, texts)[texts], b.encode_text(texts))
    source = images()
    alone = torch.stack([b.preprocess(source.load(i)) for i in source.ids])
    assert torch.equal(source.features(b)[source.ids], b.encode_image(alone))
    asked = small('cirr')
    per_query, rows = evaluate_benchmark(method('image_text', b), asked)
    assert '6 pixels' in finish({}, 'ranked', results=rows, backbone=b).data
    assert set(rows.backbone) == {'projections'} and len(per_query) == sum(map(len, asked.tasks.values()))


READS_MORE = [n for n in TRAINED if api.get('method', n).backbone_contract(settings(dict(method=n))) != api.Backbone]


def contract_only(monkeypatch, method, **more):
    "The configuration of a small training over a backbone that has only what its contract lists."
    monkeypatch.setitem(api._in_this_process['backbone'], 'projections', ProjectionsPlugin())
    fields = api.get('method', method).Config.model_fields
    given = {k: v for k, v in SMALL.items() if k in fields}
    return settings(given | dict(method=method, backbone='projections') | more)


@pytest.mark.parametrize('method', READS_MORE)
def test_a_training_names_what_its_backbone_lacks(method, monkeypatch):
    with pytest.raises(ValueError) as e:
        make_objective(contract_only(monkeypatch, method))
    said, contract = str(e.value), api.get('method', method).backbone_contract(settings(dict(method=method)))
    assert said.startswith("backbone: 'projections' has no ") and f', which {method} reads; give one that ' in said
    assert f'cis_nb.api.{contract.__name__}, as tiny does, or add what is missing' in said
    missing = said.removeprefix("backbone: 'projections' has no ").split(', which')[0].split(', ')
    assert missing and not any(hasattr(Projections(), name) for name in missing)
    assert {*missing} <= {*vars(contract), *contract.__annotations__}
    api.check_contract('backbone', 'tiny', load_backbone('tiny', device='cpu'), contract, method)


def test_pic2word_and_a_tuned_combiner_read_more_than_a_frozen_combiner(monkeypatch):
    assert {'lincir', 'pic2word', 'searle', 'contrastive', 'condvit'} <= {*READS_MORE}
    with pytest.raises(ValueError, match='logit_scale, .*which pic2word reads; give one .*cis_nb.api.TokenBackbone'):
        make_objective(contract_only(monkeypatch, 'pic2word'))
    with pytest.raises(ValueError, match='image_tower, .*which combiner reads; give one .*api.TrainableBackbone'):
        make_objective(contract_only(monkeypatch, 'combiner', tune='text'))
    with pytest.raises(ValueError, match="image_tower, .*which compile 'eager' reads"):
        make_objective(contract_only(monkeypatch, 'combiner', compile='eager'))


@pytest.mark.e2e
def test_what_the_contract_of_a_backbone_lists_is_enough_for_a_frozen_combiner(monkeypatch):
    run = train_or_load(contract_only(monkeypatch, 'combiner'))
    check_method(load_method(run, 'cpu'))


def test_a_backbone_from_outside_is_found_by_name(tmp_path, monkeypatch):
    module = '''
from cis_nb.api import BackbonePlugin

class Mine(BackbonePlugin):
    name, made_by = 'mine', 'combiner'

    def load(self, pretrained='default', *rest):
        return pretrained
'''
    (tmp_path / 'outside_backbone.py').write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(api.REGISTRY['backbone'], 'mine', 'outside_backbone:Mine')
    assert load_backbone('mine', 'weights') == 'weights'
    config = settings(dict(backbone='mine'))
    assert (config.backbone, config.method, config.pretrained) == ('mine', 'combiner', 'none')
    assert settings(dict(backbone='mine', method='lincir')).pretrained == 'default'


@pytest.mark.parametrize('method', ['auto', *TRAINED])
def test_a_training_refuses_an_unknown_backbone(method):
    with pytest.raises(ValueError) as e:
        settings(dict(backbone='vit_b31', method=method), 'some.yaml')
    said = str(e.value)
    assert said.startswith(
        "some.yaml: backbone: 'vit_b31' is not allowed: known: tiny_xs, tiny_s, tiny, tiny_products, rn50x4, "
    )
    assert said.endswith("; did you mean 'vit_b32'?")


def test_a_name_that_is_not_registered_is_refused():
    with pytest.raises(ValueError, match="benchmark: 'cirrr' is not registered; known: genecis, cirr"):
        api.get('benchmark', 'cirrr')


@pytest.mark.e2e
def test_product_pairs_are_those_of_benchmarks_with_products():
    for name in ('lrvsf', 'grocery'):
        pairs = api.get('benchmark', name).product_pairs('world', 'train', 3, 64)
        assert len(pairs) == 3 and set(pairs.simple.category) <= set(pairs.categories)
    with pytest.raises(TypeError, match="products: the benchmark 'cirr' has no product pairs to train on"):
        api.get('benchmark', 'cirr').product_pairs('world', 'train', 3, 64)
    config = api.get('method', 'condvit').Config
    with pytest.raises(ValueError, match="products: 'shoes' is none of .*, lrvsf, grocery"):
        config(products='shoes')
