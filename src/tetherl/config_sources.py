"""Where settings come from (YAML text, `key=value`, Python) and what is wrong with them, in words.

Nothing here knows a particular setting: everything follows from the types and `Meta` of the config structs.
"""

from __future__ import annotations

import difflib
import functools
import math
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any

import msgspec
from msgspec import inspect

from tetherl.errors import ConfigError, MissingExtraError

StructType = type[msgspec.Struct]
# YAML 1.1 wants a dot and a signed exponent; people write 1e-3.
_FLOAT = re.compile(r"^[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$")


# --- reading ---------------------------------------------------------------------------------------------


@functools.cache
def _loader() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise MissingExtraError("reading a configuration file or key=value settings", "train") from error

    class Loader(yaml.SafeLoader):
        """SafeLoader that reads 1e-3 as a number and refuses a key that is written twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: dict[str, int] = {}
            for key_node, _ in node.value:
                line = key_node.start_mark.line + 1
                if key_node.value in seen and isinstance(key_node, yaml.ScalarNode):
                    first = seen[key_node.value]
                    raise ConfigError(f"{key_node.value}: written in lines {first} and {line}; keep one")
                if isinstance(key_node, yaml.ScalarNode):
                    seen[key_node.value] = line
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    return Loader


def parse_yaml(text: str, where: str) -> Any:
    """YAML text to plain values; `where` names the text in errors."""
    loader = _loader()
    import yaml

    try:
        return yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The map in a YAML file; an empty file is an empty map."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{os.fspath(path)}: no such file (looked from {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error}") from error
    data = parse_yaml(text, os.fspath(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{os.fspath(path)}: expected a map of settings (key: value), got {shown(data)}")
    return data


def parse_override(text: str) -> tuple[list[str], Any]:
    """`key=value` to (the parts of the dotted key, value); the value is read as YAML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{text!r}: expected key=value, for example algorithm.lr=1e-3")
    return key.split("."), parse_yaml(value, text)


def assign(data: dict[str, Any], cls: StructType, path: Sequence[str], value: Any) -> None:
    """Set a key in nested maps, in place. A map given for a section is merged into it."""
    *parents, last = path
    target, section = data, cls
    for i, part in enumerate(parents):
        inner = target.get(part)
        if inner is None:
            inner = target[part] = {}
        if not isinstance(inner, dict):
            parent = ".".join(parents[: i + 1])
            raise ConfigError(f"{'.'.join(path)}: {parent} is {shown(inner)}, which holds no settings")
        target, section = inner, section_type(section, part)
    before = target.get(last)
    if section_type(section, last) is not None and isinstance(value, dict) and isinstance(before, dict):
        target[last] = {**before, **_copied(value)}
    else:
        target[last] = _copied(value)


def _copied(value: Any) -> Any:
    """Maps within maps copied, so that a later setting does not change what the caller holds."""
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, dict) else value


# --- the shape of the structs ------------------------------------------------------------------------------


@functools.cache
def field_types(cls: StructType) -> dict[str, Any]:
    """Field name -> type with its Meta."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


@functools.cache
def field_info(cls: StructType) -> dict[str, inspect.Field]:
    info = typing.cast(inspect.StructType, inspect.type_info(cls))
    return {field.name: field for field in info.fields}


@functools.cache
def section_type(cls: Any, name: str) -> Any:
    """The struct class of field `name`, or None when the field is a plain setting (or does not exist)."""
    hint = field_types(cls).get(name) if cls is not None else None
    members = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    for member in members:
        if isinstance(member, type) and issubclass(member, msgspec.Struct):
            return member
    return None


def leaf_keys(cls: StructType, path: str = "") -> Iterator[str]:
    """All dotted keys of plain settings."""
    for name in field_types(cls):
        section = section_type(cls, name)
        if section is None:
            yield path + name
        else:
            yield from leaf_keys(section, f"{path}{name}.")


def given_keys(cls: StructType, path: Sequence[str], value: Any) -> Iterator[str]:
    """The dotted keys of the settings that are set by setting `path` to `value`."""
    section, keys = cls, list(path)
    for i, part in enumerate(keys):
        section = section_type(section, part)
        if section is None:  # a setting; what follows lies inside its value
            yield ".".join(keys[: i + 1])
            return
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        yield from given_keys(cls, [*keys, str(name)], inner)


def meaning(cls: StructType, name: str) -> str:
    """The description in the field's Meta."""
    info = field_info(cls)[name].type
    if isinstance(info, inspect.Metadata):
        return str((info.extra_json_schema or {}).get("description", ""))
    return ""


def default_of(cls: StructType, name: str) -> Any:
    """The field's default; None for a required field."""
    field = field_info(cls)[name]
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return None if field.default_factory is msgspec.NODEFAULT else field.default_factory()


# --- checking ----------------------------------------------------------------------------------------------


def checked(
    cls: StructType, data: Mapping[str, Any], problems: list[str], root: StructType, path: str = ""
) -> dict[str, Any]:
    """The fields of `cls` in `data`, converted to their types; what is wrong is appended to `problems`."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        if not isinstance(name, str) or name not in field_types(cls):
            problems.extend(_unknown(cls, name, value, root, path))
            continue
        section = section_type(cls, name)
        if section is None:
            values[name] = _checked_value(cls, name, value, problems, path)
        else:
            values[name] = _checked_section(cls, section, name, value, problems, root, path)
    for name, field in field_info(cls).items():
        if field.required and name not in data:
            problems.append(f"{path}{name}: missing; expected {words(field.type)} ({meaning(cls, name)})")
    return values


def _checked_section(
    cls: StructType,
    section: StructType,
    name: str,
    value: Any,
    problems: list[str],
    root: StructType,
    path: str,
) -> Any:
    if isinstance(value, section):
        value = msgspec.structs.asdict(value)
    if value is None:
        if default_of(cls, name) is None:  # an optional section
            return None
        value = {}  # "model:" with nothing below it
    if not isinstance(value, Mapping):
        problems.append(f"{path}{name}: got {shown(value)}; expected a map with the keys {_listed(section)}")
        return None
    before = len(problems)
    values = checked(section, value, problems, root, f"{path}{name}.")
    return section(**values) if len(problems) == before else None


def _checked_value(cls: StructType, name: str, value: Any, problems: list[str], path: str) -> Any:
    info = field_info(cls)[name].type
    allowed = _members(info)
    plain = _plain(value)
    if isinstance(plain, str) and not any(isinstance(m, inspect.StrType | inspect.AnyType) for m in allowed):
        plain = _as_number(plain, allowed)
    whole = _wants(allowed, inspect.IntType) and not _wants(allowed, inspect.FloatType)
    if whole and isinstance(plain, float) and plain.is_integer():
        plain = int(plain)
    try:
        result = msgspec.convert(plain, field_types(cls)[name])
    except msgspec.ValidationError as error:
        where = re.search(r"at `\$(.+?)`", str(error))
        inside = f" (at {where[1]})" if where else ""
        text = f" ({meaning(cls, name)})" if meaning(cls, name) else ""
        problems.append(f"{path}{name}: got {shown(value)}{inside}; expected {words(info)}{text}")
        return None
    if _wants(allowed, inspect.FloatType) and not _finite(result):
        problems.append(f"{path}{name}: got {shown(value)}; expected finite numbers ({meaning(cls, name)})")
    return result


def _members(info: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(info, inspect.Metadata):
        return _members(info.type)
    return info.types if isinstance(info, inspect.UnionType) else (info,)


def _wants(allowed: tuple[inspect.Type, ...], kind: type) -> bool:
    return any(isinstance(member, kind) for member in allowed)


def _as_number(text: str, allowed: tuple[inspect.Type, ...]) -> Any:
    """Text such as "9e-5", which plain YAML 1.1 readers leave as text, as the number it is."""
    if not _wants(allowed, inspect.FloatType) and not _wants(allowed, inspect.IntType):
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    """Values that Python callers hold, as plain ones: numpy scalars, paths, Gymnasium spaces."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(value, gymnasium.Space):
        from tetherl.spaces import space_to_spec

        return space_to_spec(value)
    return value


def plain_tree(value: Any, path: str) -> Any:
    """Structs, maps and sequences as nested dicts and lists of plain values, which YAML and JSON can hold."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        return {key: plain_tree(inner, f"{path}.{key}") for key, inner in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain_tree(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
    value = _plain(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{path}: {shown(value)} cannot be written down; give numbers, text, lists or maps")


def _finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return all(_finite(v) for v in value) if isinstance(value, list | tuple) else True


# --- words -------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value as it stands in a message."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def words(info: inspect.Type) -> str:
    """What a type allows, in plain words."""
    match info:
        case inspect.Metadata():
            return words(info.type)
        case inspect.UnionType():
            # null last: it is the exception
            members = sorted(info.types, key=lambda member: isinstance(member, inspect.NoneType))
            return " or ".join(words(member) for member in members)
        case inspect.FloatType() | inspect.IntType():
            signs = ((">", info.gt), (">=", info.ge), ("<", info.lt), ("<=", info.le))
            bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)
            noun = "a number" if isinstance(info, inspect.FloatType) else "a whole number"
            return f"{noun} {bounds}".rstrip()
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in info.values)
        case inspect.ListType():
            return f"a list of ({words(info.item_type)})"
        case inspect.TupleType():
            return "[" + ", ".join(words(item) for item in info.item_types) + "]"
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "text"
        case inspect.NoneType():
            return "null"
        case inspect.DictType():
            return "a map"
    return "any value"


def _listed(cls: StructType) -> str:
    return ", ".join(field_types(cls))


def _unknown(cls: StructType, name: Any, value: Any, root: StructType, path: str) -> list[str]:
    """One message per unknown setting; an unknown section is reported setting by setting."""
    name = str(name)
    dotted = path + name
    if dotted in set(leaf_keys(root)) and "." in name:
        section, _, rest = dotted.partition(".")
        return [f"{dotted}: a dotted key in a map; write it nested, as {section}: {{{rest}: {shown(value)}}}"]
    if not path and isinstance(value, Mapping) and value:
        sections = [n for n in field_types(root) if section_type(root, n) is not None]
        near = difflib.get_close_matches(name, sections, n=1, cutoff=0.6)
        if near:
            section = section_type(root, near[0])
            return [
                f"{name}.{key}: unknown key (value {shown(inner)}); did you mean "
                + (f"{near[0]}.{key}?" if key in field_types(section) else f"a key of {near[0]}?")
                + f" Allowed in {near[0]}: {_listed(section)}"
                for key, inner in value.items()
            ]
    near = _nearest(cls, name, root, path)
    hint = f"; did you mean {' or '.join(near)}?" if near else ";"
    where = f"in {path[:-1]}" if path else "at the top"
    return [f"{dotted}: unknown key (value {shown(value)}){hint} Allowed {where}: {_listed(cls)}"]


def _nearest(cls: StructType, name: str, root: StructType, path: str) -> list[str]:
    """Valid dotted keys that were probably meant: the same word here or elsewhere, then a similar one."""

    def bare(key: str) -> str:
        return key.rpartition(".")[2].replace("-", "_").strip("_").lower()

    here = [path + key for key in field_types(cls)]
    everywhere = list(leaf_keys(root))
    for keys in (here, everywhere):
        same = [key for key in keys if bare(key) == bare(name)]
        if same:
            return same[:3]
    for keys in (here, everywhere):
        by_name = {bare(key): key for key in reversed(keys)}
        close = difflib.get_close_matches(bare(name), by_name, n=1, cutoff=0.6)
        if close:
            return [by_name[close[0]]]
    return []
