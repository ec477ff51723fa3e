"""TP ranks of attention and of experts give the tokens of transformers (CASES 1, 6, 12, 21)."""

from pathlib import Path

import pytest
from family_configs import FAMILIES
from models_for_tests import make_random_qwen3_moe
from safetensors.torch import load_file, save_file
from transformers_reference import TransformersReference

from tests.ranks.harness import Ranks
from tests.ranks.jobs import NUM_NEW, decode, job_values, read_summary, split, tokens

GREEDY = {"max_new_tokens": NUM_NEW, "ignore_eos": True}
# attention dp x tp, ffn ep x tp; there are 2 KV heads, 8 experts of width 48, and a dense layer of width 96
SHAPES = [(1, 2, 1, 1), (1, 4, 1, 1), (2, 2, 3, 1), (1, 1, 1, 2), (1, 2, 2, 2), (1, 1, 1, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary that no number of ranks divides, and a dense layer."""
    path = tmp_path_factory.mktemp("model")
    return make_random_qwen3_moe(path, seed=5, num_hidden_layers=3, mlp_only_layers=[1], vocab_size=131)


@pytest.fixture(scope="module")
def expected(folder: Path, lines: list[dict]) -> dict[tuple[str, int], list[int]]:
    reference = TransformersReference(folder)
    return {(line["id"], 0): reference.generate(line["prompt_token_ids"], NUM_NEW) for line in lines}


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: "a{}x{} f{}x{}".format(*shape))
def world(request: pytest.FixtureRequest):
    """A shape and its ranks."""
    dp, attention_tp, ep, ffn_tp = request.param
    with Ranks(dp * attention_tp + ep * ffn_tp) as ranks:
        yield request.param, ranks


def sections_of(shape: tuple[int, int, int, int], **settings: object) -> dict:
    dp, attention_tp, ep, ffn_tp = shape
    return split(dp, ep, tp=(attention_tp, ffn_tp), **settings)


@pytest.mark.parametrize(("stages", "gate"), [(1, "ffn"), (2, "ffn"), (3, "attention")])
def test_tp_ranks_give_the_tokens_of_transformers(world, folder, lines, expected, tmp_path, stages, gate) -> None:
    shape, ranks = world
    values = job_values(folder, tmp_path, lines, sections_of(shape, stages=stages, gate=gate), sampling=GREEDY)
    assert tokens(decode(ranks, values)) == expected


@pytest.mark.parametrize("world", [(1, 2, 2, 2)], indirect=True, ids=["a1x2 f2x2"])
def test_two_experts_swapped_change_the_tokens_of_tp_ranks(world, folder, lines, expected, tmp_path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts.0." in name]:
        other = name.replace(".experts.0.", ".experts.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    values = job_values(tmp_path, tmp_path / "job", lines, sections_of(world[0]), sampling=GREEDY)
    assert tokens(decode(world[1], values)) != expected


@pytest.mark.parametrize("world", [(1, 2, 2, 2)], indirect=True, ids=["a1x2 f2x2"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_moe"])
def test_tp_ranks_give_the_tokens_of_transformers_for_every_family(world, families, lines, tmp_path, family) -> None:
    folder, expected = families(family)
    sections = sections_of(world[0], stages=2, gate="attention")
    assert tokens(decode(world[1], job_values(folder, tmp_path, lines, sections, sampling=GREEDY))) == expected


@pytest.mark.parametrize("world", [(1, 4, 1, 1)], indirect=True, ids=["a1x4 f1x1"])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_more_tp_ranks_than_kv_heads_give_the_tokens_of_transformers(world, families, lines, tmp_path, family) -> None:
    folder, expected = families(family)
    sections = sections_of(world[0], stages=2)
    assert tokens(decode(world[1], job_values(folder, tmp_path, lines, sections, sampling=GREEDY))) == expected


@pytest.mark.parametrize("world", [(2, 2, 3, 1), (1, 2, 2, 2)], indirect=True, ids=["a2x2 f3x1", "a1x2 f2x2"])
@pytest.mark.parametrize("exchange", ["broadcast", "routed"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_what_stays_on_tp_ranks_of_attention_gives_the_same_tokens(
    world, families, lines, tmp_path, family, exchange
) -> None:
    folder, expected = families(family)
    sections = sections_of(world[0], stages=2, gate="attention", boundary="moe")
    sections["pipeline"] |= {"shared_experts": "attention", "exchange": exchange}
    assert tokens(decode(world[1], job_values(folder, tmp_path, lines, sections, sampling=GREEDY))) == expected


def test_each_rank_sends_the_rows_of_its_shard_alone(world, folder, lines, tmp_path) -> None:
    (dp, tp, ep, ffn_tp), ranks = world
    values = job_values(folder, tmp_path, lines, sections_of(world[0], stages=2), sampling=GREEDY)
    decode(ranks, values)
    reports = read_summary(values)["ranks"]
    attention, ffn = reports[: dp * tp], reports[dp * tp :]
    assert {report["rows_received"] for report in ffn} == {sum(report["rows_sent"] for report in attention) // len(ffn)}
    alone = job_values(folder, tmp_path / "dp", lines, sections_of((dp, 1, ep, ffn_tp), stages=2), sampling=GREEDY)
    with Ranks(dp + ep * ffn_tp) as fewer:
        decode(fewer, alone)
    assert ffn[0]["rows_received"] == read_summary(alone)["ranks"][-1]["rows_received"]


def test_tp_ranks_share_weights_and_cache(world, folder, lines, tmp_path) -> None:
    (dp, tp, *_), ranks = world
    values = job_values(folder, tmp_path, lines, sections_of(world[0]), sampling=GREEDY)
    decode(ranks, values)
    reports = read_summary(values)["ranks"]
    attention, ffn = reports[: dp * tp], reports[dp * tp :]
    tensors = load_file(folder / "model.safetensors")
    row_bytes, num_rows = 4 * 64, -(-131 // tp)
    assert {report["embedding_bytes"] for report in attention} == {2 * num_rows * row_bytes}
    assert len({report["weight_bytes"] for report in attention}) == 1
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    assert sum(report["expert_bytes"] for report in ffn) == experts
    routers = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("mlp.gate.weight"))
    mlps = sum(tensor.nbytes for name, tensor in tensors.items() if ".mlp." in name)
    assert sum(report["weight_bytes"] for report in ffn) == mlps + (len(ffn) - 1) * routers
    assert all(report["read_bytes"] == report["weight_bytes"] for report in ffn)
    config = values["engine"]
    num_entries = (config["max_requests_per_rank"] * config["max_context"] // 16 + 1) * 16
    assert {report["kv_bytes"] for report in attention} == {3 * 2 * num_entries * max(1, 2 // tp) * 16 * 4}


def test_a_draw_is_that_of_one_process_and_the_same_on_tp_ranks(world, one_rank, folder, lines, tmp_path) -> None:
    shape, ranks = world
    sampling = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "n": 2, "seed": 3, "logprobs": 2}
    values = job_values(folder, tmp_path / "split", lines, sections_of(shape, stages=2), sampling=sampling)
    records = decode(ranks, values)
    local = {**split(1, 1), "connector": {"kind": "local"}}
    alone = decode(one_rank, job_values(folder, tmp_path / "local", lines, local, sampling=sampling))
    assert tokens(records) == tokens(alone)
    assert all(len(record["logprobs"]) == NUM_NEW for record in records.values())


@pytest.mark.parametrize("boundary", ["ffn", "moe"])
def test_colocated_tp_ranks_give_the_tokens_of_transformers(folder, lines, expected, tmp_path, boundary) -> None:
    sections = split(1, 2, stages=2, boundary=boundary, tp=(2, 1))
    sections["topology"]["colocated"] = True
    with Ranks(2) as ranks:
        assert tokens(decode(ranks, job_values(folder, tmp_path, lines, sections, sampling=GREEDY))) == expected
