"""What every rank of a job runs: `python -m slurm.entry CONTEXT.json MODULE:FUNCTION`.

The job is complete in itself: whoever submitted it may die the moment after. A job that is queued again (time limit,
preemption, lost node) runs this anew, and the stage resumes from its files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slurm.backend import StageRequest
from slurm.environment import prepare_rank
from slurm.registry import backend_of
from specrl import logs
from specrl.context import StageContext


def main(arguments: list[str]) -> None:
    context = StageContext.load(Path(arguments[0]))
    request = StageRequest(context, entry=arguments[1])
    backend = backend_of(context.config.cluster)
    prepare_rank(request, backend)
    logs.set_up(context.config.cluster.log_level)
    backend.run_rank(request)


if __name__ == "__main__":
    main(sys.argv[1:])
