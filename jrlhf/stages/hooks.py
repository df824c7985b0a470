"""Loads the functions of a user that see each step of a run: those of the setting `hooks`."""

from collections.abc import Callable

from jrlhf.config.schema import Config
from jrlhf.errors import UserError
from jrlhf.rewards.user_code import as_it_is, explain, resolve
from jrlhf.run.processes import from_main
from jrlhf.stages.watching import STOP, Hook, Iteration, hook_names


def load_hooks(config: Config) -> list[tuple[str, Hook]]:
    """Imports the hooks of a config, in process 0, and returns them with the settings that name them.

    In other processes there are none. Raises UserError for a hook that cannot be imported, in all processes.
    """
    hooks = list[tuple[str, Hook]]()

    def load() -> None:
        for called, spec in zip(hook_names(config), config.hooks, strict=True):
            hooks.append((called, hook_of(called, as_it_is(resolve(spec, called), called).function)))

    from_main(load)
    return hooks


def hook_of(called: str, function: Callable[[Iteration], object]) -> Hook:
    """Returns the hook that calls a user's function, and raises UserError where that fails or answers anything else."""

    def hook(iteration: Iteration) -> str | None:
        try:
            answer = function(iteration)
        except (Exception, SystemExit) as error:
            frames = error.__traceback__
            theirs = error.with_traceback(frames and frames.tb_next)  # without this one
            raise UserError(f"{called}: {explain(theirs)}") from error
        if answer is None or (isinstance(answer, str) and answer == STOP):
            return answer
        raise UserError(f"{called} returned a value of type {type(answer).__name__}, and neither None nor {STOP!r}")

    return hook
