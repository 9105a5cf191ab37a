"The counts of kills and hostile input: how they are written, and that the shipped ones are of a complete run."

import re

import pandas as pd
import pytest
from fault_counts import count_table, wide_table, write_counts
from projects import ROOT

FILE = ROOT / 'cis_nb' / 'assets' / 'faults.csv'
TESTS = [p.read_text(encoding='utf-8') for p in sorted((ROOT / 'tests' / 'faults').glob('*.py'))]
INPUTS = {name for text in TESTS for name in re.findall(r"\battack\(\s*'([^']+)'", text)}  # what the tests change
KINDS = {'make', 'training', 'features', 'world', 'packing', 'corpus', 'relations'}


def test_counts_of_several_tests_are_added():
    found = [
        dict(group='g', what='a', cases=3, raw=1),
        dict(group='g', what='a', cases=2),
        dict(group='h', what='a', kills=4),
    ]
    table = count_table(found)
    assert table.number.tolist() == [5, 1, 4]
    assert wide_table(table, 'g').loc['all'].to_dict() == dict(cases=5, raw=1)


def test_a_file_has_the_counts_of_one_run(tmp_path):
    "What an earlier run has written goes."
    about = dict(commit='a', seconds=1, tests=2, failed=0)
    for kills in (3, 4):
        write_counts(tmp_path / 'a.csv', count_table([dict(group='kills', what='make', kills=kills)]), about)
    (row,) = pd.read_csv(tmp_path / 'a.csv').itertuples()
    assert (row.number, row.commit, row.failed) == (4, 'a', 0) and row.date and row.cpu and row.cores


def assert_complete(counts: pd.DataFrame):
    "The counts are of one complete run without failures, of at most 15 minutes."
    assert set(counts[counts.group == 'kills'].what) == KINDS
    assert counts.failed.tolist() == [0] * len(counts) and 'changes' not in counts.commit[0]
    assert (counts.seconds <= 900).all()
    assert counts[(counts.group == 'kills') & (counts.measure == 'kills')].number.sum() >= 40
    inputs = counts[counts.group == 'hostile input']
    cases = inputs[inputs.measure == 'cases'].set_index('what').number
    outcomes = inputs[inputs.measure != 'cases']
    assert cases.sum() >= 250 and outcomes.groupby('what').number.sum().to_dict() == cases.to_dict()
    assert not outcomes[outcomes.measure.isin(['silent', 'raw', 'hang'])].number.sum()
    assert set(cases.index) == INPUTS


def made_up(kills=6, cases=50, faulty=0, inputs=INPUTS, **about) -> pd.DataFrame:
    "Counts like those of a complete run."
    found = [dict(group='kills', what=kind, kills=kills) for kind in sorted(KINDS)]
    found += [
        dict(group='hostile input', what=what, cases=cases, raw=faulty) | {'clear error': cases - faulty}
        for what in sorted(inputs)
    ]
    return count_table(found).assign(**dict(commit='a', seconds=900.0, failed=0) | about)


def test_a_complete_run_is_told_from_others():
    assert_complete(made_up())
    assert {'COCO panoptic', 'images', 'weights', 'records', 'parameters'} < INPUTS
    others = [dict(kills=5), dict(cases=2), dict(faulty=1), dict(seconds=901), dict(failed=1)]
    for other in [*others, dict(inputs=INPUTS - {'images'})]:
        with pytest.raises(AssertionError):
            assert_complete(made_up(**other))


def test_the_shipped_counts_are_of_a_complete_run():
    if not FILE.exists():
        pytest.skip(f'{FILE} is missing: FAULTS_FILE={FILE} make test-faults writes it')
    assert_complete(pd.read_csv(FILE))
