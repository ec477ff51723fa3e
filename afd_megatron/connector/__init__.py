"""The exchange between attention and FFN ranks: one room per transport, chosen by name. Knows no model."""

from collections.abc import Callable
from typing import NamedTuple

from afd_megatron.connector.base import AttentionPort, ExchangeLayout, FfnPort
from afd_megatron.distributed import World
from afd_megatron.errors import ConfigError
from afd_megatron.topology import Role


class Ports(NamedTuple):
    """This rank's ends of the exchange: one, or both on a rank that has both roles."""

    attention: AttentionPort | None
    ffn: FfnPort | None


def make_ports(kind: str, world: World, layout: ExchangeLayout, *, timeout_s: float) -> Ports:
    """Make the ends of this rank's roles over the transport `kind`; no message waits longer than `timeout_s`.

    Raises:
        ConfigError: no such transport.
    """
    if kind not in _CONNECTORS:
        raise ConfigError(f"connector.kind: {kind} is unknown (allowed: {', '.join(sorted(_CONNECTORS))})")
    return _CONNECTORS[kind](world, layout, timeout_s)


def _local(world: World, layout: ExchangeLayout, timeout_s: float) -> Ports:
    from afd_megatron.connector.reference import ReferenceAttentionPort, ReferenceExchange, ReferenceFfnPort

    assert world.topology.world_size == 1, world.topology
    exchange = ReferenceExchange(world.topology, layout, timeout_s=timeout_s, copies=False)
    return Ports(ReferenceAttentionPort(exchange, 0), ReferenceFfnPort(exchange, 0))


def _gloo(world: World, layout: ExchangeLayout, timeout_s: float) -> Ports:
    from afd_megatron.connector.gloo import GlooAttentionPort, GlooFfnPort

    roles = world.topology.roles(world.rank)
    attention = GlooAttentionPort(world, layout, timeout_s=timeout_s) if Role.ATTENTION in roles else None
    ffn = GlooFfnPort(world, layout, timeout_s=timeout_s, attention=attention) if Role.FFN in roles else None
    return Ports(attention, ffn)


_CONNECTORS: dict[str, Callable[[World, ExchangeLayout, float], Ports]] = {"gloo": _gloo, "local": _local}
