"Receipts and progress bars."

import errno
import json
import os
import subprocess
import sys
import numpy as np
import pytest
import pandas as pd
from cis_nb.core.report import finish, keep_table, peak_memory_bytes, progress, show_table, this_run
from cis_nb.core.store import StorageFault


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    "Every test has a store of its own."
    monkeypatch.setenv('CIS_STORE', str(tmp_path / 'store'))
    for k in ('CIS_REPORT', 'CIS_EXPERIMENT', 'CIS_PROFILE', 'CIS_DATA'):
        monkeypatch.delenv(k, raising=False)
    return tmp_path / 'store'


def test_the_peak_of_memory_is_counted_in_bytes_and_stays():
    code = '''
import numpy as np
from cis_nb.core.report import peak_memory_bytes
before = peak_memory_bytes()
large = np.ones(2**26)  # far more than what imports took for a moment
with_it = peak_memory_bytes()
del large
print(before, with_it, peak_memory_bytes())
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    before, with_it, after = map(int, done.stdout.split())
    assert with_it - before == pytest.approx(2**29, rel=0.05) and after > 0.98 * with_it


def test_the_peak_of_memory_is_known_without_linux_too(monkeypatch):
    known = peak_memory_bytes()

    def missing(*a, **k):
        raise FileNotFoundError('/proc/self/status')

    monkeypatch.setattr('pathlib.Path.read_text', missing)
    assert 0.5 * known < peak_memory_bytes() < 2 * known


@pytest.mark.parametrize('names', [['<b>n'], ['<b>n', '<i>m'], [None]])
def test_the_names_of_rows_and_columns_are_text(names):
    axis = pd.MultiIndex.from_product([['<u>1']] * len(names), names=names)
    axis = axis if len(names) > 1 else axis.get_level_values(0).set_names(names)
    table = pd.DataFrame([['<s>2']], index=axis, columns=axis)
    page = show_table(table, 'a table', index=True).data
    assert not any(tag in page for tag in ('<b>n', '<i>m', '<u>1', '<s>2'))
    assert all(name is None or name.replace('<', '&lt;').replace('>', '&gt;') in page for name in names)
    assert list(table.index.names) == names


def test_a_kept_table_has_its_ending_and_its_folder(tmp_path, monkeypatch):
    "Else nothing is written; a full disk is tried with the exports of the store."
    monkeypatch.chdir(tmp_path)
    keep = lambda file: keep_table(pd.DataFrame(dict(n=[1])), this_run(), file)  # noqa: E731
    (tmp_path / 'folder.csv').mkdir()
    for name in ('', '.', 'kept', 'kept.parquet', 'folder.csv', tmp_path / 'folder.csv'):
        with pytest.raises(ValueError, match='cannot be written: .*give '):
            keep(name)
    with pytest.raises(FileNotFoundError, match='missing/kept.csv cannot be written: there is no folder missing'):
        keep('missing/kept.csv')
    assert [p.name for p in tmp_path.iterdir()] == ['folder.csv']
    keep('kept.csv')
    assert (tmp_path / 'kept.csv').read_text().startswith('n,device,')


def test_receipt_arrives_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv('CIS_REPORT', str(tmp_path / 'r'))
    finish(dict(n=np.int64(3)), 'done', runs='x', counts={'skipped': np.int64(2)})
    assert json.loads((tmp_path / 'r' / 'receipt.json').read_text())['params'] == dict(n=3)

    def full(*a, **k):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', full)
    before = (tmp_path / 'r' / 'receipt.json').read_text()
    with pytest.raises(StorageFault, match='disk full while writing the receipt .* set CIS_STORE') as e:
        finish({}, 'again')
    assert e.value.errno == errno.ENOSPC
    assert (tmp_path / 'r' / 'receipt.json').read_text() == before


def test_progress_is_quiet_or_in_the_report(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: False, raising=False)
    assert list(progress(range(3), 'quiet')) == [0, 1, 2] and capfd.readouterr().err == ''
    monkeypatch.setenv('CIS_REPORT', str(tmp_path / 'r'))
    assert list(progress(range(3), 'loud')) == [0, 1, 2] and capfd.readouterr().err == ''
    assert 'loud' in (tmp_path / 'r' / 'progress.txt').read_text()
