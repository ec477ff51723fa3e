"""Runs jobs on ranks of the test harness, as `main.run` does in a process of its own. Knows no test."""

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from afd_megatron.assembly import open_job
from afd_megatron.config import JobConfig
from afd_megatron.distributed import World
from afd_megatron.launcher import job_topology
from afd_megatron.main import serve
from afd_megatron.observability.progress import Progress
from tests.ranks.harness import Ranks

NUM_NEW = 16  # tokens of a completion


def split(
    attention: int, ffn: int, *, stages: int = 1, gate: str = "ffn", boundary: str = "ffn", tp: tuple[int, int] = (1, 1)
) -> dict[str, object]:
    """Return the sections of a split job on few places and short chunks, so that requests wait and prompts are cut."""
    return {
        "topology": {"attention": {"dp": attention, "tp": tp[0]}, "ffn": {"ep": ffn, "tp": tp[1]}},
        "pipeline": {"stages": stages, "gate": gate, "boundary": boundary},
        "engine": {"max_requests_per_rank": 3, "prefill_chunk": 24, "max_context": 128},
    }


def job_values(
    folder: Path, scratch: Path, lines: Sequence[Mapping[str, object]], sections: Mapping, **more: object
) -> dict:
    """Write the input and return the values of a job file."""
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "input.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "model": {"path": str(folder)},
        "job": {"input": str(path), "output": str(scratch / "results.jsonl")},
        **sections,
        **more,
    }


def decode(
    ranks: Ranks, values: Mapping[str, object], *, timeout_s: float = 120.0, exit_code: int = 0
) -> dict[tuple[str, int], dict]:
    """Run a job on all of `ranks` and return its records by (id, sample), each of which must come once."""
    assert ranks.run(run_job, values, timeout_s=timeout_s)[0] == exit_code
    output = Path(values["job"]["output"])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    by_key = {(record["id"], record["sample"]): record for record in records}
    assert len(by_key) == len(records), "an id and sample came twice"
    return by_key


def run_job(world: World, values: Mapping[str, object]) -> int:
    """Run a job on this rank of a world of just its size."""
    config = JobConfig.model_validate(values)
    topology = job_topology(config)
    assert topology.world_size == world.topology.world_size, (topology, world.topology)
    world = World(world.rank, topology, world.job_id, timeout_s=60.0)
    job = open_job(config, overwrite=True) if world.rank == 0 else None
    return serve(config, world, job, progress=Progress(), stop=threading.Event())


def read_summary(values: Mapping[str, object]) -> dict:
    return json.loads(Path(values["job"]["output"]).with_suffix(".summary.json").read_text())


def tokens(records: dict[tuple[str, int], dict]) -> dict[tuple[str, int], list[int]]:
    assert {record["finish_reason"] for record in records.values()} == {"length"}
    return {key: record["token_ids"] for key, record in records.items()}
