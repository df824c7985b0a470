"""Python functions as user code: what identifies them, how workers run them, and what is refused."""

import asyncio
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jrlhf.algorithms import registry
from jrlhf.config import make_config
from jrlhf.config.schema import RewardConfig
from jrlhf.errors import UserError
from jrlhf.ppo.fields import without_effect
from jrlhf.rewards.python_code import PythonCode, python_functions
from jrlhf.rewards.user_code import load, resolve
from jrlhf.run.child import GRACE

from .conftest import make_reward, make_sample

CLASS = "class C:\n    def __init__(self, x): self.x, self.me = x, self\n    def add(self, n): return self.x + n"
DATA = "import dataclasses as d, enum\n@d.dataclass\nclass D:\n    x: int = 1\n    y: int = d.field(default=0)"
SOURCES = (  # of `f`: no two compute the same
    *(f"f = lambda c: len(c) + {number}" for number in ("1", "2", "True", "1.0", "-0.0", "0.0")),
    "f, g = lambda c: c[0], lambda c: c[1]",
    "g, f = lambda c: c[0] + 1, lambda c: c[1] + 1",
    "def f(c, k=1): return k",
    "def f(c, *, k=1): return k",
    "def f(c, *, k=2): return k",
    *(
        f"def make(k):\n    return lambda c: k\nf = make({value})"
        for value in ("1", "{1: 2}", "{1, 2}", "[1, 2]", "None")
    ),
    "def make():\n    return lambda c: k\n    k = 1\nf = make()",
    *(
        f"k = {value}\ndef f(c):\n    def g(): return [k for _ in c]\n    return g()"
        for value in ("'a'", "'b'", "b'a'")
    ),
    "def f(c): return c in {'ab', 'cd', 'ef'}",
    "def f(c): return c in {'ab', 'cd', 'eg'}",
    "def f(c): return f(c[1:]) if c else 0",
    "def f(c): return f(c[2:]) if c else 0",
    "def f(c): return g(c)\ndef g(c): return f(c[1:])",
    "def f(c): return g(c)\ndef g(c): return f(c[2:])",
    "def f(c): return f.k\nf.k = 1",
    "def f(c): return f.k\nf.k = 2",
    *(f"import re\nk = re.compile({text!r})\ndef f(c): return k.match(c)" for text in ("a+", "a*")),
    "import math\ndef f(c, g=math.sqrt): return g(2)",
    "import cmath\ndef f(c, g=cmath.sqrt): return g(2)",
    "import functools\nf = functools.partial(max, 1)",
    "import functools\nf = functools.partial(max, 2)",
    f"{CLASS}\nf = C(1).add",
    f"{CLASS}\nf = C(2).add",
    f"{CLASS.replace('+', '-')}\nf = C(1).add",
    f"{DATA}\nk = D(1)\ndef f(c): return k",
    f"{DATA}\nk = D(2)\ndef f(c): return k",
    f"{DATA}\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(c, k=E.A): return k",
    f"{DATA}\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(c, k=E.B): return k",
    *(
        f"import numpy as np\nk = np.array({values})\ndef f(c): return k"
        for values in ("[1, 2]", "[1, 3]", "[[1, 2]]", "[1.0, 2.0]", "[1, 'a', None], object")
    ),
    "import numpy as np\ndef f(c): return np.exp(c)",
    "import numpy as np\ndef f(c): return np.log(c)",
    "import numpy as np\ng = np.exp\ndef f(c): return g(c)",
    "import numpy as np\ng = np.log\ndef f(c): return g(c)",
    *(f"import jax.numpy as jnp\nk = jnp.arange({n})\ndef f(c): return k" for n in ("2", "3", "3.0")),
    *(f"import jax\n@jax.jit\ndef g(c): return c * {n}\ndef f(c): return g(c)" for n in (2, 3)),
)


def digest_of(source: str, file: str = "a.py") -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    code = PythonCode(names["f"])
    code.identify("f")
    assert code.modules == ()
    return code.sha256


def test_a_digest_is_of_what_a_function_computes_with():
    digests = [digest_of(source) for source in SOURCES]
    assert len(set(digests)) == len(SOURCES)
    assert digests == [digest_of(f"\n\nother = 1\n{source}", "b.py") for source in SOURCES]
    head = "import json, sys\nfrom typing import Any\nfrom jrlhf.rewards.python_code import PythonCode"
    command = f"{head}\n{inspect.getsource(digest_of)}\nfor source in json.load(sys.stdin): print(digest_of(source))"
    environment = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    options: Any = {"cwd": Path(__file__).parents[3], "env": environment, "capture_output": True, "text": True}
    run = subprocess.run([sys.executable, "-c", command], input=json.dumps(SOURCES), **options)
    assert run.stdout.split() == digests, run.stderr


def test_functions_of_modules_have_the_modules_files(tmp_path, monkeypatch):
    (tmp_path / "own_pack").mkdir()
    (tmp_path / "own_pack/__init__.py").write_text("")
    (tmp_path / "own_pack/part.py").write_text("def h(c): return 1")
    (tmp_path / "own_low.py").write_text("K = 1")
    (tmp_path / "own_top.py").write_text("from own_low import K\ndef g(c): return K")
    monkeypatch.syspath_prepend(tmp_path)
    top = importlib.import_module("own_top")
    pack = importlib.import_module("own_pack.part") and sys.modules["own_pack"]

    def words(function) -> tuple[str | None, dict[str, str]]:
        with python_functions({"dataflow": function}) as (named,):
            code = load(named["dataflow"], "it")
            return code.sha256, code.modules

    names: dict[str, Any] = {"own_pack": pack, "__name__": "__main__"}
    exec("def f(c): return own_pack.part.h(c)", names)
    assert words(names["f"])[1].keys() == {"own_pack", "own_pack.part"}
    for function in (top.g, lambda c: top.g(c)):
        (tmp_path / "own_low.py").write_text("K = 1")
        began, modules = words(function)
        assert modules.keys() == {"own_top", "own_low"} and words(function) == (began, modules)
        (tmp_path / "own_low.py").write_text("K = 2")
        again, changed = words(function)
        assert again == began and {name for name in modules if changed[name] != modules[name]} == {"own_low"}


def test_settings_name_functions_for_the_length_of_a_run():
    def length(completions):
        return [0.0] * len(completions)

    seen: list[int] = []
    settings = {
        "rewards": [length, "kept", {"name": "short", "function": lambda c: seen, "options": {"function": len}}]
    }
    with python_functions("file.yaml", settings | {"costs": length, "grpo.dataflow": length}) as (file, named):
        assert file == "file.yaml" and named["grpo.dataflow"] == "<python>:length_3"
        assert named["costs"] == [{"name": "length_2", "function": "<python>:length_2"}]
        assert named["rewards"] == [
            {"name": "length", "function": "<python>:length"},
            "kept",
            {"name": "short", "function": "<python>:lambda", "options": {"function": len}},
        ]
        own = load("<python>:lambda", "it")
        seen.append(1)  # a function may change what it captured
        assert load("<python>:lambda", "it").sha256 == own.sha256 and own.function(0) is seen
        with python_functions({"rewards": [lambda c: 2]}):
            assert load("<python>:lambda", "it").function(0) == 2
        assert load("<python>:lambda", "it").function is own.function
    with pytest.raises(UserError, match=r"it: length was a Python function of the program .* with the function$"):
        resolve("<python>:length", "it")


@pytest.mark.parametrize(
    ("value", "what"),
    [(threading.Lock(), "thread.lock"), ((n for n in ()), "generator"), (sys.modules["__main__"], "__main__")],
)
def test_a_function_without_a_digest_is_refused(value, what):
    with python_functions({"rewards": lambda completions: value}) as (named,):
        spec = named["rewards"][0]["function"]
        with pytest.raises(UserError, match=f"^it cannot be identified .*{what}.*make the value when it is called$"):
            load(spec, "it")


def test_workers_run_functions_with_what_they_captured_and_outlive_them(start):
    here, pattern, table = os.getpid(), re.compile("5+"), np.arange(3.0)

    def f(solution_str):
        if solution_str == "hang":
            time.sleep(1000)
        if solution_str == "crash":
            os._exit(3)
        return (os.getpid() != here) * (table[2] + len(pattern.findall(solution_str)))

    with python_functions({"rewards": f}) as (named,):
        reward = start(named["rewards"][0]["function"], deadline=0.5, on_failure=-1.0, workers=2)
    assert (
        f"<python>:f (a Python function, digest {reward.facts.fingerprint}) in 2 processes" in reward.facts.describe()
    )
    began = time.monotonic()
    scored = reward.score([make_sample(row, text) for row, text in enumerate(("5", "hang", "crash", "55 5"))])
    assert time.monotonic() - began < 0.5 + GRACE + 6
    np.testing.assert_array_equal(scored.scores, [3, -1, -1, 4])
    assert scored.failures == {"hang": 1, "crash": 1}


class Odd:
    """Something that pickle makes again by int(argument), and that without one can be pickled once only."""

    def __init__(self, argument):
        self.argument, self.reduced = argument, False

    def __reduce__(self):
        if self.argument is None and self.reduced:
            raise ValueError("not sent")
        self.reduced = True
        return int, (self.argument,)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("no number", "cannot be made in its process: ValueError: invalid literal"),
        (None, r"cannot be sent to its process \(ValueError: not sent\): do not let it capture such a value"),
    ],
)
def test_what_a_worker_cannot_have_is_refused(start, argument, sentence):
    odd = Odd(argument)
    with (
        python_functions({"rewards": lambda completions: [odd]}) as (named,),
        pytest.raises(UserError, match=f"^reward .*{sentence}"),
    ):
        start(named["rewards"][0]["function"])


def test_processes_agree_on_a_dataflow(monkeypatch):
    def own(actor, reward, estimator, prompts):
        return estimator, actor.update(prompts)

    with python_functions({"grpo": {"dataflow": own}, "stages": ["grpo"]}) as (named,):
        config = make_config(named)
        words = registry.dataflow_identity(config)
        assert len(words["dataflow"]) == 16
        monkeypatch.setattr(registry, "from_main", lambda words: {**words(), "dataflow": "another"})
        with pytest.raises(UserError, match="grpo.dataflow=<python>:own is not the same function in all processes"):
            registry.dataflow_identity(config)


def test_a_function_that_cannot_be_sent_runs_here_where_that_is_asked_for(tmp_path):
    """One that holds a lock is refused, or with the option called here; the log says what is lost."""
    lock, calls = threading.Lock(), []

    def f(completions):
        with lock:
            calls.append((os.getpid(), len(completions)))
        return [1.0 if text == "a" else float("nan") for text in completions]

    samples, log = [make_sample(row, text) for row, text in enumerate("ab")], tmp_path / "log"
    with python_functions({"rewards": f}) as (named,):
        spec = named["rewards"][0]["function"]
        with pytest.raises(
            UserError, match="reward 'judge' cannot be identified .*, or set in_process of reward 'judge'"
        ):
            make_reward(spec)
        with make_reward(spec, log=log, in_process=True, on_failure=-1.0) as reward:
            scored = reward.score(samples)
            lost = "in the process that trains, without a deadline: a crash or a hang in it is one of the run"
            assert f"{lost}, and a resume checks its name alone" in reward.facts.describe() and lost in log.read_text()
            assert reward.facts.identity.keys() == {"reward judge"}
        assert calls == [(os.getpid(), 2)]
        assert scored.scores.tolist() == [1.0, -1.0] and scored.failures == {"nan": 1}
    section = RewardConfig(function="exact_match", in_process=True, deadline=5.0)
    (unread,) = without_effect(section, "rewards[0]")
    assert unread == ("rewards[0].deadline", 5.0, "rewards[0].in_process=true")


def test_calls_in_this_process_share_a_loop_and_take_turns():
    """A semaphore belongs to the loop of its first call. Of two functions at a time, each draws as it does alone."""
    semaphore, samples = asyncio.Semaphore(1), [make_sample(row) for row in range(3)]

    async def waits(completions):
        async def one() -> float:
            async with semaphore:
                await asyncio.sleep(0)
                return 1.0

        return await asyncio.gather(*(one() for _ in completions))

    begun, overtaken = threading.Event(), threading.Event()

    def draws(completions):
        begun.set()
        overtaken.wait(0.2)  # in vain, unless the other one may begin meanwhile
        return [random.random() for _ in completions]

    def overtakes(completions):
        overtaken.set()
        return [random.random() for _ in completions]

    async def score(reward) -> None:  # as in a notebook, whose thread runs a loop
        with reward:
            for _ in range(2):
                assert reward.score(samples).scores.tolist() == [1.0] * 3

    with python_functions({"rewards": [waits, draws, overtakes]}) as (named,):
        reward, first, second = (make_reward(part["function"], in_process=True) for part in named["rewards"])
        asyncio.run(score(reward))
        with first, second, ThreadPoolExecutor(1) as thread:
            drawn = thread.submit(first.score, samples)
            assert begun.wait(10)
            second.score(samples)
            assert drawn.result().scores.tolist() == first.score(samples).scores.tolist()
