"""What RLHFuse fuses: two models that train in pipelines of opposite directions, and scores with the last rows."""

from jrlhf.planning.fusion.dispatch import search as search
from jrlhf.planning.fusion.dispatch import search_apart as search_apart
from jrlhf.planning.fusion.problem import Model as Model
from jrlhf.planning.fusion.problem import Problem as Problem
from jrlhf.planning.fusion.problem import fuse as fuse
