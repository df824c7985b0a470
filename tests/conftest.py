"""Every test runs on 8 simulated devices: sharding is tested on any machine, never skipped."""

import os

import jax

os.environ.setdefault("NPROC", "16")  # more threads than devices: see jrlhf.devices.spare_threads
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
