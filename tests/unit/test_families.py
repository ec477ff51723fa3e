"""Reading config.json: shapes, both dialects of transformers, and what is refused."""

import json
from pathlib import Path

import pytest
from family_configs import FAMILIES, GLM4_MOE, QWEN3_MOE

from afd_megatron.errors import ConfigError
from afd_megatron.families import family_for, load_shape
from afd_megatron.families.base import ModelShape, QkNorm
from afd_megatron.topology import Role


def read(**overrides: object) -> ModelShape:
    config = QWEN3_MOE | overrides
    return family_for(config).read_shape(config)


def test_shape_follows_the_config() -> None:
    shape = read(num_hidden_layers=5, mlp_only_layers=[1], decoder_sparse_step=2, norm_topk_prob=False)
    assert shape.is_moe_layer == (False, False, False, True, False)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 16)
    assert (shape.num_experts, shape.router.top_k, shape.moe_width, shape.dense_width) == (8, 2, 48, 96)
    assert not shape.router.normalize_topk and not shape.has_tied_embeddings and shape.qk_norm is QkNorm.HEAD


def test_head_dim_defaults_to_hidden_size_by_heads() -> None:
    assert read(head_dim=None).head_dim == 16
    assert read(head_dim=None, hidden_size=128).head_dim == 32


def test_configs_of_transformers_4_and_5_give_the_same_shape() -> None:
    old = read(rope_theta=5e6, rope_scaling=None)
    new = QWEN3_MOE | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    new["num_local_experts"] = new.pop("num_experts")
    del new["rope_theta"]
    assert family_for(new).read_shape(new) == old
    assert old.rope.theta == 5e6


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_act", "gelu", r"hidden_act: 'gelu' \(allowed: 'silu'\)"),
        ("attention_bias", True, r"attention_bias: True \(allowed: False\)"),
        ("use_sliding_window", True, "use_sliding_window: True"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor: 0.5"),
        (
            "quantization_config",
            {"quant_method": "awq"},
            r"quantization_config\.quant_method: 'awq' \(allowed: 'fp8' or",
        ),
        ("quantization_config", {"quant_method": "fp8"}, r"quantization_config\.weight_block_size: \[\] "),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size: .128, 0"),
        ("rope_scaling", {"type": "su", "factor": 4.0}, r"rope_scaling\.type: 'su' \(allowed: 'default' or 'yarn'\)"),
        ("rope_scaling", {"type": "yarn", "factor": 0}, r"rope_scaling\.factor: 0 \(allowed: a number above 0\)"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, r"rope_scaling\.rope_type: 'linear'"),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}, r"rope_parameters\.rope_type: 'llama3'"),
        ("rope_parameters", {"partial_rotary_factor": 0.5}, r"rope_parameters\.partial_rotary_factor: 0\.5"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1}, r"rope_parameters\.rope_theta: -1"),
        ("num_experts_per_tok", 9, r"num_experts_per_tok: 9 \(allowed: 1 to the number of experts 8\)"),
        ("num_key_value_heads", 3, "num_key_value_heads: 3"),
        ("head_dim", 15, "head_dim: 15"),
        ("hidden_size", None, r"hidden_size: missing \(allowed: an integer of at least 1\)"),
        ("hidden_size", True, "hidden_size: True"),
        ("num_hidden_layers", "4", "num_hidden_layers: '4'"),
        ("norm_topk_prob", 1, "norm_topk_prob: 1"),
        ("mlp_only_layers", [0.5], r"mlp_only_layers: \[0\.5\]"),
        ("rms_norm_eps", 0, "rms_norm_eps: 0"),
    ],
)
def test_unsupported_field_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**{field: value})


def test_all_faults_are_reported_at_once_with_the_file(tmp_path: Path) -> None:
    config = QWEN3_MOE | {"hidden_act": "gelu", "vocab_size": 0, "rope_scaling": {"rope_type": "linear"}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as raised:
        load_shape(tmp_path)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3 and all(line.startswith(f"{path}: ") for line in lines)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers"])
def test_a_field_that_several_rules_need_is_missed_once(family: str, field: str) -> None:
    config = FAMILIES[family] | {field: None}
    with pytest.raises(ConfigError) as raised:
        family_for(config).read_shape(config)
    faults = [line for line in str(raised.value).splitlines() if line.startswith(f"{field}: ")]
    assert faults == [f"{field}: missing (allowed: an integer of at least 1)"]


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None, "Qwen3MoeForCausalLM"])
def test_unknown_architecture_is_refused_and_the_known_ones_listed(architectures: object) -> None:
    with pytest.raises(
        ConfigError, match=r"architectures: .*\(allowed: DeepseekV2ForCausalLM, .*Qwen3MoeForCausalLM\)"
    ):
        read(architectures=architectures)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_unreadable_config_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        load_shape(tmp_path)


def test_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: not readable"):
        load_shape(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_group", 5, r"n_group: 5 \(allowed: a divisor of the number of experts 12\)"),
        ("topk_group", 1, r"topk_group: 1 \(allowed: enough groups for num_experts_per_tok 4\)"),
        ("topk_group", 5, r"topk_group: 5 \(allowed: 1 to n_group 4\)"),
        ("partial_rotary_factor", 0.3, r"head_dim: 24, of which 7 are rotated \(allowed: an even number of 2 to 24\)"),
        ("routed_scaling_factor", 0, "routed_scaling_factor: 0"),
    ],
)
def test_grouped_router_and_partial_rotation_are_checked(field: str, value: object, message: str) -> None:
    config = GLM4_MOE | {field: value}
    with pytest.raises(ConfigError, match=message):
        family_for(config).read_shape(config)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_rules_give_every_tensor_to_one_role(family: str, is_tied: bool) -> None:
    config = FAMILIES[family] | {"tie_word_embeddings": is_tied}
    shape = family_for(config).read_shape(config)
    rules = family_for(config).tensor_rules(shape)
    names = [rule.name for rule in rules]
    sources = [source.name for rule in rules for source in rule.tensors(shape.num_experts)]
    assert len(set(names)) == len(names) and len(set(sources)) == len(sources)
    assert all((rule.role is Role.FFN) == (".mlp." in rule.name) for rule in rules)
    assert ("lm_head.weight" in sources) != is_tied
    routed = [rule.name for rule in rules if rule.name.endswith("router.weight")]
    moe_layers = [layer for layer, is_moe in enumerate(shape.is_moe_layer) if is_moe]
    assert routed == [f"decoder.layers.{layer}.mlp.router.weight" for layer in moe_layers]
