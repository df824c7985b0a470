"""Settings of the scaling of rotary frequencies."""

from dataclasses import dataclass
from typing import Literal

from jrlhf.models.config.checks import is_count, positive


@dataclass(frozen=True)
class RopeScaling:
    """Settings that lower rotary frequencies, so that positions beyond those of pretraining get angles seen there.

    kind: "linear" divides every frequency by `factor`. "llama3" divides frequencies whose wavelength exceeds
        original_max_positions / low_freq_factor, keeps those whose wavelength is below original_max_positions /
        high_freq_factor, and interpolates smoothly in between (Llama 3.1). For linear scaling the other numbers are
        None.

    Raises ValueError for numbers that do not fit the kind.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_positions: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"rope_scaling kind={self.kind!r}: known are linear, llama3")
        if not positive(self.factor):
            raise ValueError(f"rope_scaling factor={self.factor!r} must be positive")
        bands = {
            name: getattr(self, name) for name in ("low_freq_factor", "high_freq_factor", "original_max_positions")
        }
        for name, value in bands.items():
            if self.kind == "linear" and value is not None:
                raise ValueError(f"rope_scaling {name}={value!r} must be null: linear scaling has no bands")
            if self.kind == "llama3" and (value is None or not positive(value)):
                raise ValueError(f"rope_scaling {name}={value!r} must be positive: llama3 scaling needs it")
        original = self.original_max_positions
        if original is not None and not is_count(original):
            raise ValueError(f"rope_scaling original_max_positions={original!r} must be a positive integer")
        if self.low_freq_factor is not None and self.high_freq_factor is not None:
            if not self.low_freq_factor < self.high_freq_factor:
                raise ValueError(
                    f"rope_scaling low_freq_factor={self.low_freq_factor!r} must be below "
                    f"high_freq_factor={self.high_freq_factor!r}"
                )
