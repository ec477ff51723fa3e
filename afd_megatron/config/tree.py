"""A YAML job file and its overrides as one tree in which every key knows where it stands. Knows no schema.

Only plain YAML passes: no anchors, tags or repeated keys; numbers are decimal, booleans are `true` and `false`, and all
else is text, so that `3:2`, `012`, `yes` and `.nan` are never turned into something the writer did not mean.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from afd_megatron.errors import ConfigError

Tree: TypeAlias = "dict[str, Tree] | list[Tree] | str | int | float | bool | None"

_MAX_DEPTH = 16
_MAX_BYTES = 1 << 20
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,99})")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class JobTree:
    """What a job file says. Keys are dotted (`topology.ffn.ep`); `faults` are whole lines."""

    path: Path
    values: dict[str, Tree] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def place(self, key: str) -> str:
        """Return where `key` is set, else where the nearest section around it is, as `file:line` or `--set a.b=c`."""
        while key:
            if key in self.places:
                return self.places[key]
            key = key.rpartition(".")[0]
        return str(self.path)


def read_job_tree(path: Path, overrides: Sequence[str]) -> JobTree:
    """Read the file at `path`; each override `a.b=c` beats it, and a later one an earlier one.

    Raises:
        ConfigError: the file cannot be read, or is not one plain YAML mapping.
    """
    tree = JobTree(path)
    root = _compose(_read_text(path), str(path))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: no mapping at the top (expected sections such as `model:` and `job:`)")
    values = _convert(root, "", tree, None)
    assert isinstance(values, dict), values
    tree.values.update(values)
    for override in overrides:
        _apply(override, tree)
    return tree


class _PlainLoader(yaml.SafeLoader):
    """Refuses anchors, tags and deep nesting while the nodes are composed."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not allowed", problem_mark=event.start_mark)
        if event.tag is not None:
            raise yaml.MarkedYAMLError(problem=f"tag {event.tag} is not allowed", problem_mark=event.start_mark)
        if self.depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested over {_MAX_DEPTH} deep", problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path}: {len(data)} bytes (allowed: up to {_MAX_BYTES})")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: byte {data[error.start]:#04x} is not UTF-8") from error


def _compose(text: str, where: str) -> yaml.Node | None:
    """Return the nodes of `text`; `where` names it in a ConfigError, with `:line` added if it is a file of lines."""
    try:
        loader = _PlainLoader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark and not where.startswith("--set") else ""
        raise ConfigError(f"{where}{line}: not plain YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not plain YAML: {' '.join(str(error).split())}") from error


def _convert(node: yaml.Node, key: str, tree: JobTree, place: str | None) -> Tree:
    """Return the values under `node`, entering into `tree` where each key stands: `place`, or its line in the file."""
    tree.places.setdefault(key, place or _line(tree, node))
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, key, tree)
    if isinstance(node, yaml.SequenceNode):
        return [_convert(item, f"{key}.{index}", tree, place) for index, item in enumerate(node.value)]
    values: dict[str, Tree] = {}
    for name_node, value_node in node.value:
        name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "?"
        child = f"{key}.{name}" if key else name
        where = place or _line(tree, name_node)
        if name in values:
            tree.faults.append(f"{where}: {child}: repeated key (first at {tree.places[child]})")
            continue
        tree.places[child] = where
        values[name] = _convert(value_node, child, tree, place)
    return values


def _line(tree: JobTree, node: yaml.Node) -> str:
    return f"{tree.path}:{node.start_mark.line + 1}"


def _scalar(node: yaml.ScalarNode, key: str, tree: JobTree) -> str | int | float | bool | None:
    text: str = node.value
    if any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text):
        tree.faults.append(f"{tree.place(key)}: {key}: holds a character that no file can hold")
    if node.style is not None:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INT.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


def _apply(override: str, tree: JobTree) -> None:
    key, equals, text = override.partition("=")
    place = f"--set {override}"
    *sections, name = key.split(".")
    if not equals or not name or not all(sections):
        tree.faults.append(f"{place}: not of the form KEY=VALUE (for example pipeline.stages=2)")
        return
    try:
        node = _compose(text, place)
    except ConfigError as error:
        tree.faults.append(str(error))
        return
    parent = tree.values
    for depth, section in enumerate(sections):
        child = parent.get(section)
        if not isinstance(child, dict):
            child = parent[section] = {}
            tree.places[".".join(sections[: depth + 1])] = place
        parent = child
    for stale in [known for known in tree.places if f"{known}.".startswith(f"{key}.")]:
        del tree.places[stale]
    tree.places[key] = place
    parent[name] = None if node is None else _convert(node, key, tree, place)
