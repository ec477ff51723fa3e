"""What a family tells about its models: the shape, and where each tensor comes from. Knows no torch, no Megatron."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from afd_megatron.topology import Role


class QkNorm(StrEnum):
    """Over what queries and keys are normalised before they are rotated: nothing, each head, all heads together."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"


class Score(StrEnum):
    """How router logits become scores: over all experts, or of each expert alone."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class YarnShape:
    """Rotary frequencies stretched by `factor` beyond `original_max_positions`, cos and sin times `attention_factor`.

    Frequencies between `beta_fast` and `beta_slow` turns over the original context are blended; `truncate` rounds the
    bounds of the blend to whole frequencies. Latent attention multiplies its scores by `latent_factor` as well.
    Source: arXiv 2309.00071; DeepSeek-V2's and V3's own code for the last.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    latent_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Rotary positions: the first `num_dims` of a head turn with frequencies theta ** (-2 i / num_dims)."""

    theta: float
    num_dims: int
    yarn: YarnShape | None = None


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Multi-head latent attention: keys and values of all heads are made of one latent of `kv_rank` dims.

    A head has `plain_dim` dims without position and `RopeShape.num_dims` with, whose key all heads share; its values
    have `v_dim`. Queries come from a latent of `q_rank` dims, or straight from the hidden state if that is None.
    `has_pairs_side_by_side`: dims 2 i and 2 i + 1 turn together, not i and i + num_dims / 2. Source: arXiv 2405.04434.
    """

    q_rank: int | None
    kv_rank: int
    plain_dim: int
    v_dim: int
    has_pairs_side_by_side: bool


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How a row's `top_k` experts are chosen, and their weights.

    With `has_logit_bias` a learned bias is part of the logits; with `has_bias` one is added to the scores for the
    choice alone. With more than one group only experts of the `topk_groups` best groups can be chosen, a group being as
    good as the sum of its `group_top` best experts. Weights are the chosen experts' scores, divided by their sum if
    `normalize_topk`, times `scale`.
    """

    top_k: int
    normalize_topk: bool
    score: Score = Score.SOFTMAX
    has_logit_bias: bool = False
    has_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_top: int = 1
    scale: float = 1.0


class ClampedSwiglu(NamedTuple):
    """The activation (up + 1) * gate * sigmoid(alpha * gate), gate cut above and up on both sides at `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as both roles must agree on it; counts are of the whole model, never of a rank's part.

    `is_moe_layer` has one flag per layer, 0-based. `moe_width`, `shared_width` and `dense_width` are the inner sizes of
    one expert, of all shared experts together (0: none) and of a dense MLP. With `has_shared_gate` the shared experts'
    output is scaled row by row. Queries, keys and values are clipped to `qkv_clip` after the norm. With `latent` there
    are as many KV heads as heads, and `head_dim` is that of queries and keys. `windows` has how many positions a row of
    each layer sees, its own included, None for all. With `has_sinks` each head has a logit that takes part in its
    softmax and has no value. `expert_activation` None is SwiGLU. `fp8_block` is rows and columns of the blocks in which
    the checkpoint is scaled, if it is.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    is_moe_layer: tuple[bool, ...]
    num_experts: int
    moe_width: int
    dense_width: int
    router: RouterShape
    rope: RopeShape
    norm_eps: float
    has_tied_embeddings: bool
    qk_norm: QkNorm = QkNorm.NONE
    has_qkv_bias: bool = False
    qkv_clip: float | None = None
    latent: LatentShape | None = None
    windows: tuple[int | None, ...] | None = None
    has_sinks: bool = False
    has_output_bias: bool = False
    has_expert_bias: bool = False
    expert_activation: ClampedSwiglu | None = None
    fp8_block: tuple[int, int] | None = None
    shared_width: int = 0
    has_shared_gate: bool = False

    def can_share_heads(self, tp: int) -> bool:
        """Return whether `tp` ranks can have equally many heads each, with the KV heads of these."""
        return not self.num_heads % tp and (not self.num_kv_heads % tp or not tp % self.num_kv_heads)

    def kv_heads(self, tp_rank: int, tp: int) -> range:
        """Return the KV heads of one of `tp` ranks; where there are fewer than ranks, several ranks hold the same."""
        first = tp_rank * self.num_kv_heads // tp
        return range(first, first + max(1, self.num_kv_heads // tp))

    def is_remote_layer(self, stays: "Staying") -> tuple[bool, ...]:
        """Return a flag per layer: whether its rows travel to FFN ranks."""
        return self.is_moe_layer if stays.dense else (True,) * self.num_layers


class Staying(NamedTuple):
    """What of the FFN stays on attention ranks: the routers, the MLPs of dense layers, the shared experts."""

    router: bool = False
    dense: bool = False
    shared: bool = False


class Layout(StrEnum):
    """How the HF tensors of a rule make ours.

    COPY: one tensor as it is. ROWS: tensors over each other, the rank's slice of the rows of each, as of heads, or of
    gate and up. COLUMNS: the rank's slice of the columns. VOCAB: the rank's rows of equal parts, the last one padded
    with zeros. QKV: q, k, v of the rank's heads, interleaved by KV group (q.. k v per group). KV_ROWS: rows of the
    rank's KV heads.
    EXPERT_GATE_UP / EXPERT_DOWN: the rank's experts stacked and cut to its slice of their width, `{expert}` in the HF
    name stands for each of them, or one packed tensor. EXPERT_PAIRS: gate and up rows of a packed tensor take turns.
    Packed ones may be a vector per expert; what is added to the sum of the slices is that of the first of them, 0 in
    the others.
    """

    COPY = "copy"
    ROWS = "rows"
    COLUMNS = "columns"
    VOCAB = "vocab"
    QKV = "qkv"
    KV_ROWS = "kv_rows"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_DOWN = "expert_down"
    EXPERT_PAIRS = "expert_pairs"


class HfTensor(NamedTuple):
    """A tensor of a checkpoint. A name with `{expert}` stands for one tensor of this shape per expert."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRule:
    """One tensor of ours: its Megatron name, layers counted over the whole model, its HF sources, its role.

    `packed` is the one tensor that holds all experts and may be there instead of `sources`, which may be none; with
    `is_turned` its matrices lie with the input dim first. What `is_movable` may stay on attention (`Staying`) and is on
    `role` by default.
    """

    name: str
    sources: tuple[HfTensor, ...]
    layout: Layout
    role: Role
    packed: HfTensor | None = None
    is_movable: bool = False
    is_turned: bool = False

    def tensors(self, num_experts: int) -> list[HfTensor]:
        """Return the sources with the name of every expert written out, or the packed tensor if there are none."""
        if not self.sources:
            assert self.packed is not None
            return [self.packed]
        return [
            HfTensor(source.name.format(expert=expert), source.shape)
            for source in self.sources
            for expert in range(num_experts if "{expert}" in source.name else 1)
        ]


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `read_shape` refuses what it does not support with a `ConfigError` of a line per field.

    A tensor of a checkpoint that no rule names is unexpected, unless its name contains one of `ignored(shape)`.
    """

    name: str
    architecture: str
    read_shape: Callable[[Mapping[str, object]], ModelShape]
    tensor_rules: Callable[[ModelShape], tuple[TensorRule, ...]]
    ignored: Callable[[ModelShape], tuple[str, ...]]
