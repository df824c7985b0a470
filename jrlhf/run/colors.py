"""The colours of calls in all pictures: of plans, of timelines, and in reports."""

from zlib import crc32

# Of forward, backward and gradients of weights, for the first call and for one that is fused with it.
TICK_COLORS = ("#2f6fed", "#e07a1f", "#0f9d7a"), ("#8b5cf6", "#e23d6d")

# The calls of the algorithms, by the names of their times in metrics; each has a colour of its own in all pictures.
_TIMES = {
    "actor.generate": "gen",
    "reward.score": "reward",
    "actor.logprobs": "old_log_prob",
    "actor.logprobs_with_base": "old_log_prob",
    "reference.logprobs": "ref",
    "critic.values": "values",
    "critic.update": "update_critic",
    "actor.update": "update_actor",
    "cost_critic.values": "cost_values",
    "cost_critic.update": "update_cost_critic",
    "cost.score": "cost",
    **dict.fromkeys(("learner.update", "update"), "update_actor"),  # which trains the critic, too
}
_COLORS = "#2f6fed #e07a1f #0f9d7a #8b5cf6 #e23d6d #0e93b8 #a16207 #64748b #7c3f58 #4d7c0f".split()


def call_color(name: str) -> str:
    """The colour of a call, given by its name in a graph or in the metrics: the same in every picture and run."""
    names = list(dict.fromkeys(_TIMES.values()))
    name = _TIMES.get(name, name)
    return _COLORS[names.index(name) if name in names else crc32(name.encode()) % len(_COLORS)]
