"Every table that scores a training has the network before training beside it; pages run with their short parameters."

import matplotlib
import pytest
import torch

from cis_nb.api import method_style
from cis_nb.core.experiment_files import code_cells, notebooks, read_notebook, tags
from cis_nb.methods.late_fusion import BASELINES

torch.set_num_threads(1)
TABLES = {  # page -> beginning of the caption of each table with scores of its trainings
    '07_ablations/noise': [
        'Score of LinCIR by noise distribution',
        'Score with LinCIR’s noise, without, and before training, by modality gap',
        'Self-retrieval and gap of pseudo-words',
        'Score with LinCIR’s noise, without, and before training, by training text',
    ],
    '07_ablations/corpus': ['Score of LinCIR by training corpus'],
    '07_ablations/masking': ['Score of LinCIR by masking'],
    '07_ablations/supervision': ['Score of LinCIR by supervision'],
    '07_ablations/combiner': ['Mean R@1 of each ablation', 'Mean R@1 of the recipes', 'R@1 of each recipe by task'],
    '08_scaling/triplets': ['Mean R@1 by the number'],
    '08_scaling/pseudo_words_backbones': ['Score of each method, and before training, by backbone'],
    '08_scaling/backbones': ['Mean R@1 of Image + Text and the Combiner on each backbone'],
    '06_evaluation/compodiff': ['Main metric of each benchmark'],
}
SHORT = {  # page -> parameters in place of its defaults
    '07_ablations/noise': dict(seeds=[0], shorter={'steps': 2}, others=['tiny_xs']),
    '07_ablations/corpus': dict(seeds=[0], shorter={'steps': 2}, corpora=['world', 'talk'], lines=80),
    '07_ablations/masking': dict(seeds=[0], shorter={'steps': 2}),
    '07_ablations/supervision': dict(seeds=[0], shorter={'steps': 2}, prompts=2, fashion=0),
    '07_ablations/combiner': dict(seeds=[0], steps=2, tune_seeds=[]),
    '08_scaling/triplets': dict(seeds=[0], steps=2),
    '08_scaling/pseudo_words_backbones': dict(seeds=[0], shorter={'steps': 2}, close_up_images=10),
    '08_scaling/backbones': dict(backbones=['tiny_xs', 'tiny'], trainings=[], steps=2, close_up_images=10),
    '06_evaluation/compodiff': dict(searches=6, samplers=[]),
}
CONTROL = 'before training'
LATE_FUSIONS = ('07_ablations/corpus', '07_ablations/masking', '07_ablations/supervision')  # rows of them all


def tables_of(page: str, given: dict, monkeypatch) -> tuple:  # {caption: table}, names
    "The tables that a page shows, run with some parameters, and what its cells have defined."
    found, names = {}, {}
    monkeypatch.setattr('cis_nb.core.report.show_table', lambda table, said, *_, **kw: found.update({said: table}))
    matplotlib.use('Agg')
    for cell in code_cells(read_notebook(notebooks()[page])):
        exec(compile(cell['source'], page, 'exec'), names)
        if 'parameters' in tags(cell):
            names.update(given)
    return found, names


def words_of(table) -> list:
    "The headings and cells of a table, as texts."
    return [*map(str, table.columns), *map(str, table.to_numpy().ravel())]


@pytest.mark.parametrize('page', TABLES)
@pytest.mark.e2e
def test_a_training_stands_beside_its_network_before_training(page, monkeypatch):
    found, names = tables_of(page, SHORT[page], monkeypatch)
    for begin in TABLES[page]:
        (table,) = [t for said, t in found.items() if said.startswith(begin)]
        assert any(CONTROL in text for text in words_of(table)), begin
    if page in LATE_FUSIONS:
        (table,) = [t for said, t in found.items() if said.startswith(TABLES[page][0])]
        assert {method_style(m).title for m in BASELINES} <= {*words_of(table)}
    if page.endswith('compodiff'):
        no_controls_of_others(found, names)


def no_controls_of_others(found: dict, names: dict):
    "Each rival has its control, which is no row that stands there already; stage 2 is not compared with it."
    run, titles = names['run'], names['run'].titles
    started = ['combiner_synthetic_start', 'artemis_start', 'lincir_start']
    assert [m for m in titles if m.endswith('_start')] == started
    assert not {*started} & {rival for _, rival in names['found']}
    on_cirr = run.per_query[run.per_query.task == 'full'].query('seed == -1').set_index('query_id')
    ranks = {m: on_cirr[on_cirr.method == m]['rank'] for m in titles}
    for m in started:
        same = [o for o in titles if o != m and len(ranks[o]) and (ranks[o] - ranks[m]).eq(0).all()]
        assert same == [], m
