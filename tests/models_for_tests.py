"""Random model folders, and a model of both roles in one process, for tests. Knows no transport, no scheduler.

T rows of a stage, D hidden, V vocabulary, M blocks per request.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from family_configs import QWEN3_MOE
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors.torch import save_file

from afd_megatron.engine.batch import PrefillChunk, StageBatch
from afd_megatron.families import family_of, load_shape
from afd_megatron.families.base import ModelShape, Staying
from afd_megatron.models.attention_model import AttentionModel
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.models.kv_cache import KvCache
from afd_megatron.models.sources import RandomSource
from afd_megatron.models.weights import LoadReport, load_attention, load_ffn, open_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def make_random_qwen3_moe(
    folder: Path, seed: int, *, is_packed: bool = False, num_shards: int = 1, **overrides: object
) -> Path:
    """Write an HF folder of the family most tests use; `overrides` are fields of config.json."""
    return make_random_model(folder, seed, QWEN3_MOE | overrides, is_packed=is_packed, num_shards=num_shards)


def make_random_model(
    folder: Path, seed: int, config: Mapping[str, object], *, is_packed: bool = False, num_shards: int = 1
) -> Path:
    """Write an HF folder with spread norms and weights of a std (0.15 at hidden 64) with which greedy tokens vary."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shape = load_shape(folder)
    source = RandomSource(shape, seed)
    tensors = {name: source.read(name, ()) for name in source.shapes}
    if is_packed:
        pack_experts(tensors, shape)
    save_shards(folder, tensors, num_shards)
    return folder


def pack_experts(tensors: dict[str, torch.Tensor], shape: ModelShape) -> None:
    """Replace the tensors of single experts by the packed ones of transformers 5."""
    for rule in family_of(shape).tensor_rules(shape):
        if rule.packed is not None:
            experts = [
                torch.cat([tensors.pop(source.name.format(expert=expert)) for source in rule.sources])
                for expert in range(shape.num_experts)
            ]
            tensors[rule.packed.name] = torch.stack(experts)


def save_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    """Write safetensors, with an index if there is more than one file."""
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = {name: f"model-{index % num_shards}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


class Rows(NamedTuple):
    """Tokens of one request in a stage, the first at `position`, its KV in the blocks of `table`."""

    token_ids: Sequence[int]
    position: int
    table: Sequence[int]

    def cache_indices(self) -> list[int]:
        positions = range(self.position, self.position + len(self.token_ids))
        return [self.table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]


def make_stage(decode: Sequence[Rows] = (), prefill: Sequence[Rows] = ()) -> StageBatch:
    """Return a stage of one-token decode rows and prompt chunks; all rows are sampled."""
    all_rows = [*decode, *prefill]
    chunks, start = [], len(decode)
    for rows in prefill:
        end = start + len(rows.token_ids)
        chunks.append(PrefillChunk(start, end, rows.position, torch.tensor(rows.table)))
        start = end
    num_blocks = max((len(rows.table) for rows in decode), default=0)
    tables = [[*rows.table, *[0] * (num_blocks - len(rows.table))] for rows in decode]
    return StageBatch(
        token_ids_T=torch.tensor([token for rows in all_rows for token in rows.token_ids]),
        positions_T=torch.tensor([rows.position + i for rows in all_rows for i in range(len(rows.token_ids))]),
        cache_index_T=torch.tensor([index for rows in all_rows for index in rows.cache_indices()]),
        block_table_BM=torch.tensor(tables, dtype=torch.int64).view(len(decode), num_blocks),
        context_lens_B=torch.tensor([rows.position + 1 for rows in decode], dtype=torch.int64),
        prefill=tuple(chunks),
        sample_rows_N=torch.arange(start),
    )


class OneProcess:
    """A model of both roles in this process: one attention rank and `num_ffn` FFN ranks, nothing between them."""

    def __init__(
        self,
        folder: Path,
        groups: ProcessGroupCollection,
        *,
        num_ffn: int = 1,
        gate_on_attention: bool = False,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 64,
    ) -> None:
        self.shape = load_shape(folder)
        source = open_weights(folder, self.shape)
        stays = Staying(router=gate_on_attention)
        self.attention = AttentionModel(self.shape, dtype, CPU, groups, stays)
        self.reports: list[LoadReport] = [load_attention(self.attention, source, self.shape)]
        self.ffn: list[FfnModel] = []
        for role_rank in range(num_ffn):
            model = FfnModel(self.shape, dtype, CPU, groups, role_rank=role_rank, num_ffn=num_ffn, stays=stays)
            self.reports.append(load_ffn(model, source, self.shape))
            self.ffn.append(model)
        self.cache = KvCache(self.shape, num_blocks, BLOCK_SIZE, dtype, CPU)

    @torch.inference_mode()
    def logits(self, stage: StageBatch) -> torch.Tensor:
        """Run one stage and return the logits of its sampled rows."""
        attention = self.attention
        inputs = attention.prepare_stage(stage, self.cache)
        hidden_TD = attention.embed(stage.token_ids_T)
        for layer in range(self.shape.num_layers):
            residual_TD, normed_TD = attention.attend(layer, hidden_TD, inputs, self.cache)
            routing = attention.route(layer, normed_TD)
            partials = [ffn.experts(layer, normed_TD, routing).float() for ffn in self.ffn]
            hidden_TD = attention.finish(residual_TD, sum(partials).to(normed_TD.dtype))
        return attention.logits(hidden_TD[stage.sample_rows_N])
