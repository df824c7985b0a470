"""The configuration of a run: its classes, how it is loaded, and what its sections demand of each other."""

from jrlhf.config.check import mesh_sizes, validate
from jrlhf.config.schema import Config, config_names, config_yaml, load_config

__all__ = ["Config", "config_names", "config_yaml", "load_config", "mesh_sizes", "validate"]
