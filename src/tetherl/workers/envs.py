"""Makes Gymnasium environments from what a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium

from tetherl.errors import ConfigError


def is_gymnasium_id(env: Any) -> bool:
    """Whether `env` names an environment of Gymnasium's registry, and is no callable or "module:Name"."""
    # Gymnasium ids may hold a module too ("module:Id-v0"); ids with a version are Gymnasium's.
    return isinstance(env, str) and (":" not in env or "-v" in env)


def env_factory(env: Any, env_config: dict[str, Any]) -> Callable[[], gymnasium.Env]:
    """A function that builds one copy of `env`: a Gymnasium id, "module:Name", or a class/callable.

    `env_config` becomes keyword arguments.
    """
    if callable(env):
        return lambda: env(**env_config)
    name = str(env)
    if not is_gymnasium_id(name):
        module_name, _, attribute = name.partition(":")
        try:
            target = getattr(importlib.import_module(module_name), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"env: {name!r} cannot be imported: {error}. Expected 'module:Name'.") from error
        return lambda: target(**env_config)

    def make() -> gymnasium.Env:
        try:
            return gymnasium.make(name, **env_config)
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"env: {name!r} cannot be made with {env_config}: {error}") from error

    return make
