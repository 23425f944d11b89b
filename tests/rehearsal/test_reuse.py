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

LAYERS = FEWEST + 2
"""In two stages, of one and of so many layers that two are played."""
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "rl, dense": ("rl", "dense", 1, {"steps": 1}),
    "dpo, experts": ("dpo", "experts", 0, {"routing": Routing(skew=1.5)}),
    "sft, layers of ours": ("sft", "dense", 1, {"layers": "local", "steps": 1}),
}
"""Command, model, stage that is looked at (the first has several micro-batches at a time), options."""


@pytest.mark.parametrize("name", CASES)
def test_reuse_changes_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory with its curve, messages, the trace, FLOPs and rollouts of one stage: equal, seconds up to the order in
    which they are added. Of experts the curve is not compared: without gradients the last layer's
    input is released a norm later."""
    command, model, stage, options = CASES[name]
    layers = [1, FEWEST + 1] if stage else [FEWEST + 1, 1]
    tree = job_tree(command, tmp_path, model, pp=2, layers_per_stage=layers)
    write_model(tmp_path / model, {**MODELS[model], "num_hidden_layers": LAYERS})
    if command == "rl":
        del tree["reward_model"], tree["critic"]
        tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"}}
        tree["train"] |= {"prompts_per_step": 2, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 96}
    if command == "dpo":
        tree["train"] |= {"mini_batch_samples": 4}
    request = request_of(command, tree, tmp_path, world_size=2, **options)

    def seen(folder: str, **changes: Any) -> RankRecord:
        (record,) = records_of(request, tmp_path / folder, stage, **changes)
        return record

    reused = seen("reused")
    monkeypatch.setattr(ResultsByShape, "key", lambda self, func, args, kwargs: None)
    plain = seen("plain", repeat_layers=False)
    require_equal(reused, plain, with_curve=model != "experts")
    assert sum(plain.flops.values()) > 0
    assert len(plain.events) > 50
    assert len(plain.memory) > 4


def require_equal(record: RankRecord, plain: RankRecord, *, with_curve: bool) -> None:
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
        if with_curve:
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
