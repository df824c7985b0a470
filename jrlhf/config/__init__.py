"""The configuration of a run: its classes, how it is loaded, and how it is checked as a whole."""

from jrlhf.config.check import mesh_sizes as mesh_sizes
from jrlhf.config.check import validate as validate
from jrlhf.config.load import config_names as config_names
from jrlhf.config.load import load_config as load_config
from jrlhf.config.load import make_config as make_config
from jrlhf.config.load import parse_with_settings as parse_with_settings
from jrlhf.config.load import settings_of as settings_of
from jrlhf.config.parse import build as build
from jrlhf.config.parse import config_yaml as config_yaml
from jrlhf.config.schema import Config as Config
