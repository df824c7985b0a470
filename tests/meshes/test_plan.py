"""Plans as data: what they refuse, and that they survive being written."""

import pytest

from jrlhf.meshes.plan import Placement, Plan, Slice, plan_of

PLAN = Plan(
    "mine",
    {
        "actor.generate": Placement(Slice(0, 8), "generate", data=2, tensor=4),
        "reward.score": Placement(Slice(4, 1), "score", micro_batches=2),
        "actor.update": Placement(Slice(0, 8), "train", fsdp=4, pipeline=2, micro_batches=4, schedule="zb-h1"),
    },
)


def test_a_plan_is_read_back_as_it_was_written():
    assert plan_of(PLAN.as_dict()) == PLAN
    assert PLAN.as_dict()["calls"]["reward.score"] == {"devices": "4", "layout": "score", "micro_batches": 2}
    assert PLAN.devices == 8


def test_slices_know_what_they_share():
    assert Slice(0, 4).overlaps(Slice(3, 2))
    assert not Slice(0, 4).overlaps(Slice(4, 4))


def test_a_plan_that_cannot_be_is_one_sentence():
    for mapping, sentence in [
        (None, "must hold `name` and `calls`"),
        ({"calls": {}}, "must hold `name` and `calls`"),
        ({"calls": {"a": {"devices": 0, "layout": "train"}}, "size": 1}, "not size"),
        ({"calls": {"a": {"layout": "train"}}}, "call a of the plan must hold `devices`"),
        ({"calls": {"a": {"devices": 0, "layout": "train", "rows": 1}}}, "not rows"),
        ({"calls": {"a": {"devices": 0, "layout": "fsdp"}}}, "layout=fsdp: it must be train, train_tp"),
        ({"calls": {"a": {"devices": "0-3", "layout": "train", "fsdp": 2}}}, "choose sizes whose product is 4"),
        ({"calls": {"a": {"devices": "0-3", "layout": "train", "fsdp": 4.0}}}, "fsdp=4.0: it must be a whole number"),
        ({"calls": {"a": {"devices": "3-0", "layout": "train"}}}, "count at least 1"),
        ({"calls": {"a": {"devices": "0-3", "layout": "train", "data": -2, "fsdp": -2}}}, "data=-2 must be at least 1"),
        ({"calls": {"a": {"devices": "all", "layout": "train"}}}, "must be a number or a range"),
        ({"calls": {"a": {"devices": "0", "layout": "train", "schedule": "2f2b"}}}, "must be one of gpipe, 1f1b, "),
        ({"calls": {"a": {"devices": "0", "layout": "train", "schedule": "gpipe"}}}, "no effect with pipeline=1"),
    ]:
        with pytest.raises(ValueError) as error:
            plan_of(mapping)
        assert sentence in str(error.value) and "\n" not in str(error.value)
