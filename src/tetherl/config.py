"""RunConfig: every setting of a run. YAML, the command line and Python give the same object.

    config = RunConfig(env="CartPole-v1", model=ModelConfig(use_lstm=True), stop=StopConfig(iterations=50))
    config = RunConfig.load("doom.yaml", ["algorithm.lr=1e-4", "rollouts.workers=2"])
    config = RunConfig.from_dict({"env": "CartPole-v1", "algorithm": {"gamma": 0.98}})

Construction checks everything that can be checked without building an environment; `resolved()` fills in
what is derived. All that is wrong is reported in one ConfigError.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tetherl import config_rules as rules
from tetherl import config_sources as sources
from tetherl.algorithms.config import AlgorithmConfig
from tetherl.errors import ConfigError
from tetherl.models.config import ModelConfig
from tetherl.resources.config import MachineConfig
from tetherl.runs.config import CheckpointConfig, StopConfig
from tetherl.server.config import ExternalConfig
from tetherl.workers.config import EvaluationConfig, LearnersConfig, RolloutConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "EvaluationConfig",
    "ExternalConfig",
    "LearnersConfig",
    "MachineConfig",
    "ModelConfig",
    "RolloutConfig",
    "RunConfig",
    "Setting",
    "StopConfig",
    "describe",
]


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """All settings of one run. Sections may be given as structs or as maps.

    Two configurations are equal when their settings are, wherever the settings came from.
    """

    name: Annotated[str | None, Meta(description="name of the run, its identity: the same name resumes it")] = None
    env: Annotated[
        Any, Meta(description='Gymnasium id, "module:Name", or (Python) a class or function that makes one')
    ] = None
    env_config: Annotated[dict[str, Any], Meta(description="keyword arguments of `env`")] = {}
    external: ExternalConfig | None = None
    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    rollouts: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    learners: LearnersConfig = msgspec.field(default_factory=LearnersConfig)
    evaluation: EvaluationConfig = msgspec.field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = msgspec.field(default_factory=CheckpointConfig)
    stop: StopConfig = msgspec.field(default_factory=StopConfig)
    machine: MachineConfig = msgspec.field(default_factory=MachineConfig)
    runs_dir: Annotated[str, Meta(description="directory that holds the run directories")] = "runs"
    seed: Annotated[int, Meta(ge=0, description="seed of everything random")] = 0
    engine: Annotated[
        Literal["inline", "local"],
        Meta(description="where the roles run: in one process (reproducible), or in processes of this machine"),
    ] = "local"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="cpu: every GPU number becomes 0; auto: as the numbers say"),
    ] = "auto"
    resume: Annotated[
        Literal["auto", "never", "must"], Meta(description="whether a run of this name that exists goes on")
    ] = "auto"

    def __post_init__(self) -> None:
        problems: list[str] = []
        values = sources.checked(RunConfig, msgspec.structs.asdict(self), problems, RunConfig)
        _raise(problems)
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)
        _raise(rules.problems(self))

    # ------------------------------------------------------------------ from elsewhere

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> RunConfig:
        """A configuration from nested maps, as they stand in a YAML file. Raises ConfigError."""
        problems: list[str] = []
        values = sources.checked(RunConfig, settings, problems, RunConfig)
        _raise(problems)
        return cls(**values)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None,
        overrides: Iterable[str] = (),
        base: Mapping[str, Any] | None = None,
    ) -> RunConfig:
        """A configuration from a YAML file and `key=value` settings, which win; `base` lies below the file.

        path: None for no file. overrides: dotted keys, values in YAML, such as "algorithm.lr=1e-3" or
        "stop={iterations: 3}". Raises ConfigError.
        """
        settings: dict[str, Any] = {}
        origin: dict[str, str] = {}
        layers = [
            ("python", [([key], value) for key, value in (base or {}).items()]),
            ("file", [([key], value) for key, value in (sources.read_file(path) if path else {}).items()]),
            ("command line", [sources.parse_override(text) for text in overrides]),
        ]
        for label, pairs in layers:
            for keys, value in pairs:
                sources.assign(settings, cls, keys, value)
                origin.update(dict.fromkeys(sources.given_keys(cls, keys, value), label))
        config = cls.from_dict(settings)
        config.__dict__["_origin"] = origin
        return config

    # ------------------------------------------------------------------ what is derived

    def resolved(self) -> RunConfig:
        """The same with every derived setting filled in; a resolved configuration resolves to itself.

        Builds the environment once, to see its spaces. Raises ConfigError, also for what only
        the spaces show to be wrong.
        """
        if self.__dict__.get("_resolved"):
            return self
        spaces = self.spaces()
        derived = rules.derive(self, spaces)
        sections: dict[str, dict[str, Any]] = {}
        for key, (value, _) in derived.items():
            section, _, name = key.rpartition(".")
            sections.setdefault(section, {})[name] = value
        changes = sections.pop("", {})
        for section, values in sections.items():
            changes[section] = msgspec.structs.replace(getattr(self, section), **values)
        config = msgspec.structs.replace(self, **changes)
        _raise(rules.space_problems(config, spaces))
        origin = {**self.sources, **{key: f"derived: {reason}" for key, (_, reason) in derived.items()}}
        config.__dict__.update(_resolved=True, _origin=origin, _spaces=spaces)
        return config

    def spaces(self) -> rules.Spaces:
        """What observations and actions are like; builds the environment once, when there is one."""
        if "_spaces" not in self.__dict__:
            self.__dict__["_spaces"] = rules.spaces_of(self)
        found: rules.Spaces = self.__dict__["_spaces"]
        return found

    def row_bytes(self) -> int:
        """Bytes of one env step in memory, with everything that is needed to train on it."""
        return self.spaces().row_bytes

    # ------------------------------------------------------------------ to elsewhere

    def to_dict(self) -> dict[str, Any]:
        """Nested maps of plain values, for YAML and JSON; a class or function becomes "module:Name"."""
        values = {**msgspec.structs.asdict(self), "env": rules.env_name(self.env)}
        return {name: sources.plain_tree(value, name) for name, value in values.items()}

    @property
    def sources(self) -> dict[str, str]:
        """Dotted key -> where it came from: default, python, file, command line, or "derived: why"."""
        known = self.__dict__.get("_origin", {})
        found = {}
        for key in sources.leaf_keys(RunConfig):
            changed = self.get(key) != _default(key)
            found[key] = known.get(key, "python" if changed else "default")
        return found

    def get(self, key: str) -> Any:
        """The value of a dotted key; None below a section that is not there."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part) if value is not None else None
        return value


class Setting(NamedTuple):
    """One row of `tetherl config`."""

    key: str
    value: Any
    default: Any  # "derived" where it follows from other settings
    source: str
    meaning: str


def describe(config: RunConfig) -> list[Setting]:
    """Every setting: its value, its default, where the value came from, and what it means."""
    values, origin = config.to_dict(), config.sources
    rows = []
    for key in sources.leaf_keys(RunConfig):
        cls, name = _owner(key)
        if cls is ExternalConfig and config.external is None:
            continue
        value: Any = values
        for part in key.split("."):
            value = value[part]
        default = "derived" if key in rules.DERIVED else _default(key)
        rows.append(Setting(key, value, default, origin[key], sources.meaning(cls, name)))
    return rows


def _owner(key: str) -> tuple[sources.StructType, str]:
    """The struct class that has the setting, and the setting's name in it."""
    cls: sources.StructType = RunConfig
    *parents, name = key.split(".")
    for part in parents:
        cls = sources.section_type(cls, part)
    return cls, name


def _default(key: str) -> Any:
    return sources.default_of(*_owner(key))


def _raise(problems: list[str]) -> None:
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        raise ConfigError(f"{len(problems)} settings are wrong:\n" + "\n".join(f"- {p}" for p in problems))
