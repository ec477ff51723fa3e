"""torch_dist checkpoints: both ways of the conversion, what is read of them, and what is refused."""

import json
import os
import pickle
import runpy
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from family_configs import FAMILIES
from megatron.core.process_groups_config import ProcessGroupCollection
from models_for_tests import CPU, make_random_model, make_random_qwen3_moe
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from afd_megatron.errors import CheckpointError, ConfigError
from afd_megatron.families import load_shape
from afd_megatron.families.base import Staying
from afd_megatron.models.convert import convert, write_hf
from afd_megatron.models.distcp import DistcpFolder
from afd_megatron.models.ffn_model import FfnModel
from afd_megatron.models.torch_dist import TorchDistSource, find_checkpoint
from afd_megatron.models.weights import load_ffn, open_weights

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An HF folder and what it is as torch_dist."""
    folder = make_random_qwen3_moe(tmp_path_factory.mktemp("qwen"), seed=21, mlp_only_layers=[1])
    output = folder / "converted"
    convert(folder, output, "torch_dist", ignore)
    return folder, output


def ignore(num_done: int, num_all: int) -> None:
    pass


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    source = open_weights(folder, load_shape(folder), "torch_dist")
    return {name: source.read(name, ()) for name in source.shapes}


def assert_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def save_plain(folder: Path, state: Mapping[str, object]) -> None:
    dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def load_plain(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors with torch alone."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_comes_back_from_torch_dist_tensor_by_tensor(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "hf", 1, FAMILIES[family])
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "megatron", "torch_dist", ignore)
    assert_equal(read_all(tmp_path / "megatron"), tensors)
    convert(tmp_path / "megatron", tmp_path / "back", "hf", ignore)
    assert_equal(load_file(tmp_path / "back/model.safetensors"), tensors)
    assert json.loads((tmp_path / "back/config.json").read_text()) == FAMILIES[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_slice_of_any_tensor_is_that_of_the_whole(family: str, tmp_path: Path) -> None:
    folder = make_random_model(tmp_path / "hf", 2, FAMILIES[family])
    convert(folder, tmp_path / "megatron", "torch_dist", ignore)
    source = open_weights(tmp_path / "megatron", load_shape(folder), "torch_dist")
    generator = torch.Generator().manual_seed(3)
    for name, tensor in load_file(folder / "model.safetensors").items():
        bounds = [torch.randint(size + 1, (2,), generator=generator).sort().values.tolist() for size in tensor.shape]
        part = tuple(slice(*bound) for bound in bounds)
        for dims in range(len(part) + 1):
            before = source.num_bytes_read
            values = source.read(name, part[:dims])
            assert torch.equal(values, tensor[part[:dims]]), (name, part)
            assert source.num_bytes_read - before == values.nbytes


def test_a_rank_reads_its_part_and_no_more(
    qwen: tuple[Path, Path], groups: ProcessGroupCollection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are counted where they leave the files."""
    hf, folder = qwen
    shape = load_shape(folder)
    copied = Counter[str]()
    fill = DistcpFolder.fill

    def count(self: DistcpFolder, values: torch.Tensor, key: str, spans: tuple[range, ...]) -> None:
        fill(self, values, key, spans)
        copied[key] += values.nbytes

    monkeypatch.setattr(DistcpFolder, "fill", count)
    tensors = load_file(hf / "model.safetensors")
    experts = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    for role_rank in range(4):
        copied.clear()
        model = FfnModel(shape, torch.float32, CPU, groups, role_rank=role_rank, num_ffn=4, stays=Staying())
        report = load_ffn(model, open_weights(folder, shape, "torch_dist"), shape)
        assert sum(copied[key] for key in copied if ".experts.experts." in key) == report.expert_bytes == experts // 4
        assert sum(copied.values()) == report.read_bytes == report.weight_bytes


def test_the_chunks_of_other_experts_are_not_looked_at(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    """They are zeros from their first to their last byte."""
    hf, folder = qwen
    expected = load_file(hf / "model.safetensors")
    shutil.copytree(folder, tmp_path / "zeros")
    file = tmp_path / "zeros/release/__0_0.distcp"
    index = FileSystemReader(folder / "release").read_metadata().storage_data
    with file.open("r+b") as stream:
        for entry, place in index.items():
            if ".experts.experts." in entry.fqn and entry.offset[0] != 3:
                stream.seek(place.offset)
                stream.write(bytes(place.length))
    source = open_weights(tmp_path / "zeros", load_shape(folder), "torch_dist")
    name = "model.layers.0.mlp.experts.{}.up_proj.weight"
    assert torch.equal(source.read(name.format(3), ()), expected[name.format(3)])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: at byte \d+: not the tensor that \.metadata says"):
        source.read(name.format(4), ())


def test_every_fault_is_listed_under_megatrons_key(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    state = load_plain(qwen[1] / "release")
    del state["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"], state["decoder.final_layernorm.weight"]
    state["decoder.layers.9.mlp.router.weight"] = torch.ones(8, 64)
    state["decoder.layers.0.self_attention.linear_qkv.bias"] = torch.ones(128)
    state["decoder.layers.3.mlp.router.weight"] = torch.ones(7, 64)
    state["output_layer.weight"] = torch.ones(127, 64)
    save_plain(tmp_path, state)
    with pytest.raises(CheckpointError) as raised:
        TorchDistSource(tmp_path, load_shape(qwen[0]))
    assert [line.removeprefix(f"{tmp_path}: ") for line in str(raised.value).splitlines()] == [
        "decoder.layers.2.mlp.experts.experts.linear_fc1.weight: missing",
        "decoder.final_layernorm.weight: missing",
        "decoder.layers.0.self_attention.linear_qkv.bias: unexpected",
        "decoder.layers.9.mlp.router.weight: unexpected",
        "decoder.layers.3.mlp.router.weight: shape [7, 64] (expected [8, 64])",
        "output_layer.weight: shape [127, 64] (expected [128, 64])",
    ]


def test_one_expert_missing_among_single_ones_is_named(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    state = load_plain(qwen[1] / "release")
    key = "decoder.layers.2.mlp.experts.experts.{}linear_fc2.weight"
    stacked = state.pop(key.format(""))
    state |= {key.format(f"{expert}."): values for expert, values in enumerate(stacked) if expert != 5}
    save_plain(tmp_path, state)
    with pytest.raises(CheckpointError) as raised:
        TorchDistSource(tmp_path, load_shape(qwen[0]))
    assert str(raised.value) == f"{tmp_path}: {key.format('5.')}: missing"


def test_padded_vocabulary_and_what_is_no_weight_are_left_alone(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    state: dict[str, object] = {**load_plain(qwen[1] / "release")}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[key] = torch.cat([state[key], torch.full((32, 64), torch.nan)])
    state |= {
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(64),
        "chained_0.optimizer.state.exp_avg.output_layer.weight": torch.ones(160, 64),
        "rng_state/shard_0_1": 7,
        "decoder.layers.0.mlp.router._extra_state/shard_0_1": None,
    }
    save_plain(tmp_path, state)
    source = TorchDistSource(tmp_path, load_shape(qwen[0]))
    found = {name: source.read(name, ()) for name in source.shapes}
    assert_equal(found, load_file(qwen[0] / "model.safetensors"))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_in_the_checkpoint_is_ignored_only_if_tied(is_tied: bool, tmp_path: Path) -> None:
    folder = make_random_qwen3_moe(tmp_path / "hf", seed=5, num_hidden_layers=1, tie_word_embeddings=is_tied)
    convert(folder, tmp_path / "megatron", "torch_dist", ignore)
    state = load_plain(tmp_path / "megatron/release")
    assert ("output_layer.weight" in state) != is_tied
    state["output_layer.weight"] = state["embedding.word_embeddings.weight"].clone()
    save_plain(tmp_path / "saved", state)
    TorchDistSource(tmp_path / "saved", load_shape(folder))
    state["lm_head.weight"] = state["output_layer.weight"]
    save_plain(tmp_path / "more", state)
    with pytest.raises(CheckpointError, match=r"more: lm_head\.weight: unexpected$"):
        TorchDistSource(tmp_path / "more", load_shape(folder))


def test_layers_that_predict_several_tokens_are_ignored_where_the_family_has_them(tmp_path: Path) -> None:
    for family, allowed in (("deepseek_v3", True), ("deepseek_v2", False)):
        folder = make_random_model(tmp_path / family, 1, FAMILIES[family])
        convert(folder, tmp_path / f"{family}_megatron", "torch_dist", ignore)
        state = load_plain(tmp_path / f"{family}_megatron/release") | {"mtp.layers.0.enorm.weight": torch.ones(64)}
        save_plain(tmp_path / f"{family}_mtp", state)
        with nullcontext() if allowed else pytest.raises(CheckpointError, match=r"mtp\.layers\.0\.enorm.*unexpected"):
            TorchDistSource(tmp_path / f"{family}_mtp", load_shape(folder))


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._folder),)


def test_a_pickle_that_names_other_classes_is_refused_and_not_run(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(qwen[1] / "release", tmp_path / "evil")
    index = FileSystemReader(tmp_path / "evil").read_metadata()
    index.planner_data = Evil(tmp_path / "ran")
    (tmp_path / "evil/.metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"evil/\.metadata: names posix\.mkdir \(allowed: classes of torch's"):
        TorchDistSource(tmp_path / "evil", load_shape(qwen[0]))
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "evil/.metadata").read_bytes())
    assert (tmp_path / "ran").exists(), "the pickle would have run"


def test_a_chunk_that_is_no_tensor_is_refused_and_not_run(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(qwen[1] / "release", tmp_path / "evil")
    torch.save(Evil(tmp_path / "ran"), tmp_path / "evil/evil.distcp")
    index = FileSystemReader(tmp_path / "evil").read_metadata()
    [place] = [place for entry, place in index.storage_data.items() if entry.fqn == "decoder.final_layernorm.weight"]
    place.relative_path, place.offset = "evil.distcp", 0
    place.length = (tmp_path / "evil/evil.distcp").stat().st_size
    (tmp_path / "evil/.metadata").write_bytes(pickle.dumps(index))
    source = TorchDistSource(tmp_path / "evil", load_shape(qwen[0]))
    with pytest.raises(CheckpointError, match=r"evil\.distcp: at byte 0: not the tensor that \.metadata says"):
        source.read("model.norm.weight", ())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", [b"", b"nothing", pickle.dumps({"a": 1}), pickle.dumps(torch.Size([1]))])
def test_damaged_metadata_is_refused(damage: bytes, qwen: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"\.metadata: (not readable|a \w+ \(allowed: Metadata\))"):
        TorchDistSource(tmp_path, load_shape(qwen[0]))


def test_truncated_and_missing_files_are_refused(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(qwen[1] / "release", tmp_path / "cut")
    file, shape = tmp_path / "cut/__0_0.distcp", load_shape(qwen[0])
    size = file.stat().st_size
    os.truncate(file, size - 1)
    fault = rf"__0_0\.distcp: {size - 1} bytes \(expected {size} or more\)$"
    with pytest.raises(CheckpointError, match=fault):
        TorchDistSource(tmp_path / "cut", shape)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: missing$"):
        TorchDistSource(tmp_path / "cut", shape)


def test_a_file_outside_of_the_folder_is_refused(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(qwen[1] / "release", tmp_path / "evil")
    index = FileSystemReader(tmp_path / "evil").read_metadata()
    next(iter(index.storage_data.values())).relative_path = "../evil/__0_0.distcp"
    (tmp_path / "evil/.metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"'\.\./evil/__0_0\.distcp' \(allowed: one in the same folder\)"):
        TorchDistSource(tmp_path / "evil", load_shape(qwen[0]))


def test_values_that_no_chunk_holds_are_refused(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(qwen[1] / "release", tmp_path / "gap")
    index = FileSystemReader(tmp_path / "gap").read_metadata()
    del index.state_dict_metadata["decoder.layers.0.mlp.experts.experts.linear_fc2.weight"].chunks[6]
    (tmp_path / "gap/.metadata").write_bytes(pickle.dumps(index))
    source = TorchDistSource(tmp_path / "gap", load_shape(qwen[0]))
    source.read("model.layers.0.mlp.experts.5.down_proj.weight", ())
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.experts\.experts\.linear_fc2\.weight: 3072 values are in"
    ):
        source.read("model.layers.0.mlp.experts.6.down_proj.weight", ())


@pytest.mark.parametrize(
    ("latest", "folders", "expected"),
    [
        (None, ["."], "."),
        ("300", [".", "iter_0000300"], "."),
        ("200", ["iter_0000100", "iter_0000200", "iter_0000300"], "iter_0000200"),
        ("release\n", ["release", "iter_0000300"], "release"),
        (None, ["iter_0000200", "iter_0000100", "release"], "iter_0000200"),
    ],
)
def test_the_checkpoint_is_found_where_megatron_puts_it(
    latest: str | None, folders: list[str], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "iter_0000900").mkdir()  # a save that was interrupted has no .metadata
    for name in folders:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / ".metadata").touch()
    if latest:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    assert find_checkpoint(tmp_path) == tmp_path / expected


@pytest.mark.parametrize(
    ("latest", "fault"),
    [
        (None, r": no torch_dist checkpoint \(allowed: \.metadata, latest_checkpointed_iteration\.txt or iter_\*/"),
        ("400", r": no torch_dist checkpoint \(allowed: iter_0000400/\.metadata\)"),
        ("../x", r"iteration\.txt: '\.\./x' \(allowed: a number or release\)"),
    ],
)
def test_a_folder_without_a_checkpoint_is_refused(latest: str | None, fault: str, tmp_path: Path) -> None:
    if latest:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(CheckpointError, match=fault):
        find_checkpoint(tmp_path)


def test_safetensors_are_split_into_files_with_an_index(qwen: tuple[Path, Path], tmp_path: Path) -> None:
    shape = load_shape(qwen[0])
    seen: list[tuple[int, int]] = []
    source = open_weights(qwen[1], shape, "torch_dist")
    write_hf(source, tmp_path, lambda *done: seen.append(done), bytes_per_file=200_000)
    expected = load_file(qwen[0] / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert len(list(tmp_path.glob("*.safetensors"))) == len(seen) > 3 and seen[-1] == (num_bytes, num_bytes)
    other = open_weights(tmp_path, shape)
    assert_equal({name: other.read(name, ()) for name in other.shapes}, expected)


def test_packed_experts_are_converted_as_single_ones(tmp_path: Path) -> None:
    plain = make_random_qwen3_moe(tmp_path / "plain", seed=9, num_hidden_layers=2)
    packed = make_random_qwen3_moe(tmp_path / "packed", seed=9, num_hidden_layers=2, is_packed=True)
    convert(packed, tmp_path / "megatron", "torch_dist", ignore)
    assert_equal(read_all(tmp_path / "megatron"), load_file(plain / "model.safetensors"))


def test_an_output_that_exists_is_refused_and_a_failed_one_leaves_nothing(
    qwen: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match=r"there: exists \(allowed: a new folder\)"):
        convert(qwen[0], tmp_path / "there", "torch_dist", ignore)

    def fail(num_done: int, num_all: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(qwen[1], tmp_path / "new", "hf", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_tool_converts_and_tells_a_fault_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(ROOT / "tools/convert.py"))["main"]
    monkeypatch.setattr(
        "sys.argv", ["convert.py", str(ROOT / "configs/tiny_moe"), str(tmp_path / "a"), "--to", "torch_dist"]
    )
    assert main() == 0
    monkeypatch.setattr("sys.argv", ["convert.py", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf"])
    assert main() == 0
    assert_equal(load_file(tmp_path / "b/model.safetensors"), load_file(ROOT / "configs/tiny_moe/model.safetensors"))
    assert {path.name for path in (ROOT / "configs/tiny_moe").iterdir()} - {
        path.name for path in (tmp_path / "b").iterdir()
    } == {"README.md"}
    capsys.readouterr()
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"ConfigError: {tmp_path / 'b'}: exists (allowed: a new folder)"
