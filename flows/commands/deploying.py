"""The commands that put flows on a Prefect server, and start one."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from pathlib import Path

from flows.home import ServerError
from forge_core.config import store_uri
from forge_core.store import open_store

AUTHENTICATION = "PREFECT_SERVER_API_AUTH_STRING"


def server(args: argparse.Namespace) -> int:
    """Be the Prefect server of this Forge home; does not return."""
    from flows.server import serve

    for warning in exposure_warnings(args.host):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    serve(host=args.host, port=args.port)
    return 0


def exposure_warnings(host: str) -> list[str]:
    """What is dangerous about a server that listens on ``host``."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError as error:
        raise ServerError(f"--host {host}: no such IPv4 address ({error}), such as 127.0.0.1 or 0.0.0.0") from error
    if address.is_loopback:
        return []
    warnings = [f"{host} can be reached from other machines, in clear text: put TLS in front (docs/operating.md)"]
    if AUTHENTICATION not in os.environ:
        warnings.append(f"whoever connects can run code on the workers: set {AUTHENTICATION} (docs/operating.md)")
    return warnings


def deploy(args: argparse.Namespace) -> int:
    """Put the deployments of prefect.yaml on the server, and print what was created, changed and left."""
    from flows.server import running_server

    handle = running_server()
    if handle is None:
        raise ServerError("no Prefect server answers: start one with `forge server`, or name one with PREFECT_API_URL")
    print(f"Prefect UI: {handle.ui_url}", file=sys.stderr)
    from prefect.client.orchestration import get_client

    from flows import deploying
    from flows.deploying_project import load_project

    store = store_uri(args.store)
    deploying.check_store(store)
    store = open_store(store, probe=False).uri
    project = load_project(Path(args.file))
    with get_client(sync_client=True) as client:
        report = deploying.deploy(client, project, store, move_store=args.store is not None, reset=args.reset)
    for what, name in report.lines:
        print(f"{what:<8}  {name}")
    return 0
