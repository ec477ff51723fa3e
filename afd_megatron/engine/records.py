"""What the readers of input lines share: the faults of a parsed JSON object, told in one way. Knows no keys."""

import json
from collections.abc import Callable, Mapping, Sequence

from afd_megatron.errors import AfdError


def check_keys(record: Mapping[str, object], allowed: Sequence[str]) -> None:
    for key in record:
        if key not in allowed:
            raise AfdError(f"unknown key {shown(key)} (allowed: {', '.join(allowed)})")


def check_each(items: Sequence[object], key: str, is_allowed: Callable[[object], bool], allowed: str) -> None:
    for index, item in enumerate(items):
        if not is_allowed(item):
            raise AfdError(f"{key}.{index}: {shown(item)} (allowed: {allowed})")


def shown(value: object) -> str:
    """Return `value` as JSON, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
