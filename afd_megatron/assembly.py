"""Builds from the config what a rank's roles consist of, and reports on it. Knows no step and no message."""

import logging
import os
import threading
from collections import Counter
from dataclasses import asdict, astuple, dataclass

import torch

from afd_megatron.attention.leader import Leader
from afd_megatron.attention.step import AttentionStep
from afd_megatron.attention.worker import AttentionWorker, BatchShape
from afd_megatron.config import JobConfig
from afd_megatron.connector import make_ports
from afd_megatron.connector.base import ExchangeLayout
from afd_megatron.control.exchange import AttentionExchange
from afd_megatron.control.plans import PlanReceiver, PlanSender
from afd_megatron.distributed import World, megatron_groups
from afd_megatron.engine.clock import JobClock
from afd_megatron.engine.intake import Intake, JobInput, PromptLimits, read_input
from afd_megatron.engine.kv_blocks import BlockPool
from afd_megatron.engine.results import ResultWriter
from afd_megatron.engine.scheduler import Scheduler, SchedulerLimits
from afd_megatron.engine.text import TextCodec
from afd_megatron.families import load_shape
from afd_megatron.families.base import ModelShape
from afd_megatron.ffn.step import FfnStep
from afd_megatron.ffn.worker import FfnWorker
from afd_megatron.launcher import is_routed, staying
from afd_megatron.models.attention_model import AttentionModel
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.weights import LoadReport, load_attention, load_ffn, open_weights
from afd_megatron.observability.progress import JobProgress, Progress
from afd_megatron.plan import PlanRules, split_rows
from afd_megatron.topology import Role, Topology, contiguous_slices

log = logging.getLogger(__name__)
_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class JobFiles:
    """What rank 0 has of the job before the ranks meet: its input, read, and its output, open."""

    input: JobInput
    writer: ResultWriter


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


class RankParts:
    """Makes what a rank's roles consist of, and reports on them."""

    def __init__(self, config: JobConfig, world: World, shape: ModelShape, progress: Progress) -> None:
        self._config = config
        self._rules = _plan_rules(config)
        self._world = world
        self._shape = shape
        self._progress = progress
        self._groups = megatron_groups(world, timeout_s=config.control.step_timeout_s)
        self._dtype = getattr(torch, config.model.dtype)
        self._source = open_weights(config.model.path, shape, config.model.load, seed=config.model.seed, device=_DEVICE)
        self._stays = staying(config)
        is_remote = shape.is_remote_layer(self._stays)
        layout = ExchangeLayout(
            hidden_size=shape.hidden_size,
            top_k=shape.router.top_k if self._stays.router else 0,
            dtype=self._dtype,
            last_layer=max(layer for layer, goes in enumerate(is_remote) if goes),
            num_stages=config.pipeline.stages,
            max_rows=self._rules.max_rows,
            unrouted_layers=frozenset(layer for layer, is_moe in enumerate(shape.is_moe_layer) if not is_moe),
            expert_slices=_expert_slices(shape, world.topology) if is_routed(config, shape) else None,
        )
        self._ports = make_ports(config.connector.kind, world, layout, timeout_s=config.control.step_timeout_s)
        self._loaded: dict[Role, LoadReport] = {}
        self._steps: dict[Role, Counter[str]] = {}
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
            stays=self._stays,
            tp=world.topology.ffn_tp,
        )
        self._note_loaded(Role.FFN, load_ffn(model, self._source, self._shape))
        assert self._ports.ffn is not None
        return FfnStep(model, self._ports.ffn, progress=self._progress)

    def ffn_worker(self, step: FfnStep) -> FfnWorker:
        control = self._config.control
        receiver = PlanReceiver(
            self._world,
            self._rules,
            step_timeout_s=control.step_timeout_s,
            heartbeat_timeout_s=control.heartbeat_timeout_s,
        )
        worker = FfnWorker(receiver, step, progress=self._progress)
        self._steps[Role.FFN] = worker.steps
        return worker

    def leader(self, job: JobFiles) -> Leader:
        config = self._config
        is_alone = config.topology.colocated or config.connector.kind == "local"
        sender = None if is_alone else PlanSender(self._world, self._rules, timeout_s=config.control.step_timeout_s)
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
        model = AttentionModel(shape, self._dtype, _DEVICE, self._groups[Role.ATTENTION], self._stays)
        self._note_loaded(Role.ATTENTION, load_attention(model, self._source, shape))
        num_blocks = engine.num_kv_blocks + 1  # and the scratch block
        tp = self._world.topology.attention_tp
        cache = KvCache(shape, num_blocks, engine.block_size, self._dtype, _DEVICE, tp=tp)
        self._kv_bytes = cache.num_bytes
        scheduler = Scheduler(
            SchedulerLimits(engine.max_requests_per_rank, engine.max_context, engine.prefill_chunk),
            BlockPool(num_blocks, engine.block_size),
            TextCodec(config.model.path),
            clock=self._clock,
        )
        assert self._ports.attention is not None
        worker = AttentionWorker(
            self._world.topology.role_rank(self._world.rank, Role.ATTENTION),
            scheduler,
            AttentionStep(model, cache, self._ports.attention, progress=self._progress, ffn=ffn),
            AttentionExchange(self._world, timeout_s=config.control.step_timeout_s),
            rules=self._rules,
            shape=BatchShape(engine.block_size, shape.vocab_size, _DEVICE),
            clock=self._clock,
            leader=leader,
            progress=self._progress,
            stop=stop,
        )
        self._steps[Role.ATTENTION] = worker.steps
        return worker

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
                    "steps": self._steps.get(role),
                }
            )
        return reports

    def _note_loaded(self, role: Role, loaded: LoadReport) -> None:
        self._loaded[role] = loaded
        log.info(
            "%s weights: %.1f MB, of experts %.1f MB, of embedding and head %.1f MB; read %.1f MB",
            role,
            *(num_bytes / 1e6 for num_bytes in astuple(loaded)),
        )


def _plan_rules(config: JobConfig) -> PlanRules:
    num_rows = config.engine.max_requests_per_rank + config.engine.prefill_chunk
    return PlanRules(
        num_stages=config.pipeline.stages,
        num_attention=config.topology.num_attention,
        max_rows=split_rows(split_rows(num_rows, config.pipeline.stages)[0], config.topology.attention.tp)[0],
        graphs_enabled=config.graphs.enabled,
        buckets=config.graphs.buckets,
        attention_tp=config.topology.attention.tp,
    )


def _expert_slices(shape: ModelShape, topology: Topology) -> tuple[range, ...]:
    """Return the experts of each FFN rank."""
    slices = contiguous_slices(shape.num_experts, topology.num_ffn // topology.ffn_tp)
    return tuple(mine for mine in slices for _ in range(topology.ffn_tp))
