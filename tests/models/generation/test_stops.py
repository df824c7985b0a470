"""Stop strings: the table against a search of the text, and rows that end at them on meshes and in chunks."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jrlhf.meshes import GENERATE, make_mesh
from jrlhf.models import ModelConfig, SamplingConfig, Schedule, StopTable, param_shardings, stop_table
from jrlhf.models.generation.engine import Engine
from jrlhf.models.generation.occupancy import LastRows
from tests.models.conftest import random_params
from tests.models.shared import unstacked

CONFIG = ModelConfig(60, 16, 1, 4, 2, 8, mlp=24, max_positions=40)
U, S, P, R = 16, 2, 5, 24
EOS = 7


def vocabulary(draw: np.random.Generator, size: int) -> list[bytes]:
    """Tokens of up to four bytes of a small alphabet; some have no text, as special tokens, or a part of a letter."""
    return [bytes(draw.choice(list("ab#\n\xe9".encode()), draw.integers(0, 5)).tolist()) for _ in range(size)]


def ends_within_the_last(text: bytes, last: bytes, strings: list[bytes]) -> bool:
    """Whether one of the strings ends within the last token of a text."""
    return any(
        text.endswith(string, 0, end) for string in strings for end in range(len(text) - len(last) + 1, len(text) + 1)
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_table_finds_what_a_search_of_the_text_finds(seed):
    draw = np.random.default_rng(seed)
    strings = [one for one in vocabulary(draw, 6) if one] + [b"##\n#", "é".encode()] * (seed % 2)
    tokens = [*vocabulary(draw, 40), max(strings, key=len) * 3]
    table: Any = stop_table(strings, tokens)
    assert len(table.moves) == len({string[:end] for string in strings for end in range(len(string) + 1)})
    assert table == stop_table(strings, tokens) and hash(table) == hash(stop_table(strings, tokens))
    rows = draw.integers(0, len(tokens), (32, 20))
    states, texts = np.zeros(32, np.int32), [b""] * 32
    for drawn in rows.T:
        texts = [text + tokens[token] for text, token in zip(texts, drawn, strict=True)]
        states, completed = jax.device_get(table.advance(states, drawn))
        expected = [ends_within_the_last(*row, strings) for row in zip(texts, [tokens[t] for t in drawn], strict=True)]
        assert completed.tolist() == expected
    assert {True, False} == {*completed.tolist()} or seed
    # Tokens alone matter, not how they are cut: a byte at a time ends in the same state.
    single: Any = stop_table(strings, [bytes([byte]) for byte in range(256)])
    for text, state in zip(texts, states, strict=True):
        one = np.zeros(1, np.int32)
        for byte in text:
            one, _ = single.advance(one, np.array([byte]))
        assert one[0] == state


def test_a_large_vocabulary_has_few_classes():
    tokens = [str(number).encode() for number in range(150_000)]
    table: Any = stop_table([b"\n\n", b"99"], tokens)
    assert len(table.moves) == 5 and len(table.moves[0]) <= 8 and len(table.classes) < 100_000
    _, completed = table.advance(np.array([0, 0, 3]), np.array([123, 19945, 94321]))
    assert completed.tolist()[:2] == [False, True]
    for strings in ([], [b""], [b"a" * 200, b"b" * 57]):
        with pytest.raises(ValueError, match="must be of 1 to 256 bytes together, none empty"):
            stop_table(strings, tokens)
    assert len(stop_table([b"a" * 256], tokens[:100]).moves) == 257


class Drawn:
    """Rollouts of one model on a mesh, all with the same keys."""

    def __init__(self, *sizes: int):
        self.mesh = make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)])
        draw = np.random.default_rng(3)
        self.lengths = draw.integers(1, P + 1, U).astype(np.int32)
        self.prompts = draw.integers(0, CONFIG.vocab_size, (U, P)).astype(np.int32)
        self.keys = jax.random.split(jax.random.key(5), U * S)
        with jax.set_mesh(self.mesh):
            params = unstacked(random_params(CONFIG))
            self.params = jax.device_put(params, param_shardings(CONFIG, self.mesh, GENERATE))

    def __call__(self, sampling: SamplingConfig, schedule: Schedule | None = None, last: Any = None) -> Any:
        engine = Engine(CONFIG, self.mesh, sampling, schedule or Schedule(chunk=R), samples=S)
        with jax.set_mesh(self.mesh):
            return jax.device_get(engine(self.params, self.prompts, self.lengths, self.keys, last=last))


TOKENS = vocabulary(np.random.default_rng(1), CONFIG.vocab_size)
STRINGS = [b"#\na", b"b#", b"\n\n"]
SAMPLING = SamplingConfig(R, temperature=1.0, stop_ids=(EOS,), min_new_tokens=3)


def cut(whole: Any, least: int) -> list[tuple[list[int], bool]]:
    """The responses of rows that were drawn without stop strings, up to the first token that completes one."""
    rows = []
    for row, start, length, done in zip(
        whole.tokens, whole.prompt_lengths, whole.response_lengths, whole.finished, strict=True
    ):
        ids, text = row[start : start + length].tolist(), b""
        for place, token in enumerate(ids):
            text += TOKENS[token]
            if place >= least and ends_within_the_last(text, TOKENS[token], STRINGS):
                ids, done = ids[: place + 1], True
                break
        rows.append((ids, bool(done)))
    return rows


def responses(out: Any) -> list[tuple[list[int], bool]]:
    fields = zip(out.tokens, out.prompt_lengths, out.response_lengths, out.finished, strict=True)
    for row, start, length, _ in zip(out.tokens, out.prompt_lengths, out.response_lengths, out.finished, strict=True):
        assert not row[start + length :].any()
    return [(row[start : start + length].tolist(), bool(done)) for row, start, length, done in fields]


@pytest.mark.parametrize(
    ("sizes", "schedule", "last"),
    [
        ((1, 1, 1), None, None),
        ((2, 2, 2), None, None),
        ((1, 1, 2), Schedule(slots=8, chunk=3), None),
        pytest.param((1, 2, 2), Schedule(chunk=5, prefill=2), LastRows(1), marks=pytest.mark.full),
        pytest.param((2, 2, 1), Schedule(slots=16, chunk=4, buckets=2), LastRows(2), marks=pytest.mark.full),
    ],
)
def test_rows_end_after_the_token_that_completes_a_string(sizes, schedule, last):
    """Nothing else changes: they are the rows of a rollout without stop strings, cut off."""
    drawn, stops = Drawn(*sizes), stop_table(STRINGS, TOKENS)
    whole, out = drawn(SAMPLING), drawn(replace(SAMPLING, stops=stops), schedule, last)
    expected = cut(whole, SAMPLING.min_new_tokens)
    assert responses(out) == expected != cut(whole, 0)  # some strings come too early to count
    shorter = [len(ids) < length for (ids, _), length in zip(expected, whole.response_lengths, strict=True)]
    assert 8 < sum(shorter) < U * S - 4
    inside = out.logprobs != 0
    np.testing.assert_allclose(out.logprobs[inside], whole.logprobs[inside], atol=1e-5)


def test_without_stop_strings_states_have_no_array_for_them():
    drawn = Drawn(1, 1, 1)
    plain, stopped = (
        Engine(CONFIG, drawn.mesh, sampling)._in_chunks._programs.empty(4, 8)
        for sampling in (SAMPLING, replace(SAMPLING, stops=stop_table(STRINGS, TOKENS)))
    )
    assert plain.rows.matched is None and len(jax.tree.leaves(stopped)) == len(jax.tree.leaves(plain)) + 1


def test_a_table_is_sent_to_other_processes_as_text():
    table = stop_table(STRINGS, TOKENS)
    assert StopTable(table.classes, tuple(map(tuple, [list(row) for row in table.moves]))) == table
