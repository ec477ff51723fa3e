"""DeepSeek-V3: DeepSeek-V2 with a sigmoid router, a bias for the choice, and groups by their two best experts.

Source: transformers, models/deepseek_v3. Its layer for predicting several tokens is not run.
"""

from collections.abc import Mapping

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape, RouterShape, Score
from afd_megatron.families.deepseek_v2 import read_deepseek, tensor_rules
from afd_megatron.families.fields import Fields


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    router = RouterShape(
        fields.count("num_experts_per_tok", 8),
        fields.flag("norm_topk_prob", True),
        Score.SIGMOID,
        has_bias=True,
        num_groups=fields.count("n_group", 8),
        topk_groups=fields.count("topk_group", 4),
        group_top=2,
        scale=fields.number("routed_scaling_factor", 2.5),
    )
    has_pairs = fields.flag("rope_interleave", True)
    return read_deepseek(fields, "deepseek_v3", router, num_dense=3, has_pairs_side_by_side=has_pairs)


def _ignored(shape: ModelShape) -> tuple[str, ...]:
    return (*decoder.ignored(shape), f"model.layers.{shape.num_layers}.")


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_shape=_read_shape,
    tensor_rules=tensor_rules,
    ignored=_ignored,
)
