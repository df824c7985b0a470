"""The configuration of a run: its classes, how it is loaded, and what its sections demand of each other."""

from jrlhf.config.check import mesh_sizes, validate
from jrlhf.config.load import config_names, load_config, make_config, parse_with_settings
from jrlhf.config.parse import build
from jrlhf.config.parse import to_yaml as config_yaml
from jrlhf.config.schema import Config

__all__ = [
    "Config",
    "build",
    "config_names",
    "config_yaml",
    "load_config",
    "make_config",
    "mesh_sizes",
    "parse_with_settings",
    "validate",
]
