"""MLflow: one parent run per pipeline run, a child per stage, which a resubmitted stage continues.

Without `tracking.uri` everything lies in `RUNS_DIR/mlflow.db` and `RUNS_DIR/mlartifacts`. What is logged is first
written to a spool on disk (`spool`), and a thread sends it from there (`uploader`, `sender`): training goes on while
MLflow is away, and what it misses arrives later. In a job, rank 0 logs and the other ranks hold a tracker that does
nothing. MLflow takes seconds to import, so it is imported when the first of these functions is called.
"""

from specrl.tracking.benchmarks import benchmark_config, log_cell, log_speedups
from specrl.tracking.logged import LoggedSteps
from specrl.tracking.runs import finish_parent_run, log_files, stage_run, start_parent_run, sync_run
from specrl.tracking.sender import SCORE_TAG, registered_version
from specrl.tracking.source import lineage_tags
from specrl.tracking.store import RUN_ID_FILE, table_address, tracking_uri
from specrl.tracking.tracker import Silent, Tracker

__all__ = [
    "RUN_ID_FILE",
    "SCORE_TAG",
    "LoggedSteps",
    "Silent",
    "Tracker",
    "benchmark_config",
    "finish_parent_run",
    "lineage_tags",
    "log_cell",
    "log_files",
    "log_speedups",
    "registered_version",
    "stage_run",
    "start_parent_run",
    "sync_run",
    "table_address",
    "tracking_uri",
]
