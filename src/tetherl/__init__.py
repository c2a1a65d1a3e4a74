"""tetherl: reinforcement-learning training for programs that the trainer does not step itself.

Public names are loaded when they are first used, so that `import tetherl` needs neither torch nor gymnasium.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetherl.algorithm import Algorithm as Algorithm
    from tetherl.algorithm import Callbacks as Callbacks
    from tetherl.client import PolicyClient as PolicyClient
    from tetherl.config import AlgorithmConfig as AlgorithmConfig
    from tetherl.config import CheckpointConfig as CheckpointConfig
    from tetherl.config import EvaluationConfig as EvaluationConfig
    from tetherl.config import ExternalConfig as ExternalConfig
    from tetherl.config import LearnersConfig as LearnersConfig
    from tetherl.config import MachineConfig as MachineConfig
    from tetherl.config import ModelConfig as ModelConfig
    from tetherl.config import RolloutConfig as RolloutConfig
    from tetherl.config import RunConfig as RunConfig
    from tetherl.config import StopConfig as StopConfig
    from tetherl.errors import ClientError as ClientError
    from tetherl.errors import ConfigError as ConfigError
    from tetherl.errors import PlanError as PlanError
    from tetherl.errors import RunError as RunError
    from tetherl.errors import ServerError as ServerError
    from tetherl.errors import TetherlError as TetherlError
    from tetherl.errors import TrainingError as TrainingError
    from tetherl.resources.plan import ResourcePlan as ResourcePlan

_MODULES = {
    "tetherl.algorithm": ("Algorithm", "Callbacks"),
    "tetherl.client": ("PolicyClient",),
    "tetherl.config": (
        *("AlgorithmConfig", "CheckpointConfig", "EvaluationConfig", "ExternalConfig", "LearnersConfig"),
        *("MachineConfig", "ModelConfig", "RolloutConfig", "RunConfig", "StopConfig"),
    ),
    "tetherl.errors": (
        *("ClientError", "ConfigError", "PlanError", "RunError", "ServerError", "TetherlError"),
        "TrainingError",
    ),
    "tetherl.resources.plan": ("ResourcePlan",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

try:
    __version__ = version("tetherl")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tetherl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
