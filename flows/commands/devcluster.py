"""`specrl devcluster`: a real Slurm of virtual nodes on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from slurm.devcluster import DevCluster


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="devcluster")


group = typer.Typer(
    help="Run a Slurm cluster on this machine.\n\nIt is a real Slurm with virtual nodes, for development and tests, "
    "and listens on the loopback interface only."
)


@group.command()
def up(
    nodes: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, max=64, help="The number of virtual nodes, each with 8 CPUs.")
    ] = 2,
) -> None:
    """Start the cluster, unless it is up."""
    cluster = DevCluster()
    cluster.up(nodes)
    print(f"{nodes} nodes are up; `specrl run --cluster slurm` uses them. For Slurm's own commands:")
    print(f"export SLURM_CONF={cluster.slurm_conf}")


@group.command()
def down() -> None:
    """Cancel the cluster's jobs and stop it."""
    DevCluster().down()
    print("the cluster is down")


@group.command()
def status() -> None:
    """Show the cluster's daemons and nodes.

    The exit code is 1 unless all daemons are up.
    """
    found = DevCluster().status()
    if not any(found.daemons.values()):
        print("the cluster is down; start it with: specrl devcluster up")
        raise typer.Exit(1)
    for name, alive in found.daemons.items():
        state = found.nodes.get(name.removeprefix("slurmd-"), "")
        print(f"{name:12} {'up' if alive else 'down'} {state}".rstrip())
    raise typer.Exit(0 if found.up else 1)
