import subprocess
import sys
import textwrap

import pytest

DEADLINE_SECONDS = 30

PRELUDE = """
import os, select, signal, sys, threading, time
from pytest_gpucluster.agreement.watchdog import WakeupPipe

pipe = WakeupPipe()
pipe.install()

def heard(seconds=10.0):
    select.select([pipe.read_fd], [], [], seconds)
    return sorted(signal.Signals(number).name for number in pipe.heard())
"""


def run(body):
    """Run Python in a process of its own, whose signals are nobody else's; return the lines that it printed."""
    code = PRELUDE + textwrap.dedent(body)
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


def test_sigterm_is_heard_while_the_main_thread_is_blocked_where_no_handler_runs():
    lines = run(
        """
        import ctypes

        def watch():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                print(heard(), flush=True)
            os._exit(0)

        threading.Thread(target=watch).start()
        while True:
            ctypes.CDLL(None).sleep(100)  # in C: no Python handler runs until it is back
        """
    )
    assert lines == ["['SIGTERM']", "['SIGTERM']"]


def test_each_signal_is_told_once_but_those_of_other_owners_and_none_at_the_end():
    lines = run(
        """
        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append("USR1"))
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            print(heard(), heard(0), seen)
        pipe.ignore_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        print(heard(0.05))
        """
    )
    assert lines == ["['SIGTERM'] [] ['USR1']", "['SIGTERM'] [] ['USR1', 'USR1']", "[]"]


def test_ctrl_c_is_heard_and_still_interrupts_python():
    lines = run(
        """
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except KeyboardInterrupt:
            print("interrupted", heard())
        """
    )
    assert lines == ["interrupted ['SIGINT']"]


def test_a_test_that_takes_sigterm_or_the_wakeup_descriptor_loses_both_at_the_next_phase():
    lines = run(
        """
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        pipe.install()
        os.kill(os.getpid(), signal.SIGTERM)
        print(heard())
        """
    )
    assert lines == ["['SIGTERM']"]


def test_more_signals_than_the_pipe_holds_are_no_error():
    lines = run(
        """
        import fcntl
        fcntl.fcntl(pipe.read_fd, fcntl.F_SETPIPE_SZ, 4096)
        for _ in range(5000):
            os.kill(os.getpid(), signal.SIGTERM)
        print(heard())
        """
    )
    assert lines == ["['SIGTERM']"]


FORKS = {
    "fork by os": """
        pid = os.fork()
        if pid == 0:
            os.write(ready[1], b"x")
            time.sleep(10)
            os._exit(7)
        os.read(ready[0], 1)
        os.kill(pid, signal.SIGTERM)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    """,
    "multiprocessing": """
        import multiprocessing
        def child():
            os.write(ready[1], b"x")
            time.sleep(10)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        os.read(ready[0], 1)
        process.terminate()
        process.join(10)
        code = process.exitcode
    """,
}


@pytest.mark.parametrize("install", ["", "pipe.install()\n"], ids=["in the first phase", "in the second"])
@pytest.mark.parametrize("start", FORKS)
def test_a_forked_child_dies_of_sigterm_and_the_parent_hears_nothing(start, install):
    body = textwrap.dedent(FORKS[start])
    lines = run(install + "ready = os.pipe()\n" + body + "\nprint(code, heard(0.05))")
    assert lines == ["-15 []"]


def test_a_session_inside_another_program_gives_its_handler_back():
    lines = run(
        """
        pipe.restore()
        print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.set_wakeup_fd(-1))
        signal.signal(signal.SIGTERM, mine := lambda *_: None)
        pipe.install()
        pipe.install()
        pipe.restore()
        print(signal.getsignal(signal.SIGTERM) is mine)
        """
    )
    assert lines == ["True -1", "True"]
