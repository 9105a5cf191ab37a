"Combiners on products: stages, resumed runs, towers that rest, other kinds of conditions, bad input."

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cis_nb import train as T
from cis_nb.api import Unsolved
from cis_nb.methods import combiner as C
from cis_nb.methods import combiner_products as P
from cis_nb.benchmarks.lrvsf_training import product_pairs
from cis_nb.methods import condvit as V

SMALL = dict(method='combiner_products', backbone='tiny_xs', samples=24, val_samples=8, distractors=8, device='cpu')
SMALL |= dict(steps=4, batch_size=8, eval_every=2, log_every=1, lr=1e-3, warmup=0, start='sum', dtype='float32')


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    torch.set_num_threads(1)


def objective(**given):
    return T.make_objective(T.settings(SMALL | given))


def fit(o, folder, steps=4):
    loop = dict(steps=steps, batch_size=8, lr=1e-3, eval_every=1, log_every=1, device='cpu')
    return T.train(o, Path(folder), **loop)


@pytest.mark.e2e
@pytest.mark.parametrize('tune', ['text', 'image', 'both'])
def test_only_the_named_towers_change(tune, tmp_path):
    o = objective(tune=tune, tune_steps=2)
    before = {n: p.clone() for n, p in o.backbone.model.state_dict().items()}
    fit(o, tmp_path / 'run')
    moved = {C.tower_of(n) for n, p in o.backbone.model.state_dict().items() if not torch.equal(p, before[n])}
    assert moved == set(C.TRAINED_TOWERS[tune]) and (tmp_path / 'run' / 'model.safetensors').exists()


@pytest.mark.e2e
def test_a_run_that_is_cut_at_the_border_of_its_stages_goes_on_bit_for_bit(tmp_path):
    class Stops(P.ProductCombinerTraining):
        def before_step(self, step, optimizer):
            if step == 2:
                raise KeyboardInterrupt
            super().before_step(step, optimizer)

    given = dict(tune='both', tune_steps=2)
    straight = fit(objective(**given), tmp_path / 'straight')
    o = objective(**given)
    o.__class__ = Stops
    with pytest.raises(KeyboardInterrupt):
        fit(o, tmp_path / 'cut')
    resumed = fit(objective(**given), tmp_path / 'cut')
    assert list(straight.loss) == list(resumed.loss)
    for name in ('combiner.safetensors', 'model.safetensors'):
        a, b = load_file(tmp_path / 'straight' / name), load_file(tmp_path / 'cut' / name)
        assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.e2e
def test_a_batch_has_the_products_of_condvit():
    shared = {k: v for k, v in SMALL.items() if k not in ('method', 'start')}
    other = T.settings(dict(shared, method='condvit', condition='category'))
    theirs, mine = T.make_objective(other), objective(condition='category', tune='both', tune_steps=2)
    a, b = theirs.prepare(np.arange(8, 16), None), mine.prepare(np.arange(8, 16), None)
    assert torch.equal(a[0], b[0])
    assert [theirs.net.categories[i] for i in a[1]] == b[1]


@pytest.mark.e2e
def test_a_trained_run_knows_its_condition_and_its_backbone():
    run = T.train_or_load(T.settings(SMALL | dict(condition='category', tune='both', tune_steps=2)))
    m = T.load_method(run, 'cpu')
    assert (m.name, m.condition, m.tune) == ('clip4cir_products', 'category', 'both')
    pairs = product_pairs('world', 'val', 8, 64)
    assert m.for_task(V.product_task(pairs, 'category')) is m
    with pytest.raises(Unsolved, match=r'8 conditions are of another kind .*\(condition: category\), such as'):
        m.for_task(V.product_task(pairs, 'text'))
    again = objective(condition='category', tune='both', tune_steps=2)
    again.load(run)
    assert all(torch.equal(p, q) for p, q in zip(again.net.state_dict().values(), m.net.state_dict().values()))


def test_a_combiner_of_other_triplets_is_refused(tmp_path):
    b = P.load_backbone('tiny_xs', device='cpu')
    C.save_combiner(tmp_path, C.Combiner(b.D, 8, 16), b)
    with pytest.raises(ValueError, match='was not trained on products; load it with load_combiner'):
        P.load_product_combiner(tmp_path, 'cpu', b)


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(tune='both'), 'tune_steps must be above 0'),
        (dict(tune='both', tune_steps=4), 'tune_steps must be less than steps'),
        (dict(tune_steps=1), '0 where tune is none'),
        (dict(condition='none'), "condition: 'none' is not allowed"),
        (dict(tune='all', tune_steps=1), "tune: 'all' is not allowed"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        T.settings(SMALL | given)
