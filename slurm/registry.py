"""The backends by name. This is the only place that lists them."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path

from slurm.backend import Backend
from slurm.local.backend import LocalBackend
from slurm.slurm_backend import SlurmBackend
from specrl.config import STAGES, ClusterConfig, Config, ConfigError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (LocalBackend(), SlurmBackend())}


def backend_of(cluster: ClusterConfig) -> Backend:
    """The backend that `cluster.backend` names: one of `BACKENDS`, or a class given as `package.module:Class`."""
    return BACKENDS.get(cluster.backend) or _imported(cluster.backend)


def backends_of(config: Config) -> list[Backend]:
    """The backends on which the stages of a run take place, each once."""
    backends = [backend_of(config.cluster_of(stage)) for stage in STAGES]
    return list({backend.name: backend for backend in backends}.values())


@functools.cache
def _imported(path: str) -> Backend:
    module_name, _, name = path.partition(":")
    if not module_name or not name.isidentifier():
        known = ", ".join(BACKENDS)
        raise ConfigError(f"cluster.backend = {path!r}: allowed: {known}, or package.module:Class")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as in a job; a console script does not look there by itself
    try:
        kind = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cluster.backend = {path!r} cannot be imported: {error}") from error
    backend: Backend = kind()
    return backend
