"""How slices of devices lie to each other."""

from collections.abc import Iterable, Sequence

from jrlhf.meshes.plan import Slice


def segments(slices: Iterable[Slice]) -> list[Slice]:
    """The devices of these slices in as few groups as can be, such that every slice has all of a group or none."""
    known = set(slices)
    bounds = sorted({bound for each in known for bound in (each.start, each.stop)})
    groups = [Slice(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [group for group in groups if any(group.overlaps(each) for each in known)]


def nested(slices: Sequence[Slice]) -> bool:
    """Whether any two of them are the same, apart, or one within the other."""
    return not any(one.start < two.start < one.stop < two.stop for one in slices for two in slices)
