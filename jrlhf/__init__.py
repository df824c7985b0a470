"""RLHF in JAX. Start with `python -m jrlhf.train --config quickstart`, or import `jrlhf.ppo`."""

__version__ = "0.1.0"
