"""Reads rotary positions from an HF config of either dialect. Knows no family, no torch."""

import math

from afd_megatron.families.base import RopeShape, YarnShape
from afd_megatron.families.fields import Fields


def read_rope(
    fields: Fields, head_dim: int, max_positions: int, *, theta: float = 10000.0, rotary_share: float | None = None
) -> RopeShape:
    """Read the rotary shape of heads of `head_dim`.

    transformers 5 keeps everything in `rope_parameters`, 4 has the base and the share beside `rope_scaling`.

    Args:
        theta: what an absent base means.
        rotary_share: the share of a head that is rotated if the config does not say; None: always all of it.
    """
    theta = fields.number("rope_theta", theta)
    share = _read_share(fields, "partial_rotary_factor", rotary_share)
    name = "rope_parameters"
    section = fields.section(name)
    if section is None:
        name = "rope_scaling"
        section = fields.section(name)
    yarn = None
    if section is not None:
        theta = section.number(f"{name}.rope_theta", theta)
        share = _read_share(section, f"{name}.partial_rotary_factor", share if rotary_share else None)
        kinds = [section.require(f"{name}.{key}", "default", "yarn") for key in ("rope_type", "type")]
        yarn = _read_yarn(section, name, max_positions) if "yarn" in kinds else None
    num_dims = int(head_dim * share)
    fields.check(
        0 < num_dims <= head_dim and num_dims % 2 == 0,
        f"head_dim: {head_dim}, of which {num_dims} are rotated (allowed: an even number of 2 to {head_dim})",
    )
    return RopeShape(theta, num_dims, yarn)


def _read_share(fields: Fields, name: str, default: float | None) -> float:
    return float(fields.require(name, 1.0, 1)) if default is None else fields.number(name, default)


def _read_yarn(section: Fields, name: str, max_positions: int) -> YarnShape:
    """Read YaRN as transformers' `_compute_yarn_parameters` does."""
    original = section.count(f"{name}.original_max_position_embeddings", max_positions)
    factor = section.number(f"{name}.factor", max_positions / original)
    mscale = section.number(f"{name}.mscale", 0.0, can_be_zero=True)
    mscale_all = section.number(f"{name}.mscale_all_dim", 0.0, can_be_zero=True)
    is_relative = mscale > 0 and mscale_all > 0
    inferred = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all) if is_relative else _yarn_mscale(factor)
    return YarnShape(
        factor=factor,
        original_max_positions=original,
        beta_fast=section.number(f"{name}.beta_fast", 32.0),
        beta_slow=section.number(f"{name}.beta_slow", 1.0),
        attention_factor=section.number(f"{name}.attention_factor", inferred),
        latent_factor=_yarn_mscale(factor, mscale_all) ** 2,
        truncate=section.flag(f"{name}.truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return what YaRN multiplies attention by: 0.1 * mscale * ln(factor) + 1, or 1 without stretching."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
