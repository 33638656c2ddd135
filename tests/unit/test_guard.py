"""What a child's library starts ends with the child, whoever stands between them."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import psutil

HOST = """
import json, subprocess, sys, time
from libra.tasks.child.guard import announce_host
announce_host()
between = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
last = '''
import os, time
from libra.tasks.child.guard import end_with_host
end_with_host()
print(os.getpid(), flush=True)
time.sleep(60)
'''
subprocess.Popen([sys.executable, "-c", between, last], start_new_session=True)
time.sleep(60)
"""


def test_a_process_two_below_ends_with_its_killed_host() -> None:
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        guarded = psutil.Process(json.loads(host.stdout.readline()))
        between = guarded.parent()
        host.kill()
    deadline = time.monotonic() + 10
    while guarded.is_running() and guarded.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert between is not None
    psutil.wait_procs([between], timeout=10)


def test_one_that_comes_too_late_ends_at_once() -> None:
    code = "from libra.tasks.child.guard import end_with_host; end_with_host(); print('lives')"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LIBRA_CHILD_HOST": str(gone.pid)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
