"""Schedules that train two models in pipelines of opposite directions on the same devices, as RLHFuse does."""

from jrlhf.planning.fusion.improve import Fused as Fused
from jrlhf.planning.fusion.improve import search as search
from jrlhf.planning.fusion.problem import Model as Model
from jrlhf.planning.fusion.problem import Problem as Problem
from jrlhf.planning.fusion.problem import fuse as fuse
