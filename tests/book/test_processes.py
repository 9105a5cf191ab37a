"Whatever kills the making of a book: nothing that it has started is left, and nothing runs beside the next one."

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_trees import is_running, left_after, make_book, processes_of, wait_for

from cis_nb.book import processes
from cis_nb.book.processes import make_is_ending, sole_maker

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not Path('/proc/self/environ').exists(), reason='looks for processes in /proc'),
    pytest.mark.skipif(not shutil.which('make'), reason='needs make'),
]


@pytest.fixture(autouse=True)
def signals_reach_children():
    "What this process ignores, as below nohup, its children ignore too; what it catches reaches them."
    old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    for number in (number for number, handler in old.items() if handler is signal.SIG_IGN):
        signal.signal(number, lambda *_: None)
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture
def waiting(project):
    "A project with a chapter that waits."
    project.chapter('01_waits', 'n: 600\n')
    yield project
    for pid in processes_of(project.home / 'store'):
        os.kill(pid, signal.SIGKILL)


def next_call_works(project):
    project.write('params/quick/01_waits.yaml', 'n: 1\n')
    rc, said = project.book()
    assert rc == 0 and '1 of 1' in said, said


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda n: n.name)
def test_nothing_is_left_when_make_alone_gets_a_signal(waiting, number):
    make = make_book(waiting, start_new_session=True)
    wait_for(waiting.home / 'started', make)
    there = processes_of(waiting.home / 'store')
    assert any('snakemake' in c for c in there.values()) and len(there) >= 5, there
    make.send_signal(number)
    assert left_after(waiting.home / 'store', 10) == {}
    assert make.wait(10) != 0 and 'Traceback' not in make.communicate()[0]
    if number != signal.SIGKILL:  # who is killed cannot clean up; the next call does
        assert list((waiting.home / 'reports').rglob('.running-*')) == []
    if number in (signal.SIGKILL, signal.SIGHUP):
        next_call_works(waiting)
        assert list((waiting.home / 'reports').rglob('.running-*')) == []


def test_a_second_make_begins_when_nothing_of_a_killed_one_is_left(waiting):
    started = waiting.home / 'started'
    first = waiting.start('make', 'quick')
    wait_for(started, first)
    before = processes_of(waiting.home / 'store')
    first.kill()
    started.unlink()
    second = waiting.start('make', 'quick')
    wait_for(started, second)
    assert not before.keys() & processes_of(waiting.home / 'store').keys()
    second.send_signal(signal.SIGTERM)
    assert left_after(waiting.home / 'store', 10) == {} and second.wait(10) == 130


def test_ctrl_c_prints_one_line(waiting):
    ours, theirs = pty.openpty()

    def own_terminal():
        import fcntl
        import termios

        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    streams = dict(stdin=theirs, stdout=theirs, stderr=theirs, text=False)
    make = make_book(waiting, preexec_fn=own_terminal, **streams)
    os.close(theirs)
    wait_for(waiting.home / 'started', make)
    os.write(ours, b'\x03')
    said = b''
    while True:
        try:
            said += os.read(ours, 4096)
        except OSError:  # the terminal has no writer left
            break
    after = said.decode().rsplit('^C', 1)[1].splitlines()
    lines = [line for line in after if line.strip() and '\x1b' not in line]
    own = [line for line in lines if not line.startswith('make: ***')]  # make itself adds the exit code
    assert own == ['Stopped. What has finished is kept; the next call goes on.'], said
    assert make.wait(10) != 0 and left_after(waiting.home / 'store', 10) == {}


HOLDER = """
import sys, time
from pathlib import Path
from cis_nb.book.processes import running_module, sole_maker
with sole_maker(Path(sys.argv[1])), running_module('http.server', '--bind', 'localhost', '0') as child:
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_lock_lasts_as_long_as_the_last_process_that_its_maker_has_started(tmp_path, capsys):
    holder = subprocess.Popen([sys.executable, '-c', HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    os.kill(child, signal.SIGSTOP)  # it cannot look at its parent
    holder.kill()
    holder.wait()
    with pytest.MonkeyPatch.context() as m, pytest.raises(RuntimeError, match='is locked: another process is making'):
        m.setattr(processes, 'PATIENCE', 0.5)
        with sole_maker(tmp_path):
            pass
    os.kill(child, signal.SIGCONT)
    with sole_maker(tmp_path):
        assert not is_running(child)
    assert 'waiting: ' in capsys.readouterr().err


def _within(seconds, holds):
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_a_make_that_waits_for_its_command_shows_its_signal(tmp_path, number):
    (tmp_path / 'Makefile').write_text('all:\n\t@echo $$PPID; exec sleep 5\n')
    make = subprocess.Popen(['make'], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert int(make.stdout.readline()) == make.pid
    bit = 1 << (number - 1)

    def shown(mask, blocked, caught):  # while make starts a command it blocks all signals, for a moment
        return bool(mask['Blk'] & bit) == blocked and bool(mask['Cgt'] & bit) == caught

    assert _within(10, lambda: shown(processes._signal_masks(make.pid), blocked=False, caught=True))
    time.sleep(0.2)  # it has noted whom it waits for
    make.send_signal(number)
    assert _within(10, lambda: shown(processes._signal_masks(make.pid), blocked=True, caught=False))
    assert not processes._signal_masks(make.pid)['Ign'] & bit
    make.kill()
    assert make_is_ending(make.pid)  # it is not the parent of this process


POOL = """
import sys
from cis_nb.experiments.throughput import drawn_per_second
from cis_nb.mining.corpora import map_in_order
import time
if sys.argv[1] == 'drawing':
    drawn_per_second('scene', 2, 2, 100_000)
else:
    list(map_in_order(time.sleep, [600] * 4, 2))
"""


@pytest.mark.parametrize('module', ['drawing', 'parsing'])
def test_pool_workers_end_with_their_parent(tmp_path, module):
    env = os.environ | dict(CIS_STORE=str(tmp_path), OMP_NUM_THREADS='1')
    parent = subprocess.Popen([sys.executable, '-c', POOL, module], env=env)
    end = time.monotonic() + 120
    while len(processes_of(tmp_path)) < 5 and time.monotonic() < end:  # parent, tracker, server, two workers
        assert parent.poll() is None
        time.sleep(0.1)
    assert len(processes_of(tmp_path)) >= 5
    time.sleep(1)
    parent.kill()
    parent.wait()
    assert left_after(tmp_path, 10) == {}
