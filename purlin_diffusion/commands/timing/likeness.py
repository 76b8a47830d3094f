"""How like two images are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Likeness:
    """`max_abs` of values in 0..1; `psnr_db` None where not a bit differs."""

    max_abs: float
    psnr_db: float | None

    @staticmethod
    def of(image: Any, reference: Any) -> Likeness:
        """Arrays of one shape, values in 0..1."""
        apart = image.astype("float64") - reference.astype("float64")
        mean = float((apart**2).mean())
        return Likeness(float(abs(apart).max()), -10 * math.log10(mean) if mean > 0 else None)
