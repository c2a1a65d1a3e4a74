"""Does a plan fit a machine? GPUs are packed device by device; what is missing is said with its mend."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetherl.resources.machine import Machine
    from tetherl.resources.plan import PlanRow

_UNITS = 10_000  # GPU shares are counted in whole ten-thousandths, so that ten times 0.1 is 1
_SEARCH_LIMIT = 200  # shares; an exhaustive search beyond that takes too long

Placement = tuple[tuple[str, int, tuple[int, ...]], ...]
"""(role, index of the process from 1, the GPUs it gets), for every process that has a GPU."""

SECTIONS = {
    "algorithm": "algorithm",
    "rollout": "rollouts",
    "learner": "learners",
    "evaluation": "evaluation",
}
"""Role -> the configuration section that sets its numbers."""

_COUNT_KEYS = {
    "algorithm": "",
    "rollout": "rollouts.workers",
    "learner": "learners.workers",
    "evaluation": "evaluation.workers",
}

Fits = Callable[[Sequence["PlanRow"]], bool]


@dataclass(frozen=True)
class Fit:
    """What stands in the way (problems), what is worth knowing (warnings), who gets which GPU."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    placement: Placement


def fit(rows: Sequence[PlanRow], machine: Machine, user_set_cpus: bool) -> Fit:
    """Check rows against a machine. CPUs beyond it are a problem only when the user set their number."""
    problems: list[str] = []
    warnings: list[str] = []
    cpus = sum(row.total_cpus for row in rows)
    if cpus > machine.cpus + 1e-9:
        if user_set_cpus:
            problems.append(_too_few("CPU", rows, machine.cpus, _cpus_fit(machine.cpus)))
        else:
            warnings.append(
                f"the plan asks for {cpus:g} CPUs and this machine has {machine.cpus:g} "
                f"({cpus / machine.cpus:.1f} times as many): the processes share them and run slower"
            )
    placement = place(rows, machine.gpus)
    if placement is None:
        problems.append(_too_few("GPU", rows, machine.gpus, lambda r: place(r, machine.gpus) is not None))
    memory = _memory_problem(rows, machine.memory)
    if memory:
        problems.append(memory)
    return Fit(tuple(problems), tuple(warnings), placement or ())


def _cpus_fit(limit: float) -> Fits:
    return lambda rows: sum(row.total_cpus for row in rows) <= limit + 1e-9


# --- packing -----------------------------------------------------------------------------------------------


def place(rows: Iterable[PlanRow], gpus: float) -> Placement | None:
    """Give every process its GPUs: shares within one device, whole numbers as whole devices. None: no way."""
    processes = [(row.role, index, row.gpus) for row in rows if row.gpus for index in range(1, row.count + 1)]
    whole = int(gpus + 1e-9)
    free = [_UNITS] * whole
    if gpus - whole > 1e-9:
        free.append(round((gpus - whole) * _UNITS))
    # Whole devices first; only full ones will do.
    placed: dict[tuple[str, int], tuple[int, ...]] = {}
    next_device = 0
    for role, index, share in processes:
        if share >= 1:
            count = round(share)
            if next_device + count > whole:
                return None
            placed[role, index] = tuple(range(next_device, next_device + count))
            next_device += count
    parts = sorted((p for p in processes if p[2] < 1), key=lambda p: -p[2])
    sizes = tuple(max(1, round(share * _UNITS)) for _, _, share in parts)
    devices = _pack(sizes, tuple(free[next_device:]))
    if devices is None:
        return None
    for (role, index, _), device in zip(parts, devices, strict=True):
        placed[role, index] = (next_device + device,)
    return tuple((role, index, placed[role, index]) for role, index, _ in processes)


def _pack(sizes: tuple[int, ...], free: tuple[int, ...]) -> list[int] | None:
    """A device for each size (in descending order), or None when there is no way.

    The tightest device with room comes first, which nearly always works; if not, all ways are tried.
    """
    if sum(sizes) > sum(free):
        return None
    rooms = list(free)
    devices: list[int] = []
    for size in sizes:
        room = min((room for room in rooms if room >= size), default=None)
        if room is None:
            return _search(sizes, free) if len(sizes) <= _SEARCH_LIMIT else None
        device = rooms.index(room)
        rooms[device] -= size
        devices.append(device)
    return devices


def _search(sizes: tuple[int, ...], free: tuple[int, ...]) -> list[int] | None:
    """Exhaustive, with a memory of states that lead nowhere; few different sizes keep their number small."""

    @functools.cache
    def chosen_room(i: int, left: tuple[int, ...]) -> int | None:
        """The room of the device that item i should take; -1: all items are placed; None: impossible."""
        if i == len(sizes):
            return -1
        for room in sorted(set(left)):
            if room >= sizes[i] and chosen_room(i + 1, _take(left, room, sizes[i])) is not None:
                return room
        return None

    rooms = list(free)
    devices = []
    for i, size in enumerate(sizes):
        room = chosen_room(i, tuple(sorted(rooms)))
        if room is None:
            return None
        device = rooms.index(room)
        rooms[device] -= size
        devices.append(device)
    return devices


def _take(left: tuple[int, ...], room: int, size: int) -> tuple[int, ...]:
    rest = list(left)
    rest.remove(room)
    return tuple(sorted([*rest, room - size]))


# --- words -------------------------------------------------------------------------------------------------


def _too_few(what: str, rows: Sequence[PlanRow], have: float, fits: Fits) -> str:
    field = what.lower() + "s"
    asking = [row for row in rows if getattr(row, field)]
    need = sum(row.count * getattr(row, field) for row in asking)
    parts = ", ".join(f"{row.role} {row.count} × {getattr(row, field):g}" for row in asking)
    if need > have + 1e-9:
        missing = f"{need - have:g} missing"
    else:
        missing = f"no way to divide them keeps every process's share within one {what}"
    first = _first_without_room(rows, fits)
    mends = _mends(what, asking, rows, have, fits)
    mend = f"Lower {', or '.join(mends)}" if mends else "Lower several of these numbers"
    raised = ", or raise machine.cpus" if what == "CPU" else ""
    return (
        f"{what}s: the plan needs {need:g} ({parts}), the machine has {have:g}: {missing}. "
        f"The first process without room is {first}. {mend}{raised}"
    )


def _first_without_room(rows: Sequence[PlanRow], fits: Fits) -> str:
    """The first process, in the order of the plan, with which the ones before it no longer fit."""
    for i, row in enumerate(rows):
        for count in range(1, row.count + 1):
            if not fits([*rows[:i], dataclasses.replace(row, count=count)]):
                return row.role if row.role == "algorithm" else f"{row.role} worker {count}"
    return rows[-1].role


def _mends(what: str, asking: Sequence[PlanRow], rows: Sequence[PlanRow], have: float, fits: Fits) -> list[str]:
    """Settings that, lowered as said, make the plan fit: single ones, and all shares lowered together."""
    field = what.lower() + "s"
    mends: list[str] = []
    kept_all = False  # is there a mend that leaves everyone a share?
    for row in asking:
        count_key, key = _COUNT_KEYS[row.role], _key(row.role, field)
        others = [r for r in rows if r is not row]
        value = _largest(row, field, have, others, fits)
        if value is not None:
            mends.append(f"{key} to {value:g}")
            kept_all = kept_all or value > 0
        for count in range(row.count - 1, 0, -1) if count_key else ():
            if fits([*others, dataclasses.replace(row, count=count)]):
                mends.append(f"{count_key} to {count}")
                kept_all = True
                break
    if not kept_all and have > 0:
        factor = have / sum(row.count * getattr(row, field) for row in asking)
        lowered = {row.role: _floor(getattr(row, field) * factor) for row in asking}
        together = [_with(row, field, lowered.get(row.role, 0.0)) for row in rows]
        shareable = all(row.role != "learner" or row.count == 1 for row in asking)
        if factor < 1 and shareable and min(lowered.values()) > 0 and fits(together):
            mends.append(" and ".join(f"{_key(role, field)} to {value:g}" for role, value in lowered.items()))
    return mends


def _with(row: PlanRow, field: str, value: float) -> PlanRow:
    changes: dict[str, Any] = {field: value}
    return dataclasses.replace(row, **changes)


def _key(role: str, field: str) -> str:
    """The setting that says what each process of a role gets."""
    return f"algorithm.{field}" if role == "algorithm" else f"{SECTIONS[role]}.{field}_per_worker"


def _largest(row: PlanRow, field: str, have: float, others: Sequence[PlanRow], fits: Fits) -> float | None:
    """The largest number below a process's own with which the plan fits; None: lowering it is not enough."""

    def fitting(value: float) -> bool:
        return fits([*others, _with(row, field, value)])

    now = getattr(row, field)
    if field == "cpus":
        room = _floor((have - sum(r.total_cpus for r in others)) / row.count)
        return room if 0 < room < now else None
    for whole in range(math.ceil(now) - 1, 0, -1):
        if fitting(whole):
            return float(whole)
    if row.role != "learner" or row.count == 1:  # learners of one group cannot share a GPU
        # What fits with a share fits with every smaller one.
        smallest_bad = bisect.bisect_left(
            range(1, round(min(now, 1) * _UNITS)), True, key=lambda units: not fitting(units / _UNITS)
        )
        if smallest_bad:
            return smallest_bad / _UNITS
    return 0.0 if fitting(0.0) else None


def _floor(value: float) -> float:
    return math.floor(value * _UNITS + 1e-6) / _UNITS


def _memory_problem(rows: Sequence[PlanRow], memory: int | None) -> str | None:
    if memory is None or any(row.memory_max is None for row in rows):
        return None
    need = sum(row.count * (row.memory_max or 0) for row in rows)
    if need <= memory:
        return None
    largest = max(rows, key=lambda row: row.count * (row.memory_max or 0))
    parts = ", ".join(f"{row.role} {row.count} × {byte_text(row.memory_max or 0)}" for row in rows)
    count_key = _COUNT_KEYS[largest.role]
    fewer = f" or {count_key}" if count_key else ""
    return (
        f"memory: the processes may hold {byte_text(need)} ({parts}), the machine has {byte_text(memory)}: "
        f"{byte_text(need - memory)} missing, most of it for {largest.role}. Lower "
        f"algorithm.train_batch_size, rollouts.queue_bytes{fewer}, or raise machine.memory"
    )


def byte_text(count: int) -> str:
    """Bytes for people: 1_236_000_000 -> "1.2 GiB"."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
