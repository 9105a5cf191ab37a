"Learning rates: which are tried, and when another one is preferred."

from types import SimpleNamespace

import pandas as pd
import pytest

from cis_nb.experiments import learning_rates as L


def scores(**by_factor) -> pd.DataFrame:
    "Scores of one training by factor, a list over seeds each."
    factors = dict(low=0.33, own=1, high=3)
    rows = [(factors[name], seed, s) for name, values in by_factor.items() for seed, s in enumerate(values)]
    about = dict(training='05_train.a', title='A', run='')
    return pd.DataFrame(rows, columns=['factor', 'seed', 'score']).assign(lr=lambda t: t.factor * 1e-3, **about)


@pytest.mark.parametrize(
    'given, factor',
    [
        (dict(own=[5, 5, 5], low=[6, 6, 6]), 0.33),
        (dict(own=[5, 5, 5], low=[6, 6, 5]), 1),  # a tie is not ahead
        (dict(own=[5, 5, 5], low=[9, 9, 4]), 1),  # a higher mean is not enough
        (dict(own=[5, 5, 5], low=[6, 6, 6], high=[6, 6, 7]), 3),
        (dict(own=[5, 5, 5], low=[5, 5, 4]), 1),
    ],
)
def test_a_rate_is_preferred_if_it_is_ahead_with_every_seed(given, factor):
    assert L.preferred_rates(scores(**given)) == {'05_train.a': factor}


def test_equal_scores_choose_no_rate():
    found = scores(own=[5, 5, 5], low=[5, 5, 5], high=[5, 5, 5])
    assert L.undecided_trainings(found) == ['05_train.a'] and L.preferred_rates(found) == {}
    assert L.rates_table(found)['ahead with every seed'].tolist() == ['cannot be decided']


def test_table_and_finding_name_the_preferred_rate():
    found = scores(own=[5, 5], high=[6, 8])
    assert L.rates_table(found).iloc[0][['learning rate', '× 3', 'ahead with every seed']].tolist() == [
        '0.001',
        '7.0\u00a0±\u00a01.4',
        '0.003',
    ]
    assert L.learning_rate_finding(found).endswith('one is for a with 3 times its rate (+2.0 points)')


def test_rates_are_rounded_and_what_cannot_be_judged_is_refused(monkeypatch):
    monkeypatch.setattr(L, 'training_config', lambda name: SimpleNamespace(lr=1.5e-3, eval_every=int(name == 'judged')))
    assert L.rates_of('judged', [0.33, 1, 3]) == {0.33: 0.00049, 1: 0.0015, 3: 0.0045}
    with pytest.raises(ValueError, match='alone has no validation that could judge a learning rate'):
        L.rates_of('alone', [1, 3])
    with pytest.raises(ValueError, match='has no 1, the learning rate that the other ones are compared with'):
        L.rates_of('judged', [0.33, 3])
