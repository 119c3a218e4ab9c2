"""MLflow: one parent run per pipeline run, a child per stage, which a resubmitted stage continues.

Without `tracking.uri` everything lies in `RUNS_DIR/mlflow.db` and `RUNS_DIR/mlartifacts`. What is logged is first
written to a log on disk (`log`), and a thread sends it from there (`sync`, `sender`): training goes on while MLflow is
away, and what it misses arrives later. In a job, rank 0 logs and the other ranks hold a tracker that does nothing.
MLflow takes seconds to import, so it is imported when the first of these functions is called.
"""

from specrl.tracking.logged import LoggedSteps
from specrl.tracking.runs import finish_parent_run, log_cell, log_to_run, stage_run, start_parent_run, sync_run
from specrl.tracking.sender import RUN_ID_FILE, SCORE_TAG, registered_version
from specrl.tracking.store import table_address, tracking_uri
from specrl.tracking.tracker import Tracker

__all__ = [
    "RUN_ID_FILE",
    "SCORE_TAG",
    "LoggedSteps",
    "Tracker",
    "finish_parent_run",
    "log_cell",
    "log_to_run",
    "registered_version",
    "stage_run",
    "start_parent_run",
    "sync_run",
    "table_address",
    "tracking_uri",
]
