"""Who started this process, as which rank, and what the job's exit code is."""

import json
import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from family_configs import QWEN2_MOE, QWEN3_MOE

from afd_megatron import launcher
from afd_megatron.config import JobConfig
from afd_megatron.engine.results import write_summary
from afd_megatron.errors import ConfigError
from afd_megatron.families import load_shape
from afd_megatron.launcher import (
    Start,
    expected_share,
    is_routed,
    launched_rank,
    load_job,
    needs_ranks_started,
    read_start,
    thread_variables,
)
from afd_megatron.supervisor import Ending

DEEPSPEED = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_SIZE": "1"}
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": value for name, value in
          {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "3", "LOCAL_SIZE": "4"}.items()}  # fmt: skip
SRUN = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}
MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "intermediate_size": 96,
    "max_position_embeddings": 1024, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def job(**sections: object) -> JobConfig:
    files = {"model": {"path": "model"}, "job": {"input": "in.jsonl", "output": "out.jsonl"}}
    return JobConfig.model_validate(files | sections)


def job_2a2f(**sections: object) -> JobConfig:
    return job(topology={"attention": {"dp": 2}, "ffn": {"ep": 2}}, **sections)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(MODEL))
    (tmp_path / "in.jsonl").touch()
    (tmp_path / "x.yaml").write_text("model: {path: model}\njob: {input: in.jsonl, output: out.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "start"),
    [
        (DEEPSPEED, Start("deepspeed", 1, 4, 1)),
        (TORCHRUN, Start("torchrun", 2, 4, 2)),
        (MPIRUN, Start("mpirun", 3, 4, 3)),
        (SRUN, Start("srun", 0, 4, 0)),
        ({name: SRUN[name] for name in list(SRUN)[:3]}, Start("srun", 0, 4, 0)),
        (SRUN | DEEPSPEED, Start("deepspeed", 1, 4, 1)),
        ({}, None),
        ({"RANK": "0"}, None),
        ({"SLURM_NTASKS": "4"}, None),
    ],
)
def test_every_launcher_is_read_into_the_same_form(environ: Mapping[str, str], start: Start | None) -> None:
    assert read_start(environ) == start


@pytest.mark.parametrize(
    "environ",
    [
        DEEPSPEED | {"LOCAL_SIZE": "2"},
        TORCHRUN | {"LOCAL_WORLD_SIZE": "2"},
        MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_several_nodes_are_not_yet(environ: Mapping[str, str]) -> None:
    with pytest.raises(ConfigError, match="not yet: several nodes"):
        read_start(environ)


def test_a_rank_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="environment: RANK: 'x' "):
        read_start(DEEPSPEED | {"RANK": "x"})


@pytest.mark.parametrize(
    ("environ", "is_needed"),
    [
        ({}, True),
        (DEEPSPEED | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}, True),
        (DEEPSPEED, False),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, False),
    ],
)
def test_a_lone_process_starts_the_ranks(environ: Mapping[str, str], is_needed: bool) -> None:
    assert needs_ranks_started(job_2a2f(), read_start(environ)) == is_needed


def test_a_job_of_one_process_runs_where_it_is() -> None:
    assert not needs_ranks_started(job(connector={"kind": "local"}), None)


@pytest.mark.parametrize(
    ("config", "started", "message"),
    [
        (job_2a2f(), 3,
         r"^world size: attention dp 2 x tp 1 \+ ffn ep 2 x tp 1 = 4 ranks, but 3 were started .allowed: 4.$"),
        (job(topology={"attention": {"dp": 2}, "ffn": {"ep": 2}, "colocated": True}), 4,
         r"attention dp 2 x tp 1 = 2 ranks, but 4 were started"),
        (job(connector={"kind": "local"}), 2, r"connector local = 1 rank, but 2 were started"),
    ],
)  # fmt: skip
def test_a_wrong_world_size_shows_the_arithmetic(config: JobConfig, started: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launched_rank(config, Start("srun", 0, started, 0), {})


def test_ranks_of_one_launch_meet_in_a_folder_of_their_own(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    first, second = (launched_rank(job_2a2f(), Start("srun", rank, 4, rank), environ) for rank in (0, 3))
    assert (first.rank, second.rank, second.world_size, second.local_rank) == (0, 3, 4, 3)
    assert first.rendezvous == second.rendezvous and str(os.getppid()) in first.rendezvous.name
    assert stat.S_IMODE(first.rendezvous.stat().st_mode) == 0o700


def test_a_rank_alone_does_not_meet_another_job_of_its_shell(tmp_path: Path) -> None:
    launched = launched_rank(job(connector={"kind": "local"}), None, {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert launched.rendezvous.name.startswith(f"{os.getpid()}-")


def test_folders_of_launches_that_are_gone_are_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    root = tmp_path / f"afd_megatron-{os.getuid()}"
    root.mkdir(mode=0o700)
    kept, stale, reused = root / "notes", root / f"{gone.pid}-1", root / f"{os.getpid()}-1"
    for path in (kept, stale, reused):
        path.mkdir()
    launched = launched_rank(job_2a2f(), Start("srun", 0, 4, 0), {"XDG_RUNTIME_DIR": str(tmp_path)})
    assert {path.name for path in root.iterdir()} == {"notes", launched.rendezvous.name}


@pytest.mark.parametrize("make", ["open", "link"])
def test_a_meeting_place_that_others_can_enter_is_refused(tmp_path: Path, make: str) -> None:
    root = tmp_path / f"afd_megatron-{os.getuid()}"
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    if make == "link":
        root.symlink_to("elsewhere")
    else:
        root.mkdir()
        root.chmod(0o755)
    with pytest.raises(ConfigError, match="allowed: a folder of mine, 0700"):
        launched_rank(job_2a2f(), Start("srun", 0, 4, 0), {"XDG_RUNTIME_DIR": str(tmp_path)})


@pytest.mark.parametrize(
    ("config", "rank", "environ", "count"),
    [
        (job_2a2f(), 0, {}, "2"),
        (job_2a2f(), 0, {"OMP_NUM_THREADS": "5"}, "5"),
        (job_2a2f(launch={"threads": {"attention": 3, "ffn": 7}}), 1, {"OMP_NUM_THREADS": "5"}, "3"),
        (job_2a2f(launch={"threads": {"attention": 3, "ffn": 7}}), 2, {}, "7"),
        (job(topology={"attention": {"dp": 9}}), 0, {}, "1"),
        (job(connector={"kind": "local"}), 0, {}, "8"),
    ],
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, config: JobConfig, rank: int, environ: Mapping[str, str], count: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert thread_variables(config, rank, environ)["OMP_NUM_THREADS"] == count


def test_threads_beyond_the_cores_wait_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    config = job(topology={"ffn": {"ep": 2}}, launch={"threads": {"attention": 2, "ffn": 1}})
    assert thread_variables(config, 0, {})["GOMP_SPINCOUNT"] == "10000"
    assert "GOMP_SPINCOUNT" not in thread_variables(job(connector={"kind": "local"}), 0, {})
    assert "GOMP_SPINCOUNT" not in thread_variables(config, 0, {"OMP_WAIT_POLICY": "ACTIVE"})


def test_facts_of_the_model_are_judged_with_all_else(folder: Path) -> None:
    overrides = ["topology.ffn.ep=9", "engine.max_context=1025", "pipeline.stage=1"]
    with pytest.raises(ConfigError) as caught:
        load_job(Path("x.yaml"), overrides, may_replace_output=True)
    assert str(caught.value).splitlines()[1:] == [
        "--set topology.ffn.ep=9: topology.ffn.ep: 9 exceeds num_experts 8 (allowed: 1 to 8)",
        "--set engine.max_context=1025: engine.max_context: 1025 exceeds the model's positions (allowed: 1 to 1024)",
    ]


@pytest.mark.parametrize(("tp", "num_kv_heads", "is_fine"), [(2, 1, True), (4, 2, True), (3, 2, False), (8, 2, False)])
def test_heads_that_ranks_cannot_share_are_refused(folder: Path, tp: int, num_kv_heads: int, is_fine: bool) -> None:
    (folder / "model/config.json").write_text(json.dumps(QWEN3_MOE | {"num_key_value_heads": num_kv_heads}))
    overrides = [f"topology.attention.tp={tp}", "engine.max_context=64"]
    if is_fine:
        assert load_job(Path("x.yaml"), overrides, may_replace_output=True).topology.attention.tp == tp
        return
    with pytest.raises(
        ConfigError, match=rf"attention\.tp: {tp} cannot share 4 heads, 2 of keys \(allowed: 1, 2, 4\)$"
    ):
        load_job(Path("x.yaml"), overrides, may_replace_output=True)


def test_more_ranks_than_an_expert_has_columns_are_refused(folder: Path) -> None:
    (folder / "model/config.json").write_text(json.dumps(QWEN3_MOE))
    with pytest.raises(ConfigError, match=r"ffn\.tp: 49 exceeds the width of an expert 48 \(allowed: up to it\)$"):
        load_job(Path("x.yaml"), ["topology.ffn.tp=49", "engine.max_context=64"], may_replace_output=True)


@pytest.mark.parametrize("text", ["{}", '{"architectures": ["Other"]}', "[", "[]"])
def test_an_unsupported_model_is_refused_where_the_job_names_it(folder: Path, text: str) -> None:
    (folder / "model/config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"^x\.yaml:1: model\.path: "):
        load_job(Path("x.yaml"), [], may_replace_output=True)


def test_an_output_that_exists_is_refused_unless_it_may_be_replaced(folder: Path) -> None:
    (folder / "out.jsonl").write_text("a record")
    with pytest.raises(
        ConfigError, match=r"^x\.yaml:2: job\.output: out\.jsonl exists \(allowed: a new file, or --over"
    ):
        load_job(Path("x.yaml"), [], may_replace_output=False)
    assert load_job(Path("x.yaml"), [], may_replace_output=True).job.output == Path("out.jsonl")


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        (Ending(0, False, False), "ok", 0),
        (Ending(0, False, False), "partial", 3),
        (Ending(0, False, False), "interrupted", 4),
        (Ending(0, False, False), "fault", 13),
        (Ending(0, False, False), None, 13),
        (Ending(2, False, False), None, 2),
        (Ending(3, False, False), "partial", 3),
        (Ending(247, False, False), None, 247),
        (Ending(-9, False, False), None, 13),
        (Ending(-9, False, True), "ok", 13),
        (Ending(1, True, False), "interrupted", 4),
        (Ending(-15, True, False), None, 4),
        (Ending(0, True, False), "ok", 0),
        (Ending(1, True, False), "fault", 13),
        (Ending(-9, True, True), "interrupted", 4),
        (Ending(1, True, True), None, 13),
    ],
)
def test_the_exit_code_says_how_the_job_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ending: Ending, status: str | None, code: int
) -> None:
    (folder / "out.summary.json").write_text('{"status": "ok"}')  # of an earlier run, must not count

    def end_at_once(command: Sequence[str], environ: Mapping[str, str], grace_s: float) -> Ending:
        assert command[-3:] == ["script.py", "--config", "x.yaml"] and not {"RANK", "SLURM_PROCID"} & set(environ)
        if status:
            write_summary(folder / "out.summary.json", {"status": status})
        return ending

    monkeypatch.setattr(launcher, "supervise", end_at_once)
    assert launcher.start_ranks(job_2a2f(), Path("script.py"), ["--config", "x.yaml"], DEEPSPEED | SRUN) == code


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_ffn", "share"),
    [
        (256, 8, 4, 0.9036),
        (256, 8, 2, 0.9965),
        (128, 8, 4, 0.9073),
        (128, 8, 8, 0.6674),
        (64, 6, 2, 0.9879),
        (8, 2, 1, 1),
    ],
)
def test_the_share_of_ranks_that_a_row_goes_to_is_the_published_one(
    num_experts: int, top_k: int, num_ffn: int, share: float
) -> None:
    assert expected_share(num_experts, top_k, num_ffn) == pytest.approx(share, abs=5e-5)


@pytest.mark.parametrize(
    ("pipeline", "num_ffn", "wanted"),
    [
        ({"exchange": "broadcast", "gate": "attention"}, 3, False),
        ({"exchange": "routed", "gate": "attention"}, 3, True),
        ({"exchange": "routed", "gate": "attention"}, 1, False),
        ({"exchange": "auto", "gate": "attention"}, 3, True),
        ({"exchange": "auto", "gate": "attention"}, 1, False),
        ({"exchange": "auto", "gate": "ffn"}, 3, False),
    ],
)
def test_auto_takes_the_exchange_with_fewer_bytes(
    folder: Path, pipeline: dict[str, str], num_ffn: int, wanted: bool
) -> None:
    shape = load_shape(folder / "model")
    config = job(topology={"ffn": {"ep": num_ffn, "tp": 2}}, pipeline=pipeline)
    assert is_routed(config, shape) == wanted


def test_routed_is_refused_where_all_ranks_hold_shared_experts(folder: Path) -> None:
    (folder / "model/config.json").write_text(json.dumps(QWEN2_MOE))
    overrides = ["pipeline.exchange=routed", "pipeline.gate=attention", "engine.max_context=64"]
    with pytest.raises(ConfigError, match=r"pipeline\.exchange: routed leaves out ranks that all rows pass"):
        load_job(folder / "x.yaml", overrides, may_replace_output=False)
    shared = "pipeline.shared_experts=attention"
    assert load_job(folder / "x.yaml", [*overrides, shared], may_replace_output=False)
