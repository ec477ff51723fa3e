"""Fields of an HF config, read with every fault at once. Knows no family."""

from collections.abc import Mapping
from typing import TypeVar

from afd_megatron.errors import ConfigError

T = TypeVar("T")


class Fields:
    """Reads typed fields and gathers what is wrong with them; `raise_faults` at the end raises it all.

    A field that is absent or null takes its default; without one it is a fault. A reader returns a value of its type in
    any case, so reading goes on after a fault, which is told once however often the field is read.
    """

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._faults: list[str] = []

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            return self._fault(name, value, f"an integer of at least {least}", least)
        return value

    def optional_count(self, name: str) -> int | None:
        return None if self._config.get(name) is None else self.count(name)

    def number(self, name: str, default: float | None = None, *, can_be_zero: bool = False) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return self._fault(name, value, "a number", 1.0)
        if not (0 < value < float("inf") or (value == 0 and can_be_zero)):
            return self._fault(name, value, f"a number {'from' if can_be_zero else 'above'} 0", 1.0)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        return value if isinstance(value, bool) else self._fault(name, value, "true or false", default)

    def indices(self, name: str) -> tuple[int, ...]:
        """Read a list of integers, empty by default."""
        value = self._value(name, [])
        if isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return tuple(value)
        return self._fault(name, value, "a list of integers", ())

    def texts(self, name: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """Read a list of words among `allowed`, empty by default."""
        value = self._value(name, [])
        if isinstance(value, list) and all(item in allowed for item in value):
            return tuple(value)
        return self._fault(name, value, f"a list of {', '.join(allowed)}", ())

    def section(self, name: str) -> "Fields | None":
        """Read a mapping, None if it is absent; its faults are gathered here."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            return self._fault(name, value, "an object", None)
        section = Fields({f"{name}.{key}": item for key, item in value.items()})
        section._faults = self._faults
        return section if value else None

    def require(self, name: str, *allowed: T) -> T:
        """Read a value that must be among `allowed`, the first of which is what an absent field means."""
        value = self._value(name, allowed[0])
        for item in allowed:
            if value is item or (value == item and type(value) is type(item)):
                return item
        return self._fault(name, value, " or ".join(repr(item) for item in allowed), allowed[0])

    def check(self, is_right: bool, fault: str) -> None:
        if not is_right and fault not in self._faults:
            self._faults.append(fault)

    def raise_faults(self) -> None:
        if self._faults:
            raise ConfigError("\n".join(self._faults))

    def _value(self, name: str, default: object) -> object:
        value = self._config.get(name)
        return default if value is None else value

    def _fault(self, name: str, value: object, allowed: str, stand_in: T) -> T:
        shown = "missing" if value is None else repr(value)
        self.check(False, f"{name}: {shown} (allowed: {allowed})")
        return stand_in
