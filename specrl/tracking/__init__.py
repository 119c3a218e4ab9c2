"""MLflow: one parent run per pipeline run, a child per stage, which a resubmitted stage continues.

What is logged is first written to a log on disk (`log`); a thread sends it from there (`sync`, `sender`), so that
training goes on while MLflow is away. In a job, rank 0 logs. MLflow takes seconds to import, so the functions that need
it import it.
"""

from specrl.tracking.runs import finish_parent_run, log_cell, log_to_run, stage_run, start_parent_run, sync_run
from specrl.tracking.sender import SCORE_TAG, registered_version
from specrl.tracking.store import run_id_of, table_address, tracking_uri
from specrl.tracking.tracker import Tracker

__all__ = [
    "SCORE_TAG",
    "Tracker",
    "finish_parent_run",
    "log_cell",
    "log_to_run",
    "registered_version",
    "run_id_of",
    "stage_run",
    "start_parent_run",
    "sync_run",
    "table_address",
    "tracking_uri",
]
