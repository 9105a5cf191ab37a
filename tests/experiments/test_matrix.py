"The table of all methods and benchmarks with gaps: benchmarks that are absent, methods without a result, pads."

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from cis_nb import api
from cis_nb.api import MainMetric
from cis_nb.data.image_sources import ImageSource
from cis_nb.experiments import entries, supervision
from cis_nb.experiments.entries import Entry
from cis_nb.experiments.matrix import (
    cached_benchmark_rankings,
    load_benchmark,
    load_benchmarks,
    main_metric,
    main_rows,
    matrix_table,
    query_scores,
    rank_all,
    rank_pairs,
    read_results,
)
from cis_nb.experiments.sweeps import SweepParameters, train_variants
from cis_nb.retrieval.protocol import RESULT_COLUMNS, Benchmark, NoQueries, Protocol, Task


class Shelf:
    "Benchmarks that are registered: one is there, one has no files, one no queries, one is broken."

    def __init__(self, name):
        self.name = name

    def load(self, data, size, seed):
        if self.name == 'files':
            raise FileNotFoundError('no files')
        if self.name == 'queries':
            raise NoQueries('no queries')
        if self.name == 'broken':
            raise ValueError('a damaged table')
        return Benchmark(f'{data}-{size}-{seed}', {})


@pytest.fixture
def shelf(monkeypatch):
    monkeypatch.setattr(api, 'get', lambda kind, name: Shelf(name))
    monkeypatch.setattr(api, 'names', lambda kind: ['there', 'files', 'queries'])


def test_absent_benchmarks_are_listed_and_broken_ones_raise(shelf):
    found, missing = load_benchmarks([], 'folder', 4)
    assert list(found) == ['folder-0-4'] and missing == dict(files='no files', queries='no queries')
    with pytest.raises(ValueError, match='a damaged table'):
        load_benchmarks(['broken'])


@pytest.mark.parametrize('name', ['cirr=-3', 'cirr=2.5', 'cirr= 3', 'cirr=3=4'])
def test_a_size_is_an_integer(shelf, name):
    with pytest.raises(ValueError, match='the size must be an integer'):
        load_benchmark(name)


def test_an_empty_size_is_the_usual_one(shelf):
    assert load_benchmark('cirr=').name == load_benchmark('cirr').name == 'world-0-0'


def results(*rows):
    columns = ['benchmark', 'method', 'task', 'metric', 'k', 'seed', 'value', 'ci_low', 'ci_high']
    return pd.DataFrame(rows, columns=columns).reindex(columns=RESULT_COLUMNS).assign(n=9, backbone='tiny')


def test_a_benchmark_without_a_main_metric_shows_its_first_row():
    r = results(['own', 'a', 't', 'map', 5, 0, 40.0, 30.0, 50.0], ['own', 'a', 't', 'recall', 1, 0, 9.0, 8.0, 10.0])
    assert main_metric('own', r) == MainMetric('own t map@5', 't', 'map', 5)
    assert main_rows('own', r).value.tolist() == [40.0]


def test_a_method_without_a_result_has_a_dash_and_rows_follow_the_titles():
    r = results(['own', 'b', 't', 'map', 5, 0, 40.0, 30.0, 50.0], ['other', 'a', 't', 'map', 5, 0, 7.0, 6.0, 8.0])
    table = matrix_table(r, dict(a='A', b='B', c='C'))
    assert table.method.tolist() == ['A', 'B', 'C'] and list(table.columns[1:]) == ['own t map@5', 'other t map@5']
    assert table['own t map@5'].str.startswith('40').tolist() == [False, True, False]
    assert table['other t map@5'].tolist()[1:] == ['–', '–']


def test_scores_of_one_task_leave_out_the_others_and_pads_are_no_hits():
    per_query = pd.DataFrame(dict(task=['full', 'full', 'subset'], ranks=[[3, 1], [2], [1]]))
    of_task = query_scores(per_query, MainMetric('', 'full', 'recall', 1))
    assert of_task.score.tolist() == [100.0, 0.0] and of_task.index.tolist() == [0, 1]
    of_all = query_scores(per_query, MainMetric('', 'mean', 'recall', 1))
    assert of_all.score.tolist() == [100.0, 0.0, 100.0]
    assert np.isclose(query_scores(per_query, MainMetric('', 'full', 'map', 5)).score[0], 100 * (1 + 2 / 3) / 2)


# ---- a method that only keeps its contract


class OwnTower:
    "Finds the reference itself by its colour: derives from no class of the book, cannot be copied or renamed."

    __slots__ = ('backbone',)
    name, title, fingerprint = 'own_tower', 'A tower of its own', 'own tower'

    def __init__(self, backbone):
        self.backbone = backbone

    def see(self, images, ids):
        return np.array([images.load(i).getpixel((0, 0)) for i in ids], np.float32) - 100

    def encode_gallery(self, images):
        return SimpleNamespace(array=self.see(images, images.ids), index={i: j for j, i in enumerate(images.ids)})

    def encode_queries(self, queries):
        return torch.nn.functional.normalize(torch.tensor(self.see(queries.images, queries.references)), dim=-1)

    def score(self, q, gallery):
        unit = torch.nn.functional.normalize(gallery, dim=-1)
        return (q[:, None] * unit).sum(-1) if unit.ndim == 3 else q @ unit.T


class OwnTowerPlugin(api.Plugin):
    name, title = OwnTower.name, OwnTower.title

    def objective(self, backbone, config):
        raise AssertionError('the runs of this test are finished')

    def load(self, run, device='auto', backbone=None):
        return OwnTower(backbone)

    def untrained(self, backbone, seed=0):
        return OwnTower(backbone)


class NoBackbone:
    "The backbone of a method that needs none."

    name, fingerprint = 'tiny', 'none'


class OtherCode(NoBackbone):
    "The same weights, read by other code."

    def encode_image(self, images):
        return 2 * images


def plain(shade):
    return Image.new('RGB', (4, 4), shade)


def darker(shade):
    return Image.new('RGB', (4, 4), tuple(v - 1 for v in shade))


def colours(paint=plain, key='colours') -> Benchmark:
    "Three images of one colour each; every one is asked for by itself."
    shades = {'0': (250, 90, 90), '1': (90, 250, 90), '2': (90, 90, 250)}
    source = ImageSource(list(shades), lambda i: paint(shades[i]), key)
    queries = pd.DataFrame(dict(query_id=source.ids, reference=source.ids, condition='', targets=[[i] for i in shades]))
    protocol = Protocol('colours', reference='kept', split='test')
    task = Task('colours', 'colours', queries, source.load, protocol, source.ids, source.ids, key, ks=(1,))
    return Benchmark('colours', dict(colours=task))


@pytest.mark.e2e
def test_a_method_that_only_keeps_its_contract_is_ranked_trained_and_called_by_its_variant(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path))
    monkeypatch.setitem(api._in_this_process['method'], 'own_tower', OwnTowerPlugin())
    monkeypatch.setattr(entries, 'train_or_load', lambda config: Path(f'run-{config.lr}'))
    backbone = NoBackbone()
    assert isinstance(OwnTower(backbone), api.Method)
    p = dict(methods=['own_tower'], trainings=[], seeds=[3], seed=0, training='', shorter={}, backbone='tiny')
    changes = {f'rate {r}': dict(method='own_tower', lr=r) for r in (0.1, 0.2)}
    p |= dict(pretrained='default', device='cpu', changes=changes)
    run = rank_all(p, dict(colours=colours()), {}, lambda model: train_variants(SweepParameters.of(p), model), backbone)
    titles = {'own_tower': 'A tower of its own', 'rate 0.1': 'rate 0.1', 'rate 0.2': 'rate 0.2'}
    assert run.titles == titles and set(run.results.method) == set(run.per_query.method) == set(titles)
    table = matrix_table(run.results, run.titles)
    assert table.method.tolist() == list(titles.values()) and table.iloc[:, 1].str.startswith('100').all()
    assert {e.method.title for e in run.entries} == {'A tower of its own'}  # nobody has renamed it
    assert [(e.seed, e.run) for e in run.entries[1:]] == [(3, Path('run-0.1')), (3, Path('run-0.2'))]


# ---- what rankings are kept by


@dataclass
class Weighted(Benchmark):
    "A benchmark with a number of its own in its aggregation."

    weight: float = 1.0

    def aggregate(self, per_query, seed=0, **labels):
        rows = super().aggregate(per_query, seed, **labels)
        return rows.assign(value=self.weight * rows.value)


def kept(backbone=None, **given) -> Path:
    "The folder of the rankings of `colours`."
    return cached_benchmark_rankings(Entry(OwnTower(backbone or NoBackbone())), colours(**given))


def test_results_are_aggregated_anew_from_the_kept_rankings(store, monkeypatch):
    entry = Entry(OwnTower(NoBackbone()))
    pairs = [(entry, Weighted('weighted', colours().tasks, weight=w)) for w in (0.2, 0.8)]
    folders = rank_pairs(pairs)
    assert folders[0] == folders[1]
    assert np.allclose(read_results(pairs, folders).value, [20, 80])


def test_rankings_are_kept_by_the_code_of_backbone_and_loader(store):
    folders = [kept(), kept(OtherCode()), kept(paint=darker), kept(key='others')]
    assert len(set(folders)) == 4 and kept() == folders[0]


def test_rankings_of_images_without_a_key_are_not_kept(store):
    with pytest.raises(ValueError, match='the images of colours have no key'):
        kept(key='')


def test_prompts_are_scored_anew_from_the_kept_rankings(store, monkeypatch):
    class Words(OwnTower):
        def with_prompt(self, prompt):
            return self

    asked = Entry(Words(NoBackbone())), ['a photo of [$]'], 'colours', colours().tasks
    second = pd.DataFrame(dict(task=['colours'], query_id=['0'], reference=['0'], rank=[2], ranks=[[2]]))
    monkeypatch.setattr(supervision, 'set_rankings', lambda m, tasks: second)
    scores = []
    for k in (1, 2):
        monkeypatch.setattr(supervision, 'set_metric', lambda name, k=k: MainMetric('', 'colours', 'recall', k))
        scores += supervision.prompt_rankings(*asked).score.tolist()
    assert scores == [0.0, 100.0]
