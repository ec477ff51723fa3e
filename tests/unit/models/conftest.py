"""Megatron's groups of a world of this process alone."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core.process_groups_config import ProcessGroupCollection

from afd_megatron.distributed import join, megatron_groups
from afd_megatron.topology import Role, Topology


@pytest.fixture(scope="package")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroupCollection]:
    rendezvous: Path = tmp_path_factory.mktemp("world") / "rendezvous"
    with join(0, Topology(1, 1, colocated=True), rendezvous, timeout_s=30) as world:
        yield megatron_groups(world, timeout_s=30)[Role.ATTENTION]
