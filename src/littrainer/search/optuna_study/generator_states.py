"""Where the random generators of a sampler stand, as plain values that a study can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

# A sampler holds other samplers, and these their generators.
DEEPEST = 5


def generator_states(holder: Any) -> list[Any]:
    """The states of all of NumPy's generators that an object holds, in the order in which it holds them."""
    return [_state(generator) for generator in _generators(holder)]


def set_generator_states(holder: Any, states: list[Any]) -> bool:
    """Put the generators of an object where those of one like it stood.

    Returns:
        whether it has as many generators, of the same kinds; else nothing is changed.
    """
    generators = list(_generators(holder))
    if [_kind(_state(generator)) for generator in generators] != [_kind(state) for state in states]:
        return False
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.RandomState):
            name, keys, position, has_gauss, gauss = state
            generator.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        else:
            generator.bit_generator.state = _with_arrays(state)
    return True


def _kind(state: Any) -> tuple[str, str]:
    return (type(state).__name__, state["bit_generator"] if isinstance(state, dict) else state[0])


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        name, keys, position, has_gauss, gauss = generator.get_state(legacy=True)
        return [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)]
    return _without_arrays(generator.bit_generator.state)


def _without_arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_arrays(entry) for key, entry in value.items()}
    return {"array": value.tolist(), "dtype": str(value.dtype)} if isinstance(value, np.ndarray) else value


def _with_arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"array", "dtype"}:
        return np.array(value["array"], dtype=value["dtype"])
    return {key: _with_arrays(entry) for key, entry in value.items()}


def _generators(holder: Any, depth: int = 0, seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if id(holder) in seen or depth > DEEPEST:
        return
    seen.add(id(holder))
    if isinstance(holder, np.random.RandomState | np.random.Generator):
        yield holder
        return
    for value in vars(holder).values() if hasattr(holder, "__dict__") and not isinstance(holder, type) else ():
        yield from _generators(value, depth + 1, seen)
