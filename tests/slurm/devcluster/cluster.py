"""Start and stop the development cluster, and report its state."""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrl.artifacts import write_json
from specrl.processes import free_port
from tests.slurm.devcluster import configuration, daemons
from tests.slurm.devcluster.configuration import Layout
from tests.slurm.devcluster.daemons import DevClusterError

MARIADB_OPTIONS = (
    "--skip-networking",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=16M",
    "--skip-log-bin",
    "--innodb-lock-wait-timeout=900",
    "--innodb-flush-log-at-trx-commit=0",
    "--performance-schema=off",
)
START_SECONDS = 180
"""How long a daemon may take to come up, which is a second or two on a machine that does nothing else."""


def default_root() -> Path:
    """Return the cluster's folder: `$SPECRL_DEVCLUSTER`, or else `~/.specrl/devcluster`."""
    return Path(os.environ.get("SPECRL_DEVCLUSTER") or Path.home() / ".specrl" / "devcluster").absolute()


@dataclass(frozen=True)
class Status:
    """Which daemons are alive, and the states of the nodes as `sinfo` names them."""

    daemons: dict[str, bool]
    nodes: dict[str, str]

    @property
    def up(self) -> bool:
        """Whether all daemons are alive."""
        return bool(self.daemons) and all(self.daemons.values())


class DevCluster:
    """The cluster whose files lie under `root`. Its methods may be called at any time, any number of times."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_root()).absolute()

    @property
    def slurm_conf(self) -> Path:
        """The file that `SLURM_CONF` must name for Slurm's commands to talk to this cluster."""
        return self.root / "etc" / "slurm.conf"

    def up(self, nodes: int = 2) -> None:
        """Start the daemons that do not run.

        Args:
            nodes: The number of virtual nodes.

        Raises:
            DevClusterError: Programs are missing, another number of nodes is up, or a daemon does not start.
        """
        daemons.check_installed()
        status = self.status()
        if status.up and len(status.nodes) == nodes:
            return
        if any(status.daemons.values()):
            if len(self._layout().node_names) != nodes:
                raise DevClusterError(f"a cluster of {self._layout().nodes} nodes is up; stop it first")
            self.down()
        layout, own_hostname = self._plan(nodes)
        self._write_files(layout)
        self._start_munge(layout)
        self._start_database(layout)
        self._start_slurm(layout, own_hostname)

    def down(self) -> None:
        """Cancel all jobs and stop every daemon."""
        if not (self.root / "layout.json").exists():
            return
        layout = self._layout()
        self._cancel_jobs(layout)
        for name, program in reversed(_daemons(layout).items()):
            daemons.stop(layout.pid_file(name), program)

    def status(self) -> Status:
        """Return which daemons are alive, and the states of the nodes."""
        if not (self.root / "layout.json").exists():
            return Status({}, {})
        layout = self._layout()
        alive = {
            name: daemons.pid_of(layout.pid_file(name), program) is not None
            for name, program in _daemons(layout).items()
        }
        return Status(alive, self._node_states(layout) if alive["slurmctld"] else {})

    def _layout(self) -> Layout:
        data = json.loads((self.root / "layout.json").read_text())
        return Layout(**{**data, "root": self.root, "node_ports": tuple(data["node_ports"])})

    def _plan(self, nodes: int) -> tuple[Layout, bool]:
        address, own_hostname = daemons.loopback_address()
        ports: set[int] = set()
        while len(ports) < nodes + 2:
            ports.add(free_port(address))
        dbd, ctld, *node_ports = ports
        return Layout(self.root, getpass.getuser(), nodes, address, dbd, ctld, tuple(node_ports)), own_hostname

    def _write_files(self, layout: Layout) -> None:
        for folder in ("etc", "state", "spool", "log", "run", "dev", "munge", "database"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in configuration.files(layout).items():
            path = self.root / "etc" / name
            path.write_text(text)
            path.chmod({"slurmdbd.conf": 0o600, "task_prolog.sh": 0o755}.get(name, 0o644))
        for number in range(configuration.GPUS_PER_NODE):
            # Slurm wants a device file to exist for each GPU it hands out; nothing opens it.
            device = self.root / "dev" / f"gpu{number}"
            if not device.exists():
                device.symlink_to("/dev/null")
        write_json(self.root / "layout.json", dataclasses.asdict(layout))

    def _start_munge(self, layout: Layout) -> None:
        folder = layout.munge_socket.parent
        if not (folder / "key").exists():
            daemons.run("mungekey", "--create", f"--keyfile={folder / 'key'}")
        # --force, because munged refuses folders inside one that other users cannot enter, such as a home folder.
        command = ["munged", "--force", f"--socket={layout.munge_socket}", f"--key-file={folder / 'key'}"]
        command += [f"--log-file={self.root / 'log' / 'munged.log'}", f"--seed-file={folder / 'seed'}"]
        daemons.start([*command, f"--pid-file={layout.pid_file('munged')}"], self.root / "log" / "start.log")
        self._expect(layout.munge_socket.exists, "munged")

    def _start_database(self, layout: Layout) -> None:
        data, socket = self.root / "database", layout.database_socket
        if not (data / "mysql").exists():
            options = [f"--user={layout.user}", f"--datadir={data}", "--skip-test-db"]
            login = ["--auth-root-authentication-method=socket", f"--auth-root-socket-user={layout.user}"]
            daemons.run("mariadb-install-db", "--no-defaults", *options, *login)
        options = [f"--user={layout.user}", f"--datadir={data}", f"--socket={socket}", *MARIADB_OPTIONS]
        files = [f"--pid-file={layout.pid_file('mariadbd')}", f"--log-error={self.root / 'log' / 'mariadbd.log'}"]
        daemons.start(["mariadbd", "--no-defaults", *options, *files], self.root / "log" / "start.log")
        self._expect(lambda: _answers("mariadb", f"--socket={socket}", "--execute=select 1"), "mariadbd")
        daemons.run("mariadb", f"--socket={socket}", "--execute=create database if not exists slurm_acct_db")

    def _start_slurm(self, layout: Layout, own_hostname: bool) -> None:
        log = self.root / "log" / "start.log"
        env = {"SLURM_CONF": str(self.slurm_conf), "MYSQL_UNIX_PORT": str(layout.database_socket)}
        daemons.start(["slurmdbd"], log, env, own_hostname)
        self._expect(lambda: daemons.listens(layout.address, layout.dbd_port), "slurmdbd")
        # The controller must know its cluster in the accounting database when it starts.
        if not daemons.run("sacctmgr", "-nP", "show", "cluster", "specrl", env=env).strip():
            daemons.run("sacctmgr", "-i", "add", "cluster", "specrl", env=env)
        daemons.start(["slurmctld"], log, env, own_hostname)
        for node in layout.node_names:
            daemons.start(["slurmd", "-N", node], log, env, own_hostname)
        self._expect(lambda: list(self._node_states(layout).values()) == ["idle"] * layout.nodes, "slurmctld")

    def _expect(self, condition: Callable[[], bool], daemon: str) -> None:
        """Wait until a daemon is up, or stop the cluster and raise a DevClusterError after `START_SECONDS`."""
        if not daemons.wait_until(condition, START_SECONDS):
            self.down()
            raise DevClusterError(f"{daemon} did not come up within {START_SECONDS} s; see {self.root / 'log'}")

    def _node_states(self, layout: Layout) -> dict[str, str]:
        try:
            text = daemons.run("sinfo", "-hN", "-p", "debug", "-o", "%N %T", env={"SLURM_CONF": str(self.slurm_conf)})
        except DevClusterError:  # the controller is not listening yet
            return {}
        return dict(line.split(maxsplit=1) for line in sorted(text.splitlines()))

    def _cancel_jobs(self, layout: Layout) -> None:
        env = {"SLURM_CONF": str(self.slurm_conf)}
        if daemons.pid_of(layout.pid_file("slurmctld"), "slurmctld") is None:
            return
        try:
            daemons.run("scancel", "--user", layout.user, env=env)
            deadline = time.monotonic() + 15
            while daemons.run("squeue", "-h", env=env).strip() and time.monotonic() < deadline:
                time.sleep(0.2)
        except DevClusterError:  # a controller that does not answer has no job that this could end
            return


def _daemons(layout: Layout) -> dict[str, str]:
    """Return the program of each daemon by the name of its pid file, in the order of starting."""
    names = {"munged": "munged", "mariadbd": "mariadbd", "slurmdbd": "slurmdbd", "slurmctld": "slurmctld"}
    return names | {f"slurmd-{node}": "slurmd" for node in layout.node_names}


def _answers(*command: str) -> bool:
    try:
        daemons.run(*command)
    except DevClusterError:
        return False
    return True
