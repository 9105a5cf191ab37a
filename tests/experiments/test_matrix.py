"The table of all methods and benchmarks with gaps: benchmarks that are absent, methods without a result, pads."

import numpy as np
import pandas as pd
import pytest
from cis_nb import api
from cis_nb.api import MainMetric
from cis_nb.experiments.matrix import (
    load_benchmark,
    load_benchmarks,
    main_metric,
    main_rows,
    matrix_table,
    query_scores,
)
from cis_nb.retrieval.protocol import RESULT_COLUMNS, Benchmark, NoQueries


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
def test_a_size_is_a_whole_number(shelf, name):
    with pytest.raises(ValueError, match='the size must be a whole number'):
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
