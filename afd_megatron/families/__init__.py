"""Which families there are, and the shape of a model folder. Knows no family's fields."""

import json
from collections.abc import Mapping
from pathlib import Path

from afd_megatron.errors import ConfigError
from afd_megatron.families.base import Family, ModelShape
from afd_megatron.families.deepseek_v2 import DEEPSEEK_V2
from afd_megatron.families.deepseek_v3 import DEEPSEEK_V3
from afd_megatron.families.glm4_moe import GLM4_MOE
from afd_megatron.families.gpt_oss import GPT_OSS
from afd_megatron.families.mixtral import MIXTRAL
from afd_megatron.families.olmoe import OLMOE
from afd_megatron.families.qwen2_moe import QWEN2_MOE
from afd_megatron.families.qwen3_moe import QWEN3_MOE

_ALL = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE, GPT_OSS, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE)
_FAMILIES = {family.architecture: family for family in _ALL}


def family_for(config: Mapping[str, object]) -> Family:
    """Return the family of an HF config.

    Raises:
        ConfigError: no known architecture; lists the known ones.
    """
    architectures = config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if name in _FAMILIES:
            return _FAMILIES[name]
    raise ConfigError(f"architectures: {architectures!r} (allowed: {', '.join(_FAMILIES)})")


def family_of(shape: ModelShape) -> Family:
    return next(family for family in _FAMILIES.values() if family.name == shape.family)


def load_shape(folder: Path) -> ModelShape:
    """Return the shape that `folder`/config.json describes.

    Raises:
        ConfigError: no readable config.json, or a model that is not supported; one line per field at fault.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: a {type(config).__name__} (allowed: an object)")
    try:
        return family_for(config).read_shape(config)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
