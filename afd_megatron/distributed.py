"""Joins the world of one job: process guards, the gloo group, messages between ranks with deadlines, Megatron's groups.

Knows no plans, no models, and nothing of what a message holds.
"""

import ctypes
import faulthandler
import os
import secrets
import signal
import socket
import stat
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist

from afd_megatron.errors import AfdError, ExitCode, PeerError
from afd_megatron.topology import Role, Topology

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

_LAUNCHERS = (b"deepspeed", b"afd_decode", b"torchrun", b"torch.distributed")
_WATCH_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1


class World:
    """This rank among the others. `job_id` is one random number of 64 bits for all ranks of the job.

    Messages are tensors of bytes on the CPU. A receive takes a message up to the size of its buffer and does not tell
    the size that came; a longer message ends the process. So buffers have the size agreed on, and messages are sealed.
    """

    def __init__(self, rank: int, topology: Topology, job_id: int, *, timeout_s: float) -> None:
        self.rank = rank
        self.topology = topology
        self.job_id = job_id
        self._timeout_s = timeout_s
        self._group = dist.group.WORLD  # its own send and recv take half the time of dist.isend and dist.irecv
        self._is_open = True

    def send(self, data: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Start to send `data` (uint8), which stays as it is until the returned work is done. Never waits.

        NOTE: a work that is forgotten before it is done is never sent.
        """
        try:
            return self._group.send([data], peer, tag)
        except RuntimeError as error:
            raise PeerError(f"{self.topology.name(peer)}: connection lost before a send") from error

    def post_receive(self, buffer: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Take the next message with `tag` from `peer` into `buffer` (uint8) as soon as it comes. Never waits."""
        try:
            return self._group.recv([buffer], peer, tag)
        except RuntimeError as error:
            raise PeerError(f"{self.topology.name(peer)}: connection lost before a receive") from error

    def wait(self, work: dist.Work, peer: int, what: str, *, timeout_s: float) -> None:
        """Wait for a send to, or a receive from, `peer`; once per work, as a second wait would not return.

        Raises:
            PeerError: the peer is gone, or not done within `timeout_s`. No message can be exchanged any more.
        """
        start = time.monotonic()
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            is_late = time.monotonic() - start >= timeout_s
            reason = f"not done within {timeout_s:g} s" if is_late else "connection lost"
            raise PeerError(f"{self.topology.name(peer)}: {what}: {reason}") from error

    def barrier(self) -> None:
        """Wait for all ranks, at most the timeout of `join`."""
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=self._timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise PeerError(f"barrier: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Leave together with all other ranks; only after success, as a rank that is gone would be waited for."""
        if self._is_open:
            self._is_open = False
            self.barrier()
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def join(rank: int, topology: Topology, rendezvous: Path, *, timeout_s: float) -> World:
    """Meet all other ranks of the node through a file in the folder `rendezvous`, which is new for each start.

    Args:
        timeout_s: how long to wait for the slowest rank to join, and for any barrier later.

    Raises:
        AfdError: the folder is not this user's alone.
        PeerError: a rank did not come in time; names it.
    """
    _claim_folder(rendezvous)
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # one node: gloo cannot authenticate, so it stays off the network
    store = dist.FileStore(str(rendezvous / "store"), topology.world_size)
    if rank == 0:
        store.set("job_id", str(secrets.randbits(64)))
    store.set(f"joined/{rank}", "")
    deadline = time.monotonic() + timeout_s
    for peer in range(topology.world_size):
        try:
            store.wait([f"joined/{peer}"], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise PeerError(f"{topology.name(peer)}: did not join within {timeout_s:g} s") from error
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=topology.world_size, timeout=timedelta(seconds=timeout_s)
    )
    return World(rank, topology, int(store.get("job_id")), timeout_s=timeout_s)


def megatron_groups(world: World, *, timeout_s: float) -> "dict[Role, ProcessGroupCollection]":
    """Make Megatron's process groups, all ranks together, and return those of this rank's roles.

    No collective of theirs waits longer than `timeout_s`.

    Attention is a grid of TP x DP, of which only TP talks. An FFN rank is alone: its experts and its slice of their
    width are cut by us, and what it returns is added on attention. Megatron's own `initialize_model_parallel` wants one
    set of sizes for the whole world, so it is not called.
    """
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    topology, groups = world.topology, {}
    sizes = {
        Role.ATTENTION: (topology.attention_ranks, topology.attention_tp),
        Role.FFN: (topology.ffn_ranks, 1),
    }
    for role, (ranks, num_tp) in sizes.items():
        shape = [num_tp, len(ranks) // num_tp, 1]
        grid = HyperCommGrid(shape, ["tp", "dp", "one"], rank_offset=ranks.start, backend="gloo")
        tp, one = (grid.create_pg(dim, timeout=timedelta(seconds=timeout_s)) for dim in ("tp", "one"))
        groups[role] = ProcessGroupCollection(
            tp=tp, cp=one, pp=one, dp=one, dp_cp=one, tp_cp=tp, ep=one, expt_tp=one, tp_ep=one, expt_dp=one,
            tp_dp_cp=one, embd=None, pos_embd=None,
        )  # fmt: skip
    return {role: groups[role] for role in topology.roles(world.rank)}


def guard_process(grace_s: float) -> None:
    """Tie this process to its launchers: without its parent it ends at once, without one further up it is asked to.

    It gets a SIGTERM, as from a user, and is ended with exit code FAULT if it still runs `grace_s` seconds later.
    SIGUSR1 and a crash print the stacks of all threads.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    chain = _launcher_chain()
    threading.Thread(target=_watch_chain, args=(chain, grace_s), name="launcher watchdog", daemon=True).start()


def _claim_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AfdError(
            f"{folder}: mode {stat.filemode(status.st_mode)}, owner {status.st_uid} (allowed: this user alone)"
        )


def _launcher_chain() -> list[tuple[int, int]]:
    """Return (pid, parent's pid) from this process up to the topmost launcher without a gap."""
    chain = []
    pid = os.getpid()
    while (parent := _parent_of(pid)) > 1:
        try:
            command = Path(f"/proc/{parent}/cmdline").read_bytes()
        except OSError:
            break
        if not any(name in command for name in _LAUNCHERS):
            break
        chain.append((pid, parent))
        pid = parent
    return chain


def _watch_chain(chain: list[tuple[int, int]], grace_s: float) -> None:
    while all(_parent_of(pid) == parent for pid, parent in chain):
        time.sleep(_WATCH_INTERVAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.write(2, b"AFD FAILURE: the launcher is gone\n")
    os._exit(ExitCode.FAULT)


def _parent_of(pid: int) -> int:
    """Return the parent's pid, -1 if the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return -1
