"""The console: progress that can be trusted, and model output that cannot command a terminal."""

import io
import math
import os
import random
import re
from pathlib import Path

import pytest

from jrlhf.config import Config
from jrlhf.run.console import Console, validation_key
from jrlhf.run.files import in_units
from jrlhf.run.text import clean, decimals, duration


class Clock:
    """A clock that only the test moves."""

    time = 100.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plain(clock):
    """A console on a file, and what it wrote so far, line by line."""
    file = io.StringIO()
    return Console(file=file, now=clock), lambda: file.getvalue().splitlines()


@pytest.fixture
def terminal(clock, monkeypatch):
    """A console on a pseudo-terminal of 120 columns, and all that it wrote."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    with open(theirs, "w", encoding="utf-8") as file:

        def written() -> str:
            file.flush()
            data = b""
            try:
                while chunk := os.read(ours, 65536):
                    data += chunk
            except BlockingIOError:
                pass
            return data.decode()

        yield Console(file=file, now=clock), written
    os.close(ours)


def test_clean_text_cannot_command_a_terminal():
    for text, cleaned in {
        "Return x.": "Return x.",
        "ünï \u4e2d\u6587 \U0001f600": "ünï \u4e2d\u6587 \U0001f600",
        "\x1b[31mred\x1b[0m": "red",
        "\x1b[2J\x1b[1;1Hgone": "gone",
        "\x1b]0;title\x07text": "text",
        "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\": "link",
        "\x1b]52;c;c3RlYWw=": "",
        "\x1bcreset": "reset",
        "\x1b(0lqk": "lqk",
        "\x9b31mred": "31mred",
        "a\nb\r\nc\td": "a b  c d",
        "a\x00\x07\x08\x7fb": "ab",
        "\u202eevil\u2066\u200b": "evil",
        "\U0001f469\u200d\U0001f467 \u0645\u06cc\u200c\u062e": "\U0001f469\u200d\U0001f467 \u0645\u06cc\u200c\u062e",
        "a\ud800b": "ab",
        "a\u2028b": "a b",
        "\x1b": "",
        "[red]not markup[/red]": "[red]not markup[/red]",
    }.items():
        assert clean(text) == cleaned and not re.search(r"[\x00-\x1f\x7f-\x9f]", cleaned)
    assert clean("abcdef", 6) == "abcdef" and clean("abcdefg", 6) == "abcde…"


def test_duration():
    texts = {0.04: "0.0 s", 4.24: "4.2 s", 9.97: "10 s", 59.4: "59 s", 59.6: "1 min 00 s", 192: "3 min 12 s"}
    texts |= {7500: "2 h 05 min"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_a_fast_phase_gets_few_lines_and_a_slow_one_a_line_a_unit(plain, clock):
    console, lines = plain
    with console.progress("sft", total=500) as progress:
        for step in range(1, 501):
            clock.time += 0.125
            progress.advance(step, {"sft/loss": 1 / step, "sft/grad_norm": 1.0})
    assert lines()[0] == "sft   1/500  loss 1.000"
    assert lines()[1] == "sft  81/500  loss 0.012  (8/s, 52 s left)"
    assert lines()[-1] == "sft 500/500  loss 0.0020  (took 1 min 02 s: 0.1 s for the first, then 8/s)"
    assert len(lines()) == 8
    with console.progress("ppo", total=12, start=9) as progress:
        assert progress.pace() == ""  # without the first unit, which compiles, and what was done before
        for step in (10, 11, 12):
            clock.time += 2.0
            progress.advance(step, {"objective/kl": 2.0, "critic/score/mean": -0.5})
    assert lines()[8:] == [
        "ppo 10/12  reward -0.500  kl 2.00",
        "ppo 11/12  reward -0.500  kl 2.00  (2.0 s each, 2.0 s left)",
        "ppo 12/12  reward -0.500  kl 2.00  (took 6.0 s: 2.0 s for the first, then 2.0 s each)",
    ]
    with console.progress("sft", total=100) as progress:
        for step in range(1, 11):
            clock.time += 0.0625
            progress.advance(step, {"sft/eval_loss": 2.0} if step == 5 else {})
    assert lines()[11:] == ["sft   1/100", "sft   5/100  held-out loss 2.000  (16/s, 5.9 s left)"]


def test_an_asynchronous_run_says_who_waits(plain):
    console, lines = plain
    with console.progress("grpo", total=2) as progress:
        progress.advance(1, {"perf/trainer_wait_seconds": 12.25, "perf/rollouts_wait_seconds": 0.0})
    assert lines() == ["grpo 1/2  trainer waits 12.2  rollouts wait 0.0"]


def test_compilations_are_announced_once_for_each_call_from_the_first_on(plain):
    console, lines = plain
    with console.progress("ppo", total=3, calls=["actor.generate", "reward.score", "actor.update"]) as progress:
        for call in ("", "actor.generate", "actor.generate", "of_aligned"):
            progress.compiling(call)
        progress.advance(1)
        progress.compiling("actor.update")  # late, such as an evaluation
    assert lines() == ["ppo: compiling actor.generate (1 of 3)", "ppo 1/3", "ppo: compiling actor.update (3 of 3)"]


def test_sizes_are_written_in_the_largest_unit():
    sizes = {0: "0 B", 12: "12 B", 1023: "1023 B", 1024: "1 KiB", 1536 << 10: "1.5 MiB", 80 << 30: "80 GiB"}
    sizes |= {(80 << 30) + (41 << 20): "80.04 GiB", (1 << 30) - 1: "1 GiB", int(1602822.281 * 2**20): "1.53 TiB"}
    assert {count: in_units(count) for count in sizes} == sizes


def test_samples_are_cleaned_aligned_and_not_shown_too_often(plain, clock):
    console, lines = plain
    sample = {"stage": "ppo", "step": 3, "prompt": "def f(x):\n", "response": "\x1b[31mReturn [x].", "score": 0.5}
    console.samples([sample, {**sample, "prompt": "g:", "score": 123.4}])
    shown = lines()
    assert shown == [
        "samples of ppo at 3",
        "  prompt      response     score",
        "  def f(x):   Return [x].  0.50",
        "  g:          Return [x].  123",
    ]
    clock.time += 9
    console.samples([sample])
    assert lines() == shown
    clock.time += 2
    console.samples([sample])
    assert len(lines()) == len(shown) + 3
    console.samples([])


@pytest.mark.parametrize(
    "run_dir, shown, stages, longer",
    [
        ("my runs", "'my runs/r'", ("sft", "grpo"), "--config 'my runs/r'/config.yaml --resume grpo.iterations=80"),
        ("runs", "runs/r", ("sft",), "--config runs/r/config.yaml name=r-longer sft.steps=1000"),
        ("runs", "runs/r", ("sft", "reward_model"), None),
        ("s3://bucket/runs/", "s3://bucket/runs/r", ("sft",), None),
    ],
)
def test_commands_that_go_on_from_a_run_name_it_as_a_shell_reads_it(plain, run_dir, shown, stages, longer):
    console, lines = plain
    console.commands(Config(name="r", run_dir=run_dir, stages=stages))
    talk, *more = lines()
    assert talk == f"to talk to it: python -m jrlhf.generate --model {shown}"
    upload = [f"to upload it: python -m jrlhf.export {shown} --push USER/NAME"] * ("://" not in run_dir)
    anew = "" if "--resume" in str(longer) else ", anew, because its learning rates depend on its length"
    assert more == upload + ([] if longer is None else [f"to train it longer{anew}: python -m jrlhf.train {longer}"])


def test_no_number_looks_like_zero_that_is_not():
    draw = random.Random(0)
    for _ in range(300):
        value = draw.choice((-1, 1)) * 10 ** draw.uniform(-9, 3)
        for form, error in ((".3f", 5e-4), ("+.3f", 5e-4), (".2f", 5e-3), (".1f", 0.05)):
            text = decimals(value, form)
            assert abs(float(text) - value) <= max(0.051 * abs(value) if abs(value) < 20 * error else 0, error)
            assert float(text) * value > 0 and text.startswith("+") == (form[0] == "+" and value > 0)
    assert [decimals(value) for value in (0.0, -0.0, -0.0004, 0.0123, -1e-5, math.nan)] == [
        *("0.000", "0.000", "-0.00040", "0.012", "-1.0e-05", "nan")
    ]


def test_the_summary_shows_the_figures_and_where_things_are(plain):
    console, lines = plain
    figures = [("Gold score, held out", ["0.65", "0.78"], "on 512 prompts"), ("Reward model", ["87.1%"], "of pairs")]
    console.summary(figures, {"sft": 75.2}, Path("r"))
    assert lines() == [
        "",
        "Gold score, held out: 0.65 → 0.78  (on 512 prompts)",
        "Reward model: 87.1%  (of pairs)",
        "sft: 1 min 15 s",
        "report: r/report.html",
        "model: r/model, in Hugging Face form",
    ]


def test_a_validation_is_one_line_and_a_table(plain, clock):
    console, lines = plain
    console.samples([{"stage": "ppo", "step": 4, "response": "just now"}])
    metrics = {
        "val-core/openai/gsm8k/score/mean@2": 0.5,
        "val-core/all/score/mean@2": 0.375,
        "val-core/all/score/best@2/mean": 0.625,
        "val-core/openai/gsm8k/score/best@2/mean": float("nan"),
        "val-aux/all/exact/mean@2": 0.25,
        "objective/kl": 1.0,
    }
    sample = {"stage": "ppo", "step": 5, "kind": "validation", "prompt": "p", "response": "\x1b[2Jr", "score": 1.0}
    console.validation(5, metrics, [sample])
    assert lines()[3:] == [
        "validation before iteration 5  score mean@2 0.375  score best@2 0.625  "
        "openai/gsm8k: score mean@2 0.500, score best@2 nan",
        "validation samples before iteration 5",
        "  prompt  response  score",
        "  p       r         1.00",
    ]
    console.validation(6, {})
    assert lines()[7:] == ["validation before iteration 6"]
    Console(enabled=False).validation(5, metrics, [sample])


def test_validation_metrics_are_read():
    for key, parsed in {
        "val-core/all/score/mean@4": ("all", "score", "mean@4"),
        "val-core/all/gold/best@16/mean": ("all", "gold", "best@16"),
        "val-core/openai/gsm8k/score/mean@1": ("openai/gsm8k", "score", "mean@1"),
        "val-aux/openai/gsm8k/exact/digits/mean@1": ("openai/gsm8k", "exact/digits", "mean@1"),
        "val-aux/openai/exact/mean@1": ("openai", "exact", "mean@1"),
        "val-aux/unknown/exact/mean@1": ("unknown", "exact", "mean@1"),
        "val-core/two\nlines/score/mean@4": ("two\nlines", "score", "mean@4"),
        "val-core/score/mean@4": None,
        "val-core/all/score/mean": None,
        "critic/score/mean": None,
    }.items():
        assert validation_key(key, ["all", "openai", "openai/gsm8k"]) == parsed


def test_a_line_shows_few_rewards_by_name_and_that_functions_failed(plain):
    console, lines = plain
    two = {"rewards/exact/mean": 0.5, "rewards/exact/std": 1.0, "rewards/exact/words": 9.0}
    two |= {"rewards/exact/failures": 0.0, "rewards/form/mean": 1.0}
    failed = {"rewards/exact/failures": 2.0, "rewards/exact/failures/timeout": 2.0, "rewards/form/failures": 1.0}
    costs = {"costs/words/mean": 4.0, "costs/words/failures": 1.0, "costs/words/failures/nan": 1.0}
    for metrics in (
        two,
        two | failed,
        failed | costs,
        {"rewards/exact/mean": 0.5},
        {f"rewards/r{n}/mean": 0.5 for n in range(4)} | {"objective/kl": float("nan")},
    ):
        with console.progress("ppo", total=1) as progress:
            progress.advance(1, {"critic/score/mean": 0.25} | metrics)
    assert [line.removesuffix("  (took 0.0 s)") for line in lines()] == [
        "ppo 1/1  reward +0.250  exact 0.500  form 1.000",
        "ppo 1/1  reward +0.250  exact 0.500  form 1.000  failures 3",
        "ppo 1/1  reward +0.250  failures 4",
        "ppo 1/1  reward +0.250",
        "ppo 1/1  reward +0.250  kl nan",
    ]


def use_everything(console: Console, clock: Clock) -> None:
    with console.status("reading"):
        clock.time += 1
    console.warn("be\x1b]0;title\x07ware")
    with console.progress("sft", total=2) as progress:
        progress.advance(1, {"sft/loss": 1.0})
        console.samples([{"stage": "ppo", "step": 1, "response": "\x1b[2JReturn [bold]x."}])
        progress.advance(2, {"sft/loss": 0.5})
    console.summary([], {}, Path("runs/x"))


def test_a_terminal_shows_a_bar_and_nothing_that_a_model_commands(terminal, clock):
    console, written = terminal
    assert console.interactive
    use_everything(console, clock)
    output = written()
    assert "━" in output and "2/2" in output
    assert "\x1b]0;title" not in output and "\x1b[2J" not in output
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    for expected in ("reading: 1.0 s", "warning: beware", "sft 1/2  loss 1.000", "Return [bold]x.", "report: runs/x"):
        assert expected in text


def test_a_file_gets_plain_lines_only_and_other_processes_are_silent(plain, clock):
    console, lines = plain
    use_everything(console, clock)
    text = "\n".join(lines())
    assert "\x1b" not in text and "\r" not in text and "reading ..." in text and "Return [bold]x." in text
    file = io.StringIO()
    use_everything(Console(enabled=False, file=file, now=clock), clock)
    assert file.getvalue() == ""


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    ours, theirs = os.openpty()
    with open(theirs, "w", encoding="utf-8") as file:
        assert not Console(file=file).interactive
    os.close(ours)


def test_an_encoding_without_the_characters_does_not_stop_a_run():
    buffer = io.BytesIO()
    with io.TextIOWrapper(buffer, encoding="ascii") as file:
        Console(file=file).line("naïve ± 中")
        assert buffer.getvalue() == b"na?ve ? ?\n"


def test_an_exception_leaves_the_progress(terminal):
    console, written = terminal
    with pytest.raises(KeyboardInterrupt), console.progress("sft", total=2) as progress:
        progress.advance(1)
        raise KeyboardInterrupt
    assert "\x1b[?25h" in written()  # the cursor is back
