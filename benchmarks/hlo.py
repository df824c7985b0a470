"""Collectives, loops and copies in the text of compiled programs."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from jax.stages import Compiled

_KINDS = "all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter"
_OPERATION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = .*?\s({_KINDS})(?:-start)?\(", re.MULTILINE)
_COLLECTIVE = re.compile(rf"({_KINDS})(-start)?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?(\S+) = (.*?)\s([a-z][a-z0-9-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.-]+)")
_BODY = re.compile(r"\bbody=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_SIZE, _AXIS = re.compile(r"'([^']+)'=(\d+)"), re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_PAIR = re.compile(r"(\d+),(\d+)")
# Groups of a collective, in the three forms of HLO: lists of devices, [groups,size]<=..., and axes of a mesh.
_GROUPS = re.compile(
    r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=|mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\))? ?\{([^}]*)\})"
)
# What no device spends time on: names for memory that is there, and the second halves of asynchronous pairs.
_FREE = re.compile(
    r"parameter|constant|tuple|get-tuple-element|bitcast|after-all|opt-barrier|while|call|.*-(done|update)"
)
_MOVES = ("copy", "copy-start", "transpose")


def collectives(program: Compiled | str) -> Counter[str]:
    """The number of collectives of each kind in a compiled program, given as such or as its HLO text.

    An asynchronous pair (`-start`, `-done`) counts once, and so does one in the body of a loop, however often it runs.
    """
    return Counter(_OPERATION.findall(_text(program)))


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind as they run on a device. bytes: of operands or of results, whichever are more."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True)
class Loop:
    """The body of a loop.

    trips: number of iterations, where the compiler knows it.
    kernels: number of launches of a device in one iteration, without inner loops.
    copied: bytes that one iteration only copies or transposes.
    """

    trips: int | None
    kernels: int
    copied: int


def collective_traffic(program: Compiled | str) -> dict[str, Traffic]:
    """Collectives by kind, as often as they run: one in a loop of n trips counts n times.

    In a loop whose trips the compiler does not know, it counts once; so does one in each branch of a conditional.
    """
    total: dict[str, Traffic] = {}
    for kind, _, size, times in _run(program):
        total[kind] = total.get(kind, Traffic()) + Traffic(times, times * size)
    return total


def _run(program: Compiled | str) -> Iterator[tuple[str, "_Instruction", int, int]]:
    """Yields the kind, the instruction, the bytes and the number of executions of each collective."""
    computations = _parse(_text(program))

    def visit(computation: "_Computation", times: int) -> Iterator[tuple[str, "_Instruction", int, int]]:
        for instruction in computation.instructions:
            if kind := instruction.collective:
                yield kind, instruction, computation.collective_bytes(instruction), times
            else:
                for name in instruction.called:
                    yield from visit(computations[name], times * (_trips(instruction, computations) or 1))

    yield from visit(computations[""], 1)


def received_bytes(program: Compiled | str, devices: int) -> list[float]:
    """Returns the bytes that each device receives in collectives, by position; a device's own part does not count.

    Of a group of g devices, each receives (g - 1) / g of the result of an all-gather, of the operands of an all-to-all
    or reduce-scatter, and twice that of an all-reduce. A permutation sends its operand to each receiver.
    """
    total = [0.0] * devices
    for kind, instruction, size, times in _run(program):
        if kind == "collective-permute":
            for sender, receiver in _PAIR.findall(_PAIRS.search(instruction.rest)[1]):  # type: ignore[index]
                total[int(receiver)] += size * times * (sender != receiver)
        else:
            group = _group_size(instruction.rest, devices)
            share = (group - 1) / group * (2 if kind == "all-reduce" else 1)
            total = [received + size * times * share for received in total]
    return total


def _group_size(attributes: str, devices: int) -> int:
    if "replica_groups={}" in attributes:
        return devices
    match = _GROUPS.search(attributes)
    assert match is not None, f"groups in a form that is not known: {attributes}"
    listed, size, mesh, axes = match.groups()
    if listed is not None:
        return len(listed.split(","))
    if size is not None:
        return int(size)
    sizes = dict(_SIZE.findall(mesh))  # a part of an axis is written 'axis':(factors before it)size
    return prod(int(part or sizes[axis]) for axis, part in _AXIS.findall(axes))


def loops(program: Compiled | str) -> list[Loop]:
    """The loops of a compiled program, those with most kernels first."""
    computations = _parse(_text(program))

    def copied(computation: "_Computation", instruction: "_Instruction") -> int:
        if instruction.operation == "fusion":
            root = computations[instruction.called[0]].instructions[-1]
            return instruction.bytes if root.operation in _MOVES else 0
        return computation.result_bytes(instruction) if instruction.operation in _MOVES else 0

    results = []
    for name, computation in computations.items():
        for instruction in computation.instructions if name else ():
            if (body := _BODY.search(instruction.rest)) and instruction.operation == "while":
                inside = computations[body[1]]
                launched = [one for one in inside.instructions if not _FREE.fullmatch(one.operation)]
                trips = _trips(instruction, computations)
                results.append(Loop(trips, len(launched), sum(copied(inside, one) for one in launched)))
    return sorted(results, key=lambda loop: -loop.kernels)


@dataclass(frozen=True)
class _Instruction:
    name: str
    shape: str
    operation: str
    rest: str  # operands and attributes

    @property
    def bytes(self) -> int:
        return _bytes(self.shape)

    @property
    def collective(self) -> str | None:
        match = _COLLECTIVE.fullmatch(self.operation)
        return match[1] if match else None

    @property
    def called(self) -> list[str]:
        named = (one or several for one, several in _CALLED.findall(self.rest))
        return [name.strip().removeprefix("%") for names in named for name in names.split(",")]

    @property
    def operands(self) -> Iterator[str]:
        """Their names: those before the parenthesis that closes the list."""
        return (match[1] for match in _NAME.finditer(self.rest.split("), ")[0]))


@dataclass(frozen=True)
class _Computation:
    instructions: tuple[_Instruction, ...]

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        return {instruction.name: instruction.bytes for instruction in self.instructions}

    def result_bytes(self, instruction: _Instruction) -> int:
        """Returns the bytes of its results. A `-start` also returns its operands, which do not count."""
        started = instruction.operation.endswith("-start")
        return instruction.bytes - (self.operand_bytes(instruction) if started else 0)

    def operand_bytes(self, instruction: _Instruction) -> int:
        return sum(self.sizes.get(name, 0) for name in instruction.operands)

    def collective_bytes(self, instruction: _Instruction) -> int:
        return max(self.operand_bytes(instruction), self.result_bytes(instruction))


def _trips(instruction: _Instruction, computations: Mapping[str, _Computation]) -> int | None:
    """Returns the number of trips of a loop. XLA does not write it down on TPUs: there it is the bound of the counter,
    as JAX's loops of known length count from 0 by 1."""
    if instruction.operation != "while":
        return None
    if written := _TRIPS.search(instruction.rest):
        return int(written[1])
    condition = _CONDITION.search(instruction.rest)
    assert condition is not None, "every loop has one"
    tests = {one.name: one for one in computations[condition[1]].instructions}
    *_, root = tests.values()
    if root.operation != "compare" or "direction=LT" not in root.rest:
        return None
    counter, bound = (tests.get(name) for name in root.operands)
    is_constant = counter and bound and counter.operation == "get-tuple-element" and bound.operation == "constant"
    return int(bound.rest.split(")")[0]) if bound and is_constant else None


def _parse(text: str) -> dict[str, _Computation]:
    """Name -> computation; the entry is also there as ""."""
    computations: dict[str, _Computation] = {}
    names: list[str] = []
    lines: list[_Instruction] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            names, lines = [header[2], *([""] if header[1] else [])], []
        elif line.startswith("}"):
            computations |= dict.fromkeys(names, _Computation(tuple(lines)))
            names = []
        elif names and (match := _INSTRUCTION.match(line)):
            lines.append(_Instruction(match[2], match[3], match[4], match[5]))
    return computations


def _bytes(shape: str) -> int:
    """Bytes of a shape as HLO prints it, all parts of a tuple together."""
    return sum(
        (1 if kind == "pred" else max(int(bits) // 8, 1)) * prod(int(size) for size in sizes.split(",") if size)
        for kind, bits, sizes in _ARRAY.findall(shape)
    )


def _text(program: Compiled | str) -> str:
    text = program if isinstance(program, str) else program.as_text()
    assert text is not None, "every backend that we know prints its HLO"
    return text
