"""The algorithms: one file per algorithm, with the dataflow of one iteration; and the types of their parameters.

Their mathematics is in `ppo/`; `ppo/config/algorithms.py` describes their settings. A row of `config/stages.py` names
an algorithm's file. A dataflow is a function whose parameters name the roles that it needs and its inputs: `prompts`
are a `Batch`, `kl_coef` is the weight of the KL; `reference` is None where no reference is needed. It returns the
experience and the metrics of its updates. `registry.graph_of` traces it to the graph of its calls.
"""

from jax import Array

from jrlhf.algorithms.dynamic_sampling import DynamicSampler as DynamicSampler
from jrlhf.algorithms.pair_actor import PairActor as PairActor
from jrlhf.algorithms.pair_actor import PairReference as PairReference
from jrlhf.data.batches import Batch as Batch
from jrlhf.ppo import Experience as Experience
from jrlhf.rewards.mixture import Rewards as Rewards
from jrlhf.roles.actor import Actor as Actor
from jrlhf.roles.actor import Reference as Reference
from jrlhf.roles.actor import policy_logprobs as policy_logprobs
from jrlhf.roles.critic import Constraint as Constraint
from jrlhf.roles.critic import CostCritic as CostCritic
from jrlhf.roles.critic import Critic as Critic
from jrlhf.roles.critic import FusedUpdate as FusedUpdate
from jrlhf.roles.experience import ExperienceMaker as ExperienceMaker

Number = float | Array
Result = tuple[Experience, dict[str, Array]]  # a dataflow's result: the experience, and the metrics of its updates
