"Processes of a small project: who is there, who is left."

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from projects import ROOT


def is_running(pid: int) -> bool:
    "Does a process exist that is no zombie (Linux)? It may end while it is looked at."
    try:
        return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(store) -> dict:  # process id -> command line
    "The running processes whose environment names a run store (Linux)."
    found = {}
    for folder in Path('/proc').glob('[0-9]*'):
        try:
            state = (folder / 'stat').read_text().rsplit(')', 1)[1].split()[0]
            named = f'CIS_STORE={store}'.encode() in (folder / 'environ').read_bytes().split(b'\0')
            if named and state != 'Z' and int(folder.name) != os.getpid():
                found[int(folder.name)] = (folder / 'cmdline').read_bytes().replace(b'\0', b' ').decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass
    return found


def left_after(store, seconds: float) -> dict:
    "The processes with a run store that are still there after some seconds; returns at once when there is none."
    end = time.monotonic() + seconds
    while (left := processes_of(store)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def hear_signals():
    "Let signals end a process, also where a shell has made the tests deaf to them: under nohup, in the background."
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def make_book(project, *words, **popen) -> subprocess.Popen:
    "`make book` in a project, with this Python in the place of its environment."
    (folder := project.home / 'environment' / 'bin').mkdir(parents=True, exist_ok=True)
    (folder / 'python').write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (folder / 'python').chmod(0o755)
    for name in ('settings.ini', 'setup.py', 'pyproject.toml', 'constraints.txt'):
        (project.home / name).touch()
    (folder.parent / '.ready').touch()
    command = ['make', '-f', ROOT / 'Makefile', 'book', 'VENV=environment', *words]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=hear_signals) | popen
    return subprocess.Popen(command, cwd=project.home, env=project.env, **pipes)


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 240):
    "Wait until a file is there; the process must not end before."
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.05)
