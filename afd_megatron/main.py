"""One rank's life: config, world, role, work, report. Knows every room, and the inside of none."""

import json
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import nullcontext
from dataclasses import asdict
from typing import NoReturn

import torch

from afd_megatron import __version__
from afd_megatron.assembly import JobFiles, RankParts, open_job
from afd_megatron.attention.leader import Leader
from afd_megatron.attention.worker import AttentionWorker
from afd_megatron.config import JobConfig
from afd_megatron.control.handshake import gather, handshake
from afd_megatron.distributed import World, guard_process, join
from afd_megatron.engine.results import benchmark_metrics, write_summary
from afd_megatron.errors import AfdError, CheckpointError, ConfigError, ExitCode
from afd_megatron.families import load_shape
from afd_megatron.families.base import ModelShape
from afd_megatron.launcher import LaunchedRank, job_topology
from afd_megatron.observability.progress import Progress
from afd_megatron.observability.summary import job_summary
from afd_megatron.topology import Role

log = logging.getLogger(__name__)


def run(config: JobConfig, launched: LaunchedRank, *, overwrite: bool) -> int:
    """Live one rank's life and return the exit code of its process; a fault ends the process at once.

    A fault is one line on stderr that names rank, role, step, layer and stage, so that the first culprit can be told.

    Raises:
        AfdError: the job cannot be run as it is (exit code CONFIG); nothing was decoded.
    """
    topology = job_topology(config)
    name = topology.name(launched.rank)
    logging.basicConfig(level=config.observe.log_level.upper(), format=f"%(asctime)s {name}: %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    progress = Progress()
    stop = _stop_on_signal(progress)
    guard_process(config.launch.grace_s)
    try:
        job = open_job(config, overwrite=overwrite) if launched.rank == 0 else None
        timeout_s = config.control.handshake_timeout_s
        with join(launched.rank, topology, launched.rendezvous, timeout_s=timeout_s) as world:
            return serve(config, world, job, progress=progress, stop=stop)
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must not wait for this one
        _die(config, launched.rank, f"{name}: {progress}: {type(error).__name__}: {error}", error)


def serve(
    config: JobConfig, world: World, job: JobFiles | None, *, progress: Progress, stop: threading.Event
) -> ExitCode:
    """Run one job in a joined world; all its ranks call this together, for one job after the other.

    Returns:
        The job's exit code on rank 0, which alone has a `job`; OK on the others.
    """
    shape = load_shape(config.model.path)
    handshake(world, _agreed_fields(config, shape), timeout_s=config.control.handshake_timeout_s)
    parts = RankParts(config, world, shape, progress)
    ffn = parts.ffn_step() if Role.FFN in world.topology.roles(world.rank) else None
    if Role.ATTENTION not in world.topology.roles(world.rank):
        assert ffn is not None
        follower = parts.ffn_worker(ffn)
        world.barrier()  # all have loaded: from here on a peer that is late is lost
        follower.run()
        leader = None
    else:
        leader = None if job is None else parts.leader(job)
        worker = parts.attention_worker(ffn, leader, stop)
        with leader or nullcontext():
            world.barrier()
            worker.warm_up(config.engine.max_requests_per_rank)
            worker.run()
    parts.close()
    reports = gather(world, json.dumps(parts.reports()).encode(), timeout_s=config.control.step_timeout_s)
    if leader is None:
        return ExitCode.OK
    return _summarise(config, worker, leader, [report for line in reports for report in json.loads(line)])


def _summarise(config: JobConfig, worker: AttentionWorker, leader: Leader, ranks: list[dict[str, object]]) -> ExitCode:
    """Write the summary and return the job's exit code."""
    metrics = benchmark_metrics(leader.results, worker.duration_s) | {"unstarted": leader.num_unstarted}
    if worker.was_interrupted:
        status, exit_code = "interrupted", ExitCode.INTERRUPTED
    elif metrics["failed"]:
        status, exit_code = "partial", ExitCode.SOME_FAILED
    else:
        status, exit_code = "ok", ExitCode.OK
    counted = {"metrics": metrics, "steps": dict(worker.steps)}
    summary = job_summary(config, status, ranks=ranks, counted=counted)
    write_summary(config.job.summary, summary)
    log.info(
        "%s: %d of %d requests, %.1f tokens/s",
        status,
        metrics["completed"],
        len(leader.results) + leader.num_unstarted,
        metrics["output_throughput"],
    )
    return exit_code


def _agreed_fields(config: JobConfig, shape: ModelShape) -> dict[str, str]:
    """Return what the protocol depends on, for the handshake."""
    kept = config.model_dump(mode="json", include={"topology", "connector", "pipeline", "graphs", "engine", "control"})
    fields = {f"{section}.{key}": str(value) for section, keys in kept.items() for key, value in keys.items()}
    fields |= {f"model.{key}": str(value) for key, value in asdict(shape).items()}
    return fields | {"model.dtype": config.model.dtype, "afd_megatron": __version__, "torch": torch.__version__}


def _stop_on_signal(progress: Progress) -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets; a Python handler would not run while gloo blocks.

    Before the first step there is nothing to finish, and ranks may wait for one that never comes: the process ends at
    once. Threads that are running already must block both signals, or one of them may die of it.
    """
    stop = threading.Event()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait() -> None:
        signal.sigwait(signals)
        if progress.step is None:
            os._exit(ExitCode.INTERRUPTED)
        stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stop


def _die(config: JobConfig, rank: int, line: str, error: Exception) -> NoReturn:
    """Report a fault and end the process without waiting for anyone."""
    if not isinstance(error, AfdError):
        traceback.print_exception(error)
    sys.stderr.write(f"AFD FAILURE {line}\n")
    sys.stderr.flush()
    try:
        if rank == 0:
            write_summary(config.job.summary, job_summary(config, "fault", ranks=[], counted={"fault": line}))
    finally:
        os._exit(ExitCode.FAULT)
