"""Decides which settings may change when a run is resumed: those that do not define its results, and its length.

It also decides which settings may differ between the processes of a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import jax

from jrlhf import __version__
from jrlhf.config.keys import flatten
from jrlhf.config.parse import build, config_yaml, parse_yaml
from jrlhf.config.schema import Config
from jrlhf.config.stages import OptimizerConfig, optimizers_of
from jrlhf.errors import UserError
from jrlhf.run.files import saved_steps
from jrlhf.run.processes import from_main, several, to_main

# Patterns of keys that may change. The results stay the same,
_SAME = (
    *("name", "run_dir", "distributed.*", "deadline", "fleet.*", "sleep.*", "profile.*"),
    *("checkpoints.keep", "export.*"),
    *(f"{kind}[[]*.{key}" for kind in ("rewards", "costs") for key in ("deadline", "workers", "on_failure")),
    *(f"*].client.{key}" for key in ("key_env", "concurrent", "timeout", "retries")),
    # These only observe.
    *("*.asynchronous.logprob_check", "*.asynchronous.uncorrected", "stop_after_skipped"),
    *("storage.*", "wandb.*", "prometheus"),
    *("evaluation.*", "validation.*", "*.eval_every", "*.save_every"),
)
# or the same up to rounding, as sums are computed in another order.
_ROUNDED = (
    *("plan", "device.*", "mesh.*", "rollout.*", "*.micro_batches", "*.micro_batch_tokens", "*.pipeline.*"),
    *("compute.remat", "compute.logprob", "compute.fused_loss", "compute.attention", "compute.score_tokens"),
)
_ENDING = "stop.*", "hooks*", "checkpoints.best"  # They change the end of a stage, which a run may want at any time.
_SCHEDULE = "rollout.slots", "rollout.chunk"  # in asynchronous runs they decide which weights draw which tokens
_TILE = "compute.score_rows"
# Settings of one process: its place, files that only process 0 reads, and a directory that is checked on its own.
_OF_A_PROCESS = "distributed.*", "plan", "storage.scratch"


def changes(path: Path | str, saved: str, config: Config) -> tuple[list[str], str]:
    """Compares a config with that of a run's start. Returns (clauses on refused changes, a line on other changes).

    path: the run's directory, or an address, whose checkpoints are not read. saved: its config.yaml. The line is empty
    if there are no other changes.
    """
    old, new = _settings(parse_yaml(saved, str(path)), config)
    differing = [key for key in {**new, **old} if old.get(key) != new.get(key)]
    differing = [key for key in differing if (key, new.get(key)) != (_TILE, "auto")]  # the run has chosen
    longer = [key for key in differing if key == length_key(config) and key in old]
    scheduled = () if config.asynchronous is None else _SCHEDULE
    allowed = longer + [key for key in differing if _is_moved(key, old.get(key, ""), new.get(key, ""))]
    may_change = _SAME + _ROUNDED + _ENDING
    free = [key for key in differing if key in allowed or (_matches(key, may_change) and key not in scheduled)]
    fixed = [key for key in differing if key not in free]
    refused = [f"{key}: {old.get(key, 'absent')} there, {new.get(key, 'absent')} here" for key in fixed]
    if longer and not refused:
        _check_length(path, config, longer[0], old)
    line = "with " + ", ".join(f"{key}={new.get(key, 'absent')} (was {old.get(key, 'absent')})" for key in free)
    if any(_matches(key, _ROUNDED) for key in free):
        line += "; results are the same up to rounding"
    return refused, line if free else ""


def _is_moved(key: str, before: str, now: str) -> bool:
    """True for code of the user's own whose file has only moved. Checkpoints hold a digest of it."""
    own = "].function", ".dataflow", ".optimizer"
    return key.endswith(own) and ":" in before and Path(before).name == Path(now).name


def refuse_other_processes(config: Config, **options: bool | str) -> None:
    """Refuses processes whose settings are not those of process 0: they would wait for each other, or train otherwise.

    All processes must call this, before they compile or write anything. options: of the command, which must also agree.
    """
    if not several():
        return
    own = _keys(parse_yaml(config_yaml(config, off=True), "config")) | {"jrlhf": __version__, "jax": jax.__version__}
    own |= {f"--{name.replace('_', '-')}": str(value).lower() for name, value in options.items()}
    settings = to_main(own)

    def compare() -> None:
        if others := other_settings(settings):
            raise UserError(
                f"the processes of a run must have the same settings, and {'; '.join(others)}: start all processes "
                "with the same config, overrides and versions"
            )

    from_main(compare)


def other_settings(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns clauses on the processes whose settings differ from those of process 0.

    Files and directories may have other parents, because hosts may mount them elsewhere.
    """
    first, processes = settings[0], dict[str, list[int]]()
    for process, own in enumerate(settings):
        differences = [
            f"{key}={own.get(key, 'absent')} (process 0: {first.get(key, 'absent')})"
            for key in {**first, **own}
            if not (_matches(key, _OF_A_PROCESS) or _is_same(first.get(key, ""), own.get(key, "")))
        ]
        if differences:
            processes.setdefault(", ".join(differences), []).append(process)
    subjects = {what: ", ".join(map(str, numbers)) for what, numbers in processes.items()}
    return [
        f"processes {who} have {what}" if "," in who else f"process {who} has {what}" for what, who in subjects.items()
    ]


def _is_same(value: str, other: str) -> bool:
    paths = Path(value), Path(other)
    return value == other or (all(path.is_absolute() for path in paths) and paths[0].name == paths[1].name)


def saved_tile(config: Path) -> int | None:
    """Returns the `compute.score_rows` of a run's config.yaml, which the run may have chosen."""
    parsed = parse_yaml(config.read_text(errors="replace"), str(config)) if config.exists() else None
    rows = _keys(parsed).get(_TILE, "null")
    return int(rows) if rows.isdigit() else None


def defines_results(key: str) -> bool:
    """False for settings that only determine where and how a run computes, or what it monitors and writes."""
    return not _matches(key, _SAME + _ROUNDED)


def _settings(saved: object, config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the settings of a saved config and of `config`, key -> value."""
    try:
        began = build(Config, saved)
    except UserError:  # keys of another version are compared as text
        return _keys(saved), _keys(parse_yaml(config_yaml(config), "config"))
    versions = began, config
    old, new = (_keys(parse_yaml(config_yaml(one, off=True), "config")) | _logical_workers(one) for one in versions)
    return old, new


def _logical_workers(config: Config) -> dict[str, str]:
    """Returns the number of logical workers, which define results, and whose default is the number of processes."""
    if config.asynchronous is None:
        return {}
    return {f"{config.algorithm}.asynchronous.logical_workers": str(config.logical_workers)}


def _keys(parsed: object) -> dict[str, str]:
    """Returns dotted key -> value of a parsed config, with keys for each reward, such as `rewards[0].workers`."""
    sections: dict[str, object] = {}
    for key, value in (parsed if isinstance(parsed, dict) else {}).items():
        rewards = isinstance(value, list) and key in ("rewards", "costs")
        sections |= {f"{key}[{index}]": item for index, item in enumerate(value)} if rewards else {key: value}
    return flatten(sections)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def length_key(config: Config) -> str | None:
    """Returns the key of the last stage's length; None for a reward model, which its last step normalises."""
    stage = config.stages[-1]
    if stage == "reward_model":
        return None
    return f"{stage}.steps" if isinstance(config.sections[stage], OptimizerConfig) else f"{stage}.iterations"


def longer(config: Config) -> str:
    """Returns the words of a command line that train a run for twice its length; empty if nothing does.

    They resume it if the learning rates of its steps so far would be the same, or else begin a new run.
    """
    if (key := length_key(config)) is None:
        return ""
    length = config.length(config.stages[-1])
    keeps = not any(_other_rates(config, length, 2 * length))
    return f"{'--resume' if keeps else f'name={config.name[:200]}-longer'} {key}={2 * length}"


def _other_rates(config: Config, before: int, length: int) -> Iterator[tuple[str, OptimizerConfig]]:
    """Yields the optimizers of the last stage, by name, whose learning rates in a stage of `before` steps or iterations
    are not those of one of `length`."""
    stage = config.stages[-1]
    section = config.sections[stage]
    updates = section.updates // config.length(stage)  # of each step
    for name, optimizer in optimizers_of(stage, section).items():
        if optimizer.duration(updates * before) != optimizer.duration(updates * length):
            yield name, optimizer


def _check_length(path: Path | str, config: Config, key: str, old: Mapping[str, str]) -> None:
    stage, before = config.stages[-1], int(old[key])
    length = config.length(stage)
    done = max(saved_steps(Path(path, "checkpoints", stage)), default=0)
    if length < done:
        raise UserError(f"{key}={length}: {path} has done {done} already, set it to {done} or more")
    for name, optimizer in _other_rates(config, before, length):
        raise UserError(
            f"{key}={length}: the learning rates of {path} are those of a run of {before} "
            f"({name}.schedule={optimizer.schedule}, {name}.final={optimizer.final:g}, {name}.warmup="
            f"{optimizer.warmup}): resume it with {key}={before}, "
            "or give a run of another length another name="
        )
