"A process for one measurement ends with the process that asked for it."

import os
import signal
import subprocess
import sys
import time

import pytest
from process_trees import is_running
from cis_nb.core.orphans import run_alone

CHILDREN = {
    'waits': 'import time; time.sleep(60)',
    'computes': 'import hashlib; hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8)',
}
PARENT = """
import sys
from cis_nb.core.orphans import run_alone
run_alone(f'import os; open({sys.argv[1]!r}, "w").write(str(os.getpid())); {sys.argv[2]}')
"""


def until(seen, seconds: float = 60):
    "Wait until something is so, at most some seconds."
    end = time.monotonic() + seconds
    while not (found := seen()) and time.monotonic() < end:
        time.sleep(0.1)
    return found


@pytest.mark.e2e
@pytest.mark.parametrize('what', CHILDREN)
def test_a_measurement_ends_when_its_parent_is_killed(tmp_path, what):
    note = tmp_path / 'pid'
    parent = subprocess.Popen([sys.executable, '-c', PARENT, str(note), CHILDREN[what]])
    pid = int(until(lambda: note.exists() and note.read_text()))
    assert is_running(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        assert until(lambda: not is_running(pid), 20)
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_what_a_measurement_prints_comes_back():
    done = run_alone('import sys; print(3); sys.exit(4)')
    assert (done.returncode, done.stdout) == (4, '3\n')
