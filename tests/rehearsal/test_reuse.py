"""What is reused instead of rehearsed again changes nothing that a rank has seen: shapes of results, equal layers.

Not covered: whether either is faster.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarlhf.rehearsal.job import RankRecord
from megarlhf.rehearsal.layers import FEWEST
from megarlhf.rehearsal.routing import Routing
from megarlhf.rehearsal.shapes import ResultsByShape
from tests.rehearsal.jobs import MODELS, job_tree, records_of, request_of, write_model

LAYERS = 2 * FEWEST + 1
"""In two stages of which one has the fewest for which layers are played, and the other one more."""
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rl, dense": ("rl", "dense", {}),
    "sft, experts": ("sft", "experts", {"routing": Routing(skew=1.5)}),
    "rl, experts": ("rl", "experts", {}),
    "sft, layers of ours": ("sft", "dense", {"layers": "local"}),
}


@pytest.mark.parametrize("name", CASES)
def test_reuse_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory with its curve, messages, the trace, FLOPs and rollouts, of the last stage over two steps: equal, seconds
    up to the order in which they are added."""
    command, model, options = CASES[name]
    tree = job_tree(command, tmp_path, model, pp=2, layers_per_stage=[FEWEST, FEWEST + 1])
    write_model(tmp_path / model, {**MODELS[model], "num_hidden_layers": LAYERS})
    if command == "rl":
        del tree["reward_model"], tree["critic"]
        tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"}}
    request = request_of(command, tree, tmp_path, world_size=2, **options)

    def seen(folder: str, **changes: Any) -> RankRecord:
        (record,) = records_of(request, tmp_path / folder, 1, **changes)
        return record

    reused = seen("reused")
    played = seen("layers", repeat_layers=False)
    monkeypatch.setattr(ResultsByShape, "key", lambda self, func, args, kwargs: None)
    plain = seen("plain", repeat_layers=False)
    for record in (reused, played):
        require_equal(record, plain)
    assert sum(plain.flops.values()) > 0
    assert len(plain.events) > 100


def require_equal(record: RankRecord, plain: RankRecord) -> None:
    for name in ("messages", "flops", "shares", "rollouts", "groups_created", "memberships", "cache_bytes"):
        assert getattr(record, name) == getattr(plain, name), name
    assert len(record.events) == len(plain.events)
    for ours, theirs in zip(record.events, plain.events, strict=True):
        assert type(ours) is type(theirs)
        for key in type(ours).__slots__:
            if key == "seconds":
                assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-9)  # type: ignore[union-attr]
            else:
                assert getattr(ours, key) == getattr(theirs, key)
    assert len(record.memory) == len(plain.memory)
    for mine, other in zip(record.memory, plain.memory, strict=True):
        for key in ("step", "phase", "start", "peak", "end", "by_kind", "largest", "host_peak"):
            assert getattr(mine, key) == getattr(other, key), (mine.step, mine.phase, key)
        assert [kinds for _, kinds in mine.curve] == [kinds for _, kinds in other.curve]


def test_both_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without which the test above would compare nothing: layers between the second and the last do not run, and
    nearly all operations are made again by shape."""
    tree = job_tree("sft", tmp_path)
    write_model(tmp_path / "dense", {**MODELS["dense"], "num_hidden_layers": LAYERS})
    request = request_of("sft", tree, tmp_path, world_size=1, steps=1, workers=1)
    seen = tmp_path / "seen"
    run, make = TransformerLayer.forward, ResultsByShape.make

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with seen.open("a") as file:
            file.write(f"{self.layer_number}\n")
        return run(self, *args, **kwargs)

    def made(self: Any, *args: Any) -> Any:
        with seen.open("a") as file:
            file.write("made\n")
        return make(self, *args)

    monkeypatch.setattr(TransformerLayer, "forward", forward)
    monkeypatch.setattr(ResultsByShape, "make", made)
    (record,) = records_of(request, tmp_path / "standing_in", 0)
    said = seen.read_text().split()
    assert {each for each in said if each != "made"} == {"1", "2", str(LAYERS)}
    assert said.count("made") > 0.2 * sum(record.operations.values())
