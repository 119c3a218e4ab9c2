"""MLflow: one parent run per pipeline run, a child per stage, which a resubmitted stage continues.

Everything is first written to a log on disk (`log`), from which a thread sends it (`sync`, `sender`), so that training
continues while MLflow is unreachable. In a job, rank 0 logs. MLflow takes seconds to import, so only the functions that
need it import it.
"""
