"""Options of sbatch that a configuration may pass through, and those that specrl sets itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, StrictBool, StrictFloat, StrictInt, StrictStr

OptionValue = StrictBool | StrictInt | StrictFloat | StrictStr

MEMORY_KEYS = "resources.memory_gib_per_rank, or cluster.request_memory = false to ask for none"
EXPORT_KEYS = "cluster.setup, with a line such as export NAME=value, or cluster.environment_file for secrets"
_WITHOUT_KEY = (
    "array chdir clusters error job-name no-requeue open-mode output parsable requeue signal test-only wait wrap"
)
OWN_OPTIONS: Mapping[str, str] = {
    "account": "cluster.account",
    "constraint": "cluster.constraint",
    "cpus-per-gpu": "resources.cpus_per_rank",
    "cpus-per-task": "resources.cpus_per_rank",
    "export": EXPORT_KEYS,
    "export-file": EXPORT_KEYS,
    "mem": MEMORY_KEYS,
    "nodes": "resources.nodes",
    "ntasks": "resources.nodes and resources.ranks_per_node",
    "ntasks-per-gpu": "resources.ranks_per_node",
    "ntasks-per-node": "resources.ranks_per_node",
    "partition": "cluster.partition",
    "qos": "cluster.qos",
    "time": "resources.minutes",
    **dict.fromkeys(_WITHOUT_KEY.split(), ""),
}
"""The options that specrl sets itself, with the keys that determine them, if any."""
_OTHERS = (
    "acctg-freq batch bb bbf begin cluster-constraint comment consolidate-segments container container-id "
    "contiguous core-spec cores-per-socket cpu-freq deadline delay-boot dependency distribution exclude exclusive "
    "extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres "
    "gres-flags hint hold ignore-pbs input kill-on-invalid-dep licenses mail-type mail-user mcs-label mem-bind "
    "mem-per-cpu mem-per-gpu mincpus network nice no-kill nodefile nodelist ntasks-per-core ntasks-per-socket "
    "oom-kill-step overcommit oversubscribe power prefer priority profile propagate quiet reboot reservation "
    "resv-ports segment share sockets-per-node spread-job spread-segments stepmgr switches thread-spec "
    "threads-per-core time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait-all-nodes wckey"
)
OTHER_OPTIONS = frozenset(_OTHERS.split())
"""The options of Slurm 20.11 to 25.11 that a configuration may set; a site's plugins add more."""
MEMORY_OPTIONS = frozenset({"mem-per-cpu", "mem-per-gpu"})
"""The options that replace `--mem`, for sites that allocate memory by cores or GPUs."""
GPU_NUMBERS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")
"""The options, besides `gres`, that set a job's number of GPUs."""
GPU_OPTIONS = (*GPU_NUMBERS, "gpu-bind", "gpu-freq")
"""The options, besides `gres`, that only jobs with GPUs may have."""
LONG_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def _check(options: object) -> object:
    """Check names and values, and write names with dashes, as sbatch does."""
    if not isinstance(options, Mapping):
        return options
    checked: dict[str, object] = {}
    for key, value in options.items():
        name = str(key).replace("_", "-")
        if len(name) == 1 or not LONG_NAME.fullmatch(name):
            raise ValueError(f"{key!r} is not the long name of an option of sbatch, such as reservation")
        if name in OWN_OPTIONS:
            instead = f"; set {OWN_OPTIONS[name]}" if OWN_OPTIONS[name] else ""
            raise ValueError(f"{name} is an option that specrl sets itself{instead}")
        if not isinstance(value, bool | int | float | str) or not str(value).isprintable():
            raise ValueError(f"{name} = {value!r} must be a number, true, false, or one line of printable characters")
        if isinstance(value, str) and (value.startswith("-") or "\\" in value):
            raise ValueError(f"{name} = {value!r} begins with - or has a backslash; numbers stand without quotes")
        checked[name] = value
    return checked


SbatchOptions = Annotated[dict[str, OptionValue], BeforeValidator(_check)]
"""Options of sbatch by their long names; `true` for an option without a value, `false` to omit it."""


def asks_for_gpus(name: str, value: OptionValue) -> bool:
    """Whether only jobs with GPUs may have this option of sbatch."""
    return name in GPU_OPTIONS or (name == "gres" and bool(_gpu_parts(value)))


def names_gpus(name: str, value: OptionValue) -> bool:
    """Whether an option of sbatch sets a job's number of GPUs."""
    return name in GPU_NUMBERS or (name == "gres" and bool(_gpu_parts(value)))


def gpus_per_node(name: str, value: OptionValue, nodes: int, ranks_per_node: int) -> int | None:
    """How many GPUs per node an option of sbatch requests, or None if it does not say."""
    if name == "gres":
        return sum(_count(part) for part in _gpu_parts(value)) or None
    if name not in ("gpus", "gpus-per-node", "gpus-per-task"):
        return None
    count = sum(_count(part) for part in str(value).split(","))
    return {"gpus": count // nodes, "gpus-per-node": count, "gpus-per-task": count * ranks_per_node}[name]


def _gpu_parts(value: OptionValue) -> list[str]:
    return [part for part in str(value).split(",") if part.removeprefix("gres/").split(":")[0] == "gpu"]


def _count(part: str) -> int:
    number = part.partition("(")[0].rpartition(":")[2]
    return int(number) if number.isdecimal() else 1
