"""The commands as a user types them, through the real launcher."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from afd_megatron.config import JobConfig
from afd_megatron.supervisor import process_start

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "launch/afd_decode.py")
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.yaml"))
DEEPSPEED = [str(Path(sys.executable).with_name("deepspeed"))]

# Stands for a rank: says who it is, then does what its last argument says.
RANK = """\
import json, os, signal, sys, time
out, mode = sys.argv[-2:]
def stop(*_):
    if os.environ["RANK"] == "0":
        open(out, "w").write('{"status": "interrupted"}')
    os._exit(4)
signal.signal(signal.SIGTERM, stop)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR")
sys.stdout.write(json.dumps([os.getpid(), os.getppid(), *map(os.environ.get, names)]) + "\\n")
sys.stdout.flush()
if mode == "ok":
    open(out, "w").write('{"status": "ok"}')
    sys.exit()
time.sleep(60)
"""
START = """\
import os, sys
from pathlib import Path
from afd_megatron.config import JobConfig
from afd_megatron.launcher import start_ranks
config = JobConfig.model_validate_json(sys.argv[1])
sys.exit(start_ranks(config, Path("rank.py"), [str(config.job.summary.resolve()), sys.argv[2]], os.environ))
"""


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environ())


def environ() -> dict[str, str]:
    return os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.fixture(params=["ok", "idle"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Three stand-in ranks under the real launcher, one case per way to end."""
    (tmp_path / "rank.py").write_text(RANK)
    sections = {"model": {"path": "."}, "job": {"input": "in.jsonl", "output": str(tmp_path / "out.jsonl")}}
    config = JobConfig.model_validate(sections | {"topology": {"attention": {"dp": 2}}})
    command = [sys.executable, "-c", START, config.model_dump_json(), request.param]
    with subprocess.Popen(command, cwd=tmp_path, env=environ(), stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


class Rank(NamedTuple):
    pid: int
    launcher_pid: int
    rank: str
    local_rank: str
    world_size: str
    accelerator: str


def ranks_of(process: subprocess.Popen[str]) -> list[Rank]:
    assert process.stdout is not None
    return sorted((Rank(*json.loads(process.stdout.readline())) for _ in range(3)), key=lambda rank: rank.rank)


@pytest.mark.parametrize("started", ["ok"], indirect=True)
def test_a_lone_process_starts_all_ranks_and_ends_as_they_do(started: subprocess.Popen[str]) -> None:
    ranks = ranks_of(started)
    assert [rank[2:] for rank in ranks] == [(str(rank), str(rank), "3", "cpu") for rank in range(3)]
    assert started.wait(60) == 0


@pytest.mark.parametrize("started", ["idle"], indirect=True)
def test_sigterm_ends_all_ranks_as_interrupted(started: subprocess.Popen[str]) -> None:
    ranks = ranks_of(started)
    started.terminate()
    assert started.wait(60) == 4
    assert [process_start(rank.pid) for rank in ranks] == [None] * 3


@pytest.mark.parametrize("started", ["idle"], indirect=True)
def test_a_killed_launcher_is_a_fault_and_leaves_no_rank(started: subprocess.Popen[str]) -> None:
    ranks = ranks_of(started)
    os.kill(ranks[0].launcher_pid, signal.SIGKILL)
    assert started.wait(60) == 13
    assert [process_start(rank.pid) for rank in ranks] == [None] * 3


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_job_is_valid_and_read_without_torch(name: str) -> None:
    done = run(
        sys.executable, "-X", "importtime", SCRIPT, "--config", f"configs/{name}", "--validate", "--local_rank=0"
    )
    assert (done.returncode, done.stdout) == (0, f"configs/{name}: valid\n"), done.stderr[-2000:]
    assert "pydantic" in done.stderr and "torch" not in done.stderr


def test_a_printed_config_can_be_run_again(tmp_path: Path) -> None:
    first = run(sys.executable, SCRIPT, "--config", "configs/tiny_moe_2a2f_gloo.yaml", "--set", "sampling.seed=7",
                "--print-config")  # fmt: skip
    (tmp_path / "printed.yaml").write_text(first.stdout)
    second = run(sys.executable, SCRIPT, "--config", str(tmp_path / "printed.yaml"), "--print-config")
    assert second.stdout == first.stdout and "seed: 7" in first.stdout


def test_python_refuses_a_misspelt_key_with_file_and_line(tmp_path: Path) -> None:
    text = (ROOT / "configs/tiny_moe_1a1f_gloo.yaml").read_text().replace("stages:", "stagse:")
    (tmp_path / "job.yaml").write_text(text)
    done = run(sys.executable, SCRIPT, "--config", str(tmp_path / "job.yaml"))
    line = text[: text.index("stagse")].count("\n") + 1
    assert done.returncode == 2
    assert f"ConfigError: {tmp_path}/job.yaml:{line}: pipeline.stagse: unknown key (did you mean stages?" in done.stderr


def test_deepspeed_refuses_a_misspelt_key_with_the_same_exit_code() -> None:
    job = ["--config", "configs/tiny_moe_1a1f_gloo.yaml", "--set", "pipelin.stages=2"]
    done = run(*DEEPSPEED, SCRIPT, *job)
    assert done.returncode == 2
    assert "ConfigError: --set pipelin.stages=2: pipelin: unknown key (did you mean pipeline?" in done.stderr


def test_deepspeed_with_a_wrong_number_of_ranks_shows_the_arithmetic_once() -> None:
    job = ["--config", "configs/tiny_moe_2a2f_gloo.yaml", "--set", "job.output=not_made.jsonl"]
    done = run(*DEEPSPEED, "--num_gpus", "3", SCRIPT, *job)
    assert done.returncode == 2
    message = (
        "attention dp 2 x tp 1 + ffn ep 2 x tp 1 = 4 ranks, but 3 were started (allowed: 4; deepspeed --num_gpus 4)"
    )
    assert done.stderr.count(message) == 1


@pytest.mark.parametrize("arguments", [[], ["--config"], ["--config", "x", "--stages=3"], ["--conf", "x"]])
def test_a_wrong_command_line_shows_the_usage(arguments: list[str]) -> None:
    done = run(sys.executable, SCRIPT, *arguments)
    assert done.returncode == 2 and "usage: " in done.stderr
