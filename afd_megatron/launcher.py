"""How this process was started, by which launcher, and how the ranks of a job start. Knows no torch, no tensors."""

import base64
import json
import logging
import os
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import NamedTuple

from afd_megatron.config import JobConfig
from afd_megatron.config.load import Fault, read_job_file
from afd_megatron.errors import ConfigError, ExitCode
from afd_megatron.families import load_shape
from afd_megatron.families.base import ModelShape, Staying
from afd_megatron.supervisor import Ending, process_start, supervise
from afd_megatron.topology import Role, Topology, contiguous_slices

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedRank:
    """One rank among all. `rendezvous` is a folder that only this user can enter and only this launch uses."""

    rank: int
    world_size: int
    local_rank: int
    rendezvous: Path


class Start(NamedTuple):
    """What a launcher tells the process it starts."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int


class _Variables(NamedTuple):
    rank: str
    world_size: str
    local_rank: str
    local_size: str


# The first launcher whose variables are set started this process. torchrun and DeepSpeed differ in the last one; a
# batch script of Slurm may start any other launcher, so srun comes last.
_LAUNCHERS = {
    "deepspeed": _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    "torchrun": _Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpirun": _Variables(*(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    "srun": _Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def read_start(environ: Mapping[str, str]) -> Start | None:
    """Return who started this process as which rank, or None if no launcher did.

    Raises:
        ConfigError: a variable is no number, or there are several nodes.
    """
    for launcher, names in _LAUNCHERS.items():
        needed = names[:3] if launcher == "srun" else names  # an old srun does not set the last
        if not all(name in environ for name in needed):
            continue
        rank, world_size, local_rank = (_number(environ, name) for name in names[:3])
        local_size = environ.get(names.local_size, str(world_size))
        if local_size != str(world_size):
            raise ConfigError(f"{launcher}: not yet: several nodes ({local_size} of {world_size} ranks on this one)")
        return Start(launcher, rank, world_size, local_rank)
    return None


def load_job(path: Path, overrides: Sequence[str], *, may_replace_output: bool) -> JobConfig:
    """Return the job at `path`, judged with the facts of its model and, if wanted, refused if its output exists.

    Raises:
        ConfigError: one line for every fault.
    """
    job = read_job_file(path, overrides)
    if not job.is_broken("model.path") and (job.config.model.path / "config.json").is_file():
        job.add(_model_faults(job.config))
    if not may_replace_output:
        job.add(_output_faults(job.config))
    return job.checked()


def job_topology(config: JobConfig) -> Topology:
    topology = config.topology
    return Topology(
        topology.num_attention,
        topology.num_ffn,
        topology.colocated or config.connector.kind == "local",
        attention_tp=topology.attention.tp,
        ffn_tp=topology.ffn.tp,
    )


def staying(config: JobConfig) -> Staying:
    """Return what of the FFN the job leaves on attention ranks."""
    pipeline = config.pipeline
    return Staying(pipeline.gate == "attention", pipeline.boundary == "moe", pipeline.shared_experts == "attention")


def is_routed(config: JobConfig, shape: ModelShape) -> bool:
    """Return whether rows travel to the FFN ranks of their experts alone.

    A row's bytes are the same either way, so with `auto` the share of ranks that a row goes to decides, which is below
    1 as soon as several have experts of their own and a row can miss one of them.
    """
    pipeline, ep = config.pipeline, config.topology.ffn.ep
    if pipeline.exchange == "auto":
        can = pipeline.gate == "attention" and not _spreads_shared_experts(config, shape)
        return can and expected_share(shape.num_experts, shape.router.top_k, ep) < 1
    return pipeline.exchange == "routed" and ep > 1


def _spreads_shared_experts(config: JobConfig, shape: ModelShape) -> bool:
    """Return whether every FFN rank holds a part of shared experts, so that every row must go to all of them."""
    return bool(shape.shared_width) and config.pipeline.shared_experts == "ffn"


def expected_share(num_experts: int, top_k: int, ep: int) -> float:
    """Return the share of FFN ranks that a row goes to if every choice of experts is equally likely.

    1 - C(E - E_f, k) / C(E, k), averaged over the `ep` parts f with their E_f experts. Source: AIConfigurator.
    """
    slices = contiguous_slices(num_experts, ep)
    misses = [comb(num_experts - len(mine), top_k) / comb(num_experts, top_k) for mine in slices]
    return 1 - sum(misses) / ep


def needs_ranks_started(config: JobConfig, start: Start | None) -> bool:
    """Return whether this process is alone and the job wants more: `deepspeed` starts one rank on a CPU machine."""
    is_alone = start is None or (start.launcher == "deepspeed" and start.world_size == 1)
    return is_alone and job_topology(config).world_size > 1


def start_ranks(config: JobConfig, script: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start DeepSpeed's launcher for all ranks of `script arguments`, stay with it to the end, return the exit code."""
    # DeepSpeed's launcher of one node: its runner would add 5 s, and dies of a signal without telling the ranks.
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(job_topology(config).world_size))}).encode())
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world.decode()}"]
    command += ["--master_addr=127.0.0.1", f"--master_port={_free_port()}", "--log_level=critical"]
    taken = {name for names in _LAUNCHERS.values() for name in names} | {"MASTER_ADDR", "MASTER_PORT"}
    taken |= {"CROSS_RANK", "CROSS_SIZE", "CUDA_VISIBLE_DEVICES"}
    inherited = {name: value for name, value in environ.items() if name not in taken}
    before = _summary_stamp(config.job.summary)
    ending = supervise(
        [*command, str(script), *arguments], inherited | {"DS_ACCELERATOR": "cpu"}, config.launch.grace_s
    )
    return _exit_code(ending, config.job.summary, before)


def launched_rank(config: JobConfig, start: Start | None, environ: Mapping[str, str]) -> LaunchedRank:
    """Return this process's rank, with its rendezvous folder made.

    Raises:
        ConfigError: another number of ranks was started than the job has, or the folder is not safe.
    """
    start = start or Start("none", 0, 1, 0)
    if start.world_size != job_topology(config).world_size:
        raise ConfigError(f"world size: {_arithmetic(config, start)}")
    # Ranks of one launch share a parent; a rank alone may share it with another job of the same shell.
    owner = os.getppid() if start.world_size > 1 else os.getpid()
    return LaunchedRank(start.rank, start.world_size, start.local_rank, _rendezvous(environ, owner))


def thread_variables(config: JobConfig, rank: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what must be in the environment before torch is imported, so that ranks do not fight for cores.

    Where all ranks together have more threads than there are cores, an idle one waits for some ten microseconds, which
    bridges the gap to the next product of its rank, and then leaves its core to the other ranks. Elsewhere threads wait
    as long as they like. Source: docs/perf/decode_cpu.md, and GOMP_SPINCOUNT in the manual of GNU libgomp.
    """
    topology = job_topology(config)
    num_cores = len(os.sched_getaffinity(0))
    default = environ.get("OMP_NUM_THREADS", str(max(1, num_cores // topology.world_size)))
    threads = config.launch.threads
    counts = [
        str((threads.attention if Role.ATTENTION in topology.roles(each) else threads.ffn) or default)
        for each in range(topology.world_size)
    ]
    variables = {"OMP_NUM_THREADS": counts[rank]}
    if sum(map(int, counts)) > num_cores and not environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        variables["GOMP_SPINCOUNT"] = "10000"
    return variables


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ[name].isdecimal():
        raise ConfigError(f"environment: {name}: {environ[name]!r} (allowed: a whole number)")
    return int(environ[name])


def _model_faults(config: JobConfig) -> Iterator[Fault]:
    try:
        shape = load_shape(config.model.path)
    except ConfigError as error:
        yield from (Fault(("model.path",), line) for line in str(error).splitlines())
        return
    if config.topology.ffn.ep > shape.num_experts:
        text = f"{config.topology.ffn.ep} exceeds num_experts {shape.num_experts} (allowed: 1 to {shape.num_experts})"
        yield Fault(("topology.ffn.ep",), text)
    if config.topology.ffn.tp > shape.moe_width:
        text = f"{config.topology.ffn.tp} exceeds the width of an expert {shape.moe_width} (allowed: up to it)"
        yield Fault(("topology.ffn.tp",), text)
    if not shape.can_share_heads(config.topology.attention.tp):
        text = f"{config.topology.attention.tp} cannot share {shape.num_heads} heads, {shape.num_kv_heads} of keys"
        allowed = ", ".join(str(tp) for tp in range(1, shape.num_heads + 1) if shape.can_share_heads(tp))
        yield Fault(("topology.attention.tp",), f"{text} (allowed: {allowed})")
    if config.pipeline.exchange == "routed" and _spreads_shared_experts(config, shape):
        text = "routed leaves out ranks that all rows pass for the shared experts (allowed: shared_experts attention)"
        yield Fault(("pipeline.exchange", "pipeline.shared_experts"), text)
    if not any(shape.is_remote_layer(staying(config))):
        yield Fault(("pipeline.boundary",), "moe leaves the FFN ranks nothing: no layer has experts (allowed: ffn)")
    if config.engine.max_context > shape.max_positions:
        text = f"{config.engine.max_context} exceeds the model's positions (allowed: 1 to {shape.max_positions})"
        yield Fault(("engine.max_context",), text)


def _output_faults(config: JobConfig) -> Iterator[Fault]:
    if config.job.output.is_file() and config.job.output.stat().st_size:
        yield Fault(("job.output",), f"{config.job.output} exists (allowed: a new file, or --overwrite)")


def _arithmetic(config: JobConfig, start: Start) -> str:
    attention, ffn = config.topology.attention, config.topology.ffn
    parts = f"attention dp {attention.dp} x tp {attention.tp}"
    if config.connector.kind == "local":
        parts = "connector local"
    elif not config.topology.colocated:
        parts += f" + ffn ep {ffn.ep} x tp {ffn.tp}"
    wanted = job_topology(config).world_size
    hint = f"; deepspeed --num_gpus {wanted}" if start.launcher == "deepspeed" else ""
    return (
        f"{parts} = {wanted} rank{'s' if wanted > 1 else ''}, but {start.world_size} were started"
        f" (allowed: {wanted}{hint})"
    )


def _summary_stamp(summary: Path) -> tuple[int, int] | None:
    """Return what tells one version of the file from the next, which takes its place as a whole."""
    try:
        found = summary.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _exit_code(ending: Ending, summary: Path, before: tuple[int, int] | None) -> int:
    """Return the job's exit code; where the launcher ends well or is killed, what this run's summary says decides.

    `before` is the stamp of the summary of an earlier run.
    """
    status = "absent"
    if _summary_stamp(summary) not in (None, before):
        status = json.loads(summary.read_bytes())["status"]
    codes = {"ok": ExitCode.OK, "partial": ExitCode.SOME_FAILED, "interrupted": ExitCode.INTERRUPTED}
    if status == "fault":
        return ExitCode.FAULT
    if ending.was_stopped:
        return codes.get(status, ExitCode.FAULT if ending.was_killed else ExitCode.INTERRUPTED)
    if ending.exit_code > 0:
        return ending.exit_code
    if ending.exit_code < 0 or status not in codes:
        log.error("the launcher ended with %d, and %s is %s", ending.exit_code, summary, status)
        return ExitCode.FAULT
    return codes[status]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rendezvous(environ: Mapping[str, str], owner: int) -> Path:
    """Return a 0700 folder named after process `owner` and its start, and remove those of processes that are gone."""
    runtime = Path(environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    root = runtime / f"afd_megatron-{os.getuid()}"
    folder = root / f"{owner}-{process_start(owner)}"
    for path in (root, folder):
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            raise ConfigError(
                f"{path}: mode {found.st_mode:o} of user {found.st_uid} (allowed: a folder of mine, 0700)"
            )
    for other in root.iterdir():
        pid, _, start = other.name.partition("-")
        if pid.isdecimal() and str(process_start(int(pid))) != start:
            shutil.rmtree(other, ignore_errors=True)
    return folder
