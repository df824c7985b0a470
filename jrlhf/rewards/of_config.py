"""`open_rewards`: a context manager that opens the rewards and the costs of a config."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from jrlhf.config.schema import RewardConfig
from jrlhf.data.task import Task
from jrlhf.data.tokenizer import Tokenizer
from jrlhf.ppo.config.score import ScoreConfig
from jrlhf.rewards.functions import FunctionReward
from jrlhf.rewards.mixture import TRAINED, Rewards, TextPart, TokenPart
from jrlhf.rewards.types import INVALID, Kind
from jrlhf.roles.initial import InitialModels
from jrlhf.roles.model import Model
from jrlhf.roles.placement import RolePlacement
from jrlhf.run.clock import Clock
from jrlhf.run.processes import from_main


@contextmanager
def open_rewards(
    initial: InitialModels,
    task: Task,
    folder: Path,
    placement: Callable[[str], RolePlacement],
    policy: Model,
    trained: Model | None,
) -> Iterator[tuple[Rewards, Rewards | None]]:
    """Yields the rewards and the costs of a config; costs are not shaped. Processes of functions end with the block.

    folder: where the functions' logs are written. placement: role ("reward" or "cost") -> its placement.
    policy: its base serves the adapters of rewards. trained: the reward model that this run trained.
    """
    config, data, clock = initial.config, initial.config.data, Clock(deadline=initial.config.deadline)
    assert task.prompts is not None
    epochs = config.rl.rollout_batch / config.samples / len(task.prompts.ids)
    interruptible = list[FunctionReward]()  # functions in processes

    def end_calls(kind: type[BaseException] | None, *_: object) -> None:
        for function in interruptible if kind is not None else ():
            function.close()

    def start(function: FunctionReward) -> str:
        stack.enter_context(function)
        initial.console.line(function.facts.describe())
        return function.facts.fingerprint

    def opened(kind: Kind, section: Sequence[RewardConfig], shaping: ScoreConfig, own: Model | None) -> Rewards:
        places, tokens, texts = placement(kind), dict[str, TokenPart](), dict[str, TextPart]()
        if own is not None:
            stored = places.store(own, donate=False)
            tokens[TRAINED] = TokenPart(config.reward_model.weight, stored, own.fingerprint(), INVALID)
        for index, reward in enumerate(section):
            if reward.adapter is not None:
                model = initial.reward_adapter(policy, reward.adapter, f"{kind}s[{index}].adapter")
                identity = model.fingerprint()
                on_failure = INVALID if reward.on_failure == "exclude" else reward.on_failure
                tokens[reward.name] = TokenPart(reward.weight, places.store(model), identity, on_failure)
            elif reward.model is not None:
                texts[reward.name] = _text_part(initial, reward, f"{kind}s[{index}].model", kind, places)
            else:
                log, steps = folder / f"{kind}-{reward.name}.log", config.rl.iterations
                function = FunctionReward(reward, config.seed, log, kind=kind, steps=steps, epochs=epochs)
                identity = from_main(partial(start, function))
                texts[reward.name] = TextPart(reward.weight, function.score, identity, calls=function.calls)
                if not reward.in_process:
                    interruptible.append(function)
        rewards = Rewards(
            tokens,
            texts,
            placement=places,
            compute=initial.compute,
            clock=clock,
            tokenizer=task.tokenizer,
            gap=cache(partial(_gap, task.tokenizer)),
            max_response=data.max_response,
            shaping=shaping,
            kind=kind,
            trained=own,
            samples=config.samples,
            counts=config.rl.algorithm.counts,
            warn=initial.console.warn,
        )
        stack.callback(rewards.close)  # before the functions' processes end
        stack.push(end_calls)  # before that, after an error: nobody waits for the rows of a call that is at work
        return rewards

    with ExitStack() as stack:
        rewards = opened("reward", config.rewards, config.rl.scores, trained)
        yield rewards, opened("cost", config.costs, ScoreConfig(), None) if config.costs else None


def _text_part(initial: InitialModels, reward: RewardConfig, key: str, kind: Kind, places: RolePlacement) -> TextPart:
    """Loads a reward model that reads text. key: the setting that names it."""
    from jrlhf.rewards.text_model import TextReward

    config, rows = initial.config, initial.config.compute.score_rows
    assert reward.model is not None and rows != "auto"  # the run has chosen
    usual = config.data.max_prompt + config.data.max_response
    model = initial.reward(reward.model, key)
    scorer = TextReward(reward, key, model, places, initial.compute, kind=kind, usual=usual, rows=rows)
    return TextPart(reward.weight, scorer.score, scorer.identity, scorer)


def _gap(tokenizer: Tokenizer) -> str:
    from jrlhf.data.encode import answer_gap

    return answer_gap(tokenizer)
