"""The split gives the tokens of one process and of transformers (CASES 1, 2, 8, 9, 10, 13)."""

from pathlib import Path

import pytest
import torch
from tests.reference import generate, make_random_qwen3_moe

from tests.ranks.harness import Ranks, run_ranks
from tests.ranks.jobs import decode, job_values, read_summary, run_job, split

NUM_NEW = 16
RATIOS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 2)]
PIPELINES = [(1, "ffn"), (2, "ffn"), (3, "ffn"), (2, "attention"), (3, "attention")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen3_moe(tmp_path_factory.mktemp("model"), seed=5)


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    """Prompts of 1, 2, 17, 64 tokens and some more, so that stages and ranks get unequal work."""
    generator = torch.Generator().manual_seed(11)
    lengths = [1, 2, 17, 64, 5, 33, 9]
    return [
        {"id": f"p{length}", "prompt_token_ids": torch.randint(0, 128, (length,), generator=generator).tolist()}
        for length in lengths
    ]


@pytest.fixture(scope="module")
def expected(folder: Path, lines: list[dict]) -> dict:
    """What transformers generates for each prompt alone."""
    return {line["id"]: generate(folder, line["prompt_token_ids"], NUM_NEW) for line in lines}


@pytest.fixture(scope="module", params=RATIOS, ids=lambda ratio: f"{ratio[0]}a{ratio[1]}f")
def ranks(request: pytest.FixtureRequest):
    """One world per ratio, which runs every pipeline."""
    with Ranks(sum(request.param)) as ranks:
        yield request.param, ranks


@pytest.mark.parametrize(("stages", "gate"), PIPELINES)
def test_greedy_tokens_equal_transformers(ranks, folder, lines, expected, tmp_path, stages, gate):
    (attention, ffn), world = ranks
    sections = split(attention, ffn, stages=stages, gate=gate, max_requests_per_rank=3, prefill_chunk=24)
    values = job_values(folder, tmp_path, lines, **sections, sampling=greedy())
    check_tokens(decode(world, values), expected)
    held = read_summary(values)["ranks"]
    assert sum(rank["expert_bytes"] for rank in held if rank["role"] == "attention") == 0
    assert sum(rank["kv_bytes"] + rank["embedding_bytes"] for rank in held if rank["role"] == "ffn") == 0


@pytest.mark.parametrize("dp", [1, 2])
def test_colocated_tokens_equal_transformers(folder, lines, expected, tmp_path, dp):
    sections = split(dp, dp, stages=2, max_requests_per_rank=3, prefill_chunk=24)
    sections["topology"]["colocated"] = True
    values = job_values(folder, tmp_path, lines, **sections, sampling=greedy())
    run_ranks(run_job, dp, values)
    check_tokens(records_of(values), expected)


def test_local_tokens_equal_transformers(folder, lines, expected, tmp_path):
    values = job_values(folder, tmp_path, lines, connector={"kind": "local"}, sampling=greedy())
    run_ranks(run_job, 1, values)
    check_tokens(records_of(values), expected)
