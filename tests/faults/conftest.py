"The counts of all tests with the marker `faults`, as a table, and as a file where $FAULTS_FILE names one."

import os
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd
from hostile import COUNTS, report

from cis_nb.core.store import machine, versions


def pytest_terminal_summary(terminalreporter):
    "Tests count with `record_property('faults', dict(group, what, measure=number, …))`."
    if COUNTS:
        terminalreporter.section('hostile input')
        terminalreporter.write_line(report())
    reports = [r for outcome in ('passed', 'failed') for r in terminalreporter.getreports(outcome)]
    found = [value for r in reports for key, value in r.user_properties if key == 'faults']
    if not found:
        return
    rows = [
        dict(group=f['group'], what=f['what'], measure=k, number=n)
        for f in found
        for k, n in f.items()
        if k not in ('group', 'what')
    ]
    table = pd.DataFrame(rows)
    terminalreporter.section('faults')
    for group, some in table.groupby('group', sort=False):
        wide = some.pivot_table(index='what', columns='measure', values='number', aggfunc='sum', sort=False)
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
