"The counts of all tests with the marker `faults`, as a table, and as a file where $FAULTS_FILE names one."

import os
import time
from pathlib import Path

import pytest
from fault_counts import commit, count_table, wide_table, write_counts
from hostile import COUNTS, OUTCOMES

BEGUN = pytest.StashKey()  # commit and time


def pytest_configure(config):
    "What the checkout holds when the tests begin."
    config.stash[BEGUN] = commit(), time.monotonic()


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
    table = count_table(found)
    terminalreporter.section('faults')
    for group in table.group.unique():
        terminalreporter.write_line(f'{group}\n{wide_table(table, group).to_string()}\n')
    if file := os.environ.get('FAULTS_FILE'):
        code, start = config.stash[BEGUN]
        failed = [r for outcome in ('failed', 'error') for r in terminalreporter.getreports(outcome)]
        tests = len({r.nodeid for r in [*reports, *failed]})
        about = dict(commit=code, seconds=round(time.monotonic() - start), tests=tests, failed=len(failed))
        write_counts(Path(file), table, about)
