"""The algorithms, each as the dataflow of one iteration, in a file of its own.

What they compute with is in `ppo/`; their settings are in `ppo/config.py`, whose classes describe them. A function's
parameters name the roles that it needs and the values that it starts from: `prompts` are a `Batch`, `kl_coef` is the
weight of the KL. A reference that is None is not needed. It returns the experience and the metrics of its updates.
`registry.graph_of` traces it to the graph of its calls.
"""

from jrlhf.roles.actor import policy_logprobs

__all__ = ["policy_logprobs"]
