"""Actors and services: objects in processes of their own, alone or as replicas behind one name."""

from forge_core.services.actor import ForgeActor, shutdown
from forge_core.services.config import ServiceConfig
from forge_core.services.errors import ActorDied, ActorError, RemoteTraceback, ServiceUnavailable
from forge_core.services.handles import ActorHandle, ServiceInterface

__all__ = [
    "ActorDied",
    "ActorError",
    "ActorHandle",
    "ForgeActor",
    "RemoteTraceback",
    "ServiceConfig",
    "ServiceInterface",
    "ServiceUnavailable",
    "shutdown",
]
