"""Look for problems before a run writes or submits anything; each is one line that says how to fix it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from flows.folder import HOLDER_FILE, LOCK_FILE, size_of
from flows.origin import ORIGIN
from flows.server import silence_of
from slurm.access import check_access
from slurm.commands import foreign_options, unknown_options, unused_variables
from slurm.environment import read_environment_file
from slurm.submit import backends_of
from specrl.checks.file_systems import existing, shared_database
from specrl.checks.gpu import GIB, cuda_of_build, torch_for_gpus
from specrl.config import STAGES, Config, ConfigError
from specrl.data.formats.places import files_of
from specrl.keys import data_places
from specrl.lineage.record import CODE_DIR, RUN_FILE
from specrl.models.checks.folder import check_model_folder
from specrl.models.directory import chat_template
from specrl.models.drafters import check_source_drafter
from specrl.models.layout import check_teacher, teacher_doubts
from specrl.models.shapes import KNOWN_SHAPES, model_shape
from specrl.models.sources import check_model_fits_method, check_source
from specrl.projection.plan import disk_bytes, plan
from specrl.report.results import CONFIG_FILE, is_run
from specrl.tracking.store import RUN_ID_FILE, check_server
from specrl.tracking.weights_biases import check_wandb

BEGUN = (LOCK_FILE, HOLDER_FILE, CODE_DIR, str(ORIGIN))  # files of a run that was interrupted at its start
SENSIBLE_ONLINE_LR = 1e-6, 5e-4  # no warning in between: benchmarks/drafter-online.md
SENSIBLE_TOP_P, HIGHEST_LR = 0.5, 5e-3


def check(config: Config, *, dry_run: bool = False) -> None:
    """Check everything that a run needs, and warn of allowed but doubtful settings; nothing is written.

    A `dry_run` skips requirements of the machine that submits the jobs.
    """
    problems = [line for look in (DRY_CHECKS if dry_run else CHECKS) for line in look(config)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    source = _source_folder(config)
    warnings = [*doubts(config), *(teacher_doubts(config, source) if source is not None else [])]
    warnings += [*_shared_databases(config), *_slurm_doubts(config)]
    warnings += _reward_doubts(config) if dry_run else []
    for line in warnings:
        Console(stderr=True, soft_wrap=True).print(f"warning: {line}", style="yellow", markup=False)


def doubts(config: Config) -> list[str]:
    """A line for each setting that is allowed but far from proven values, or hardly lets anything be learned."""
    rate, (low, high) = config.drafter.online_lr, SENSIBLE_ONLINE_LR
    policy_rate = config.policy.lr
    warmup, steps, top_p = config.policy.lr_warmup_steps, config.train.num_steps, config.sampling.top_p
    lines = {
        f"drafter.online_lr = {rate:g} is constant and far from the default, 1e-4: above {high:g} the drafter has been "
        f"accepted less than without training, and below {low:g} it hardly learns; 0 freezes it": (
            config.speculation.draft_method.has_weights and rate and not low <= rate <= high
        ),
        f"policy.lr = {policy_rate:g} is far above what RL uses, 1e-6 to 1e-4, or 1e-3 for adapters; the policy is "
        "likely to collapse": policy_rate > HIGHEST_LR,
        f"policy.lr_warmup_steps = {warmup} with train.num_steps = {steps}: the learning rate never reaches policy.lr "
        f"= {policy_rate:g}": warmup > steps,
        f"sampling.top_p = {top_p:g} often leaves a single token: responses to a prompt are then much alike, and "
        "little is learned from their difference; 1 keeps all tokens": top_p < SENSIBLE_TOP_P,
    }
    return [line for line, doubtful in lines.items() if doubtful]


def _shared_databases(config: Config) -> list[str]:
    several_hosts = any(config.cluster_of(stage).backend != "local" for stage in STAGES)
    line = shared_database(config.runs_dir, config.tracking.uri) if several_hosts else None
    return [line] if line is not None else []


def _reward_doubts(config: Config) -> list[str]:
    is_learned_from = config.environment.name is None and config.train.advantage.name != "none"
    if is_learned_from and not any(config.data.part_weights):
        return ["data.reward: each part has weight 0, so that all responses earn the same and nothing is learned"]
    if not is_learned_from or not any(":" in part.name for part in config.data.reward):
        return []
    from specrl.data.check import empty_and_right  # starts the reward's process

    empty, right = empty_and_right(config)
    if empty.error is not None or right.error is not None:
        return [f"data.reward = {config.data.reward_words}: it fails on a response: {right.error or empty.error}"]
    if empty.score != right.score:
        return []
    earned = "None, which leaves them out"
    if right.score is not None:
        earned = f"{right.score:g}; where all responses earn the same reward, nothing is learned"
    return [f"data.reward = {config.data.reward_words}: an empty response and the reference answer both earn {earned}"]


def _refusals(*looks: Callable[[], object]) -> list[str]:
    """The lines of the user errors that a check raises."""
    lines: list[str] = []
    for look in looks:
        try:
            look()
        except ValueError as error:
            lines += str(error).splitlines()
    return list(dict.fromkeys(lines))


def check_folder(config: Config) -> list[str]:
    """Check that the run's folder is absent, empty or this run's, and that others cannot change or replace it."""
    run_dir = config.run_dir
    if lines := _refusals(lambda: check_access(run_dir, config.cluster)):
        return lines
    if (place := next(path for path in run_dir.parents if os.path.lexists(path))) and not place.is_dir():
        return [f"runs_dir = {config.runs_dir}: {place} is no folder; choose another one"]
    if not os.path.lexists(run_dir) or (run_dir / RUN_FILE).is_file():
        return []
    own = {*BEGUN, CONFIG_FILE} if is_run(run_dir) else set(BEGUN)
    others = [path for path in run_dir.iterdir() if path.name not in own] if run_dir.is_dir() else [run_dir]
    left = [path.name for path in others if not (path.name.startswith(".") and path.suffix == ".tmp")]
    if not left:
        return []
    return [
        f"{run_dir} is not this run's: it has {min(left)}; a run begins in a folder that is absent or empty: choose "
        "another name (--set name=NAME) or another runs_dir"
    ]


def check_model(config: Config) -> list[str]:
    """Check that the model exists and, if its shape is known without the hub, that parallel sizes and memory fit."""
    looks: list[Callable[[], object]] = [lambda: check_source(config.model), lambda: check_model_fits_method(config)]
    if _shape_is_known(config):
        looks.append(lambda: plan(config))
    if lines := _refusals(*looks):
        return lines
    return _chat_problems(config) if config.data.template == "chat" else []


def _chat_problems(config: Config) -> list[str]:
    from specrl.data.rendering import check_chat_template  # imports jinja2

    source = _source_folder(config)
    if source is None and config.model.source != "tiny":
        return []  # not here yet
    template = None if source is None else chat_template(source)
    if template is None:
        return [
            f'data.template = "chat": the tokenizer in {source or config.model.source} has no chat template; put one '
            "there as chat_template.jinja, or give a format string such as {prompt}"
        ]
    try:
        check_chat_template(template, config.data.chat_template_kwargs)
    except ConfigError as error:
        return [f'data.template = "chat": {error}']
    return []


def check_draft_model(config: Config) -> list[str]:
    """Check that `speculation.draft_model` is a model directory with the policy's vocabulary."""
    directory = config.speculation.draft_model
    if directory is None:
        return []
    try:
        hf_config = check_model_folder(directory, config.model.max_length)
    except ConfigError as error:
        return [f"speculation.draft_model: {error}"]
    if not _shape_is_known(config):
        return []
    own, wanted = hf_config["vocab_size"], model_shape(config.model).vocab_size
    source = _source_folder(config)
    if own != wanted or (source is not None and _vocabulary(source) != _vocabulary(directory)):
        return [
            f"speculation.draft_model = {directory}: its vocabulary ({own} tokens) is not the policy's ({wanted}); "
            "take a smaller model of the same family"
        ]
    return []


def _vocabulary(directory: Path) -> dict[str, int] | None:
    path = directory / "tokenizer.json"
    return json.loads(path.read_bytes())["model"].get("vocab") if path.is_file() else None


def check_other_models(config: Config) -> list[str]:
    """Check the models of `train.teacher` and `drafter.source` against the policy, as far as all are here."""
    source = _source_folder(config)
    return _refusals(lambda: check_teacher(config, source), lambda: check_source_drafter(config, source))


def check_data(config: Config) -> list[str]:
    """Check that data files and reward exist and can be used."""
    named = {key: places for key, places in data_places(config).items() if not key.startswith("validate.")}
    lines = [
        f"{key} = {place}: {_why_no_data(place)}"
        for key, places in named.items()
        for place in places
        if not files_of([place])
    ]
    if lines:
        return lines
    from specrl.data.check import check_data as check_contents  # generators and scorers take a second to import

    return _refusals(lambda: check_contents(config))


def _why_no_data(place: Path) -> str:
    if place.is_dir():
        return "no data file lies in this folder"
    if place.exists():
        return "it is not a regular file (a pipe, for example), and data are read more than once"
    if place.is_symlink():
        return f"it is a link to {place.readlink()}, which is not there"
    return f"there is no such file{'' if place.suffix else '; a data set of the hub is hub:OWNER/NAME'}"


def check_algorithms(config: Config) -> list[str]:
    """Check that losses, advantage estimator and correction exist and accept the given options."""
    return _refusals(*(partial(registry.function, algorithm) for registry, algorithm in config.algorithms))


def check_disk(config: Config) -> list[str]:
    """Check that the runs folder is writable and has room for the run, or for its missing part."""
    folder = existing(config.runs_dir)
    if not os.access(folder, os.W_OK):
        return [f"runs_dir: {folder} cannot be written; --set runs_dir=FOLDER puts runs elsewhere"]
    occupied = size_of(config.run_dir) if config.run_dir.exists() else 0
    shape = model_shape(config.model) if _shape_is_known(config) else None
    needed, free = disk_bytes(config, shape) - occupied, shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"too little free disk: the run needs up to {needed / GIB:.1f} GiB more, {folder} has {free / GIB:.1f} GiB; "
        "free some, lower train.keep_checkpoints, or put runs elsewhere with --set runs_dir=FOLDER"
    ]


def check_tracking(config: Config) -> list[str]:
    """Check that an MLflow server answers, that the jobs' file of secrets is readable, and that W&B has a key.

    Other stores are left to MLflow. A run that MLflow already knows continues without it: its logs wait on disk.
    """
    is_new = not (config.run_dir / RUN_ID_FILE).exists()
    return _refusals(
        lambda: check_server(config) if is_new else None,
        lambda: check_wandb(config, read_environment_file(config.cluster.environment_file)),
    )


def check_prefect(_: Config) -> list[str]:
    """Check that the user's own Prefect server answers, without which a run ends at its start."""
    url = os.environ.get("PREFECT_API_URL", "")
    if not url or (why := silence_of(url)) is None:
        return []
    return [
        f"PREFECT_API_URL = {url}: no Prefect server answers there ({why}); start it, or unset the variable, and "
        "specrl starts a server of its own"
    ]


def take_wandb_variables(config: Config) -> None:
    """Set the W&B variables that jobs read from their file, because the flow sends the run's own log."""
    if config.tracking.wandb != "off":
        found = read_environment_file(config.cluster.environment_file)
        os.environ.update({name: value for name, value in found.items() if name.startswith("WANDB_")})


def check_gpu_packages(config: Config) -> list[str]:
    """Check that packages are built for GPUs, if the jobs of stages with GPUs share this environment."""
    clusters = {stage: config.cluster_of(stage) for stage in STAGES if config.resources_of(stage).gpus_per_rank}
    stages = [stage for stage, cluster in clusters.items() if cluster.container is None and cluster.python is None]
    if not stages or cuda_of_build(torch_for_gpus()) is not None:
        return []
    return [
        f"gpus_per_rank = 1 in {', '.join(stages)}: the packages of this environment are for CPUs; "
        "make env LOCK=requirements/gpu.lock, or set gpus_per_rank = 0"
    ]


def check_cluster(config: Config) -> list[str]:
    """Why the requested schedulers cannot be used from here."""
    return [line for backend in backends_of(config) for line in backend.problems(config)]


def check_sbatch(config: Config) -> list[str]:
    """Check that sbatch, if installed here, knows the options of `cluster.sbatch` with which a stage is submitted."""
    return unknown_options(config) if _uses_slurm(config) and shutil.which("sbatch") else []


def _slurm_doubts(config: Config) -> list[str]:
    if not _uses_slurm(config):
        return []
    lines = []
    if (foreign := foreign_options(config)) and not shutil.which("sbatch"):
        lines.append(
            f"{', '.join(foreign)}: Slurm itself has no such option, and there is no sbatch here to tell whether a "
            "plugin of the cluster has it"
        )
    if names := unused_variables():
        what = "cluster.sbatch and [resources] say what jobs ask for"
        lines.append(f"{', '.join(names)}: sbatch does not get them; {what}")
    return lines


def _uses_slurm(config: Config) -> bool:
    return any(config.cluster_of(stage).backend == "slurm" for stage in STAGES)


ALWAYS: tuple[Callable[[Config], list[str]], ...] = (
    check_folder,
    check_model,
    check_draft_model,
    check_other_models,
    check_data,
    check_algorithms,
    check_disk,
    check_tracking,
    check_sbatch,
)
DRY_CHECKS = (*ALWAYS, check_prefect)
CHECKS = (*ALWAYS, check_gpu_packages, check_cluster)


def _shape_is_known(config: Config) -> bool:
    return config.model.source in ("tiny", *KNOWN_SHAPES) or _source_folder(config) is not None


def _source_folder(config: Config) -> Path | None:
    """The folder of the policy before training, if it is already here."""
    folder = Path(config.model.source).expanduser()
    return folder if folder.is_dir() else None
