"""Every test runs on 8 simulated devices: sharding is tested on any machine, never skipped."""

import os

import jax

from jrlhf.devices import spare_threads

os.environ.setdefault("NPROC", "32")
# Three fifths of the suite's time is compiling, much of it in LLVM's optimiser, which tiny programs do not need. The
# slow proofs run programs as users compile them: .ci/run sets XLA_FLAGS to nothing for them.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
spare_threads(8)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
