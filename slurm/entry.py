"""The program that every rank of a job runs: `python -m slurm.entry CONTEXT.json MODULE:FUNCTION`.

A job needs nothing from the flow that submitted it, which may be killed at once. A requeued job (after its time limit,
preemption or the loss of a node) runs this program again, and the stage resumes from its files. `slurm.trust` has
checked beforehand who owns these files, and that the code is unchanged.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from slurm.access import restrict
from slurm.backend import StageRequest
from slurm.environment import prepare_rank
from slurm.submit import backend_of
from slurm.supervisor import Supervisor, end_process
from specrl import logs
from specrl.context import StageContext
from specrl.processes import allow_warnings, name_user, reach_loopback


def main(arguments: list[str]) -> None:
    """Set up this rank, call the stage's function (`module:function`) under supervision, and end the process."""
    reach_loopback()
    name_user()
    context = StageContext.load(Path(arguments[0]))
    context.check()
    restrict(context.config.cluster)
    request = StageRequest(context, entry=arguments[1])
    backend = backend_of(request.key.cluster)
    prepare_rank(request, backend)
    allow_warnings()
    logs.set_up(context.config.cluster.log_level)
    code = Supervisor(request, backend).run()
    logging.shutdown()
    end_process(code)


if __name__ == "__main__":
    main(sys.argv[1:])
