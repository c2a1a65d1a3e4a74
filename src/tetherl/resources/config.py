"""Settings of the machine that the resource plan is checked against."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[float, Meta(gt=0)]
NonNegative = Annotated[float, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(ge=1)]


class MachineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `machine` section. A CPU is a hardware thread. None: detected."""

    cpus: Annotated[Positive | None, Meta(description="CPUs the run may use; default: detected")] = None
    gpus: Annotated[NonNegative | None, Meta(description="GPUs the run may use; default: detected")] = None
    memory: Annotated[PositiveInt | None, Meta(description="bytes of memory the run may use; default: detected")] = None
