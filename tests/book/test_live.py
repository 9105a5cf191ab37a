"The progress of a book that is being made: a made-up folder of reports with running experiments."

import io
import json
import os
import time
from types import SimpleNamespace

import pytest

from cis_nb.book import live
from cis_nb.book.live import BookProgress, show_progress
from cis_nb.core.experiment_files import Experiment

NOW = 1_800_000_000.0


@pytest.fixture
def book(tmp_path, monkeypatch):
    "Four experiments, of which the last needs the first; nothing has run."
    monkeypatch.setenv('CIS_HOME', str(tmp_path))
    monkeypatch.setattr(live, 'time', SimpleNamespace(time=lambda: NOW))
    first, second, third = (
        Experiment('quick', name, name, tmp_path / name, {}, {}) for name in ('01_a', '06_evaluation/b', '03_c')
    )
    last = Experiment('quick', '04_d', '04_d', tmp_path / 'd', {}, {}, all_cores=True, before=(first,))
    found = {e.name: e for e in (first, second, third, last)}
    return BookProgress(found, {'01_a': 100.0, '06_evaluation/b': 40.0}, 2)


def run(e, seconds: float, bar: str = None):
    "Begin an experiment some seconds ago; `bar` is what its progress file holds."
    folder = e.folder.parent / f'.running-{e.folder.name}'
    folder.mkdir(parents=True)
    (folder / '.source.ipynb').write_text('{}')
    os.utime(folder / '.source.ipynb', (NOW - seconds, NOW - seconds))
    if bar is not None:
        (folder / 'progress.txt').write_text(bar)


def end(e, file='receipt.json', seconds=None):
    e.folder.mkdir(parents=True)
    (e.folder / file).write_text('{}')
    if seconds is not None:
        said = dict(experiment=e.name, inputs={}, seconds=seconds, created='2027-01-15T08:00:00+00:00')
        (e.folder / 'run.json').write_text(json.dumps(said))


def test_only_possible_seconds_are_kept(tmp_path):
    said = '{"a": 3, "b": NaN, "c": -Infinity, "d": -1, "e": true, "f": "9", "g": 1' + '0' * 400 + ', "h": 0.5}'
    (tmp_path / live.SECONDS_FILE).write_text(said)
    assert live._read_seconds(tmp_path / live.SECONDS_FILE) == dict(a=3, h=0.5)
    (tmp_path / live.SECONDS_FILE).write_text('[' * 100_000)
    assert live._read_seconds(tmp_path / live.SECONDS_FILE) == {}


def test_nothing_runs(book):
    assert book.running() == {} and book.lines() == [
        '     0 of 4 experiments, 0:00 minutes, about 2:55 left, then the pages'
    ]
    assert BookProgress(book.found, {}, 2).left() is None


def test_what_runs_has_its_seconds_and_the_last_of_its_bars(book):
    book.started = NOW - 90
    run(
        book.found['01_a'],
        75,
        'old: 100%|#| 3/3 [00:10<00:00, 3it/s]\rtraining:  45%|####5  | 9/20 [00:10<01:12, 1.1s/it]',
    )
    run(book.found['06_evaluation/b'], 10, 'waiting: another process is at work\n')
    run(book.found['03_c'], 5)
    assert book.running() == {
        '01_a': (75, 'training 45 %, 1.1s/it, 01:12 left', 72),
        '06_evaluation/b': (10, 'waiting: another process is at work', 0),
        '03_c': (5, '', 0),
    }
    assert book.lines()[:-1] == [
        '  ▸  01_a  1:15 of about 1:40  training 45 %, 1.1s/it, 01:12 left',
        '  ▸  06_evaluation/b  0:10 of about 0:40  waiting: another process is at work',
        '  ▸  03_c  0:05  ',
    ]


def test_a_folder_of_an_earlier_book_runs_no_more(book):
    run(book.found['01_a'], 300, 'training:  45%|####5  | 9/20 [00:10<01:12, 1.1s/it]')
    assert book.running() == {} and len(book.lines()) == 1


def test_the_seconds_that_are_left(book):
    """By hand, on two cores with one each, and both for the last: 100 and 40 seconds of earlier runs, an average of 70
    for the two others. A bar that says more than the earlier run is believed."""
    found, usual = book.found, 70
    assert book.left() == (100 + 40 + usual + 2 * usual) / 2
    book.started = NOW - 60
    run(found['01_a'], 60, 'training:  45%|####5  | 9/20 [00:10<01:12, 1.1s/it]')  # 40 from its past, 72 in its bar
    run(found['06_evaluation/b'], 15)
    assert book.left() == (72 + 25 + usual + 2 * usual) / 2
    end(found['06_evaluation/b'])
    assert book.left() == (72 + usual + 2 * usual) / 2
    end(found['03_c'], 'failed.json')
    assert book.left() == (72 + 2 * usual) / 2
    assert book.summary() == '2 of 4 experiments, 1:00 minutes, about 1:46 left, then the pages'


def test_the_first_book_learns_from_what_ends_and_from_bars(book):
    """By hand, on two cores as above, without earlier runs: 72 and 8 seconds of a bar are an average of 80 for the
    three others; then 40 for one that has ended, so 60 for the two others."""
    book.seconds, book.started, found = {}, NOW - 60, book.found
    assert book.left() is None and book.summary() == '0 of 4 experiments, 1:00 minutes'
    run(found['01_a'], 8, 'training:  45%|####5  | 9/20 [00:08<01:12, 1.1s/it]')
    assert book.left() == (72 + 80 + 80 + 2 * 80) / 2
    end(found['06_evaluation/b'], seconds=40)
    assert book.left() == (72 + 60 + 2 * 60) / 2
    assert book.summary() == '1 of 4 experiments, 1:00 minutes, about 2:06 left, then the pages'
    end(found['03_c'], 'failed.json', seconds=30)
    assert book.left() == 72 / 2 + 50 and book.seconds == {'06_evaluation/b': 40, '03_c': 30}


def test_one_that_runs_longest_is_the_least_that_is_left(book):
    for name in ('06_evaluation/b', '03_c', '04_d'):
        end(book.found[name])
    assert book.left() == 100


def test_what_needs_a_failed_one_is_not_waited_for(book):
    end(book.found['01_a'], 'failed.json')
    assert book.left() == max((40 + 70) / 2, 70)


@pytest.fixture
def first_runs(book, monkeypatch):
    "A book whose first experiment runs, by the real clock."
    monkeypatch.setattr(live, 'time', time)
    book.started = time.time()
    folder = book.found['01_a'].folder.with_name('.running-01_a')
    folder.mkdir(parents=True)
    (folder / '.source.ipynb').write_text('{}')
    return book


def test_a_log_names_what_runs(first_runs):
    class Slow(list):
        def __iter__(self):
            time.sleep(0.3)
            yield from super().__iter__()

    log = io.StringIO()
    show_progress(Slow(['  ✓  03_c\n']), first_runs, log, minute=0.1)
    assert '; running: 01_a\n' in log.getvalue() and '  ✓  03_c\n' in log.getvalue()


def test_a_terminal_has_a_block_that_is_redrawn_below_the_lines_that_stay(first_runs):
    screen = io.StringIO()
    screen.isatty = lambda: True

    def one_after_the_other():
        for line in ('  ✓  03_c\n', '  ✓  04_d\n'):
            yield line
            while line not in screen.getvalue():
                time.sleep(0.01)

    show_progress(one_after_the_other(), first_runs, screen)
    first, *redrawn = screen.getvalue().split('\x1b[2F\x1b[J')  # a line of the experiment and one of the book
    assert first.startswith('  ✓  03_c\n  ▸  01_a  ') and 'of 4 experiments' in first.splitlines()[-1]
    assert any(part.startswith('  ✓  04_d\n  ▸  01_a  ') for part in redrawn)
    assert redrawn[-1] == ''  # nothing is left of it at the end
