"""The algorithms: one file per algorithm, with the dataflow of one iteration; and what a dataflow may call.

Their mathematics is in `ppo/`; `ppo/config/algorithms.py` describes their settings. A row of `config/stages.py` names
an algorithm's file. A dataflow is a function whose parameters name the roles that it needs and its inputs: `prompts`
are a `Batch`, `kl_coef` is the weight of the KL; `reference` is None where no reference is needed. It returns the
experience and the metrics of its updates. `registry.graph_of` traces it to the graph of its calls.
"""

from jrlhf.algorithms.calls import policy_logprobs as policy_logprobs
