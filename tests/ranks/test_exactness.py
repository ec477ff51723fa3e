"""The split gives the tokens of transformers and of one process (CASES 1, 2, 6, 8, 13, 14, 21)."""

import json
from pathlib import Path

import pytest
from family_configs import FAMILIES
from models_for_tests import make_random_qwen3_moe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers_reference import TransformersReference

from afd_megatron.engine.text import TextCodec
from tests.ranks.harness import Ranks
from tests.ranks.jobs import NUM_NEW, decode, job_values, read_summary, split, tokens

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs/tiny_moe"
GREEDY = {"max_new_tokens": NUM_NEW, "ignore_eos": True}
RATIOS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 2)]
PIPELINES = [(1, "ffn"), (2, "ffn"), (3, "ffn"), (1, "attention"), (3, "attention")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of them dense, 8 experts."""
    path = tmp_path_factory.mktemp("model")
    return make_random_qwen3_moe(path, seed=5, num_hidden_layers=3, mlp_only_layers=[1])


@pytest.fixture(scope="module")
def expected(folder: Path, lines: list[dict]) -> dict[tuple[str, int], list[int]]:
    """What transformers generates for each prompt alone."""
    reference = TransformersReference(folder)
    return {(line["id"], 0): reference.generate(line["prompt_token_ids"], NUM_NEW) for line in lines}


@pytest.fixture(scope="module", params=RATIOS, ids=lambda ratio: f"{ratio[0]}a{ratio[1]}f")
def world(request: pytest.FixtureRequest):
    """A ratio and its ranks, which run every pipeline one after the other."""
    with Ranks(sum(request.param)) as ranks:
        yield request.param, ranks


@pytest.mark.parametrize(("stages", "gate"), PIPELINES)
def test_split_gives_the_tokens_of_transformers(world, folder, lines, expected, tmp_path, stages, gate) -> None:
    (attention, ffn), ranks = world
    sections = split(attention, ffn, stages=stages, gate=gate)
    values = job_values(folder, tmp_path, lines, sections, sampling=GREEDY)
    assert tokens(decode(ranks, values)) == expected
    reports = read_summary(values)["ranks"]
    attention_steps = [report["steps"]["warmup"] + report["steps"]["eager"] for report in reports[:attention]]
    ffn_steps = [report["steps"] for report in reports[attention:]]
    assert ffn_steps == [{"eager": attention_steps[0]}] * ffn  # one plan per step, for every rank
    assert attention_steps == attention_steps[:1] * attention


def test_split_gives_the_answers_of_transformers_on_the_shipped_model(world, shipped_expected, tmp_path) -> None:
    (attention, ffn), ranks = world
    prompts = [json.loads(line) for line in (ROOT / "configs/prompts.jsonl").read_text().splitlines()]
    records = decode(ranks, job_values(TINY, tmp_path, prompts, split(attention, ffn, stages=2)))
    assert {record["id"]: record["token_ids"] for record in records.values()} == shipped_expected


@pytest.fixture(scope="module")
def shipped_expected() -> dict[str, list[int]]:
    """What transformers generates from the shipped model for the shipped prompts, up to the end token."""
    reference, codec = TransformersReference(TINY), TextCodec(TINY)
    expected = {}
    for line in (ROOT / "configs/prompts.jsonl").read_text().splitlines():
        record = json.loads(line)
        token_ids = reference.generate(codec.encode(record["prompt"]), 48)
        end = next(place for place, token_id in enumerate(token_ids) if token_id in codec.eos_token_ids)
        expected[record["id"]] = token_ids[: end + 1]
    return expected


@pytest.mark.parametrize("gate", ["ffn", "attention"])
@pytest.mark.parametrize("world", [(1, 1), (3, 2)], indirect=True, ids=["1a1f", "3a2f"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_moe"])
def test_split_gives_the_tokens_of_transformers_for_every_family(
    world, families, lines, tmp_path, family, gate
) -> None:
    (attention, ffn), ranks = world
    folder, expected = families(family)
    sections = split(attention, ffn, stages=2, gate=gate)
    assert tokens(decode(ranks, job_values(folder, tmp_path, lines, sections, sampling=GREEDY))) == expected


@pytest.mark.parametrize("gate", ["ffn", "attention"])
def test_dense_layers_on_attention_give_the_same_tokens(world, folder, lines, expected, tmp_path, gate) -> None:
    (attention, ffn), ranks = world
    sections = split(attention, ffn, stages=2, gate=gate, boundary="moe")
    values = job_values(folder, tmp_path, lines, sections, sampling=GREEDY)
    assert tokens(decode(ranks, values)) == expected
    sent = {report["role"]: report["rows_sent"] for report in read_summary(values)["ranks"]}
    whole = job_values(folder, tmp_path / "whole", lines, split(attention, ffn, stages=2, gate=gate), sampling=GREEDY)
    decode(ranks, whole)
    sent_whole = {report["role"]: report["rows_sent"] for report in read_summary(whole)["ranks"]}
    assert sent == {role: rows * 2 // 3 for role, rows in sent_whole.items()}  # one layer of three is dense


@pytest.mark.parametrize(("exchange", "boundary"), [("routed", "ffn"), ("routed", "moe"), ("auto", "ffn")])
def test_rows_sent_to_their_experts_alone_give_the_same_tokens(
    world, folder, lines, expected, tmp_path, exchange, boundary
) -> None:
    (attention, ffn), ranks = world
    sections = split(attention, ffn, stages=2, gate="attention", boundary=boundary)
    whole = job_values(folder, tmp_path / "whole", lines, sections, sampling=GREEDY)
    decode(ranks, whole)
    sections["pipeline"]["exchange"] = exchange
    values = job_values(folder, tmp_path, lines, sections, sampling=GREEDY)
    assert tokens(decode(ranks, values)) == expected
    sent, sent_whole = (sum(report["bytes_sent"] for report in read_summary(each)["ranks"]) for each in (values, whole))
    assert (sent < sent_whole) == (ffn > 1)


@pytest.mark.parametrize("world", [(1, 1), (3, 2)], indirect=True, ids=["1a1f", "3a2f"])
@pytest.mark.parametrize("boundary", ["ffn", "moe"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_on_attention_give_the_same_tokens(world, families, lines, tmp_path, family, boundary) -> None:
    (attention, ffn), ranks = world
    folder, expected = families(family)
    sections = split(attention, ffn, stages=2, boundary=boundary)
    sections["pipeline"]["shared_experts"] = "attention"
    values = job_values(folder, tmp_path, lines, sections, sampling=GREEDY)
    assert tokens(decode(ranks, values)) == expected
    whole = job_values(folder, tmp_path / "whole", lines, split(attention, ffn), sampling=GREEDY)
    decode(ranks, whole)
    moved = [
        report["weight_bytes"] - before["weight_bytes"]
        for report, before in zip(read_summary(values)["ranks"], read_summary(whole)["ranks"], strict=True)
    ]
    assert all(change > 0 for change in moved[:attention]) and all(change < 0 for change in moved[attention:])


@pytest.mark.parametrize("boundary", ["ffn", "moe"])
def test_two_colocated_ranks_give_the_tokens_of_transformers(folder, lines, expected, tmp_path, boundary) -> None:
    sections = split(2, 2, stages=2, boundary=boundary)
    sections["topology"]["colocated"] = True
    values = job_values(folder, tmp_path, lines, sections, sampling=GREEDY)
    with Ranks(2) as ranks:
        assert tokens(decode(ranks, values)) == expected


LOCAL = {"connector": {"kind": "local"}}


@pytest.mark.parametrize(("stages", "gate"), [(1, "ffn"), (3, "attention")])
def test_one_process_gives_the_tokens_of_transformers(
    one_rank, folder, lines, expected, tmp_path, stages, gate
) -> None:
    sections = split(1, 1, stages=stages, gate=gate) | LOCAL
    values = job_values(folder, tmp_path, lines, sections, sampling=GREEDY)
    assert tokens(decode(one_rank, values)) == expected


def test_two_experts_swapped_change_the_tokens(one_rank, folder, lines, expected, tmp_path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name in list(tensors):
        if ".experts.0." in name:
            other = name.replace(".experts.0.", ".experts.1.")
            tensors[name], tensors[other] = tensors[other], tensors[name]
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    values = job_values(tmp_path, tmp_path / "job", lines, split(1, 1) | LOCAL, sampling=GREEDY)
    assert tokens(decode(one_rank, values)) != expected


def test_each_role_holds_its_part_and_the_parts_make_the_checkpoint(world, folder, lines, tmp_path) -> None:
    (attention, ffn), ranks = world
    values = job_values(folder, tmp_path, lines, split(attention, ffn), sampling=GREEDY)
    decode(ranks, values)
    held = {(report["role"], report["role_rank"]): report for report in read_summary(values)["ranks"]}
    attention_reports = [held["attention", role_rank] for role_rank in range(attention)]
    ffn_reports = [held["ffn", role_rank] for role_rank in range(ffn)]
    assert all(report["expert_bytes"] == 0 and report["kv_bytes"] > 0 for report in attention_reports)
    assert all(report["kv_bytes"] == report["embedding_bytes"] == 0 for report in ffn_reports)
    with safe_open(folder / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118 (no mapping)
    routers = sum(size for name, size in sizes.items() if name.endswith("mlp.gate.weight"))
    parts = attention_reports[0]["weight_bytes"] + sum(report["weight_bytes"] for report in ffn_reports)
    assert parts == sum(sizes.values()) + (ffn - 1) * routers
    assert sum(report["expert_bytes"] for report in ffn_reports) == sum(
        size for name, size in sizes.items() if ".experts." in name
    )


def test_a_seeded_draw_does_not_depend_on_the_ratio(world, one_rank, folder, lines, tmp_path) -> None:
    (attention, ffn), ranks = world
    sampling = {**GREEDY, "temperature": 0.8, "top_p": 0.95, "n": 2, "seed": 3}
    sections = split(attention, ffn, stages=2)
    drawn = tokens(decode(ranks, job_values(folder, tmp_path / "split", lines, sections, sampling=sampling)))
    alone = job_values(folder, tmp_path / "local", lines, split(1, 1) | LOCAL, sampling=sampling)
    assert drawn == tokens(decode(one_rank, alone))
    assert all(drawn[line["id"], 0] != drawn[line["id"], 1] for line in lines)
