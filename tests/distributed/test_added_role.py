"""A frozen role that exists only as a section of a configuration and an entry of the table of roles.

Not covered: a loss that reads its column, ranks of its own, rehearsals.
"""

from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

from megarlhf.config import ROLES, RLConfig, RoleConfig
from megarlhf.config.role_table import RoleSpec
from megarlhf.planning.preflight import preflight
from megarlhf.resume.points.point import find_points, read_manifest
from megarlhf.runtime import Runtime
from tests.distributed.test_rl_layouts import config
from tests.refuses import missing_names


class TeacherConfig(RLConfig):
    teacher: RoleConfig


TEACHER = RoleSpec("lm", rl_section=lambda cfg: cfg.teacher, column="teacher_logprobs")


def run_with_teacher(runtime: Runtime, tree: dict[str, Any]) -> dict[str, Any]:
    """A run of rl, after its preflight: what was planned, and the columns of its steps; or the refusal."""
    from megarlhf.trainers.rl import loop

    columns: list[dict[str, torch.Tensor]] = []

    def score(*args: Any) -> Any:
        scored = real_score(*args)
        columns.append({name: column.values_T.clone() for name, column in scored[0].columns.items()})
        return scored

    real_score = loop.score
    with (
        mock.patch.dict(cast(dict[str, RoleSpec], ROLES), teacher=TEACHER),
        mock.patch.object(loop, "score", score),
    ):
        cfg = TeacherConfig.model_validate(tree)
        planned = preflight("rl", cfg, 1)
        try:
            loop.run(cfg, runtime)
        except ValueError as error:
            return {"refusal": str(error)}
    return {"roles": [name for name, *_ in planned.roles], "notes": planned.notes, "columns": columns}


def test_a_teacher_is_a_section_and_an_entry(ranks, two_layers, data, tmp_path: Path) -> None:
    """It has the reference's weights, so its column has the reference's bits. With other weights the run does not go
    on. A key that only training reads is reported."""
    tree = config({**two_layers, "other": two_layers["scorer"]}, data["prompts"], {}, advantage="group_relative")
    del tree["critic"], tree["reward_model"]
    tree["rewards"] = [{"kind": "rule", "rule": "exact_match"}]
    tree["run"]["dir"] = str(tmp_path / "run")
    tree["train"] |= {"epochs_per_step": 1, "mini_batch_samples": 16}
    tree["checkpoint"] = {"every": 1, "export_every": 0}
    tree["teacher"] = {"model": {"path": str(two_layers["plain"])}, "optim": {"lr": 0.5}}
    (result,) = ranks.run(1, run_with_teacher, tree)
    assert result["roles"] == ["actor", "reference", "teacher"]
    (note,) = [note for note in result["notes"] if "teacher" in note]
    assert not missing_names(note, "teacher.optim", "rl does not train the teacher")
    (columns,) = result["columns"]
    assert columns["teacher_logprobs"].numel() > 0
    assert torch.equal(columns["teacher_logprobs"], columns["ref_logprobs"])
    (point,) = find_points(tmp_path / "run")
    manifest = read_manifest(point)
    assert manifest["others"]["weights of the teacher"] == manifest["reference"]
    assert set(manifest["roles"]) == {"actor"}
    tree["train"]["num_steps"] = 2
    tree["teacher"]["model"]["path"] = str(two_layers["other"])
    (refused,) = ranks.run(1, run_with_teacher, tree)
    assert not missing_names(refused["refusal"], "weights of the teacher: changed since")
