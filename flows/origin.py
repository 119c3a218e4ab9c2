"""What `specrl run CONFIG --from` starts from: a checkpoint of another run, or a policy in a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flows.folder import find_own_run
from specrl.config import Config, ConfigError
from specrl.config.methods import METHODS
from specrl.lineage.history import link_files
from specrl.lineage.record import RUN_FILE, Continuation, read_record, saved_steps
from specrl.report.results import read_config

ORIGIN = Path("origin")  # a run's folder with the checkpoint, policy and drafter from which it starts


@dataclass(frozen=True)
class Origin:
    """A checkpoint of another run, from which a new run starts."""

    start: Continuation  # the checkpoint's place in the new run
    checkpoint_dir: Path  # its place in the other run
    policy_dir: Path  # the other run's policy before RL; a checkpoint contains neither tokenizer nor configuration
    drafter_dir: Path  # the other run's drafter before RL; absent if its method has none

    def link(self, run_dir: Path) -> None:
        """Link the files into the new run's folder, which then no longer depends on the other run."""
        folder = run_dir / ORIGIN
        places = {
            self.checkpoint_dir: self.start.in_run(run_dir).checkpoint_dir,
            self.policy_dir: folder / "policy",
            self.drafter_dir: folder / "drafter",
        }
        for source, target in places.items():
            if source.is_dir():
                link_files(source, target)


def start_from(place: str, config: Config) -> tuple[Config, Origin | None]:
    """Make a configuration start from a run, `RUN@STEP` or a Hugging Face folder; also return a run's checkpoint."""
    folder = Path(place).expanduser()
    if (folder / "config.json").is_file() and not (folder / RUN_FILE).exists():
        return _with_source(config, folder.absolute()), None
    theirs = read_config(find_own_run(place.partition("@")[0], config.runs_dir))
    if config.policy.lora is not None or theirs.policy.lora is not None:
        command = f"specrl export {place} --format policy --to FOLDER, then --from FOLDER"
        raise ConfigError(f"--from {place}: where either run has policy.lora, the new one needs a policy: {command}")
    origin = find_origin(place, config)
    return _with_source(config, origin.policy_dir), origin


def own_source(config: Config) -> Config:
    """Make the configuration use the policy that `Origin.link` puts into the run's folder."""
    return _with_source(config, config.run_dir / ORIGIN / "policy")


def _with_source(config: Config, folder: Path) -> Config:
    return config.updated(model={"source": str(folder)}, warm_start={"num_examples": 0})


def find_origin(place: str, config: Config) -> Origin:
    """Find a checkpoint of a run (`RUN@STEP`, or the newest of `RUN`) from which `config` can start."""
    name, _, step = place.partition("@")
    run_dir = find_own_run(name, config.runs_dir)
    record = read_record(run_dir)
    if record is None:
        raise ConfigError(f"{run_dir.name}: the run has not started")
    stages = run_dir / "stages"
    current = stages / record.stage_keys["train"]
    folders = [current, *sorted(folder for folder in stages.glob("train-*") if folder != current)]
    found = {number: folder for folder in reversed(folders) for number in saved_steps(folder)}
    if not found:
        raise ConfigError(f"{run_dir.name}: the run has no checkpoint yet")
    wanted = step or str(max(saved_steps(current) or found))
    if not wanted.isdigit() or int(wanted) not in found:
        kept = ", ".join(map(str, sorted(found)))
        raise ConfigError(f"{run_dir.name}@{wanted}: the run has checkpoints after these steps: {kept}")
    stage_dir = found[int(wanted)]
    theirs, own = read_config(run_dir), config.speculation.draft_method
    start = Continuation(
        run=run_dir.name,
        key=stage_dir.name,
        step=int(wanted),
        stage_dir=ORIGIN,
        counts_on=False,
        has_drafter=own.has_weights and own.same_model(METHODS[theirs.speculation.method]),
    )
    return Origin(
        start,
        start.model_copy(update={"stage_dir": stage_dir}).checkpoint_dir,
        stages / record.stage_keys["prepare"] / "policy",
        stages / record.stage_keys["pretrain"] / "drafter",
    )
