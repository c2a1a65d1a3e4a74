"""Values that change while training goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def schedule_value(schedule: float | Sequence[Sequence[float]], step: float) -> float:
    """A constant, or points [[step, value], ...]: linear between them, constant outside.

    step counts env steps trained on. ValueError unless the points are finite pairs in ascending order of
    step.
    """
    if isinstance(schedule, int | float):
        return float(schedule)
    points = [tuple(float(x) for x in point) for point in schedule]
    if not points or any(len(p) != 2 or not all(map(math.isfinite, p)) for p in points):
        raise ValueError(f"a schedule is a number or a list of [step, value] pairs of finite numbers, got {schedule!r}")
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise ValueError(f"the steps of a schedule must ascend, got {schedule!r}")
    if step <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if step < x1:
            return y0 + (y1 - y0) * (step - x0) / (x1 - x0)
    return points[-1][1]
