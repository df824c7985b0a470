"""Every test runs on 8 simulated devices: sharding is tested on any machine, never skipped."""

import os

import jax

from jrlhf.devices import spare_threads

os.environ.setdefault("NPROC", "32")
spare_threads(8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
