"""One rank's life: config, world, role, work, report. Knows every room, and the inside of none."""

import json
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch

from afd_megatron import __version__
from afd_megatron.attention.leader import Leader
from afd_megatron.attention.step import AttentionStep
from afd_megatron.attention.worker import AttentionWorker, BatchShape
from afd_megatron.config import JobConfig
from afd_megatron.connector import make_ports
from afd_megatron.connector.base import ExchangeLayout
from afd_megatron.control import AttentionExchange, PlanReceiver, PlanSender, gather, handshake
from afd_megatron.distributed import World, guard_process, join, megatron_groups
from afd_megatron.engine.clock import JobClock
from afd_megatron.engine.intake import Intake, JobInput, PromptLimits, read_input
from afd_megatron.engine.kv_blocks import BlockPool
from afd_megatron.engine.results import ResultWriter, benchmark_metrics, write_summary
from afd_megatron.engine.scheduler import Scheduler, SchedulerLimits
from afd_megatron.engine.text import TextCodec
from afd_megatron.errors import AfdError, ExitCode
from afd_megatron.families import load_shape
from afd_megatron.families.base import ModelShape
from afd_megatron.ffn.step import FfnStep
from afd_megatron.ffn.worker import FfnWorker
from afd_megatron.launcher import LaunchedRank, job_topology
from afd_megatron.models.attention_model import AttentionModel
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.weights import LoadReport, load_attention, load_ffn, open_weights
from afd_megatron.observability.progress import JobProgress, Progress
from afd_megatron.observability.summary import job_summary
from afd_megatron.plan import PlanRules
from afd_megatron.topology import Role

log = logging.getLogger(__name__)
_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What rank 0 has of the job before the ranks meet: its input, read, and its output, open."""

    input: JobInput
    writer: ResultWriter


def run(config: JobConfig, launched: LaunchedRank, *, overwrite: bool) -> int:
    """Live one rank's life and return the exit code of its process; a fault ends the process at once.

    A fault is one line on stderr that names rank, role, step, layer and stage, so that the first culprit can be told.
    """
    topology = job_topology(config)
    name = topology.name(launched.rank)
    logging.basicConfig(level=config.observe.log_level.upper(), format=f"%(asctime)s {name}: %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    progress = Progress()
    guard_process()
    stop = _stop_on_signal()
    try:
        job = open_job(config, overwrite=overwrite) if launched.rank == 0 else None
        timeout_s = config.control.handshake_timeout_s
        with join(launched.rank, topology, launched.rendezvous, timeout_s=timeout_s) as world:
            return serve(config, world, job, progress=progress, stop=stop)
    except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must not wait for this one
        _die(config, launched.rank, f"{name}: {progress}: {type(error).__name__}: {error}", error)


def open_job(config: JobConfig, *, overwrite: bool) -> JobFiles:
    """Read the input and open the output.

    Raises:
        ConfigError: the job cannot be run.
    """
    shape = load_shape(config.model.path)
    lines = read_input(
        config.job.input,
        config.sampling,
        TextCodec(config.model.path),
        limits=PromptLimits(shape.vocab_size, config.engine.max_context),
        request_rate=config.job.request_rate,
    )
    writer = ResultWriter(config.job.output, overwrite=overwrite)
    config.job.summary.unlink(missing_ok=True)  # it would speak for this job
    return JobFiles(lines, writer)


def serve(
    config: JobConfig, world: World, job: JobFiles | None, *, progress: Progress, stop: threading.Event
) -> ExitCode:
    """Run one job in a joined world; all its ranks call this together, for one job after the other.

    Returns:
        The job's exit code on rank 0, which alone has a `job`; OK on the others.
    """
    shape = load_shape(config.model.path)
    handshake(world, _agreed_fields(config, shape), timeout_s=config.control.handshake_timeout_s)
    parts = _Parts(config, world, shape, progress)
    ffn = parts.ffn_step() if Role.FFN in world.topology.roles(world.rank) else None
    if Role.ATTENTION not in world.topology.roles(world.rank):
        assert ffn is not None
        control = config.control
        receiver = PlanReceiver(
            world,
            parts.rules,
            step_timeout_s=control.step_timeout_s,
            heartbeat_timeout_s=control.heartbeat_timeout_s,
        )
        world.barrier()  # all have loaded: from here on a peer that is late is lost
        FfnWorker(receiver, ffn, progress=progress).run()
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


class _Parts:
    """Makes what a rank's roles consist of, and reports on them."""

    def __init__(self, config: JobConfig, world: World, shape: ModelShape, progress: Progress) -> None:
        self.rules = _plan_rules(config)
        self._config = config
        self._world = world
        self._shape = shape
        self._progress = progress
        self._groups = megatron_groups(world)
        self._dtype = getattr(torch, config.model.dtype)
        self._source = open_weights(
            config.model.path, shape, seed=config.model.seed, is_random=config.model.load == "random"
        )
        self._gate_on_attention = config.pipeline.gate == "attention"
        layout = ExchangeLayout(
            hidden_size=shape.hidden_size,
            top_k=shape.top_k if self._gate_on_attention else 0,
            dtype=self._dtype,
            num_layers=shape.num_layers,
            num_stages=config.pipeline.stages,
            max_rows=self.rules.max_rows,
            unrouted_layers=frozenset(layer for layer, is_moe in enumerate(shape.is_moe_layer) if not is_moe),
        )
        self._ports = make_ports(config.connector.kind, world, layout, timeout_s=config.control.step_timeout_s)
        self._loaded: dict[Role, LoadReport] = {}
        self._kv_bytes = 0
        self._clock = JobClock()

    def ffn_step(self) -> FfnStep:
        world = self._world
        model = FfnModel(
            self._shape,
            self._dtype,
            _DEVICE,
            self._groups[Role.FFN],
            role_rank=world.topology.role_rank(world.rank, Role.FFN),
            num_ffn=world.topology.num_ffn,
            has_router=not self._gate_on_attention,
        )
        self._loaded[Role.FFN] = load_ffn(model, self._source, self._shape)
        assert self._ports.ffn is not None
        return FfnStep(model, self._ports.ffn, progress=self._progress)

    def leader(self, job: JobFiles) -> Leader:
        config = self._config
        is_alone = config.topology.colocated or config.connector.kind == "local"
        sender = None if is_alone else PlanSender(self._world, self.rules, timeout_s=config.control.step_timeout_s)
        num_results = len(job.input.requests) + len(job.input.failures)
        leader = Leader(
            Intake(job.input.requests),
            job.writer,
            sender,
            clock=self._clock,
            heartbeat_interval_s=config.control.heartbeat_interval_s,
            progress=JobProgress(num_results),
        )
        for failure in job.input.failures:
            leader.record(failure)
        return leader

    def attention_worker(self, ffn: FfnStep | None, leader: Leader | None, stop: threading.Event) -> AttentionWorker:
        config, shape, engine = self._config, self._shape, self._config.engine
        model = AttentionModel(
            shape, self._dtype, _DEVICE, self._groups[Role.ATTENTION], has_router=self._gate_on_attention
        )
        self._loaded[Role.ATTENTION] = load_attention(model, self._source, shape)
        num_blocks = engine.num_kv_blocks + 1  # and the scratch block
        cache = KvCache(shape, num_blocks, engine.block_size, self._dtype, _DEVICE)
        self._kv_bytes = cache.num_bytes
        scheduler = Scheduler(
            SchedulerLimits(engine.max_requests_per_rank, engine.max_context, engine.prefill_chunk),
            BlockPool(num_blocks, engine.block_size),
            TextCodec(config.model.path),
            clock=self._clock,
        )
        assert self._ports.attention is not None
        return AttentionWorker(
            self._world.topology.role_rank(self._world.rank, Role.ATTENTION),
            scheduler,
            AttentionStep(model, cache, self._ports.attention, progress=self._progress, ffn=ffn),
            AttentionExchange(self._world, timeout_s=config.control.step_timeout_s),
            rules=self.rules,
            shape=BatchShape(engine.block_size, shape.vocab_size, _DEVICE),
            clock=self._clock,
            leader=leader,
            progress=self._progress,
            stop=stop,
        )

    def close(self) -> None:
        """Let the last messages leave."""
        for port in self._ports:
            if port is not None:
                port.close()

    def reports(self) -> list[dict[str, object]]:
        """Return an entry for the summary per role of this rank."""
        ends = {Role.ATTENTION: self._ports.attention, Role.FFN: self._ports.ffn}
        reports = []
        for role, loaded in self._loaded.items():
            end = ends[role]
            assert end is not None
            reports.append(
                {
                    "rank": self._world.rank,
                    "role": role,
                    "role_rank": self._world.topology.role_rank(self._world.rank, role),
                    "device": str(_DEVICE),
                    "pid": os.getpid(),
                    "num_threads": torch.get_num_threads(),
                    **asdict(loaded),
                    "kv_bytes": self._kv_bytes if role is Role.ATTENTION else 0,
                    **asdict(end.traffic),
                }
            )
        return reports


def _summarise(config: JobConfig, worker: AttentionWorker, leader: Leader, ranks: list[dict[str, object]]) -> ExitCode:
    """Write the summary and return the job's exit code."""
    metrics = benchmark_metrics(leader.results, worker.duration_s)
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
        len(leader.results),
        metrics["output_throughput"],
    )
    return exit_code


def _plan_rules(config: JobConfig) -> PlanRules:
    num_rows = config.engine.max_requests_per_rank + config.engine.prefill_chunk
    return PlanRules(
        num_stages=config.pipeline.stages,
        num_attention=job_topology(config).num_attention,
        max_rows=-(-num_rows // config.pipeline.stages),
        graphs_enabled=config.graphs.enabled,
        buckets=config.graphs.buckets,
    )


def _agreed_fields(config: JobConfig, shape: ModelShape) -> dict[str, str]:
    """Return what the protocol depends on, for the handshake."""
    kept = config.model_dump(mode="json", include={"topology", "connector", "pipeline", "graphs", "engine", "control"})
    fields = {f"{section}.{key}": str(value) for section, keys in kept.items() for key, value in keys.items()}
    fields |= {f"model.{key}": str(value) for key, value in asdict(shape).items()}
    return fields | {"model.dtype": config.model.dtype, "afd_megatron": __version__, "torch": torch.__version__}


def _stop_on_signal() -> threading.Event:
    """Return an event that SIGTERM or SIGINT sets; a Python handler would not run while gloo blocks."""
    stop = threading.Event()
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait() -> None:
        signal.sigwait(signals)
        stop.set()

    threading.Thread(target=wait, name="signals", daemon=True).start()
    return stop


def _die(config: JobConfig, rank: int, line: str, error: Exception) -> NoReturn:
    """Report a fault and end the process without waiting for anyone."""
    if not isinstance(error, AfdError):
        traceback.print_exception(error)
    sys.stderr.write(f"AFD FAILURE {line}\n")
    sys.stderr.flush()
    if rank == 0:
        write_summary(config.job.summary, job_summary(config, "fault", ranks=[], counted={"fault": line}))
    os._exit(error.exit_code if isinstance(error, AfdError) else ExitCode.FAULT)
