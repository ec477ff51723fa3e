"""The main job on the shipped model, as a user starts it: answers, an early end, a checkpoint with holes."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from models_for_tests import make_random_qwen3_moe
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
DEEPSPEED = str(Path(sys.executable).with_name("deepspeed"))
CONFIG = ("launch/afd_decode.py", "--config", "configs/tiny_moe_2a2f_gloo.yaml")
DEADLINE_S = 150.0


def start(*command: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "DS_ACCELERATOR")}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def children_of(pid: int) -> list[int]:
    """Return all processes below `pid`."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *children_of(child)]
    return found


def test_deepspeed_decodes_the_shipped_prompts_on_2a2f(tmp_path: Path) -> None:
    output = tmp_path / "results.jsonl"
    process = start(DEEPSPEED, *CONFIG, "--set", f"job.output={output}")
    text, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, text + errors
    answers = json.loads((ROOT / "configs/prompts.answers.json").read_text())
    texts = {record["id"]: record["text"] for record in map(json.loads, output.read_text().splitlines())}
    assert texts.keys() == answers.keys()
    assert sum(texts[id_] == answer for id_, answer in answers.items()) >= 0.9 * len(answers)
    summary = json.loads((tmp_path / "results.summary.json").read_text())
    assert summary["status"] == "ok"
    assert [(rank["rank"], rank["role"]) for rank in summary["ranks"]] == [
        (0, "attention"),
        (1, "attention"),
        (2, "ffn"),
        (3, "ffn"),
    ]
    metrics = summary["metrics"]
    assert metrics["output_throughput"] == pytest.approx(
        metrics["mean_concurrency"] * metrics["output_throughput_per_user"], rel=0.01
    )


def test_sigterm_on_an_idle_job_keeps_what_is_done_and_ends_every_process(tmp_path: Path) -> None:
    lines = [{"id": "now", "prompt": "sort dbca="}, {"id": "never", "prompt": "add 1+1=", "arrival_s": 600}]
    job, output = tmp_path / "job.jsonl", tmp_path / "results.jsonl"
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = start(sys.executable, *CONFIG, "--set", f"job.input={job}", "--set", f"job.output={output}")
    deadline = time.monotonic() + DEADLINE_S
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)  # no event of this process tells of another one's file
    below = children_of(process.pid)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 4
    assert [record["id"] for record in map(json.loads, output.read_text().splitlines())] == ["now"]
    assert json.loads((tmp_path / "results.summary.json").read_text())["status"] == "interrupted"
    assert len(below) >= 5 and not [pid for pid in below if Path(f"/proc/{pid}").exists()]


def test_sigterm_to_deepspeed_alone_records_what_runs_as_interrupted(tmp_path: Path) -> None:
    lines = [{"id": "now", "prompt": "sort dbca="}]
    lines += [{"id": f"long-{i}", "prompt": "add 1+1=", "max_new_tokens": 480, "ignore_eos": True} for i in range(9)]
    job, output = tmp_path / "job.jsonl", tmp_path / "results.jsonl"
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    process = start(DEEPSPEED, *CONFIG, "--set", f"job.input={job}", "--set", f"job.output={output}")
    deadline = time.monotonic() + DEADLINE_S
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)  # no event of this process tells of another one's file
    below = [os.pidfd_open(pid) for pid in children_of(process.pid)]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)  # all of them hold its pipes
    reasons = [record["finish_reason"] for record in map(json.loads, output.read_text().splitlines())]
    assert reasons == ["stop", *["interrupted"] * 9]
    assert json.loads((tmp_path / "results.summary.json").read_text())["status"] == "interrupted"
    assert len(below) >= 7 and all(select.select([pid], [], [], 10.0)[0] for pid in below)


def test_a_checkpoint_with_holes_is_refused_with_the_whole_list(tmp_path: Path) -> None:
    folder = make_random_qwen3_moe(tmp_path / "model", seed=1, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    names = [name for name in tensors if ".experts.3." in name]
    for name in names:
        del tensors[name]
    tensors["model.layers.0.extra.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    process = start(
        sys.executable, *CONFIG, "--set", f"model.path={folder}", "--set", "engine.max_context=64",
        "--set", f"job.output={tmp_path / 'out.jsonl'}", "--set", "topology.attention.dp=1",
    )  # fmt: skip
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2, errors
    assert all(f"{name}: missing" in errors for name in names)
    assert "model.layers.0.extra.weight: unexpected" in errors


def test_ids_that_come_twice_are_refused_before_any_rank_waits_for_rank_0(tmp_path: Path) -> None:
    job, output, summary = (tmp_path / name for name in ("job.jsonl", "out.jsonl", "out.summary.json"))
    job.write_text('{"id": "a", "prompt": "add 1+1="}\n' * 2)
    for old in (output, summary):
        old.write_text('{"status": "ok"}\n')
    process = start(
        sys.executable, *CONFIG, "--set", f"job.input={job}", "--set", f"job.output={output}", "--overwrite",
        "--set", "control.handshake_timeout_s=600",
    )  # fmt: skip
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert output.read_text() == summary.read_text() == '{"status": "ok"}\n'
    assert process.returncode == 2, errors
    assert f'{job}:2: id "a" is that of line 1 too' in errors
    assert "AFD FAILURE" not in errors
