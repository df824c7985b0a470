"""Hangs, crashes, floods and deaths: every one is counted, bounded in time, and leaves no process and no pipe.

The `start` fixture looks for what is left after each test.
"""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jrlhf.errors import RewardFailure, UserError
from jrlhf.rewards import functions
from jrlhf.rewards.functions import LOG_BYTES
from jrlhf.run.child import GRACE
from tests.support.processes import alive, eventually, gone

from .conftest import make_sample, pids

ROOT = Path(__file__).parents[3]
SLACK = 4.0  # seconds for starting processes on a busy machine
RUN = """
import atexit, faulthandler, multiprocessing, os, re, signal, stat, subprocess, sys, time
fork = multiprocessing.get_context("fork")
def f(solution_str):
    if solution_str != "ok":
        exec(solution_str)
    return 1.0
def stubborn():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
def is_socket(n):
    try: return stat.S_ISSOCK(os.fstat(n).st_mode)
    except OSError: return False
"""
HANGS = {
    "sleep": "time.sleep(1000)",
    "holding the interpreter lock": "re.match('(a*)*b', 'a' * 60)",
    "deaf to all it can be": "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64)); time.sleep(1000)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "waiting for a program": "subprocess.run(['sleep', '1000'])",
    "catching everything": "stubborn()",
}
CRASHES = {
    "os._exit(0)": "left with exit code 0",
    "os._exit(3)": "left with exit code 3",
    "faulthandler._sigsegv()": "ended by SIGSEGV, at <string>:1",
    "os.kill(os.getpid(), signal.SIGKILL)": "ended by SIGKILL",
    "print('last words'); os._exit(1)": "left with exit code 1, saying 'last words'",
    "os.closerange(3, 200)": "left with exit code 1",
    "[os.write(n, b'\\xff' * 99) for n in range(3, 200) if is_socket(n)]": "crash: answered with 4294967295 bytes",
    "[os.write(n, b'\\0\\0\\0\\2no') for n in range(3, 200) if is_socket(n)]": "crash: wrote into the channel",
    "fork.Process(target=time.sleep, args=(1000,)).start(); os._exit(6)": "left with exit code 6",
}


def test_hangs_and_crashes_cost_their_deadline_and_their_own_sample(start, tmp_path):
    """Every kind of them at once, each in a worker of its own; the last worker has done nothing wrong."""
    codes = [*HANGS.values(), *CRASHES]
    reward = start(RUN, deadline=1, on_failure=-1.0, workers=len(codes) + 1)
    before, began = pids(reward), time.monotonic()
    scored = reward.score([*(make_sample(row, code) for row, code in enumerate(codes)), make_sample(99, "ok")])
    assert time.monotonic() - began < 1 + GRACE + SLACK
    np.testing.assert_array_equal(scored.scores, [-1] * len(codes) + [1])
    assert scored.failures == {"hang": len(HANGS), "crash": len(CRASHES)}
    assert [alive(pid) for pid in before] == [False] * len(codes) + [True]
    np.testing.assert_array_equal(reward.score([make_sample(0, "ok")] * len(before)).scores, 1)
    assert pids(reward)[-1] == before[-1] and not set(pids(reward)[:-1]) & set(before)
    stories = (tmp_path / "log").read_text()
    for row, sentence in enumerate([r"hang: no answer within 1 s"] * len(HANGS) + list(CRASHES.values())):
        assert re.search(rf"failed \((crash: )?{sentence}.*'<user>prompt {row}'", stories), (codes[row], stories)
    reward.on_failure = None
    with pytest.raises(RewardFailure, match="crash: left with exit code 3"):
        reward.score([make_sample(0, "ok"), make_sample(1, "os._exit(3)")])


def test_a_hang_of_a_batch_function_concerns_all_samples_of_the_call_and_names_its_place(start):
    source = """
    import time
    def f(completions):
        if "hang" in completions:
            time.sleep(1000)
        return [1.0] * len(completions)
    """
    samples = [make_sample(0), make_sample(1, "hang"), make_sample(2), make_sample(3)]
    reward = start(source, deadline=0.5, workers=2)
    with pytest.raises(
        RewardFailure,
        match=r"hang: no answer within 0.5 s, at .*function0.py:5\) on a call with 2 .*: raise deadline of .*, mend",
    ):
        reward.score(samples)
    reward.on_failure = -1.0
    scored = reward.score(samples)
    np.testing.assert_array_equal(scored.scores, [-1, -1, 1, 1])
    assert scored.failures == {"hang": 2}
    source = "import time\nasync def f(solution_str):\n    time.sleep(1000)\n"  # it cannot be cancelled
    assert start(source, deadline=0.5, on_failure=-1.0).score(samples[:2]).failures == {"hang": 2}


def test_a_child_that_the_function_forks_does_not_answer(start):
    source = """
    import os
    def f(solution_str):
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        return float(pid != 0)
    """
    np.testing.assert_array_equal(start(source).score([make_sample(row) for row in range(4)]).scores, [1] * 4)


def test_programs_that_a_function_started_end_with_it(start, tmp_path):
    file = tmp_path / "pid"
    launch = f"open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))"
    reward = start(RUN, deadline=0.5, on_failure=0.0)
    assert reward.score([make_sample(0, f"{launch}; time.sleep(1000)")]).failures == {"hang": 1}
    assert gone(int(file.read_text()), 2)
    assert reward.score([make_sample(0, launch)]).scores == [1]
    program = int(file.read_text())
    assert alive(program)
    reward.close()
    assert gone(program, 2)


def test_an_import_that_hangs_is_ended(start, monkeypatch):
    monkeypatch.setattr(functions, "START_SECONDS", 1)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"did not finish importing .* \(no answer within 1 s, at .*\)"):
        start("import re; re.match('(a*)*b', 'a' * 60)")
    assert time.monotonic() - began < 1 + GRACE + SLACK


def test_a_function_that_cannot_be_started_again_stops_the_run_whatever_replaces_failures(start, tmp_path):
    source = f"""
    import os
    if os.path.exists({str(tmp_path / "once")!r}):
        raise RuntimeError("only once")
    open({str(tmp_path / "once")!r}, "w").close()
    def f(solution_str):
        os._exit(1)
    """
    with pytest.raises(UserError, match="cannot be imported: RuntimeError: only once"):
        start(source, on_failure=0.0).score([make_sample(0), make_sample(1)])


def test_a_flood_of_output_neither_blocks_nor_fills_the_disk(start, tmp_path, capfd):
    source = f"""
    import os, sys
    print("imported")
    def f(completions):
        for _ in range({LOG_BYTES // (1 << 20) + 4}):
            sys.stdout.write("o" * (1 << 20))
            os.write(2, b"e" * 1000)
        return [1.0]
    """
    reward = start(source)
    for _ in range(2):
        assert reward.score([make_sample()]).scores == [1]
    text = (tmp_path / "log").read_text()
    assert text.startswith("imported\n") and text.endswith("\n(further output is not kept)\n")
    assert LOG_BYTES <= len(text) < LOG_BYTES + 100 and "e" * 1000 in text
    assert capfd.readouterr() == ("", "")
    reward = start("def f(completions):\n    while True: print('x' * 10000)\n", deadline=0.5, on_failure=0.0)
    began = time.monotonic()  # a flood does not delay the end of a hang
    assert reward.score([make_sample()]).failures == {"hang": 1}
    assert time.monotonic() - began < 0.5 + GRACE + SLACK


def test_output_that_cannot_be_logged_fails_no_call(start, monkeypatch):
    def full(self: object, output: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(functions.FunctionReward, "_write", full)
    reward = start("def f(completions):\n    print('x' * (1 << 20))\n    return [1.0]\n")
    for _ in range(2):
        assert reward.score([make_sample()]).scores == [1]


def test_standard_streams_may_be_read_and_closed(start):
    reward = start(RUN)
    code = "assert sys.stdin.read() == ''; sys.stdout = None; os.close(1); os.close(2)"
    assert reward.score([make_sample(0, code)]).scores == [1]
    began = time.process_time()
    assert reward.score([make_sample(0, "time.sleep(0.3)")]).scores == [1]
    assert time.process_time() - began < 0.2  # a closed pipe is not polled in circles


def test_signals_to_everyone_do_not_stop_workers_but_reach_their_programs(start):
    source = """
    import os, signal, subprocess
    def f(solution_str):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        program = subprocess.Popen(["sleep", "1000"])
        program.terminate()
        pid = os.fork()
        if not pid:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        return float(program.wait() == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM)
    """
    reward = start(source, workers=2)
    for pid in pids(reward):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        assert os.getsid(pid) == pid != os.getsid(0)  # the terminal's Ctrl-C passes them by
    np.testing.assert_array_equal(reward.score([make_sample(row) for row in range(4)]).scores, [1] * 4)


def test_a_worker_that_died_between_batches_is_replaced_without_blame(start):
    reward = start(RUN, workers=2)
    os.kill(pids(reward)[0], signal.SIGKILL)
    assert eventually(reward._pool[0].ended, 2)
    scored = reward.score([make_sample(0, "ok"), make_sample(1, "ok")])
    np.testing.assert_array_equal(scored.scores, [1, 1])
    assert not scored.failures


def test_an_interrupted_batch_leaves_no_answer_to_the_next(start):
    source = """
    import time
    def f(completions, answer):
        time.sleep(answer[0])
        return [float(c) for c in completions]
    """

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    reward = start(source)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            reward.score([make_sample(0, "1", answer=0.3)])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    time.sleep(0.4)
    assert reward.score([make_sample(0, "2", answer=0)]).scores == [2]


def test_a_failure_of_one_worker_stops_the_others_calls(start):
    reward = start(RUN, workers=2)
    began = time.monotonic()
    with pytest.raises(RewardFailure, match="exception: ZeroDivisionError"):
        reward.score([make_sample(0, "1 / 0"), make_sample(1, "time.sleep(15)")])
    assert time.monotonic() - began < SLACK
    np.testing.assert_array_equal(reward.score([make_sample(0, "ok"), make_sample(1, "ok")]).scores, [1, 1])


def test_closing_lets_exit_handlers_run_but_not_for_ever(start, tmp_path):
    for wait, most in (("print('x' * 1000000)", 2.0), ("time.sleep(1000)", 2.0 + SLACK)):
        reward = start(RUN)
        reward.score([make_sample(0, f"atexit.register(lambda: (print('left'), {wait}))")])
        began = time.monotonic()
        reward.close()
        assert time.monotonic() - began < most
        reward.close()
    assert (tmp_path / "log").read_text().count("left\n") == 2


PARENT = """
import os, sys
from pathlib import Path
from jrlhf.config.schema import RewardConfig
from jrlhf.rewards.functions import FunctionReward
from jrlhf.data.types import Example, Response
from jrlhf.rewards.types import Sample
activities = ["deaf", "program", "lock"]
config = RewardConfig(function=sys.argv[1], workers=4, deadline=3.0, on_failure=0.0)
with FunctionReward(config, log=Path(os.devnull)) as reward:  # the last worker gets no sample
    print(*[worker.pid for _, worker in sorted(reward._pool.items())], flush=True)
    reward.score([Sample(Example("p"), "p", Response((1,), name, True)) for name in activities])
"""


FUNCTION = """
import os, re, signal, subprocess, time
def f(solution_str):
    program = subprocess.Popen(["sleep", "1000"]) if solution_str == "program" else None
    with open(os.path.join(os.path.dirname(__file__), solution_str), "w") as file:
        file.write(str(program.pid if program else ""))
    if solution_str == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
    if solution_str == "lock":
        re.match("(a*)*b", "a" * 60)
    time.sleep(1000)
"""


def test_workers_and_their_programs_end_when_their_parent_is_killed(tmp_path):
    (tmp_path / "function.py").write_text(FUNCTION)
    command = [sys.executable, "-c", PARENT, f"{tmp_path / 'function.py'}:f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        deaf, program, locked, idle = map(int, parent.stdout.readline().split())
        workers = [deaf, program, idle]
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 4, 2.5) and all(map(alive, [*workers, locked]))
        parent.kill()
    assert all(gone(pid, 2.0) for pid in [*workers, int((tmp_path / "program").read_text())])
    assert gone(locked, 3.0 + SLACK)  # it holds the lock until its deadline
