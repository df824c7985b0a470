"""`Facts` about a reward function, found by its worker: how to call it, and its names in logs, checkpoints, errors."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from jrlhf.config.schema import RewardConfig
from jrlhf.errors import UserError
from jrlhf.rewards import builtin
from jrlhf.rewards.types import MODULES, Kind, Sample
from jrlhf.rewards.worker import GIVEN
from jrlhf.run.files import digest_of

SHOWN = 300  # characters of a text in a message


@dataclass(frozen=True)
class Facts:
    """Facts about a function. Raises UserError if its config renames a column for a parameter that is no column."""

    config: RewardConfig
    kind: Kind
    spec: str  # module and function, with the whole path of a file
    style: Literal["trl", "verl"]
    asynchronous: bool
    texts: Sequence[str]  # its parameters for a sample's texts and tokens
    open_ended: bool  # it takes `**`
    columns: Sequence[str]  # the parameters that take a column of the dataset
    required: Sequence[str]  # the columns without a default
    file: str | None
    sha256: str | None
    modules: Mapping[str, str]  # modules that its file imports: name -> sha256

    def __post_init__(self) -> None:
        for parameter in self.config.columns:
            taken = parameter in self.given or parameter in self.config.options
            if taken or not (parameter in self.columns or self.open_ended):
                raise UserError(
                    f"columns.{parameter} of {self.called}: the parameters of {self.spec} that take a column are "
                    f"{', '.join(self.columns) or 'none'}"
                )

    @property
    def called(self) -> str:
        return f"{self.kind} {self.config.name!r}"

    @property
    def given(self) -> tuple[str, ...]:
        """The parameters that the program passes by itself."""
        return GIVEN[self.style] if self.config.client is None else (*GIVEN[self.style], "client")

    @property
    def is_builtin(self) -> bool:
        return self.spec.startswith(f"{builtin.__name__}:")

    @property
    def fingerprint(self) -> str:
        """A digest of the function's file, wherever that is, its options, and the model that it asks."""
        source = builtin.IDENTITIES[self.spec.rpartition(":")[2]] if self.is_builtin else self.sha256 or ""
        parts = [os.path.basename(self.spec), source, repr(sorted(self.config.options.items()))]
        if (client := self.config.client) is not None:  # not the key, nor what only says when it answers
            parts.append(repr((client.url, client.model, client.temperature, client.max_tokens)))
        return digest_of(parts)

    @property
    def identity(self) -> dict[str, str]:
        """The entries of a checkpoint's `meta` for the function: its digest, and one of the modules it imports."""
        key = f"{self.kind} {self.config.name}"
        imported = {f"{key}{MODULES}": digest_of(map(str, sorted(self.modules.items())))} if self.modules else {}
        return {key: self.fingerprint} | imported

    def describe(self) -> str:
        """Returns one line for the log: the function, its file, and what happens if it fails."""
        config, failing = self.config, "a failure stops the run"
        source = f" ({self.file}, digest {self.fingerprint})" if self.sha256 else ""
        call = f"in {config.workers} process{'es' * (config.workers > 1)}, {config.deadline:g} s a call"
        if config.in_process:
            call = "in the process that trains, without a deadline: a crash or a hang in it is one of the run"
            call += "" if source else ", and a resume checks its name alone"
        if config.client is not None:
            call += f", with answers of {config.client.model} at {config.client.url}"
        if config.on_failure == "exclude":
            failing = "a row where it fails counts nowhere"
        elif config.on_failure is not None:
            failing = f"{config.on_failure:g} where it fails"
        return f"{self.kind} {config.name}: {self.spec}{source} {call}, {failing}"

    def check_columns(self, columns: Iterable[str]) -> None:
        """Compares the function's parameters with a dataset's columns, before anything is trained."""
        columns = set(columns)
        given = columns | {"data_source", "extra_info"} | ({"ground_truth"} if "reward_model" in columns else set())
        for parameter in [*self.required, *self.config.columns]:
            column = self.config.columns.get(parameter, parameter)
            if column not in given:
                # Built-in functions need an answer for each row, which no option gives.
                option = "" if self.is_builtin else f", or give options.{parameter}"
                near = get_close_matches(column, sorted(columns), 1) if parameter == column and option else ()
                rename = f"rename the parameter to {near[0]}, or " if near else ""
                rename += "give the section client, or " if parameter == "client" else ""
                raise UserError(
                    f"{self.called} needs the column {column!r} for {self.spec}, and the dataset has "
                    f"{', '.join(sorted(columns)) or 'none'}: {rename}name one of these in its columns.{parameter}"
                    f"{option}"
                )

    def story(self, sample: Sample, failure: Mapping[str, str], samples: int) -> str:
        """Describes a failed call in one line, with its first sample; unprintable characters are escaped."""
        among = f"a call with {samples} samples, the first of them" if samples > 1 else "the sample"
        row, names = sample.columns, dict.fromkeys(self.config.columns.get(c, c) for c in self.columns)
        shown: dict[str, Any] = {"prompt": sample.prompt_text, "response": sample.response.text}
        if self.style == "trl" and not isinstance(sample.completion, str):  # what the function got: a list of messages
            shown = {"prompt": sample.prompt_text, "completion": [dict(message) for message in sample.completion]}
        shown |= {column: row[column] for column in names if column in row}
        text = ", ".join(f"{key}={_short(value)}" for key, value in shown.items())
        return f"{self.called} failed ({failure['failure']}: {failure['detail']}) on {among} {text}"


def _short(value: Any) -> str:
    text = repr(value if not isinstance(value, str) or len(value) <= SHOWN else f"{value[:SHOWN]}...")
    return text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]}..."
