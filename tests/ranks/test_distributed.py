"""Joining, leaving, Megatron's groups and the guards of a process."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from afd_megatron.distributed import World, join, megatron_groups
from afd_megatron.errors import AfdError, PeerError
from afd_megatron.topology import Role, Topology
from tests.ranks.harness import run_ranks


def test_rank_that_does_not_join_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"^rank 1 \(ffn 0\): did not join within 0.1 s$"):
        join(0, Topology(1, 1), tmp_path / "meet", timeout_s=0.1)


def test_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(AfdError, match="mode drwxrwxrwx"):
        join(0, Topology(1, 1), tmp_path, timeout_s=0.1)


def join_and_leave(world: World, folder: str) -> tuple[int, bool]:
    """Leave the harness's world and meet in another as 2a1f."""
    dist.destroy_process_group()
    with join(world.rank, Topology(2, 1), Path(folder) / "meet", timeout_s=20.0) as joined:
        job_id = joined.job_id
        joined.barrier()
    joined.close()
    return job_id, dist.is_initialized()


def test_ranks_share_a_job_id_and_leave_together(tmp_path: Path) -> None:
    results = run_ranks(join_and_leave, 3, str(tmp_path))
    assert len({job_id for job_id, _ in results}) == 1
    assert not any(is_initialized for _, is_initialized in results)


def group_ranks(world: World, topology: Topology) -> dict[Role, dict[str, list[int]]]:
    groups = megatron_groups(World(world.rank, topology, world.job_id, timeout_s=20.0), timeout_s=20.0)
    for group in groups.values():
        assert isinstance(group, ProcessGroupCollection)
        dist.all_reduce(torch.ones(1), group=group.tp)
    return {
        role: {name: dist.get_process_group_ranks(getattr(group, name)) for name in ("tp", "expt_tp")}
        for role, group in groups.items()
    }


@pytest.mark.parametrize(
    "topology",
    [Topology(2, 1), Topology(2, 1, attention_tp=2), Topology(3, 3, colocated=True, attention_tp=3)],
    ids=["2a1f", "tp 2", "3c tp 3"],
)
def test_each_role_has_a_grid_of_its_own(topology: Topology) -> None:
    for rank, groups in enumerate(run_ranks(group_ranks, 3, topology)):
        assert tuple(groups) == topology.roles(rank)
        if Role.ATTENTION in groups:
            assert groups[Role.ATTENTION] == {"tp": list(topology.tp_ranks(rank)), "expt_tp": [rank]}
        if Role.FFN in groups:
            assert groups[Role.FFN] == {"tp": [rank], "expt_tp": [rank]}


GUARDED = """
import subprocess, sys
rank = "from afd_megatron.distributed import guard_process; guard_process(1.0); print('up', flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", rank], stdin=subprocess.PIPE)
print(child.pid, flush=True)
child.wait()
"""


def test_rank_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", GUARDED], stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    assert launcher.stdout.readline() == "up\n"
    rank = os.pidfd_open(pid)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    assert dead_within(rank, timeout_s=10.0)


RUNNER = """
import subprocess, sys
middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sys.argv[1]!r}, 'deepspeed'])"
subprocess.run([sys.executable, "-c", middle, "deepspeed"])
"""
RANK = """
import os, signal
from afd_megatron.distributed import guard_process
signal.signal(signal.SIGTERM, signal.SIG_IGN if {is_deaf} else signal.SIG_DFL)
guard_process(1.0)
print(os.getpid(), flush=True)
input()
"""


@pytest.mark.parametrize("is_deaf", [False, True])
def test_rank_is_asked_to_end_and_made_to_when_a_launcher_further_up_is_killed(is_deaf: bool) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, RANK.format(is_deaf=is_deaf), "deepspeed"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    rank = os.pidfd_open(int(runner.stdout.readline()))
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    assert dead_within(rank, timeout_s=10.0)


def dead_within(pidfd: int, *, timeout_s: float) -> bool:
    ready, _, _ = select.select([pidfd], [], [], timeout_s)
    return bool(ready)
