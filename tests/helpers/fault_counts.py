"The counts of the tests with the marker `faults`: a table, and a file for the page of the run store."

import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pandas as pd

from cis_nb.core.store import machine
from projects import ROOT

COLUMNS = ['group', 'what', 'measure', 'number']


def commit() -> str:
    "The commit of the checkout, marked where tracked files differ from it; empty outside of a repository."
    command = ['git', 'describe', '--always', '--abbrev=10', '--dirty=, with changes', '--exclude=*']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ''


def count_table(found: list) -> pd.DataFrame:  # group, what, measure, number
    "The sums of some counts dict(group, what, measure=number, …), a line a measure."
    rows = [(f['group'], f['what'], k, n) for f in found for k, n in f.items() if k not in ('group', 'what')]
    table = pd.DataFrame(rows, columns=COLUMNS)
    return table.groupby(COLUMNS[:3], sort=False, as_index=False).number.sum()


def wide_table(table: pd.DataFrame, group: str) -> pd.DataFrame:
    "One group: a row for each kind of work or input, a column for each measure, sums in the last row."
    wide = table[table.group == group].pivot_table(index='what', columns='measure', values='number', sort=False)
    wide = wide.fillna(0)
    wide.loc['all'] = wide.sum()
    return wide.astype(int)


def write_counts(file: Path, table: pd.DataFrame, about: dict):
    "Write the counts of one run, and what all its lines share: commit, seconds, tests, failed."
    m = machine()
    shared = dict(date=datetime.now(timezone.utc).date().isoformat(), cpu=m['cpu'], cores=m['cores'])
    table.assign(**shared, **about).to_csv(file, index=False)
