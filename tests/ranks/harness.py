"""Gloo ranks for tests: processes that start once and run one function after the other. Knows nothing of the package
but `join`.

A fork server imports once, for all ranks of all modules, what the tests have imported of the package; even so, a module
starts its ranks once, in a fixture:

    @pytest.fixture(scope="module")
    def ranks():
        with Ranks(4) as ranks:
            yield ranks

    def test_something(ranks):
        ranks.run(check_something, Topology(2, 1))      # check_something(world, topology) runs on every rank
"""

import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Self

import torch

from afd_megatron.distributed import World, join
from afd_megatron.topology import Topology

JOIN_TIMEOUT_S = 60.0


class RankFailure(AssertionError):
    """What went wrong first, with the traceback of the rank."""


class Ranks:
    """Processes of one gloo world. After a failure they are killed, and the next `run` starts new ones."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., object], *args: object, timeout_s: float = 60.0, dying: Collection[int] = ()
    ) -> list:
        """Call `function(world, *args)` on all ranks at the same time and return what each returned.

        Function and arguments are pickled, so the function stands at the top of its module. Ranks in `dying` must die
        in the call, without an answer (None).

        Raises:
            RankFailure: a rank raised, died, or did not answer within `timeout_s`; tells which and its traceback.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        try:
            return self._collect(time.monotonic() + timeout_s, dying)
        except RankFailure:
            self.close()
            raise
        finally:
            if dying:
                self.close()

    def close(self) -> None:
        """Kill the ranks; none of them holds anything that matters."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        costly = {name for name in sys.modules if name.startswith(("afd_megatron", "megatron.core"))}
        costly.discard("afd_megatron.ops.grouped_cpu")  # starts threads on import, which a fork does not survive
        context.set_forkserver_preload(["pytest", *sorted(costly)])
        self._folder = tempfile.TemporaryDirectory(prefix="afd_ranks_")
        for rank in range(self._world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._world_size, self._folder.name, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, deadline: float, dying: Collection[int]) -> list:
        results: list = [None] * self._world_size
        waiting = dict(zip(self._pipes, range(self._world_size), strict=True))
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=deadline - time.monotonic())
            if not ready:
                raise RankFailure(f"no answer in time from ranks {sorted(waiting.values())}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    has_failed, results[rank] = pipe.recv()
                except EOFError:
                    if rank not in dying:
                        self._processes[rank].join()
                        raise RankFailure(f"rank {rank} died, exit code {self._processes[rank].exitcode}") from None
                else:
                    if has_failed:
                        raise RankFailure(f"rank {rank}:\n{results[rank]}")
                    assert rank not in dying, f"rank {rank} should have died"
        return results


def run_ranks(
    function: Callable[..., object],
    world_size: int,
    *args: object,
    timeout_s: float = 60.0,
    dying: Collection[int] = (),
) -> list:
    """Start `world_size` ranks for one call of `function(world, *args)`; see `Ranks.run`."""
    with Ranks(world_size) as ranks:
        return ranks.run(function, *args, timeout_s=timeout_s, dying=dying)


def as_topology(world: World, topology: Topology, *, timeout_s: float = 20.0) -> World | None:
    """Return this rank's world for a case with `topology` on the first ranks of `world`; None on those left over."""
    if world.rank >= topology.world_size:
        return None
    return World(world.rank, topology, world.job_id, timeout_s=timeout_s)


def _serve(rank: int, world_size: int, folder: str, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    topology = Topology(world_size, world_size, colocated=True)
    world = join(rank, topology, Path(folder), timeout_s=JOIN_TIMEOUT_S)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        world.barrier()  # unpickling imports the test's module, which takes one rank longer than the other
        try:
            pipe.send((False, function(world, *args)))
        except BaseException:  # noqa: BLE001  the test shall see it, whatever it is
            pipe.send((True, traceback.format_exc()))
