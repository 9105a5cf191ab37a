"Forked processes: what they take over, how they end, and that none is left."

import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from process_trees import is_running

from cis_nb.book import preload
from cis_nb.book.preload import can_preload, preload_server

pytestmark = pytest.mark.skipif(not can_preload(), reason='this system cannot watch forked processes')

PROBE = """
import json, os, sys, time
print(json.dumps(dict(
    pid=os.getpid(), group=os.getpgrp(), folder=os.getcwd(), argv=sys.argv, word=os.environ.get('WORD'),
    stdin=sys.stdin.read() if 'read' in sys.argv else '', loaded='decimal' in sys.modules, name=__name__)))
print('to stderr', file=sys.stderr)
if 'child' in sys.argv:
    import subprocess
    print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)
if 'wait' in sys.argv:
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def client(tmp_path):
    "Starts a client of a server that has imported `decimal`, in a folder with a module `probe`."
    (tmp_path / 'probe.py').write_text(PROBE)
    started = []

    def start(*arguments, address, **environment):
        env = os.environ | address | environment | dict(PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        pipes = dict.fromkeys(('stdin', 'stdout', 'stderr'), subprocess.PIPE)
        command = [sys.executable, '-m', 'cis_nb.book.preload', 'probe', *map(str, arguments)]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes))
        return started[-1]

    yield start
    for p in started:
        p.kill()


def said(p) -> dict:
    "The first line of a probe."
    return json.loads(p.stdout.readline())


def ended(pid: int, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not is_running(pid):
            return True
        time.sleep(0.02)
    return False


def test_a_forked_process_takes_over_what_its_client_has(client, tmp_path):
    with preload_server(['decimal']) as address:
        p = client(3, 'read', address=address, WORD='ü "quoted" \n')
        out, err = p.communicate('typed')
        told = json.loads(out)
    assert p.returncode == 3 and err == 'to stderr\n'
    assert told['pid'] != p.pid and told['group'] == told['pid'] and told['loaded'] and told['name'] == '__main__'
    assert (told['folder'], told['stdin'], told['word']) == (str(tmp_path), 'typed', 'ü "quoted" \n')
    assert told['argv'][1:] == ['3', 'read']


@pytest.mark.parametrize('address', [{}, dict(CIS_PRELOADED='/nowhere/socket')])
def test_without_a_server_the_client_is_the_process(client, address):
    p = client(4, address=address)
    out, _ = p.communicate()
    told = json.loads(out)
    assert p.returncode == 4 and told['pid'] == p.pid and not told['loaded']


ENDS = dict(
    code='sys.exit(7)',
    large_code='sys.exit(259)',
    nothing='sys.exit()',
    text='sys.exit("no such thing")',
    error='raise ValueError("wrong")',
    interrupt='raise KeyboardInterrupt',
    open_file='kept = open("out.txt", "w"); kept.write("held back")',
    thread='import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), said.append("late"))).start()',
    pool='from concurrent.futures import ThreadPoolExecutor as P; P(1).submit(lambda: (time.sleep(0.3), print("job")))',
    library='import ctypes; ctypes.CDLL(None).printf(b"from C")',
)
ENDING = """
import atexit, sys, time
said = []
atexit.register(lambda: print('at the end', *said))
"""


@pytest.mark.parametrize('how', ENDS)
def test_a_forked_process_ends_as_python_does(how, tmp_path):
    (tmp_path / 'ending.py').write_text(ENDING + ENDS[how])
    seen = []
    with preload_server(['decimal']) as address:
        for place in ({}, address):
            env = os.environ | dict(CIS_PRELOADED='') | place
            env['PYTHONPATH'] = os.pathsep.join(p for p in sys.path if p)
            command = [sys.executable, '-m', 'cis_nb.book.preload', 'ending']
            p = subprocess.run(command, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60)
            written = ''.join(f.read_text() for f in tmp_path.glob('out.txt'))
            seen.append(({-2: 130}.get(p.returncode, p.returncode), p.stdout, p.stderr[-30:], written))
            (tmp_path / 'out.txt').unlink(missing_ok=True)
    assert seen[0] == seen[1]
    assert 'at the end' in seen[0][1]


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=['usual', 'in the background'])
def interrupts(request):
    "How the process that starts a server treats Ctrl-C: in the background of a shell it ignores it."
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


def test_signals_reach_the_forked_process(client, interrupts):
    with preload_server(['decimal']) as address:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            p = client(0, 'wait', address=address)
            told = said(p)
            p.send_signal(number)
            assert p.wait(20) == code
            assert ended(told['pid'])


EARLY = """
import os, signal, sys
from cis_nb.book import preload
send = preload.socket.send_fds
def send_and_signal(*arguments):
    send(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
preload.socket.send_fds = send_and_signal
sys.exit(preload.run_module('probe', '0', 'wait'))
"""


def test_a_signal_right_after_the_request_is_passed_on(client, tmp_path):
    with preload_server(['decimal']) as address:
        assert json.loads(client(0, address=address).communicate()[0])['loaded']
        env = os.environ | address | dict(PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        assert subprocess.run([sys.executable, '-c', EARLY], cwd=tmp_path, env=env, timeout=60).returncode == 143


@pytest.mark.parametrize('who', ['client', 'server'])
def test_nothing_is_left_when_one_is_killed(client, who):
    with preload_server(['decimal']) as address:
        p = client(0, 'child', 'wait', address=address)
        told = said(p)
        grandchild = int(p.stdout.readline())
        if who == 'client':
            p.kill()
            assert ended(told['pid']) and ended(grandchild)
            assert said(client(0, address=address))['loaded'], 'the server answers others'
    assert ended(told['pid']) and ended(grandchild)
    assert p.wait(20) == (-9 if who == 'client' else 137)


def test_a_client_ends_with_its_parent(client, tmp_path):
    code = (
        'import subprocess, sys; '
        'p = subprocess.Popen([sys.executable, "-m", "cis_nb.book.preload", "probe", "0", "wait"]); p.wait()'
    )
    with preload_server(['decimal']) as address:
        env = os.environ | address | dict(PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        parent = subprocess.Popen(
            [sys.executable, '-c', code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
        )
        (tmp_path / 'probe.py').write_text(PROBE)
        told = said(parent)
        parent.kill()
        assert ended(told['pid'])


def test_a_server_ends_with_the_process_that_started_it(client, tmp_path):
    (tmp_path / 'probe.py').write_text(PROBE)
    code = (
        'import os, subprocess, sys\n'
        'from cis_nb.book.preload import preload_server\n'
        'with preload_server(["decimal"]) as address:\n'
        '    command = [sys.executable, "-m", "cis_nb.book.preload", "probe", "0", "wait"]\n'
        '    subprocess.run(command, env=os.environ | address)\n'
    )
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    maker = subprocess.Popen([sys.executable, '-c', code], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    told = said(maker)
    with open(f'/proc/{told["pid"]}/stat') as f:
        server = int(f.read().rsplit(')', 1)[1].split()[1])
    maker.kill()
    assert ended(told['pid']) and ended(server)


def test_a_package_that_is_not_there_is_left_to_the_page(client):
    with preload_server(['no_such_package', 'decimal']) as address:
        assert said(client(0, address=address))['loaded']


def test_a_client_that_ends_at_once_does_not_end_the_server(client):
    with preload_server(['decimal']) as address:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hasty:
                hasty.connect(address['CIS_PRELOADED'])
        killed = [client(0, 'wait', address=address) for _ in range(5)]
        for p in killed:
            p.kill()
        assert said(client(0, address=address))['loaded']


def test_a_signal_before_the_process_runs_is_not_lost(monkeypatch):
    "The group exists as soon as the server watches it, also where the forked process has done nothing yet."
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    monkeypatch.setattr(sys, 'stdin', os.fdopen(read))
    monkeypatch.setattr(preload, '_become', lambda *given: time.sleep(600))
    server = preload.Server(listener)
    monkeypatch.setattr(preload.Server, '_watch', lambda self, child, connection: started.append(child))
    monkeypatch.setattr(server, 'listener', SimpleNamespace(accept=lambda: (own, '')))
    started = []
    socket.send_fds(other, [b'{"module": "probe"}'], [0])
    server._fork()
    preload._send_signal(started[0], signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1]) == -signal.SIGKILL
    os.close(write)
