"""README, tree and reading path say the truth."""

import ast
import io
import tokenize
from pathlib import Path

import yaml

from afd_megatron.config import NOT_YET, load_config

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()

# From a request to its token, on both roles of the gloo job. What runs before the first request is not in it: the
# command, the config, joining the world and the handshake, building model and ports, loading weights, reading the
# input. Nor is what this job can do without: latent attention (models/latent_attention.py) and the streamed product
# (ops/grouped_cpu.py) are the same way once more, and one TP rank does nothing in models/tensor_parallel.py.
READING_PATH = [
    "plan.py",
    "pipeline.py",
    "topology.py",
    "routing.py",
    "control/messages.py",
    "control/exchange.py",
    "control/plans.py",
    "attention/worker.py",
    "attention/leader.py",
    "attention/step.py",
    "ffn/worker.py",
    "ffn/step.py",
    "connector/base.py",
    "connector/message.py",
    "connector/gloo.py",
    "engine/request.py",
    "engine/scheduler.py",
    "engine/served.py",
    "engine/kv_blocks.py",
    "engine/batch.py",
    "engine/sampler.py",
    "engine/balance.py",
    "engine/clock.py",
    "models/attention_model.py",
    "models/attention.py",
    "models/rope.py",
    "models/kv_cache.py",
    "models/router.py",
    "models/ffn_model.py",
    "ops/experts.py",
    "ops/grouped.py",
]


def test_reading_path_is_under_2100_lines_of_code() -> None:
    assert sum(num_code_lines(ROOT / "afd_megatron" / name) for name in READING_PATH) < 2100


def test_no_file_of_the_package_is_over_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / "afd_megatron").rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_readme_shows_every_room_of_the_package() -> None:
    tree = README.split("afd_megatron/\n")[1].split("```")[0]
    rooms = [
        path.name + "/" * path.is_dir() for path in (ROOT / "afd_megatron").iterdir() if not path.name.startswith("__")
    ]
    assert [room for room in rooms if f"  {room} " not in tree] == []


def test_readme_names_everything_that_is_not_there_yet() -> None:
    section = README.split("## Not yet")[1]
    assert [key for key in NOT_YET if f"`{key}`" not in section] == []


def test_readme_names_files_that_exist() -> None:
    words = README.replace("(", " ").replace(")", " ").replace("`", " ").split()
    named = {word.strip(".,:") for word in words if word.startswith(("configs/", "tools/", "launch/", "docs/"))}
    named = {name for name in named if "*" not in name}
    assert named and [name for name in named if not (ROOT / name).exists()] == []


def test_every_shipped_config_is_valid() -> None:
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    assert configs
    for path in configs:
        assert load_config(path).model.path == Path("configs/tiny_moe")


def test_the_config_in_the_readme_is_valid(tmp_path: Path) -> None:
    text = README.split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert load_config(path).topology.attention.dp == yaml.safe_load(text)["topology"]["attention"]["dp"]


def num_code_lines(path: Path) -> int:
    """Count lines that hold code: no blank line, comment or docstring."""
    source = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)
