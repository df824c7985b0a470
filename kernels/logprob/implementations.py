"""The names of the implementations of the log-prob op."""

from typing import Literal

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
