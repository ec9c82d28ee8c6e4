"""What numpy counts of values, and the sites of a diagnosis to compare with it."""

import math
from typing import Any

import numpy as np


def counts(values: Any) -> tuple[dict[int, int], int, int, float, float]:
    """Exponents, zeros, values that are not finite, largest and smallest magnitude."""
    magnitudes = np.abs(np.asarray(values).astype(np.float64)).ravel()
    finite = magnitudes[np.isfinite(magnitudes)]
    some = finite[finite > 0]
    exponents, numbers = np.unique(np.frexp(some)[1] - 1, return_counts=True)
    return (
        dict(zip(exponents.tolist(), numbers.tolist(), strict=True)),
        int((finite == 0).sum()),
        magnitudes.size - finite.size,
        float(finite.max(initial=0.0)),
        float(some.min(initial=math.inf)) if some.size else 0.0,
    )


def counted(site: Any) -> tuple[dict[int, int], int, int, float, float]:
    return site.exponents, site.zeros, site.nonfinite, site.amax, site.amin


def only(sites: Any, operation: str, direction: str = "forward") -> Any:
    (site,) = [s for s in sites if (s.operation, s.direction) == (operation, direction)]
    return site


def of(sites: Any, operation: str, direction: str = "forward") -> list[Any]:
    return [s for s in sites if (s.operation, s.direction) == (operation, direction)]
