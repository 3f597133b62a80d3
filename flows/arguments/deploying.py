"""Commands that put flows on a Prefect server, and start its processes."""

from __future__ import annotations

from flows.arguments.common import Commands


def add_to(commands: Commands) -> None:
    server = commands.add("server", "be the Prefect server of this Forge home, until stopped", store=False)
    server.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    server.add_argument("--port", type=int, default=4200, help="port to listen on (default 4200)")
    deploy = commands.add("deploy", "put every deployment of prefect.yaml on the Prefect server, with all they need")
    deploy.add_argument("--file", default="prefect.yaml", help="the deployments (default: ./prefect.yaml)")
    deploy.add_argument(
        "--reset", action="store_true", help="also set limits, schedules and the store back to what the file says"
    )
