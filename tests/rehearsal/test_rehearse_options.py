"""Each option of `megarlhf rehearse` changes what it says it changes, and is refused where it could change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.rehearsal.jobs import H100, job_tree, run_command, write_job

MIB, GIB = 2**20, 2**30
Say = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> Say:
    """The answer for one rank and one step, by options; each is asked once."""
    return _asked(tmp_path_factory, "sft")


@pytest.fixture(scope="module")
def grpo(tmp_path_factory) -> Say:
    """The same of an rl job."""
    return _asked(tmp_path_factory, "rl")


def _asked(tmp_path_factory: pytest.TempPathFactory, command: str) -> Say:
    folder = tmp_path_factory.mktemp(command)
    tree = job_tree(command, folder)
    if command == "rl":
        del tree["critic"], tree["reward_model"]
        tree |= {"rewards": [{"kind": "rule", "rule": "exact_match"}], "algo": {"advantage": "group_relative"}}
    file, known = write_job(command, folder, tree), dict[tuple[str, ...], dict[str, Any]]()

    def ask(*options: str) -> dict[str, Any]:
        if options not in known:
            out = folder / f"out{len(known)}"
            done = run_command(
                command, file, out, "--workers", "1", *(options if "--steps" in options else ("--steps", "1", *options))
            )
            assert done.status == 0
            known[options] = done.json()
        return known[options]

    return ask


def peak(said: dict[str, Any], kind: str, phase: str = "train/actor") -> int:
    """Bytes of a kind at the peak of a phase of the first step."""
    rows = (row for row in said["ranks"][0]["memory"] if (row["step"], row["phase"]) == (1, phase))
    return int(next(rows)["by_kind"].get(kind, 0))


def test_bytes_of_a_parameter(sft) -> None:
    """In bf16: 2 of itself, 4 of its gradient, 4 of the main parameter and 8 of Adam's two moments; blocks of 512 bytes
    and a buffer's padding add a few. 2 layers of 4 x 64 x 64 + 3 x 64 x 96 + 2 x 64, a norm, 2 x 512 x 64 words. Of
    each shape of a weight TransformerEngine has one gradient more that nobody reads, in bf16."""
    parameters = 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64 + 2 * 512 * 64
    unread = 2 * (192 * 64 + 64 * 64 + 64 * 96)
    said = sft()
    for kind, nbytes in (("parameters", 2), ("gradients", 4), ("main parameters", 4), ("optimizer state", 8)):
        held, least = peak(said, kind, "optimizer/actor"), nbytes * parameters + unread * (kind == "gradients")
        assert least <= held < 1.02 * least, kind


def test_a_peak_that_lasts_is_that_of_the_phase_that_made_it(sft) -> None:
    """With one step the optimizer's state is made last, and what follows begins with it."""
    assert sft()["ranks"][0]["peak_at"][1] != "between phases"


def test_a_resume_point_has_weights_and_the_optimizers_state(sft) -> None:
    """It is written before the last rehearsed step, and so not with one step. The copy in host memory has all of it
    but what pads buffers to their size."""
    (none,) = (row["nbytes"] for row in sft()["host"] if "resume point" in row["name"])
    assert none == 0
    said = sft("--steps", "2")
    (copied,) = (row["nbytes"] for row in said["host"] if "resume point" in row["name"])
    held = sum(peak(said, kind, "optimizer/actor") for kind in ("parameters", "main parameters", "optimizer state"))
    assert copied == pytest.approx(held, rel=0.01)


def test_a_resume_point_is_written_from_where_the_state_lies(grpo) -> None:
    """What is offloaded stays away, but for a number or two; as many bytes are copied."""
    here, away = (grpo("--steps", "2", f"actor.offload.optimizer={offload}") for offload in ("false", "true"))
    of_point = [
        next(row for row in said["ranks"][0]["memory"] if (row["step"], row["phase"]) == (2, "checkpoint"))["by_kind"]
        for said in (here, away)
    ]
    held = [sum(kinds.get(kind, 0) for kind in ("optimizer state", "main parameters")) for kinds in of_point]
    assert held[0] > 100_000
    assert held[1] <= 1024
    copied = [row["nbytes"] for said in (here, away) for row in said["host"] if "resume point" in row["name"]]
    assert copied[0] == copied[1] > 0


def test_layers(sft) -> None:
    """TransformerEngine's layers keep other tensors than ours."""
    te, local = sft("--steps", "2"), sft("--layers", "local", "--steps", "2")
    assert peak(te, "activations") != peak(local, "activations") > 0
    ours, theirs = (next(note for note in said["notes"] if "Layers" in note) for said in (local, te))
    assert "local" in ours
    assert "TransformerEngine" in theirs
    items = [{item["name"] for item in said["ranks"][0]["margin"]} for said in (te, local)]
    assert items[0] - items[1] == {"norms' backward"}


def test_margin(sft, tmp_path) -> None:
    """A context that takes 1000 MiB more."""
    file = tmp_path / "margin.yaml"
    file.write_text(yaml.safe_dump({"context_mib": 1600}))
    (more,), (plain,) = sft("--margin", str(file))["ranks"], sft()["ranks"]
    assert more["need"] - plain["need"] == 1000 * MIB
    assert more["peak"] == plain["peak"]


def test_the_margin_is_of_the_trained_role_that_takes_most(tmp_path) -> None:
    """The critic's rank holds all four heads, the actor's one of them. An engine without memory: training needs most,
    and no other phase has the work space of attention's backward."""
    tree = job_tree("rl", tmp_path, tp=4)
    tree["rollout"] |= {"engine": "megatron"}
    tree["critic"] = {**tree["critic"], "parallel": {"tp": 1, "pp": 2}}
    options = ("--world-size", "4", "--ranks", "0", "--steps", "1", "--workers", "1")
    done = run_command("rl", write_job("rl", tmp_path, tree), tmp_path / "out", *options)
    (item,) = (item for item in done.json()["ranks"][0]["margin"] if item["name"] == "attention's backward")
    assert " x 4 heads x 16 " in item["scaling"]
    # Of the critic's two stages one is here: what it waits for is not.
    assert [note for note in done.json()["notes"] if "critic" in note and "another layout" in note]


def test_memory_of_a_device(grpo) -> None:
    """A larger device leaves more, and vLLM takes its share of it (`rollout.vllm.gpu_memory_utilization`, 0.4)."""
    small, large = grpo("--gpu-memory-gib", "40"), grpo()
    assert small["capacity"] == 40 * GIB
    more = large["capacity"] - small["capacity"]
    assert more > 30 * GIB
    caches = [said["ranks"][0]["cache_bytes"] for said in (small, large)]
    assert caches[1] - caches[0] == pytest.approx(0.4 * more, abs=2)
    assert large["free"] - small["free"] == pytest.approx(0.6 * more, abs=0.1 * MIB)


def test_speed_of_the_rollout(grpo) -> None:
    """One engine: tokens / speed, by hand; the step is longer by as much."""
    plain, slow = grpo(), grpo("--rollout-tokens-per-second", "10")
    (row,) = slow["rollouts"]
    assert row["slowest"] == pytest.approx(row["tokens"] / 10)
    more = row["slowest"] - plain["rollouts"][0]["slowest"]
    assert slow["times"][0]["seconds"] - plain["times"][0]["seconds"] == pytest.approx(more)


def test_lengths_of_responses(grpo) -> None:
    """8 samples of 5 tokens."""
    said = grpo("--response-lengths", "constant:5")
    assert said["rollouts"][0]["tokens"] == 8 * 5
    assert any("5 tokens" in note and "at most 64" in note for note in said["notes"])


def test_lengths_of_prompts(sft) -> None:
    long, short = (sft("--prompt-lengths", f"constant:{n}", "--response-lengths", "constant:4") for n in (32, 8))
    tokens = [said["times"][0]["tokens_per_second"] * said["times"][0]["seconds"] for said in (long, short)]
    assert tokens == [pytest.approx(8 * 36), pytest.approx(8 * 12)]


def test_skew_of_the_routing_on_hardware_of_the_user(tmp_path) -> None:
    """The busiest of four experts gets all tokens, each of which goes to two: products and memory are others, seen on
    a machine that launches in 10 ns: in no time at all, equally many bytes take equally long."""
    hardware = yaml.safe_load(H100.read_text())
    hardware |= {"name": "quick", "launch": {"value": 1e-8, "source": "assumed"}}
    quick = tmp_path / "quick.yaml"
    quick.write_text(yaml.safe_dump(hardware))
    file, found = write_job("sft", tmp_path, job_tree("sft", tmp_path, "experts")), []
    for skew in ("1", "2"):
        options = ("--world-size", "1", "--steps", "1", "--hardware", str(quick), "--routing-skew", skew)
        found.append(run_command("sft", file, tmp_path / skew, *options).json())
    assert [said["hardware"] for said in found] == ["quick", "quick"]
    even, skewed = ([(row["phase"], row["peak"]) for row in said["ranks"][0]["memory"]] for said in found)
    assert even != skewed
    even, skewed = (said["times"][0]["seconds"] for said in found)
    assert even < skewed
    notes = [next(note for note in said["notes"] if note.startswith("Routing")) for said in found]
    assert ["2 times" in note for note in notes] == [False, True]


def test_ranks_per_node(tmp_path) -> None:
    file = write_job("sft", tmp_path, job_tree("sft", tmp_path, pp=2))
    ways = []
    for number in ("1", "2"):
        options = ("--world-size", "2", "--steps", "1", "--ranks-per-node", number)
        said = run_command("sft", file, tmp_path / f"out{number}", *options).json()
        ways.append(
            {row["between_nodes"] for rank in said["ranks"] for row in rank["messages"] if row["group"] == "pp"}
        )
        assert said["host_per_node"] == int(number) * sum(row["nbytes"] for row in said["host"])
    assert ways == [{True}, {False}]


def test_ranks_of_no_whole_pipeline_have_no_times(tmp_path) -> None:
    file = write_job("sft", tmp_path, job_tree("sft", tmp_path, pp=2))
    options = ("--world-size", "4", "--steps", "1", "--ranks", "0,3")
    done = run_command("sft", file, tmp_path / "out", *options)
    said = done.json()
    assert (done.status, said["times"], said["faults"]) == (0, [], [])
    assert [(rank["rank"], rank["why"]) for rank in said["ranks"]] == [(0, "asked for"), (3, "asked for")]
    assert [note for note in said["notes"] if "no times" in note]


def test_a_model_is_named_as_the_user_names_it(tmp_path, capsys) -> None:
    """Not by the directory that stands in for it: a sequence of 800 tokens has no positions in a model of 512."""
    tree = job_tree("sft", tmp_path)
    tree["data"] |= {"max_prompt_tokens": 400, "max_response_tokens": 400}
    tree["train"]["max_tokens_per_micro_batch"] = 1024
    lengths = ("--prompt-lengths", "constant:400", "--response-lengths", "constant:400")
    done = run_command("sft", write_job("sft", tmp_path, tree), tmp_path / "out", *lengths)
    told = " ".join(capsys.readouterr().err.split())
    assert done.status == 2, told
    assert str(tmp_path / "dense") in told
    assert "0_dense" not in told
    assert not done.out.exists()
