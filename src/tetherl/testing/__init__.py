"""Fakes and contract suites, for the tests of tetherl and of those who build on it.

CountingEnv       a Gymnasium environment that counts: lost, doubled and mixed steps show up as wrong numbers
CountingActor     an actor that does whatever an engine must cope with
EngineContract    what every engine must do, as tests
probes            module of tiny environments with exactly known answers, one for each thing that can go wrong
tasks             module of small tasks with a known best score
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetherl.testing.engines import CountingActor, EngineContract
    from tetherl.testing.environments import CountingEnv

__all__ = ["CountingActor", "CountingEnv", "EngineContract"]

_HOME = {"CountingActor": "engines", "EngineContract": "engines", "CountingEnv": "environments"}


def __getattr__(name: str) -> Any:
    # Loaded when used: an actor's process that needs the one should not import what the other needs.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
