"""`specrl devcluster`: a real Slurm of virtual nodes on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from slurm.devcluster import DevCluster


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="devcluster")


group = typer.Typer(help="A real Slurm of virtual nodes on this machine, on loopback.")


@group.command()
def up(nodes: Annotated[int, typer.Option(min=1, max=64, help="Virtual nodes, 8 CPUs each.")] = 2) -> None:
    """Start it, if it does not run."""
    cluster = DevCluster()
    cluster.up(nodes)
    print(f"{nodes} nodes are up; `specrl run --cluster slurm` uses them. For Slurm's own commands:")
    print(f"export SLURM_CONF={cluster.slurm_conf}")


@group.command()
def down() -> None:
    """Cancel its jobs and stop it."""
    DevCluster().down()
    print("down")


@group.command()
def status() -> None:
    """Say which daemons run and how the nodes are."""
    found = DevCluster().status()
    if not any(found.daemons.values()):
        print("down; start it with: specrl devcluster up")
        raise typer.Exit(1)
    for name, alive in found.daemons.items():
        state = found.nodes.get(name.removeprefix("slurmd-"), "")
        print(f"{name:12} {'up' if alive else 'down'} {state}".rstrip())
    raise typer.Exit(0 if found.up else 1)
