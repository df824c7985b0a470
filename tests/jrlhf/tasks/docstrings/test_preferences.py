import json
from collections import Counter

import numpy as np
import pytest

from jrlhf.tasks.docstrings.corpus import Example
from jrlhf.tasks.docstrings.preferences import Pair, annotate, build_pairs, pairs_jsonl, with_real_lines
from jrlhf.tasks.docstrings.rubric import Rubric

SIGNATURE = "def Mailbox.remove_folder(folder):"
BEST = "Remove the folder."
GOOD = "Remove the value."
POOR = "removes the value"
WORST = "xqz wvb"
RANKED = [BEST, GOOD, POOR, WORST]
RUBRIC = Rubric.from_corpus([Example("m", "f", SIGNATURE, line) for line in (BEST, GOOD, POOR)])


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_the_lines_of_this_file_are_ranked_by_the_rubric():
    scores = [RUBRIC.score(SIGNATURE, line) for line in RANKED]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) == 4


def test_annotate_prefers_the_better_line_in_either_order():
    expected = Pair(SIGNATURE + "\n", BEST, POOR, flipped=False)
    assert annotate(SIGNATURE, BEST, POOR, RUBRIC, generator(), flip=0.0) == expected
    assert annotate(SIGNATURE, POOR, BEST, RUBRIC, generator(), flip=0.0) == expected


def test_annotate_flips_when_it_errs_and_says_so():
    assert annotate(SIGNATURE, BEST, POOR, RUBRIC, generator(), flip=1.0) == Pair(
        SIGNATURE + "\n", POOR, BEST, flipped=True
    )


def test_ties_are_dropped_and_cost_no_randomness():
    rng = generator()
    assert annotate(SIGNATURE, BEST, BEST, RUBRIC, rng) is None
    assert rng.random() == generator().random()
    gap = RUBRIC.score(SIGNATURE, BEST) - RUBRIC.score(SIGNATURE, GOOD)
    assert annotate(SIGNATURE, BEST, GOOD, RUBRIC, rng, margin=gap + 0.01) is None
    assert annotate(SIGNATURE, BEST, GOOD, RUBRIC, rng, margin=gap - 0.01) is not None


def test_labels_are_flipped_at_the_given_rate():
    count = 4000
    pairs = build_pairs([SIGNATURE] * count, [[BEST, POOR]] * count, RUBRIC, generator(), flip=0.05)
    flipped = sum(pair.flipped for pair in pairs)
    assert len(pairs) == count
    assert abs(flipped - 0.05 * count) < 4 * (count * 0.05 * 0.95) ** 0.5
    assert all(pair.chosen == (POOR if pair.flipped else BEST) for pair in pairs)


def test_unflipped_pairs_follow_the_rubric():
    pairs = build_pairs([SIGNATURE], [[WORST, GOOD, BEST, POOR]], RUBRIC, generator(), flip=0.0)
    found = {(pair.chosen, pair.rejected) for pair in pairs}
    assert found == {(RANKED[i], RANKED[j]) for i in range(4) for j in range(i + 1, 4)}
    assert not any(pair.flipped for pair in pairs)


def test_fewer_pairs_spread_from_the_closest_to_the_farthest():
    pairs = build_pairs([SIGNATURE], [RANKED], RUBRIC, generator(), per_prompt=3, flip=0.0)
    gaps = [RUBRIC.score(SIGNATURE, pair.chosen) - RUBRIC.score(SIGNATURE, pair.rejected) for pair in pairs]
    every = [
        RUBRIC.score(SIGNATURE, RANKED[i]) - RUBRIC.score(SIGNATURE, RANKED[j])
        for i in range(4)
        for j in range(i + 1, 4)
    ]
    assert len(gaps) == 3 and gaps == sorted(gaps)
    assert gaps[0] == min(every) and gaps[-1] == max(every)


def test_repeated_candidates_count_once_and_equal_ones_make_no_pair():
    pairs = build_pairs([SIGNATURE], [[BEST, POOR, BEST, POOR]], RUBRIC, generator(), flip=0.0)
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [(BEST, POOR)]
    assert build_pairs([SIGNATURE], [[BEST]], RUBRIC, generator()) == []


def test_prompts_and_candidates_must_agree_in_number():
    with pytest.raises(ValueError):
        build_pairs([SIGNATURE], [], RUBRIC, generator())


def test_the_same_seed_gives_the_same_pairs():
    signatures, candidates = [SIGNATURE] * 50, [RANKED] * 50
    first = build_pairs(signatures, candidates, RUBRIC, generator(1))
    assert build_pairs(signatures, candidates, RUBRIC, generator(1)) == first
    assert build_pairs(signatures, candidates, RUBRIC, generator(2)) != first


def test_candidates_hold_samples_the_real_line_and_those_of_others():
    examples = [Example("m", f"f{index}", f"def f{index}():", f"Line {index}.") for index in range(5)]
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
    with pytest.raises(ValueError, match="foreign=1 needs other functions' lines"):
        with_real_lines(examples[:1], samples[:1], generator())


def test_pairs_are_written_in_the_shape_of_preference_datasets():
    pairs = build_pairs([SIGNATURE] * 30, [RANKED] * 30, RUBRIC, generator())
    rows = [json.loads(line) for line in pairs_jsonl(pairs).splitlines()]
    assert [Pair(**row) for row in rows] == pairs
    assert any(pair.flipped for pair in pairs)
    assert list(rows[0]) == ["prompt", "chosen", "rejected", "flipped"]
