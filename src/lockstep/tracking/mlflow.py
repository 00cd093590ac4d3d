"""MLflow."""

from __future__ import annotations

import json
import os
from typing import Any

from lockstep.config import env
from lockstep.errors import ConfigError
from lockstep.logging import get_notices
from lockstep.tracking.built_in import BuiltInTracker
from lockstep.tracking.failures import guarded
from lockstep.tracking.general import on_main_process
from lockstep.tracking.values import report_left_out, scalars


class MLflowTracker(BuiltInTracker):
    """A run of an experiment. MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, MLFLOW_TAGS and MLFLOW_NESTED_RUN win.

    Where it is stored is MLflow's own setting, MLFLOW_TRACKING_URI. ``logging_dir`` is the place of its artifacts.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool | None = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        environ = env.snapshot()
        self.experiment_name = environ.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        self.logging_dir = None if logging_dir is None else os.fspath(logging_dir)
        self.run_id = environ.get("MLFLOW_RUN_ID", run_id)
        self.tags = _read_tags(environ.get("MLFLOW_TAGS", tags))
        nested = environ.get("MLFLOW_NESTED_RUN", nested_run)
        self.nested_run = env.parse_flag(nested, "MLFLOW_NESTED_RUN") if isinstance(nested, str) else bool(nested)
        self.run_name = run_name
        self.description = description

    @on_main_process
    def start(self) -> None:
        """Begin the run, in the experiment of that name or in a new one."""
        import mlflow

        experiment = None if self.experiment_name is None else mlflow.get_experiment_by_name(self.experiment_name)
        if self.experiment_name is None:
            experiment_id = None  # MLflow's own default
        elif experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = mlflow.create_experiment(
                self.experiment_name, artifact_location=self.logging_dir, tags=self.tags
            )
        self._run = mlflow.start_run(
            run_id=self.run_id,
            experiment_id=experiment_id,
            run_name=self.run_name,
            nested=self.nested_run,
            tags=self.tags,
            description=self.description,
        )

    @property
    def active_run(self) -> Any:
        """The run."""
        return self.tracker

    @property
    def _id(self) -> str:
        # Given with each call: MLflow's own idea of the active run is that of one thread.
        return str(self.tracker.info.run_id)

    @guarded
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """The run's parameters, as texts; one longer than MLflow's limit is left out."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        too_long = [key for key, value in values.items() if len(str(value)) > MAX_PARAM_VAL_LENGTH]
        if too_long:
            get_notices("lockstep.tracking").warning(
                "Tracker 'mlflow' stores parameters of up to %d characters. Longer ones were left out: %s.",
                MAX_PARAM_VAL_LENGTH,
                ", ".join(map(str, too_long)),
            )
        kept = [(key, value) for key, value in values.items() if key not in too_long]
        for start in range(0, len(kept), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(kept[start : start + MAX_PARAMS_TAGS_PER_BATCH]), run_id=self._id)

    @guarded
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers as metrics."""
        import mlflow

        metrics = {}
        for key, value in scalars(values).items():
            if isinstance(value, (int, float)):
                metrics[key] = value
            else:
                report_left_out(self.name, key, value, "numbers")
        mlflow.log_metrics(metrics, step=step, **{"run_id": self._id, **kwargs})

    @guarded
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """A figure of matplotlib or plotly, as an artifact."""
        import mlflow

        mlflow.MlflowClient().log_figure(self._id, figure, artifact_file, **save_kwargs)

    @guarded
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """The files of a folder, as artifacts."""
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path=artifact_path, run_id=self._id)

    @guarded
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """A file, as an artifact."""
        import mlflow

        mlflow.log_artifact(local_path, artifact_path=artifact_path, run_id=self._id)

    def _end(self, run: Any) -> None:
        import mlflow

        mlflow.end_run()


def _read_tags(tags: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(tags, str):
        return tags
    try:
        read = json.loads(tags)
    except ValueError as error:
        raise ConfigError(f'MLFLOW_TAGS={tags!r} is not JSON ({error}). Expected: \'{{"key": "value"}}\'.') from None
    if not isinstance(read, dict):
        raise ConfigError(f'MLFLOW_TAGS={tags!r} is not a JSON object. Expected: \'{{"key": "value"}}\'.')
    return read
