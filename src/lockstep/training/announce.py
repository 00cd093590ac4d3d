"""What is logged once about a run: how it is set up before its first update, and a schedule of another length."""

from __future__ import annotations

from lockstep.comm import rng
from lockstep.config.choices import SchedulerUnit
from lockstep.config.settings import Settings
from lockstep.optim import schedule_length
from lockstep.optim.optimizer import PreparedOptimizer
from lockstep.optim.scheduler import PreparedScheduler
from lockstep.training.state import TrainingState


def announce_horizon(state: TrainingState, settings: Settings, scheduler: PreparedScheduler) -> None:
    """Before a schedule's first step: log where it ends, if that is not where the training does."""
    iteration, length = state.current_batch.training, schedule_length.schedule_length(scheduler.scheduler)
    if length is None or iteration is None or not settings.step_with_optimizer:
        return
    loader = iteration.loader
    try:
        batches = len(loader)
    except TypeError:
        return
    updates = -(-batches // state.accumulation.num_steps)
    # Who counts updates did not count the batches of the unprepared loader.
    before = loader.batches_before if settings.scheduler_unit is SchedulerUnit.PROCESS else None
    per_update = scheduler.steps_per_update
    line = schedule_length.describe(length, updates * per_update, per_update, before, batches)
    if line is not None:
        from lockstep.logging import get_notices  # loaded where it is used: there is seldom anything to log

        get_notices("lockstep.run").info(line)


def announce_run(state: TrainingState, optimizer: PreparedOptimizer) -> None:
    """Before the first update: log how the run is set up, and what that changes against the run before."""
    state.strategy.check_optimizer(optimizer, state.models)
    iteration = state.current_batch.training
    loader = None if iteration is None else iteration.loader
    if state.run_summary is not None or loader is None:
        return
    from lockstep.optim import run_summary, run_summary_file  # loaded where it is used: once

    state.run_summary = summary = run_summary.record_of(
        total_batch=loader.total_batch_size,
        processes=state.strategy.data_parallel.size,
        accumulation=state.accumulation.num_steps,
        groups=optimizer.param_groups,
        seed=rng.seed_in_force(),
        precision=state.precision.mode.value,
    )
    if not state.topology.is_main:
        return
    from lockstep.logging import get_notices  # loaded where it is used: once, on one process

    notices = get_notices("lockstep.run")
    notices.info(summary.line())
    found = run_summary.compare_loaded(state.loaded_run, summary)
    folder = state.project.project_dir
    found += run_summary_file.write_summary(folder, summary) if folder else []
    for warning in dict.fromkeys(found):
        notices.warning(warning)
