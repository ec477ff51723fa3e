"""The whole schema of a job, configs/*.yaml, and what of it does not exist yet. Knows no YAML, no model, no torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, Strict

MAX_SEED = 2**63 - 1

FilePath = Annotated[Path, Strict(False)]  # text in YAML; relative paths are taken from the working directory
Count = Annotated[int, Field(ge=1, le=1 << 30)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class Section(BaseModel):
    """A mapping of the job file: strict types, no unknown key, no inf or nan, frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    path: FilePath
    """Folder with config.json and weights, and a tokenizer if the job has text; all as Hugging Face lays them out.

    For `load: torch_dist` the weights are Megatron's: `.metadata` lies in the folder itself, or in the iteration that
    latest_checkpointed_iteration.txt names, or in the newest `iter_*`.
    """
    load: Literal["hf", "random", "torch_dist"] = "hf"
    """Where weights come from: safetensors, Megatron's distributed checkpoint, or nowhere.

    `random` needs only config.json and is for measuring.
    """
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, KV cache and messages. float32 is what a CPU computes fastest and what exactness is tested in."""
    seed: Seed = 0
    """Of random weights."""


class AttentionTopology(Section):
    dp: Count = 1
    """Attention ranks that each hold requests of their own."""
    tp: Count = 1
    """Ranks that serve the same requests and share the heads; a divisor of the model's number of heads."""


class FfnTopology(Section):
    ep: Count = 1
    """FFN ranks that share the experts, whose numbers may differ by one."""
    tp: Count = 1
    """Ranks that hold the same experts and share their width."""


class TopologyConfig(Section):
    """Any ratio of attention to FFN ranks."""

    attention: AttentionTopology = AttentionTopology()
    ffn: FfnTopology = FfnTopology()
    colocated: bool = False
    """Every rank has both roles: the baseline that a split is compared with."""
    placement: str | None = None
    """Which role sits on which node; null is one node."""

    @property
    def num_attention(self) -> int:
        return self.attention.dp * self.attention.tp

    @property
    def num_ffn(self) -> int:
        return self.ffn.ep * self.ffn.tp


class ConnectorConfig(Section):
    kind: Literal["local", "gloo", "cuda_ipc", "nccl"] = "gloo"
    """What carries hidden states. `local`: one process has both roles. gloo runs on every machine."""
    reply_dtype: Literal["model", "float32"] = "model"
    """Of the FFN's partial sums on the wire; the model's dtype halves the bytes of bfloat16."""


class PipelineConfig(Section):
    stages: Annotated[int, Field(ge=1, le=64)] = 2
    """Slices of a step's rows that take turns; two is the least with which both roles work at once."""
    gate: Literal["ffn", "attention"] = "ffn"
    """Where the router runs; on the FFN only hidden states travel."""
    exchange: Literal["broadcast", "routed", "auto"] = "broadcast"
    """Which FFN ranks get a row: all, or those with an expert it chose, which wants the gate on attention. `auto` takes
    the one with fewer bytes that the gate allows."""
    boundary: Literal["ffn", "moe"] = "ffn"
    """What is remote: every MLP, or only those with experts."""
    shared_experts: Literal["ffn", "attention"] = "ffn"
    """Where the experts that every row passes run; on attention they do so while the row is with the others."""


class GraphsConfig(Section):
    enabled: bool = False
    """Replay CUDA graphs in steps of decode only."""
    buckets: Annotated[tuple[Count, ...], Strict(False)] = ()
    """Padded rows per rank and stage that get a graph, ascending."""


class EngineConfig(Section):
    """Limits of one attention rank."""

    max_requests_per_rank: Annotated[int, Field(ge=1, le=65536)] = 16
    """Requests in flight; the rest wait."""
    max_context: Count = 512
    """Tokens of a prompt and its completion."""
    prefill_chunk: Annotated[int, Field(ge=1, le=65536)] = 256
    """Prompt tokens in one step, which bounds how long running requests wait for new ones."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens in a block of the KV cache; small wastes little memory, large needs fewer table entries."""
    kv_blocks: Count | None = None
    """Blocks of the KV cache for requests; null holds `max_requests_per_rank` of `max_context` tokens."""
    kv_memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of a GPU's free memory for the KV cache."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks for requests; the cache holds one more, the scratch block."""
        return self.kv_blocks or self.max_requests_per_rank * -(-self.max_context // self.block_size)


class SamplingConfig(Section):
    """Defaults of a request, which may set its own."""

    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass to draw from."""
    top_k: Annotated[int, Field(ge=0, le=1 << 30)] = 0
    """Tokens to draw from; 0 is all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Least probability of a token, as a share of the likeliest one's."""
    max_new_tokens: Annotated[int, Field(ge=0, le=1 << 30)] = 64
    """Tokens of a completion; at 0 a request ends without a step."""
    seed: Seed = 0
    """Of draws and arrivals."""
    n: Annotated[int, Field(ge=1, le=1024)] = 1
    """Completions of a prompt."""
    logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Likeliest tokens to record per token, as in the OpenAI interface."""
    ignore_eos: bool = False
    """Go on to `max_new_tokens`; for measuring."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Strict(False)] = ()
    """Texts that end a completion and are cut off."""


class WorkloadConfig(Section):
    """What is decoded: the section `job`."""

    input: FilePath
    """JSONL of requests."""
    output: FilePath
    """JSONL of results; the summary lies beside it."""
    request_rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Arrivals per second, with random gaps; null is all at once."""
    resume: bool = False
    """Go on with an output that was left unfinished."""

    @property
    def summary(self) -> Path:
        """`results.summary.json` for `results.jsonl`."""
        return self.output.with_suffix(".summary.json")


class ObserveConfig(Section):
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level of log lines on stderr."""
    trace: FilePath | None = None
    """File for a timeline of all ranks."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port for Prometheus."""


class ControlConfig(Section):
    """When a silent rank counts as lost."""

    step_timeout_s: Seconds = 30.0
    """Longest wait for a peer inside a step, seconds; a long prompt on a loaded CPU takes some."""
    heartbeat_interval_s: Seconds = 1.0
    """Seconds between signs of life of idle ranks."""
    heartbeat_timeout_s: Seconds = 5.0
    """Silence after which an idle rank is lost, seconds; a few intervals, since an OS may stall a process."""
    handshake_timeout_s: Seconds = 60.0
    """Longest wait for all ranks at the start, seconds; loading weights from a cold disk is slow."""


class ThreadsConfig(Section):
    """CPU threads of one rank; null shares the machine's cores equally."""

    attention: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Of an attention rank, also one with both roles."""
    ffn: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Of an FFN rank."""


class LaunchConfig(Section):
    threads: ThreadsConfig = ThreadsConfig()
    grace_s: Seconds = 5.0
    """Seconds from a request to stop until what still runs is killed."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """Times to start again after a fault."""


class JobConfig(Section):
    """One job, as main and tools get it from `load_config`."""

    model: ModelConfig
    topology: TopologyConfig = TopologyConfig()
    connector: ConnectorConfig = ConnectorConfig()
    pipeline: PipelineConfig = PipelineConfig()
    graphs: GraphsConfig = GraphsConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    job: WorkloadConfig
    observe: ObserveConfig = ObserveConfig()
    control: ControlConfig = ControlConfig()
    launch: LaunchConfig = LaunchConfig()


class NotYet(NamedTuple):
    """What a key may be today, and what the rest of its values will bring."""

    allowed: tuple[object, ...]
    what: str


NOT_YET = {
    "topology.placement": NotYet((None,), "several nodes"),
    "connector.kind": NotYet(("local", "gloo"), "connectors between GPUs"),
    "connector.reply_dtype": NotYet(("model",), "partial sums in float32 on the wire"),
    "graphs.enabled": NotYet((False,), "CUDA graphs"),
    "engine.kv_memory_fraction": NotYet((0.9,), "a KV cache sized by GPU memory"),
    "job.resume": NotYet((False,), "resuming an unfinished output"),
    "observe.trace": NotYet((None,), "a timeline of all ranks"),
    "observe.metrics_port": NotYet((None,), "a Prometheus endpoint"),
    "launch.restarts": NotYet((0,), "starting again after a fault"),
}


def schema_keys(section: type[BaseModel] = JobConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting."""
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from schema_keys(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name
