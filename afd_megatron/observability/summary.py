"""What stands in the summary of a job beside its metrics. Knows no roles' insides, no transport."""

import platform
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from afd_megatron.config import JobConfig

_PACKAGES = ("afd_megatron", "torch", "megatron-core", "deepspeed", "transformers", "safetensors")


def job_summary(
    config: JobConfig, status: str, *, ranks: Sequence[Mapping[str, object]], counted: Mapping[str, object]
) -> dict[str, object]:
    """Return the summary of a job: `status` is ok, partial, interrupted or fault; `counted` is what it counted."""
    return {
        "status": status,
        **counted,
        "ranks": list(ranks),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "command": sys.argv,
        "config": config.model_dump(mode="json"),
    }


def hardware() -> dict[str, object]:
    """Return host, processor, cores and memory (bytes) of this machine."""
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "host": platform.node(),
        "cpu": names[0] if names else platform.processor(),
        "num_cores": len(names),
        "memory_bytes": 1024 * memory_kib,
    }


def _cpuinfo() -> list[str]:
    return Path("/proc/cpuinfo").read_text().splitlines()
