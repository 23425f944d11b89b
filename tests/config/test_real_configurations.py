"""The configurations for real clusters: each is what its name says, and passes the check of a dry run. Not covered:
whether they fit (`make bench-fits`), heads of checkpoints, of which there are none, and anything on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarlhf.config import RLConfig, RMConfig, SFTConfig, load_config
from megarlhf.planning.preflight import preflight
from megarlhf.rehearsal.fakes.inputs import stand_in

ROOT = Path(__file__).parents[2]
KINDS = {"sft": SFTConfig, "rm": RMConfig, "ppo": RLConfig, "grpo": RLConfig}
SIZES = {
    "llama-3-8b": (8,), "llama-3-70b": (32, 64, 128, 512), "qwen2.5-32b": (32,), "qwen3-30b-a3b": (16, 64),
    "llama-3.1-405b": (256, 1024),
}  # fmt: skip
NAMES = [f"{model}/{kind}-{gpus}" for model, sizes in SIZES.items() for gpus in sizes for kind in KINDS]


def test_there_are_no_others() -> None:
    found = {f"{file.parent.name}/{file.stem}" for model in SIZES for file in (ROOT / "configs" / model).iterdir()}
    assert found == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_passes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tokenizer and data that stand in, for the ranks of its name."""
    monkeypatch.chdir(ROOT)
    model, stem = name.split("/")
    kind, gpus = stem.split("-")
    file = ROOT / "configs" / f"{name}.yaml"
    cfg = load_config(KINDS[kind], file, ())
    assert cfg.run.world_size == int(gpus)
    assert cfg.run.dir == Path("runs") / model / stem
    assert f"-c configs/{name}.yaml" in file.read_text(encoding="utf-8")
    command = "rl" if isinstance(cfg, RLConfig) else kind
    monkeypatch.setattr("megarlhf.planning.preflight.check_heads", lambda *args, **kwargs: [])
    preflight(command, stand_in(cfg, tmp_path, prompt_lengths=None, response_lengths=None, steps=2).cfg, int(gpus))


@pytest.mark.parametrize("name", NAMES)
def test_one_of_a_size_was_chosen_and_the_others_follow(name: str) -> None:
    """Each role that is trained has the layout of the one that was chosen, and its file says which that is."""
    folder, stem = (ROOT / "configs" / name).parent, name.split("/")[1]
    gpus = stem.split("-")[1]
    texts = {kind: (folder / f"{kind}-{gpus}.yaml").read_text(encoding="utf-8") for kind in KINDS}
    (chosen,) = [kind for kind, text in texts.items() if "which says why" not in text]
    mine, other = stem.split("-")[0], load_config(KINDS[chosen], folder / f"{chosen}-{gpus}.yaml", ())
    assert chosen == mine or f"Its layout is that of {chosen}-{gpus}.yaml" in texts[mine]
    expected = next(iter(other.roles().values())).parallel
    cfg = load_config(KINDS[mine], folder / f"{stem}.yaml", ())
    assert all(role.parallel == expected for role in cfg.roles().values())
