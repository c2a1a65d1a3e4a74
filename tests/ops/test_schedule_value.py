from __future__ import annotations

import pytest

from tetherl.ops.schedules import schedule_value


def test_a_number_is_a_constant() -> None:
    assert schedule_value(0.3, 0) == schedule_value(0.3, 10**9) == 0.3
    assert isinstance(schedule_value(1, 5), float)


def test_one_point_is_a_constant() -> None:
    assert schedule_value([[100, 0.5]], 0) == schedule_value([(100, 0.5)], 1000) == 0.5


def test_linear_between_and_constant_outside() -> None:
    points = [(10, 1.0), (20, 3.0), (40, 0.0)]
    steps = [0, 10, 15, 20, 30, 40, 50]
    assert [schedule_value(points, s) for s in steps] == [1.0, 1.0, 2.0, 3.0, 1.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "pairs"),
        ([[0, 1, 2]], "pairs"),
        ([[0, float("nan")]], "finite"),
        ([[10, 1.0], [0, 2.0]], "ascend"),
        ([[10, 1.0], [10, 2.0]], "ascend"),
    ],
)
def test_nonsense_is_refused(bad: list[list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_value(bad, 0)
