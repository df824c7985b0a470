"""Pairs follow the rubric, but for the annotator's mistakes, and are token ids of what the policy sampled."""

import zlib
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from jrlhf.config import load_config
from jrlhf.config.schema import DataConfig, DocstringsData
from jrlhf.data.types import Response
from jrlhf.errors import UserError
from jrlhf.tasks.docstrings.annotator import Annotator, build_pairs, with_real_lines
from jrlhf.tasks.docstrings.corpus import DocumentedFunction
from jrlhf.tasks.docstrings.rubric import Rubric
from jrlhf.tasks.docstrings.vocabulary import encode_split, train_tokenizer

SIGNATURE = "def Mailbox.remove_folder(folder):"
BEST, GOOD, POOR, WORST = RANKED = ["Remove the folder.", "Remove the value.", "removes the value", "xqz wvb"]
RUBRIC = Rubric.from_corpus([DocumentedFunction("m", "f", SIGNATURE, line) for line in (BEST, GOOD, POOR)])
SCORES = [RUBRIC.score(SIGNATURE, line) for line in RANKED]


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ranked(lines: list[str], **options) -> list[tuple[str, str]]:
    pairs = build_pairs([SIGNATURE], [lines], RUBRIC, generator(), **{"flip": 0.0, **options})
    assert all(pair.prompt == SIGNATURE + "\n" and pair.flipped == (options.get("flip") == 1.0) for pair in pairs)
    return [(pair.chosen, pair.rejected) for pair in pairs]


def test_pairs_follow_the_rubric_and_ties_make_none():
    assert SCORES == sorted(SCORES, reverse=True) and len(set(SCORES)) == 4
    assert set(ranked([WORST, GOOD, BEST, POOR])) == set(combinations(RANKED, 2))
    assert ranked([POOR, BEST]) == ranked([BEST, POOR, BEST, POOR]) == [(BEST, POOR)]
    assert ranked([BEST]) == []
    assert ranked([BEST, POOR], flip=1.0) == [(POOR, BEST)]
    gap = SCORES[0] - SCORES[1]
    assert ranked([BEST, GOOD], margin=gap + 0.01) == [] and len(ranked([BEST, GOOD], margin=gap - 0.01)) == 1
    rng = generator()
    build_pairs([SIGNATURE], [[BEST]], RUBRIC, rng)
    assert rng.random() == generator().random(), "a tie draws no random number"
    with pytest.raises(ValueError):
        build_pairs([SIGNATURE], [], RUBRIC, generator())


def test_labels_are_flipped_at_the_given_rate_and_depend_on_the_seed():
    count, rate = 4000, 0.05
    signatures, candidates = [SIGNATURE] * count, [[BEST, POOR]] * count
    pairs = build_pairs(signatures, candidates, RUBRIC, generator(), flip=rate)
    assert len(pairs) == count
    assert abs(sum(pair.flipped for pair in pairs) - rate * count) < 4 * (count * rate * (1 - rate)) ** 0.5
    assert all(pair.chosen == (POOR if pair.flipped else BEST) for pair in pairs)
    again, other = (
        build_pairs(signatures[:500], candidates[:500], RUBRIC, generator(seed), flip=rate) for seed in (0, 1)
    )
    assert again == pairs[:500] != other


def test_fewer_pairs_spread_from_the_closest_to_the_farthest():
    pairs = build_pairs([SIGNATURE], [RANKED], RUBRIC, generator(), per_prompt=3, flip=0.0)
    gaps = [RUBRIC.score(SIGNATURE, pair.chosen) - RUBRIC.score(SIGNATURE, pair.rejected) for pair in pairs]
    possible = [better - worse for better, worse in combinations(SCORES, 2)]
    assert gaps == [pair.gap for pair in pairs] == sorted(gaps) and len(gaps) == 3
    assert (gaps[0], gaps[-1]) == (min(possible), max(possible))


def test_candidates_hold_samples_the_real_line_and_those_of_others():
    examples = [DocumentedFunction("m", f"f{index}", f"def f{index}():", f"Line {index}.") for index in range(5)]
    samples = [[f"sample {index}"] for index in range(5)]
    seen: Counter[str] = Counter()
    for seed in range(100):
        candidates = with_real_lines(examples, samples, generator(seed), foreign=2)
        for index, row in enumerate(candidates):
            assert row[:2] == [f"sample {index}", f"Line {index}."] and len(row) == 4
            assert f"Line {index}." not in row[2:]
            seen.update(row[2:])
    assert min(seen[f"Line {index}."] for index in range(5)) > 150  # each of five is as likely: 200 expected
    assert with_real_lines(examples, samples, generator(), foreign=0)[3] == ["sample 3", "Line 3."]


class FakeSampler:
    """Answers each prompt with RANKED in turn; the ids 500, 501, ... are no tokens of these texts."""

    def __init__(self):
        self.asked: dict[str, int] = {}

    def responses(self, prompts, count, purpose):
        self.asked[purpose] = len(prompts)
        return [[Response((500 + n,), f" {RANKED[n % 4]} ", True) for _ in prompts] for n in range(count)]

    def rng(self, purpose):
        return np.random.default_rng((0, zlib.crc32(purpose.encode())))


def test_collected_pairs_are_sampled_ids_and_real_lines_that_fit():
    real = "Remove the old folder of the box."
    examples = [DocumentedFunction("m", "f", f"def Box{letter}.remove_folder(folder):", real) for letter in "abcdef"]
    tokenizer = train_tokenizer([example.prompt + real for example in examples], 270)
    longest = len(tokenizer.encode(real)) + 1

    def collect(*overrides: str):
        annotator = "{prompts: 4, samples_per_prompt: 4, heldout_prompts: 9, label_flip: 0.3, margin: 0.2}"
        given = load_config("quickstart", [f"data.annotator={annotator}", "data.max_prompt=64", *overrides]).data
        assert isinstance(given, DocstringsData)
        data = DataConfig(max_prompt=64)
        train, heldout = encode_split(tokenizer, examples[:4], data), encode_split(tokenizer, examples, data)
        return Annotator(given, 0, tokenizer, RUBRIC, train, heldout).collect(sampler)

    sampler = FakeSampler()
    train, heldout = collect(f"data.max_response={longest}")
    assert sampler.asked == {"preferences": 4, "heldout preferences": 6}, "no more prompts than there are"
    assert any(row["flipped"] for row in train.rows) and not any(row["flipped"] for row in heldout.rows)
    assert list(train.rows[0]) == ["prompt", "chosen", "rejected", "flipped"]
    assert train.clear is not None and train.clear.all(), "pairs to learn from differ by more than the margin"
    assert heldout.clear is not None and 0 < heldout.clear.sum() < len(heldout)
    assert len(train) == len(train.rows) > 0 and len(heldout) == len(heldout.rows)
    ids: dict[str, tuple[int, ...]] = {line: (500 + number,) for number, line in enumerate(RANKED)}
    ids[real] = (*tokenizer.encode(real), tokenizer.eos_id)
    for pairs in (train, heldout):
        for chosen, rejected, length, row in zip(
            pairs.chosen, pairs.rejected, pairs.prompt_lengths, pairs.rows, strict=True
        ):
            assert tokenizer.decode(chosen[:length]) == tokenizer.decode(rejected[:length]) == row["prompt"]
            assert (chosen[length:], rejected[length:]) == (ids[row["chosen"]], ids[row["rejected"]])
    fewer, _ = collect(f"data.max_response={longest - 1}")
    assert [row for row in train.rows if real not in (row["chosen"], row["rejected"])] and len(fewer) < len(fewer.rows)
    assert all(len(row) - start == 1 for row, start in zip(fewer.chosen, fewer.prompt_lengths, strict=True))
    with pytest.raises(UserError, match="data.annotator.margin=1 leaves 0 pairs to learn from and .* to measure with"):
        collect("data.annotator.margin=1")
