"""Encoders, the recurrent core and the policy. Loaded lazily: `tetherl.models.config` needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tetherl.models.policy import ActResult, Policy, PolicyOutput

__all__ = ["ActResult", "Policy", "PolicyOutput"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tetherl.models import policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
