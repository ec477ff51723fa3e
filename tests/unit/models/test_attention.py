"""Paged attention: batch mates, stages, padding and garbage in the cache do not change a request's logits."""

from pathlib import Path

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from models_for_tests import OneProcess, Rows, make_random_qwen3_moe, make_stage

from afd_megatron.errors import ConfigError
from afd_megatron.models.kv_cache import KvCache

LENGTHS = (1, 2, 17, 64)
TABLES = [[50, 3], [7, 1], [12, 40, 9, 41, 8], list(range(60, 60 + 17))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_qwen3_moe(tmp_path_factory.mktemp("model"), seed=5, mlp_only_layers=[1])


@pytest.fixture
def model(folder: Path, groups: ProcessGroupCollection) -> OneProcess:
    return OneProcess(folder, groups, num_blocks=80)


def prompt(index: int) -> list[int]:
    return torch.randint(0, 128, (LENGTHS[index],), generator=torch.Generator().manual_seed(index)).tolist()


def last_logits_and_next(model: OneProcess, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after the prompt, and after one more token (7), of the request alone."""
    first = model.logits(make_stage(prefill=[Rows(prompt(index), 0, TABLES[index])]))[-1]
    return first, model.logits(make_stage(decode=[Rows([7], LENGTHS[index], TABLES[index])]))[0]


def test_prompts_of_any_lengths_in_one_batch_equal_each_alone(model: OneProcess) -> None:
    alone = [last_logits_and_next(model, index) for index in range(4)]
    prefill = model.logits(make_stage(prefill=[Rows(prompt(index), 0, TABLES[index]) for index in range(4)]))
    decode = model.logits(make_stage(decode=[Rows([7], LENGTHS[index], TABLES[index]) for index in range(4)]))
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    torch.testing.assert_close(prefill[ends], torch.stack([first for first, _ in alone]), atol=1e-4, rtol=0)
    torch.testing.assert_close(decode, torch.stack([second for _, second in alone]), atol=1e-4, rtol=0)


def test_decode_rows_beside_prompt_chunks_equal_each_alone(model: OneProcess) -> None:
    _, expected = last_logits_and_next(model, 2)
    first, _ = last_logits_and_next(model, 3)
    model.logits(make_stage(prefill=[Rows(prompt(2), 0, TABLES[2]), Rows(prompt(3)[:40], 0, TABLES[3])]))
    mixed = model.logits(
        make_stage(decode=[Rows([7], LENGTHS[2], TABLES[2])], prefill=[Rows(prompt(3)[40:], 40, TABLES[3])])
    )
    torch.testing.assert_close(mixed[0], expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(mixed[-1], first, atol=1e-4, rtol=0)


def test_garbage_in_unread_cache_entries_does_not_leak(model: OneProcess) -> None:
    expected = [last_logits_and_next(model, index) for index in range(4)]
    for layer in range(model.shape.num_layers):
        for entries in model.cache.layer(layer):
            entries.fill_(float("nan"))
    model.logits(make_stage(prefill=[Rows(prompt(index), 0, TABLES[index]) for index in range(4)]))
    padded = Rows([0], 0, [0])
    decode = [Rows([7], LENGTHS[index], TABLES[index]) for index in range(4)]
    logits = model.logits(make_stage(decode=[*decode, padded, padded]))
    torch.testing.assert_close(logits[:4], torch.stack([second for _, second in expected]), atol=1e-4, rtol=0)


def test_padded_rows_write_to_the_scratch_block_alone(model: OneProcess) -> None:
    for layer in range(model.shape.num_layers):
        for entries in model.cache.layer(layer):
            entries.fill_(3.0)
    padded = Rows([0], 0, [0])
    model.logits(make_stage(decode=[padded, padded]))
    for layer in range(model.shape.num_layers):
        for entries in model.cache.layer(layer):
            assert (entries[model.cache.block_size :] == 3.0).all()
            assert (entries[0] != 3.0).any()


def test_another_position_changes_the_logits(model: OneProcess) -> None:
    """The comparisons above would not notice a model that ignores positions."""
    right = model.logits(make_stage(prefill=[Rows(prompt(2), 0, TABLES[2])]))
    decode = model.logits(make_stage(decode=[Rows([7], LENGTHS[2], TABLES[2])]))
    shuffled = model.logits(make_stage(prefill=[Rows([*prompt(2)[1::-1], *prompt(2)[2:]], 0, TABLES[2])]))
    assert (right[-1] - shuffled[-1]).abs().max() > 1e-2
    assert (right[-1] - decode[0]).abs().max() > 1e-2


def test_a_cache_that_does_not_fit_is_a_config_error(model: OneProcess) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_blocks: 1099511627775 take .* GB, which are not there"):
        KvCache(model.shape, 1 << 40, 16, torch.float32, torch.device("cpu"))
