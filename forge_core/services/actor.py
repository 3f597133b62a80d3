"""The base class of actors: classes whose objects live in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import types
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

from forge_core.services.config import ServiceConfig
from forge_core.services.handles import ActorHandle, Methods, ServiceInterface
from forge_core.services.mesh import Mesh
from forge_core.services.service import Service

_SETTINGS = {field.name: field.default for field in fields(ServiceConfig)}
_KINDS: dict[str, Any] = {
    "procs": int,
    "hosts": int | None,
    "with_gpus": bool,
    "num_replicas": int,
    "mesh_name": str | None,
}
_BODY = tuple(_KINDS)  # settings that a class body may give
_LEFT_OUT: Any = object()
_running: list[ActorHandle | ServiceInterface] = []
log = logging.getLogger(__name__)


class ForgeActor:
    """Subclass it; every public method can then be called from outside:

        class Counter(ForgeActor):
            def __init__(self, start: int) -> None:
                self.value = start

            def increment(self) -> int:
                self.value += 1
                return self.value

        service = await Counter.options(num_replicas=2).as_service(10)
        value = await service.increment.route()

    ``rank`` and ``size`` say which of the actor's processes this is. Plain methods run one at a time, coroutine
    methods side by side. The class must be importable by its name, unless it runs on threads.

    ``procs``, ``with_gpus``, ``num_replicas`` and ``mesh_name`` in the body of the class are its settings where
    ``options`` gives no others; ``settings``, a ServiceConfig, gives all of them. Raises ValueError, at the definition,
    for one that cannot be.
    """

    rank: int
    size: int
    procs: ClassVar[int] = ServiceConfig.procs
    hosts: ClassVar[int | None] = ServiceConfig.hosts
    with_gpus: ClassVar[bool] = ServiceConfig.with_gpus
    num_replicas: ClassVar[int] = ServiceConfig.num_replicas
    mesh_name: ClassVar[str | None] = ServiceConfig.mesh_name
    settings: ClassVar[ServiceConfig] = ServiceConfig()
    _defined: ClassVar[type[ForgeActor]]

    def __init_subclass__(cls, *, _options_of: type[ForgeActor] | None = None) -> None:
        cls._defined = cls if _options_of is None else _options_of._defined
        body = {name: vars(cls)[name] for name in _BODY if name in vars(cls)}
        for name, value in body.items():
            if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and _KINDS[name] is not bool):
                raise ValueError(
                    f"{cls.__name__}.{name} is the actor's setting of that name, and {value!r} cannot be one"
                )
        if not isinstance(cls.settings, ServiceConfig):
            raise ValueError(f"{cls.__name__}.settings are the actor's settings: a ServiceConfig")
        cls.settings = replace(cls.settings, **body)
        for name in _BODY:
            setattr(cls, name, getattr(cls.settings, name))

    def setup(self) -> None:
        """Runs on every rank once it is made, and again after each restart: what a fresh replica needs to be of use."""

    @classmethod
    def options(
        cls,
        *,
        procs: int = _LEFT_OUT,
        hosts: int | None = _LEFT_OUT,
        with_gpus: bool = _LEFT_OUT,
        num_replicas: int = _LEFT_OUT,
        mesh_name: str | None = _LEFT_OUT,
        **others: Any,
    ) -> type[Self]:
        """A new class with other settings (those of ``ServiceConfig``); what is left out stays. This class is not
        changed. Raises TypeError for a setting that there is not, ValueError for one that cannot be."""
        named = dict(zip(_BODY, (procs, hosts, with_gpus, num_replicas, mesh_name), strict=True))
        given = {name: value for name, value in named.items() if value is not _LEFT_OUT} | others
        if unknown := sorted(given.keys() - _SETTINGS.keys()):
            raise TypeError(f"{cls.__name__}.options: no setting {unknown[0]!r}; there are {', '.join(_SETTINGS)}")
        settings = replace(cls.settings, **given)
        body = {name: getattr(settings, name) for name in _BODY}
        body |= {"settings": settings, "__module__": cls.__module__}
        return types.new_class(cls.__name__, (cls,), {"_options_of": cls}, lambda own: own.update(body))

    @classmethod
    async def launch(cls, *arguments: Any, **keywords: Any) -> ActorHandle:
        """One actor, set up, that the caller ends with ``shutdown``. Raises what making it raises."""
        mesh = Mesh(cls._importable(), cls._name(), cls.settings, (arguments, keywords), on_death=log.error)
        await mesh.start()
        return ActorHandle(mesh, cls._methods())

    @classmethod
    async def as_actor(cls, *arguments: Any, **keywords: Any) -> ActorHandle:
        """One actor, without replicas or restarts. ``forge_core.services.shutdown`` ends it at the latest."""
        _running.append(handle := await cls.launch(*arguments, **keywords))
        return handle

    @classmethod
    async def as_service(cls, *arguments: Any, **keywords: Any) -> ServiceInterface:
        """``num_replicas`` actors behind one handle, all set up."""
        service = Service(cls._importable(), cls._name(), cls.settings, (arguments, keywords))
        await service.start()
        _running.append(interface := ServiceInterface(service, cls._methods()))
        return interface

    @classmethod
    async def shutdown(cls, actor: ActorHandle) -> None:
        """End ``actor``. Idempotent."""
        await actor._mesh.stop()

    @classmethod
    def _name(cls) -> str:
        return cls.settings.mesh_name or cls.__name__

    @classmethod
    def _methods(cls) -> Methods:
        own = {*vars(ForgeActor)} - {"setup"}
        return frozenset(
            name for name in dir(cls) if not name.startswith("_") and name not in own and callable(getattr(cls, name))
        )

    @classmethod
    def _importable(cls) -> type[ForgeActor]:
        """The class as a child process finds it. Raises ValueError when it would not."""
        found = cls._defined
        if not cls.settings.threads and (found.__module__ == "__main__" or "<locals>" in found.__qualname__):
            raise ValueError(
                f"{found.__qualname__} (of {found.__module__}) cannot be imported by a child process: define it at the "
                "top of a module, or run it on threads with options(threads=True)"
            )
        return found


async def shutdown() -> None:
    """End every service, then every actor, that ``as_service`` and ``as_actor`` have started, latest first."""
    latest_first = _running[::-1]
    handles = sorted(latest_first, key=lambda handle: isinstance(handle, ActorHandle))
    _running.clear()
    for handle in handles:
        with contextlib.suppress(RuntimeError):  # of an event loop that is closed: its actors have ended with it
            await (handle.shutdown() if isinstance(handle, ServiceInterface) else ForgeActor.shutdown(handle))
