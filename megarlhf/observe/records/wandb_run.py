"""The run at Weights & Biases, if one is configured. The package is imported here only, and only then."""

from __future__ import annotations

import importlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarlhf.config import WandbConfig
from megarlhf.observe.records.sample_tables import Row, columns_and_cells

ID_FILE = "wandb_id"
"""File in the run directory with the id under which a resumed run continues."""

log = logging.getLogger(__name__)


def require_wandb(cfg: WandbConfig) -> None:
    """Raises: ValueError if the package or, for `online`, a key is missing. Asks no server."""
    wandb = _import(cfg)
    if cfg.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ValueError(
            f"run.wandb (project {cfg.project!r}): no key of Weights & Biases is known here; run `wandb login` once, "
            "or export WANDB_API_KEY, or write to the run directory only with run.wandb.mode=offline"
        )


class WandbRun:
    """Sends metrics under their names in metrics.jsonl; the axis of the charts is the metric `step`.

    W&B's own step numbers are not used: W&B drops a number that does not rise, such as a step that is repeated after a
    kill. With a metric `step` it is a second point at the same place.

    config: the resolved configuration, shown beside the run

    Raises: ValueError if the package is missing or the run cannot be opened.
    """

    def __init__(self, run_dir: Path, cfg: WandbConfig, config: Mapping[str, Any]) -> None:
        self._wandb = wandb = _import(cfg)
        self._broken = False
        id_file = run_dir / ID_FILE
        if not id_file.exists():  # before the run is opened: a kill in between loses nothing
            run_dir.mkdir(parents=True, exist_ok=True)
            id_file.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        settings = wandb.Settings(
            console="off",  # it would take stdout, on which the progress bar is drawn
            init_timeout=cfg.timeout_seconds,
            finish_timeout=cfg.timeout_seconds,
        )
        try:
            self._run = wandb.init(
                project=cfg.project,
                entity=cfg.entity,
                name=cfg.name or run_dir.resolve().name,
                group=cfg.group,
                tags=cfg.tags,
                mode=cfg.mode,
                dir=str(run_dir),
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                config=dict(config),
                allow_val_change=True,
                settings=settings,
            )
            self._run.define_metric("step")
            self._run.define_metric("*", step_metric="step")
        except wandb.Error as error:
            raise ValueError(
                f"run.wandb (project {cfg.project!r}): Weights & Biases does not open the run: {error}; check "
                "project, entity and network, or write to the run directory only with run.wandb.mode=offline"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        self._send({"step": step, **metrics})

    def log_samples(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Send a table for the step."""
        columns, cells = columns_and_cells(rows)
        self._send({"step": step, name: self._wandb.Table(columns=columns, data=cells, allow_mixed_types=True)})

    def close(self) -> None:
        if not self._broken:
            self._run.finish()

    def _send(self, values: Mapping[str, Any]) -> None:
        if self._broken:
            return
        try:
            self._run.log(values)
        except Exception as error:  # noqa: BLE001 -- whatever it is, training does not end for it
            self._broken = True
            log.warning("Weights & Biases gets nothing more of this run: %s; metrics.jsonl goes on", error)


def _import(cfg: WandbConfig) -> Any:
    try:
        return importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"run.wandb (project {cfg.project!r}) needs Weights & Biases, and {error.name} is not installed: "
            '`pip install "megarlhf[wandb]"` or `pip install wandb`, or leave run.wandb out'
        ) from error
