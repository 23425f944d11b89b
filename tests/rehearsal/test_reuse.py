"""What is reused instead of rehearsed again changes nothing that a rank has seen: shapes of results, equal layers,
experts and digests.

Not covered: whether either is faster.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megarlhf.rehearsal.fake_device.result_cache import ResultsByShape
from megarlhf.rehearsal.fake_device.routing import Routing
from megarlhf.rehearsal.job import RankRecord
from megarlhf.rehearsal.reuse.experts import FEWEST as EQUAL_EXPERTS
from megarlhf.rehearsal.reuse.layers import FEWEST
from megarlhf.rehearsal.timeline.trace import Compute, Event
from megarlhf.rehearsal.transformer_engine.layers import Gate
from megarlhf.weights.checks import digest
from tests.rehearsal.jobs import MODELS, job_tree, records_of, request_of, write_model

LAYERS = FEWEST + 2
"""Of which at least one is played, also where the last two of a stage run."""
NUM_EXPERTS = 2 * EQUAL_EXPERTS + 4
"""Of which so many get equally many tokens that some are played."""
CASES: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "rl, dense": ("rl", "dense", 2, 1, {"steps": 1}),
    "dpo, experts": ("dpo", "experts", 2, 0, {"routing": Routing(skew=1.5)}),
    "dpo, in the middle": ("dpo", "dense", 3, 1, {"layers": "local", "steps": 1}),
    "sft, layers of ours": ("sft", "dense", 2, 1, {"layers": "local", "steps": 1}),
    "rl, all layers again": ("rl", "dense", 2, 1, {"steps": 1, "recompute": "full"}),
    "dpo, all layers again": ("dpo", "dense", 2, 0, {"layers": "local", "steps": 1, "recompute": "full"}),
    "dpo, experts again": ("dpo", "experts", 2, 1, {"steps": 1, "recompute": "full"}),
    "sft, some layers again": ("sft", "dense", 2, 0, {"steps": 1, "recompute": "layers", "recompute_layers": FEWEST}),
    "sft, virtual stages": ("sft", "dense", 2, 0, {"layers": "local", "steps": 1, "vpp": 2}),
    "sft, a bucket for each matrix, layers again": ("sft", "dense", 1, 0, {"steps": 2, "recompute": "full", "dp": 2}),
    "sft, attention again": ("sft", "dense", 2, 0, {"steps": 1, "recompute": "core_attention"}),
}
"""Command, model, stages, the one that is looked at (before the last: several micro-batches at a time), options."""


WIDE = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
"""A layer has 200 million parameters, a bucket of Megatron-Core's 40 million."""
SLOW = ("rl, all layers again", "dpo, all layers again", "sft, attention again", "sft, virtual stages")
"""What the others have parts of."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_reuse_changes_nothing(name, tmp_path, monkeypatch) -> None:
    """Memory with its curve, messages, the trace, FLOPs and rollouts of one stage: equal, seconds up to the order in
    which they are added. Of experts the curve is not compared: without gradients the last layer's
    input is released a norm later."""
    command, model, stages, stage, given = CASES[name]
    options = {
        key: value for key, value in given.items() if not key.startswith("recompute") and key not in ("vpp", "dp")
    }
    played, vpp = 2 * FEWEST if "recompute_layers" in given else FEWEST + 1, given.get("vpp", 1)
    layers = [played if each == stage else 1 for each in range(stages)] * vpp
    tree = job_tree(command, tmp_path, model, pp=stages, vpp=vpp, layers_per_stage=layers)
    tree["actor"] |= {key: value for key, value in given.items() if key.startswith("recompute")}
    more = {"num_experts": NUM_EXPERTS} if model == "experts" else {}
    write_model(tmp_path / model, {**MODELS[model], "num_hidden_layers": sum(layers), **more})
    if command == "rl":
        del tree["reward_model"], tree["critic"]
        tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"}}
        tree["train"] |= {"prompts_per_step": 2, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 96}
    if command == "dpo":
        tree["train"] |= {"mini_batch_samples": 4}
    if dp := given.get("dp"):  # wide layers, whose sums and gathers go beside the work in many buckets
        write_model(tmp_path / model, {**MODELS[model], "num_hidden_layers": sum(layers), **WIDE})
        stages *= dp
    request = request_of(command, tree, tmp_path, world_size=stages, **options)

    def seen(folder: str, **changes: Any) -> RankRecord:
        (record,) = records_of(request, tmp_path / folder, stage, **changes)
        return record

    reused = seen("reused")
    monkeypatch.setattr(ResultsByShape, "key", lambda self, func, args, kwargs: None)
    plain = seen("plain", reuse=False)
    buckets, unlike = "dp" in given, int(name == "sft, layers of ours")
    require_equal(reused, plain, with_curve=model != "experts" and not buckets, unlike=unlike, buckets=buckets)
    assert sum(plain.flops.values()) > 0
    assert (sum(plain.recomputed_seconds.values()) > 0) == ("recompute" in given)
    assert len(plain.events) > 50
    assert len(plain.memory) > 4


def require_equal(
    record: RankRecord, plain: RankRecord, *, with_curve: bool, unlike: int = 0, buckets: bool = False
) -> None:
    """`buckets`: a played layer waits for all of its weights at once, not for each when it needs it: stretches of
    computing are others.

    `unlike`: points of a phase's curve that may differ. In one case two releases of the same moment, 23 KB of a layer
    and 512 bytes of a scalar, change places; why is not known, and peaks, starts and ends are equal.
    """
    for name in ("messages", "flops", "loads", "rollouts", "groups_created", "memberships", "cache_bytes"):
        assert getattr(record, name) == getattr(plain, name), name
    for name in ("work_seconds", "recomputed_seconds"):
        assert getattr(record, name) == pytest.approx(getattr(plain, name), rel=1e-9), name
    for ours, theirs in zip(_events(record, buckets), _events(plain, buckets), strict=True):
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
            pairs = list(zip(mine.curve, other.curve, strict=True))
            assert len([n for n, (ours, theirs) in enumerate(pairs) if ours[1] != theirs[1]]) <= unlike


def _events(record: RankRecord, buckets: bool) -> list[Event]:
    return [event for event in record.events if not (buckets and isinstance(event, Compute))]


def test_layers_and_results_are_reused(tmp_path, monkeypatch) -> None:
    """Without which the test above would compare nothing: layers between the second and the last do not run, and
    nearly all operations are made again by shape."""
    tree = job_tree("sft", tmp_path)
    write_model(tmp_path / "dense", {**MODELS["dense"], "num_hidden_layers": LAYERS})
    request = request_of("sft", tree, tmp_path, world_size=1, steps=1, workers=1)
    said = tmp_path / "said"
    note(monkeypatch, TransformerLayer, "forward", lambda layer: str(layer.layer_number), said)
    note(monkeypatch, ResultsByShape, "make", lambda results: "made", said)
    (record,) = records_of(request, tmp_path / "standing_in", 0)
    words = Counter(said.read_text().split())
    assert words.keys() - {"made"} == {"1", "2", str(LAYERS)}
    assert words["made"] > 0.2 * sum(record.operations.values())


def test_experts_and_digests_are_reused(tmp_path, monkeypatch) -> None:
    """The same of these: of each layer that runs at most three experts with equally many tokens, of which there are up
    to two numbers; of each box two digests of weights at a time."""
    tree = job_tree("rl", tmp_path, "experts")
    write_model(tmp_path / "experts", {**MODELS["experts"], "num_hidden_layers": LAYERS, "num_experts": NUM_EXPERTS})
    del tree["reward_model"], tree["critic"]
    tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"}}
    request = request_of("rl", tree, tmp_path, world_size=1, steps=1, workers=1)
    said = tmp_path / "said"
    note(monkeypatch, MoELayer, "forward", lambda layer: "layer", said)
    note(monkeypatch, Gate, "forward", lambda expert: "expert", said)
    digests = digest._keyed_sum
    monkeypatch.setattr(digest, "_keyed_sum", lambda *args: (append(said, "digest"), digests(*args))[1])
    records_of(request, tmp_path / "standing_in", 0)
    words = Counter(said.read_text().split())
    assert 2 * words["layer"] <= words["expert"] <= 6 * words["layer"]
    # Of six kinds of matrices and a few vectors, in up to five blocks; each is looked at two or three times.
    assert 0 < words["digest"] < 3 * NUM_EXPERTS * LAYERS


def note(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, word: Callable[[Any], str], said: Path) -> None:
    """A word for each call of a method."""
    run = getattr(owner, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        append(said, word(self))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, noted)


def append(said: Path, word: str) -> None:
    with said.open("a") as file:
        file.write(f"{word}\n")
