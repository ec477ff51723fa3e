"""Whole jobs on 3a2f and on colocated ranks: many requests, idle ranks, faulty lines, early ends (CASES 2, 7, 9)."""

import json
import threading
from pathlib import Path

import pytest
import torch
from models_for_tests import make_random_qwen3_moe

from afd_megatron.assembly import open_job
from afd_megatron.config import JobConfig
from afd_megatron.distributed import World
from afd_megatron.errors import ProtocolError
from afd_megatron.launcher import job_topology
from afd_megatron.main import serve
from afd_megatron.observability.progress import Progress
from tests.ranks.harness import Ranks
from tests.ranks.jobs import decode, job_values, read_summary, run_job, split

TINY = Path(__file__).resolve().parents[2] / "configs/tiny_moe"
IGNORE_EOS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen3_moe(tmp_path_factory.mktemp("model"), seed=8, num_hidden_layers=2, num_experts=5)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(5) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def one_rank():
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def many_lines() -> list[dict]:
    """200 prompts of 1 to 60 tokens with 1 to 24 tokens to generate."""
    generator = torch.Generator().manual_seed(2)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high + 1, (count,), generator=generator).tolist()

    return [
        {
            "id": f"r{index}",
            "prompt_token_ids": draw(0, 127, draw(1, 60)[0]),
            "max_new_tokens": draw(1, 24)[0],
        }
        for index in range(200)
    ]


@pytest.fixture(scope="module")
def many_expected(one_rank, folder, many_lines, tmp_path_factory) -> dict:
    """The tokens of one process."""
    values = job_values(folder, tmp_path_factory.mktemp("local"), many_lines, local(), sampling=IGNORE_EOS)
    return tokens(decode(one_rank, values))


def test_200_requests_at_once_on_3a2f_give_the_tokens_of_one_process(
    ranks, folder, many_lines, many_expected, tmp_path
) -> None:
    values = job_values(folder, tmp_path, many_lines, places(split(3, 2, stages=2), 16), sampling=IGNORE_EOS)
    assert tokens(decode(ranks, values)) == many_expected
    summary = read_summary(values)
    assert summary["status"] == "ok" and summary["metrics"]["completed"] == 200
    assert all(report["rows_sent"] > 0 for report in summary["ranks"])


def test_200_requests_at_a_rate_with_idle_gaps_on_3a2f_give_the_tokens_of_one_process(
    ranks, folder, many_lines, many_expected, tmp_path
) -> None:
    lines = [
        line | {"arrival_s": 4.0 * (index // 67)} if index % 67 == 0 else line for index, line in enumerate(many_lines)
    ]
    values = job_values(folder, tmp_path, lines, places(split(3, 2, stages=2), 16), sampling=IGNORE_EOS)
    values["job"]["request_rate"] = 80.0
    assert tokens(decode(ranks, values)) == many_expected
    assert read_summary(values)["metrics"]["duration"] > 8.0


def test_200_requests_on_two_colocated_ranks_give_the_tokens_of_one_process(
    folder, many_lines, many_expected, tmp_path
) -> None:
    sections = places(split(2, 2), 16)
    sections["topology"]["colocated"] = True
    values = job_values(folder, tmp_path, many_lines, sections, sampling=IGNORE_EOS)
    with Ranks(2) as ranks:
        assert tokens(decode(ranks, values)) == many_expected


def test_attention_ranks_without_requests_take_part(ranks, folder, many_lines, many_expected, tmp_path) -> None:
    values = job_values(folder, tmp_path, many_lines[:1], split(3, 2, stages=3), sampling=IGNORE_EOS)
    assert tokens(decode(ranks, values)) == {("r0", 0): many_expected["r0", 0]}


def test_a_rank_that_finishes_early_takes_part_to_the_end(ranks, one_rank, folder, tmp_path) -> None:
    lines = [
        {"id": f"n{index}", "prompt_token_ids": [index, 3, 5], "max_new_tokens": num_new}
        for index, num_new in enumerate((4, 64, 64))
    ]
    values = job_values(folder, tmp_path / "split", lines, split(3, 2, stages=2), sampling=IGNORE_EOS)
    alone = job_values(folder, tmp_path / "local", lines, local(), sampling=IGNORE_EOS)
    assert tokens(decode(ranks, values)) == tokens(decode(one_rank, alone))


def test_idling_longer_than_every_deadline_does_no_harm(ranks, folder, many_lines, many_expected, tmp_path) -> None:
    lines = [many_lines[0], many_lines[1] | {"arrival_s": 4.0}]
    values = job_values(folder, tmp_path, lines, split(3, 2), sampling=IGNORE_EOS)
    values["control"] = {"step_timeout_s": 2.5, "heartbeat_interval_s": 0.2, "heartbeat_timeout_s": 1.5}
    found = tokens(decode(ranks, values))
    assert found == {key: many_expected[key] for key in (("r0", 0), ("r1", 0))}


def test_faulty_lines_become_error_records_and_the_rest_is_done(ranks, folder, many_expected, many_lines, tmp_path):
    values = job_values(folder, tmp_path, [], split(3, 2), sampling=IGNORE_EOS)
    faulty = [
        b"{oops",
        b"[1,2,3]",
        b"null",
        b'"\xff"',
        json.dumps({"id": "long", "prompt_token_ids": [1] * 500}).encode(),
    ]
    faulty.append(json.dumps({"id": "text", "prompt": "no tokenizer here"}).encode())
    good = [json.dumps(line).encode() for line in many_lines[:3]]
    Path(values["job"]["input"]).write_bytes(b"\xef\xbb\xbf" + b"\r\n".join([*faulty, b"", *good]))
    records = decode(ranks, values, exit_code=3)
    failed = {key for key, record in records.items() if record["finish_reason"] == "error"}
    assert failed == {(name, 0) for name in ("0", "1", "2", "3", "long", "text")}
    assert all(records[key]["error"] for key in failed)
    done = {key: record["token_ids"] for key, record in records.items() if key not in failed}
    assert done == {(f"r{index}", 0): many_expected[f"r{index}", 0] for index in range(3)}
    assert read_summary(values)["status"] == "partial"


def test_an_empty_input_ends_at_once(ranks, folder, tmp_path) -> None:
    values = job_values(folder, tmp_path, [], split(3, 2))
    assert decode(ranks, values) == {}
    assert read_summary(values)["status"] == "ok"


def test_text_ends_at_eos_stop_strings_and_length(ranks, tmp_path) -> None:
    lines = [
        {"id": "eos", "prompt": "sort dbca="},
        {"id": "stop", "prompt": "sort dbca=", "stop": ["bc"]},
        {"id": "one", "prompt": "sort dbca=", "max_new_tokens": 1},
        {"id": "none", "prompt": "sort dbca=", "max_new_tokens": 0},
    ]
    records = decode(ranks, job_values(TINY, tmp_path, lines, split(3, 2, stages=2)))
    found = {record["id"]: (record["text"], record["finish_reason"]) for record in records.values()}
    assert found == {"eos": ("abcd", "stop"), "stop": ("a", "stop"), "one": ("a", "length"), "none": ("", "length")}
    assert records["eos", 0]["num_tokens"] == len("abcd") + 1


def test_logprobs_hold_the_chosen_token_and_the_likeliest(ranks, folder, tmp_path) -> None:
    line = {"id": "a", "prompt_token_ids": [3, 1, 4], "max_new_tokens": 5, "logprobs": 3}
    record = decode(ranks, job_values(folder, tmp_path, [line], split(3, 2), sampling=IGNORE_EOS))["a", 0]
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    for entry in record["logprobs"]:
        assert entry["top"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"]}
        assert len(entry["top"]) == 3 and entry["logprob"] < 0


def test_a_request_to_stop_on_any_rank_ends_the_job(ranks, folder, many_lines, tmp_path) -> None:
    values = job_values(folder, tmp_path, many_lines, split(3, 2), sampling=IGNORE_EOS)
    assert ranks.run(run_with_a_stop, values, 1)[0] == 4
    summary = read_summary(values)
    assert summary["status"] == "interrupted" and summary["metrics"]["unstarted"] > 0
    counts = [summary["metrics"][key] for key in ("completed", "failed", "interrupted", "unstarted")]
    assert sum(counts) == len(many_lines)


def run_with_a_stop(world: World, values: dict, rank: int) -> int:
    config = JobConfig.model_validate(values)
    stop = threading.Event()
    if world.rank == rank:
        stop.set()
    job = open_job(config, overwrite=True) if world.rank == 0 else None
    world = World(world.rank, job_topology(config), world.job_id, timeout_s=30.0)
    return serve(config, world, job, progress=Progress(), stop=stop)


@pytest.mark.parametrize(
    ("section", "key", "odd", "common"),
    [
        ("pipeline", "gate", "attention", "ffn"),
        ("pipeline", "stages", "2", "1"),
        ("model", "dtype", "bfloat16", "float32"),
        ("engine", "max_requests_per_rank", "4", "3"),
    ],
)
def test_ranks_of_different_settings_refuse_each_other(ranks, folder, tmp_path, section, key, odd, common) -> None:
    values = job_values(folder, tmp_path, [], split(3, 2))
    other = json.loads(json.dumps(values))
    other[section][key] = int(odd) if odd.isdecimal() else odd
    messages = ranks.run(run_and_refuse, values, other)
    assert len(set(messages)) == 1
    assert f"{section}.{key} is {common} on" in messages[0] and f"but {odd} on rank 4 (ffn 1)" in messages[0]


def run_and_refuse(world: World, values: dict, values_of_last_rank: dict) -> str:
    is_last = world.rank == world.topology.world_size - 1
    with pytest.raises(ProtocolError) as error:
        run_job(world, values_of_last_rank if is_last else values)
    return str(error.value)


def local() -> dict:
    return places(split(1, 1), 16) | {"connector": {"kind": "local"}}


def places(sections: dict, count: int) -> dict:
    return {**sections, "engine": {**sections["engine"], "max_requests_per_rank": count}}


def tokens(records: dict[tuple[str, int], dict]) -> dict[tuple[str, int], list[int]]:
    return {key: record["token_ids"] for key, record in records.items()}
