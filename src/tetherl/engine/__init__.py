"""Where processes run: an engine starts actors (objects that live somewhere), calls their methods, ends them.

It knows processes and nothing of reinforcement learning. `inline` runs everything in the calling process,
`local` gives every actor a fresh interpreter on this machine; both keep the contract in `contract`, which
`tetherl.testing.EngineContract` checks.
"""

from tetherl.engine.contract import Actor, Engine, Ref
from tetherl.engine.inline import InlineEngine
from tetherl.engine.local import LocalEngine

__all__ = ["Actor", "Engine", "InlineEngine", "LocalEngine", "Ref"]
