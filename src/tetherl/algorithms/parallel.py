"""Several learners that make one update together: what they exchange, and how they find each other.

Every learner holds the whole batch, computes the gradient of its slice of each minibatch, and gets the sum of all
gradients back; all other decisions follow from numbers that are the same everywhere. A `Reduction` is one learner's
end of the exchange; a rendezvous hands it out. All learners must make the same calls in the same order.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from tetherl.errors import TrainingError

JOIN_TIMEOUT_S = 300.0
"""Longest wait for all learners to come together, and for one that is behind in an exchange."""


class Reduction(Protocol):
    """One learner's end of the exchange between `size` learners; `rank` counts from 0."""

    rank: int
    size: int

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum of all learners' ones; the same bits for all."""
        ...

    def max(self, tensor: Tensor) -> None:
        """Replace the tensor by the elementwise maximum over all learners."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The value that learner 0 gives; what the others give is ignored."""
        ...

    def close(self) -> None:
        """Leave; twice is fine."""
        ...


class Rendezvous(Protocol):
    """Where the learners of one group meet."""

    def join(self, rank: int) -> Reduction:
        """Waits until all have come."""
        ...


# ---------------------------------------------------------------- learners in processes


@dataclass(frozen=True)
class ProcessRendezvous:
    """Processes of this machine meet over a file that all can open; `path` must not exist yet."""

    path: str
    size: int
    backend: str = "gloo"  # nccl: each learner has a GPU of its own

    def join(self, rank: int) -> Reduction:
        return _ProcessReduction(self, rank)


class _ProcessReduction:
    def __init__(self, rendezvous: ProcessRendezvous, rank: int) -> None:
        self.rank, self.size = rank, rendezvous.size
        torch.distributed.init_process_group(
            rendezvous.backend,
            store=torch.distributed.FileStore(rendezvous.path, self.size),
            rank=rank,
            world_size=self.size,
            timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        )
        self._open = True

    def sum(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> None:
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)

    def broadcast(self, value: Any) -> Any:
        box = [value]
        torch.distributed.broadcast_object_list(box, 0)
        return box[0]

    def close(self) -> None:
        if self._open:
            self._open = False
            torch.distributed.destroy_process_group()


# ---------------------------------------------------------------- learners in threads of one process


class ThreadRendezvous:
    """Threads of one process meet here: for the inline engine, and for tests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def join(self, rank: int) -> Reduction:
        return _ThreadReduction(self, rank)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What all learners gave, in their order."""
        try:
            self._barrier.wait(JOIN_TIMEOUT_S)  # the slots of the exchange before have been read by all
            self._slots[rank] = value
            self._barrier.wait(JOIN_TIMEOUT_S)
            return list(self._slots)
        except threading.BrokenBarrierError as error:
            raise TrainingError(f"learner {rank + 1} of {self.size}: another learner has left or is stuck") from error

    def abort(self) -> None:
        """Whoever waits gets an error, now and later."""
        self._barrier.abort()


class _ThreadReduction:
    def __init__(self, meeting: ThreadRendezvous, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def sum(self, tensor: Tensor) -> None:
        self._combine(tensor, torch.add)

    def max(self, tensor: Tensor) -> None:
        self._combine(tensor, torch.maximum)

    def _combine(self, tensor: Tensor, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        first, *others = self._meeting.exchange(self.rank, tensor.clone())
        for other in others:
            first = operation(first, other)
        tensor.copy_(first)

    def broadcast(self, value: Any) -> Any:
        return self._meeting.exchange(self.rank, value)[0]

    def close(self) -> None:
        self._meeting.abort()


# ---------------------------------------------------------------- agreement


def check_agreement(reduction: Reduction, numbers: dict[str, float], device: torch.device) -> None:
    """Raise TrainingError, for all learners, unless these numbers are the same for all of them."""
    table = torch.zeros(reduction.size, len(numbers), dtype=torch.float64, device=device)
    table[reduction.rank] = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    reduction.sum(table)
    for column, name in enumerate(numbers):
        given = table[:, column].tolist()
        if len(set(given)) > 1:
            raise TrainingError(
                f"the learner workers have come apart: {name} is {given}, in their order, and must be the same for "
                "all. Resume from the latest checkpoint; if it happens again, learn with learners.workers: 1"
            )


def checksum(module: nn.Module) -> float:
    """A number that is the same for the same parameters and buffers, to the bit, and hardly for others."""
    value = 0
    for tensor in module.state_dict().values():
        value = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), value)
    return float(value)
