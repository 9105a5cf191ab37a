"The counts of all tests with the marker `faults`, as a table, and as a file where $FAULTS_FILE names one."

import os
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd
import pytest
from hostile import COUNTS, OUTCOMES

from cis_nb.core.store import machine, versions


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    "The outcomes of a test's hostile cases are rows of the table."
    if call.when != 'call':
        return
    for what, counts in COUNTS.items():
        row = dict(group='hostile input', what=what, cases=counts.total(), **{k: counts[k] for k in OUTCOMES})
        item.user_properties.append(('faults', row))
    COUNTS.clear()


def pytest_terminal_summary(terminalreporter, config):
    "Tests count with `record_property('faults', dict(group, what, measure=number, …))`."
    reports = [r for outcome in ('passed', 'failed') for r in terminalreporter.getreports(outcome)]
    found = [value for r in reports for key, value in r.user_properties if key == 'faults']
    if not found or hasattr(config, 'workerinput'):  # of several processes, the one that has all results
        return
    rows = [(f['group'], f['what'], k, n) for f in found for k, n in f.items() if k not in ('group', 'what')]
    table = pd.DataFrame(rows, columns=['group', 'what', 'measure', 'number'])
    table = table.groupby(['group', 'what', 'measure'], sort=False, as_index=False).number.sum()
    terminalreporter.section('faults')
    for group, some in table.groupby('group', sort=False):
        wide = some.pivot_table(index='what', columns='measure', values='number', sort=False)
        wide.loc['all'] = wide.sum()
        terminalreporter.write_line(f'{group}\n{wide.astype(int).to_string()}\n')
    if file := os.environ.get('FAULTS_FILE'):
        _write(Path(file), table)


def _write(file: Path, table: pd.DataFrame):
    "Replace the groups of this run in the file; others stay."
    about = ', '.join(f'{k} {v}' for k, v in versions().items())
    table = table.assign(date=datetime.now(timezone.utc).date().isoformat(), cores=machine()['cores'], versions=about)
    if file.exists():
        old = pd.read_csv(file)
        table = pd.concat([old[~old.group.isin(set(table.group))], table])
    table.to_csv(file, index=False)
