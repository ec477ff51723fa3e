"""Reads a job file and finds every fault in it at once. Knows no model: its facts are added by the launcher."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from afd_megatron.config.schema import NOT_YET, JobConfig, schema_keys
from afd_megatron.config.tree import JobTree, Tree, read_job_tree
from afd_megatron.errors import ConfigError

_MAX_NAME_BYTES = 240  # of an output, whose summary's name is longer


class Fault(NamedTuple):
    """A setting that cannot be: `keys[0]` is where to mend it, all `keys` are what the judgement rests on."""

    keys: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class JobFile:
    """A job file as far as it could be read: defaults stand for `broken` keys, `faults` has one line for each fault."""

    config: JobConfig
    faults: list[str]
    broken: frozenset[str]
    tree: JobTree

    def add(self, faults: Iterator[Fault]) -> None:
        """Take up `faults`, except those that rest on a broken key."""
        for fault in faults:
            if not any(self.is_broken(key) for key in fault.keys):
                self.faults.append(f"{self.tree.place(fault.keys[0])}: {fault.keys[0]}: {fault.text}")

    def is_broken(self, key: str) -> bool:
        return any(f"{key}.".startswith(f"{broken}.") for broken in self.broken)

    def checked(self) -> JobConfig:
        """Return the config.

        Raises:
            ConfigError: there is a fault; the message has one line each.
        """
        if self.faults:
            raise ConfigError("\n".join(self.faults))
        return self.config


def load_config(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the job of the YAML file at `path`; each override `a.b=c` beats the file.

    Raises:
        ConfigError: one line for every fault, with file and line.
    """
    return read_job_file(path, overrides).checked()


def read_job_file(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Read the file and judge all that needs no model and is not yet there to be overwritten.

    Raises:
        ConfigError: the file cannot be read or is not one plain YAML mapping.
    """
    tree = read_job_tree(path, overrides)
    values: dict[str, Tree] = {"model": {}, "job": {}, **tree.values}
    faults = list(tree.faults)
    broken: set[str] = set()
    try:
        config = JobConfig.model_validate(values)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            key = _dotted(detail["loc"])
            faults.append(f"{tree.place(key)}: {key}: {_describe(detail)}")
            broken.add(_dotted(takewhile(lambda part: isinstance(part, str), detail["loc"])))
        config = JobConfig.model_validate(_without(values, broken))
    job = JobFile(config, faults, frozenset(broken), tree)
    job.add(_not_yet(config))
    job.add(_contradictions(config))
    job.add(_missing_files(config))
    return job


def dump_config(config: JobConfig) -> str:
    """Return YAML that loads to the same config."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _not_yet(config: JobConfig) -> Iterator[Fault]:
    for key, (allowed, what) in NOT_YET.items():
        value: object = config
        for name in key.split("."):
            value = getattr(value, name)
        if value not in allowed:
            yield Fault((key,), f"not yet: {_shown(value)}, {what} ({_allowed(allowed)})")


def _contradictions(config: JobConfig) -> Iterator[Fault]:
    topology, local = config.topology, config.connector.kind == "local"
    num_attention, num_ffn = topology.num_attention, topology.num_ffn
    counts = tuple(f"topology.{key}" for key in ("attention.dp", "attention.tp", "ffn.ep", "ffn.tp"))
    if topology.colocated and num_attention != num_ffn:
        text = (
            f"{num_attention} attention ranks (dp x tp) are not {num_ffn} FFN ranks (ep x tp) (allowed: equal numbers)"
        )
        yield Fault(("topology.colocated", *counts), text)
    if local and (num_attention, num_ffn) != (1, 1):
        text = f"local is one process, but there are {num_attention} attention and {num_ffn} FFN ranks"
        yield Fault(("connector.kind", *counts), f"{text} (allowed: 1 and 1, or kind gloo)")
    if topology.colocated and num_attention == num_ffn == 1 and not local:
        text = f"{config.connector.kind} has no peer on one colocated rank (allowed: local)"
        yield Fault(("connector.kind", "topology.colocated", *counts), text)
    if config.launch.threads.ffn and (topology.colocated or local):
        text = "no effect, each rank has both roles (allowed: null)"
        yield Fault(("launch.threads.ffn", "topology.colocated", "connector.kind"), text)
    if config.model.seed and config.model.load != "random":
        text = f"no effect with model.load {config.model.load} (allowed: 0)"
        yield Fault(("model.seed", "model.load"), text)
    buckets = config.graphs.buckets
    if buckets and not config.graphs.enabled:
        yield Fault(("graphs.buckets", "graphs.enabled"), "no effect with graphs.enabled false (allowed: [])")
    if config.pipeline.exchange == "routed" and config.pipeline.gate == "ffn":
        text = "routed knows no experts before the gate (allowed: pipeline.gate attention)"
        yield Fault(("pipeline.exchange", "pipeline.gate"), text)
    if list(buckets) != sorted(set(buckets)):
        yield Fault(("graphs.buckets",), f"{list(buckets)} (allowed: ascending, each once)")
    interval, timeout = config.control.heartbeat_interval_s, config.control.heartbeat_timeout_s
    if timeout <= interval:
        keys = ("control.heartbeat_timeout_s", "control.heartbeat_interval_s")
        yield Fault(keys, f"{timeout} (allowed: more than heartbeat_interval_s {interval})")


def _missing_files(config: JobConfig) -> Iterator[Fault]:
    job = config.job
    if not (config.model.path / "config.json").is_file():
        yield Fault(("model.path",), f"{config.model.path} has no config.json")
    if not job.input.is_file():
        yield Fault(("job.input",), f"{job.input} is not a file")
    if not job.output.parent.is_dir():
        yield Fault(("job.output",), f"folder {job.output.parent} does not exist")
    elif not os.access(job.output.parent, os.W_OK):
        yield Fault(("job.output",), f"folder {job.output.parent} is not writable")
    elif len(os.fsencode(job.output.name)) > _MAX_NAME_BYTES:
        text = f"a name of {len(os.fsencode(job.output.name))} bytes (allowed: up to {_MAX_NAME_BYTES})"
        yield Fault(("job.output",), text)
    elif job.output.is_dir():
        yield Fault(("job.output",), f"{job.output} is a folder")
    elif job.summary.is_dir():
        yield Fault(("job.output",), f"its summary {job.summary} is a folder")
    elif job.input.resolve() in (job.output.resolve(), job.summary.resolve()):
        yield Fault(("job.output", "job.input"), f"{job.output} or its summary would overwrite job.input")


def _without(values: dict[str, Tree], broken: set[str]) -> dict[str, Tree]:
    """Return `values` with defaults in place of broken keys, so that the rest can still be judged."""

    def strip(branch: dict[str, Tree], prefix: str) -> dict[str, Tree]:
        kept = {name: value for name, value in branch.items() if prefix + name not in broken}
        return {
            name: strip(value, f"{prefix}{name}.") if isinstance(value, dict) else value for name, value in kept.items()
        }

    stripped = strip(values, "")
    for section, required in (("model", {"path": "."}), ("job", {"input": ".", "output": "."})):
        present = stripped.get(section, {})
        assert isinstance(present, dict), present
        stripped[section] = {**required, **present}
    return stripped


def _describe(detail: ErrorDetails) -> str:
    """Return what is wrong and what is allowed."""
    key = _dotted(detail["loc"])
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"unknown key ({_suggestion(detail['loc'])})"
    if kind == "missing":
        return "is required"
    if kind == "literal_error":
        allowed = NOT_YET[key].allowed if key in NOT_YET else tuple(re.findall("'(.*?)'", detail["ctx"]["expected"]))
        close = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], n=1)
        return f"{_shown(value)} is unknown ({_guess(close)}{_allowed(allowed)})"
    if kind == "model_type":
        return f"{_shown(value)} should be a mapping of keys"
    if kind == "path_type":
        return f"{_shown(value)} should be a path"
    return f"{_shown(value)} should {detail['msg'].rpartition(' should ')[2]}"


def _suggestion(loc: tuple[int | str, ...]) -> str:
    *sections, name = map(str, loc)
    section: type[BaseModel] = JobConfig
    for part in sections:
        annotation = section.model_fields[part].annotation
        assert isinstance(annotation, type) and issubclass(annotation, BaseModel), (loc, annotation)
        section = annotation
    names = tuple(section.model_fields)
    elsewhere = [key for key in schema_keys() if key.rpartition(".")[2] == name]
    return _guess(difflib.get_close_matches(name, names, n=1) or elsewhere) + _allowed(names)


def _guess(close: Sequence[str]) -> str:
    return f"did you mean {close[0]}? " if close else ""


def _dotted(loc: Iterable[int | str]) -> str:
    return ".".join(map(str, loc))


def _allowed(values: Sequence[object]) -> str:
    return f"allowed: {', '.join(value if isinstance(value, str) else _shown(value) for value in values)}"


def _shown(value: object) -> str:
    """Return `value` as YAML would have it, cut short."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Dumper(yaml.SafeDumper):
    """Quotes all text but plain words, since it might read as a number."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
