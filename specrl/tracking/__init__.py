"""MLflow: one parent run per pipeline run, a child per stage, which a resubmitted stage continues.

What is logged is first written to a log on disk (`log`); a thread sends it from there (`sync`, `sender`), so that
training goes on while MLflow is away. In a job, rank 0 logs. MLflow takes seconds to import, so the functions that need
it import it.
"""
