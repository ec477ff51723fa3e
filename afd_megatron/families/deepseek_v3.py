"""DeepSeek-V3: DeepSeek-V2 with a sigmoid router, a bias for the choice, and groups by their two best experts.

Source: transformers, models/deepseek_v3. Its layer for predicting several tokens is not run.
"""

from collections.abc import Mapping

from afd_megatron.families import decoder
from afd_megatron.families.base import Family, ModelShape
from afd_megatron.families.deepseek_v2 import read_deepseek, tensor_rules
from afd_megatron.families.fields import Fields


def _read_shape(config: Mapping[str, object]) -> ModelShape:
    fields = Fields(config)
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    router = decoder.read_sigmoid_router(fields, num_groups=8, topk_groups=4, scale=2.5)
    has_pairs = fields.flag("rope_interleave", True)
    return read_deepseek(fields, "deepseek_v3", router, num_dense=3, has_pairs_side_by_side=has_pairs)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read_shape=_read_shape,
    tensor_rules=tensor_rules,
    ignored=decoder.ignored_and_next_layer,
)
