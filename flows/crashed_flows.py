"""Mark flows whose process was killed as crashed in Prefect, which would otherwise show them as running for ever."""

from __future__ import annotations

from pathlib import Path

RUNNING = ("PENDING", "RUNNING", "CANCELLING")


def mark_crashed_flows(run_dir: Path) -> None:
    """Mark the flows and tasks that Prefect believes to be running in this folder as crashed.

    Call this while holding the folder's lock (`only_flow`), when no flow can be running there, and before starting a
    new one.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import State, StateType
    from prefect.states import Crashed

    running = [StateType(name) for name in RUNNING]
    crashed: State[None] = Crashed(message="its process was killed")
    with get_client(sync_client=True) as client:
        flows = filters.FlowRunFilter(
            name=filters.FlowRunFilterName(any_=[str(run_dir)]),
            state=filters.FlowRunFilterState(type=filters.FlowRunFilterStateType(any_=running)),
        )
        of_type = filters.TaskRunFilterStateType(any_=running)
        tasks = filters.TaskRunFilter(state=filters.TaskRunFilterState(type=of_type, name=None))
        for task in client.read_task_runs(flow_run_filter=flows, task_run_filter=tasks):
            client.set_task_run_state(task.id, crashed, force=True)
        for flow in client.read_flow_runs(flow_run_filter=flows):
            client.set_flow_run_state(flow.id, crashed, force=True)
