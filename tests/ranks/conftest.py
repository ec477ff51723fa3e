"""Prompts, models with what transformers makes of them, and a rank alone, for the tests of jobs."""

from functools import cache
from pathlib import Path

import pytest
import torch
from family_configs import FAMILIES
from models_for_tests import make_random_model
from transformers_reference import TransformersReference

from tests.ranks.harness import Ranks
from tests.ranks.jobs import NUM_NEW


@pytest.fixture(scope="session")
def lines() -> list[dict]:
    """Prompts of 1, 2, 17, 64 tokens and some more, so that ranks and stages get unequal work."""
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 2, 17, 64, 5, 33, 9)
    return [
        {"id": f"p{length}", "prompt_token_ids": torch.randint(0, 128, (length,), generator=generator).tolist()}
        for length in lengths
    ]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory, lines: list[dict]):
    """Return a folder of a family, and what transformers generates from it."""

    @cache
    def get(family: str) -> tuple[Path, dict[tuple[str, int], list[int]]]:
        folder = make_random_model(tmp_path_factory.mktemp(family), 5, FAMILIES[family])
        reference = TransformersReference(folder)
        return folder, {(line["id"], 0): reference.generate(line["prompt_token_ids"], NUM_NEW) for line in lines}

    return get


@pytest.fixture(scope="module")
def one_rank():
    with Ranks(1) as ranks:
        yield ranks
