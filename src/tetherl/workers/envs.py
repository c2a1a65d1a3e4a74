"""Makes Gymnasium environments from what a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium

from tetherl.errors import ConfigError


def env_factory(env: Any, env_config: dict[str, Any]) -> Callable[[], gymnasium.Env]:
    """A function that builds one copy of `env`: a Gymnasium id, "module:Name", or a class/callable.

    `env_config` becomes keyword arguments.
    """
    if callable(env):
        return lambda: env(**env_config)
    name = str(env)
    # Gymnasium ids may hold a module too ("module:Id-v0"); ids with a version are Gymnasium's.
    if ":" in name and "-v" not in name:
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
