"""Gymnasium spaces <-> arrays: specs for configuration files, observations as flat leaves, actions as rows."""

from tetherl.spaces.actions import ActionCodec, ActionPart
from tetherl.spaces.checks import Kind, Leaf
from tetherl.spaces.observations import ObservationCodec
from tetherl.spaces.specs import space_from_spec, space_to_spec

__all__ = [
    "ActionCodec",
    "ActionPart",
    "Kind",
    "Leaf",
    "ObservationCodec",
    "space_from_spec",
    "space_to_spec",
]
