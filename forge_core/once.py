"""``functools.cached_property`` that is made once also when several threads ask at a time: since Python 3.12 the one of
the library may make a value twice, which for a model is its memory twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class once(Generic[T]):
    """A property that is made when it is first asked for. One that fails is made again at the next request."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> once[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> once[T] | T:
        if instance is None:
            return self
        made = instance.__dict__
        with made.setdefault(f"_{self._name}_lock", threading.RLock()):
            if self._name not in made:
                made[self._name] = self._make(instance)
            return made[self._name]
