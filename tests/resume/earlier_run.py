"""A run that has begun in its directory, and was stopped; and what a start is asked there."""

import os
from pathlib import Path

from megarlhf.config import GenerateConfig, RLConfig, RMConfig, SFTConfig
from megarlhf.observe.records.step_records import open_records
from megarlhf.resume.claim.on_existing import Claim, claim, require_usable
from tests.refuses import refuses

Config = SFTConfig | RMConfig | RLConfig | GenerateConfig


def begin(cfg: Config, command: str) -> Claim:
    """Claim the run directory, write what a start writes, and leave it. Returns the claim, which is not held."""
    claimed = claim(cfg, cfg.run, command)
    with claimed.lock:
        claimed.start()
    return claimed


def leave_a_run(cfg: Config, command: str = "sft") -> set[str]:
    """The traces of a whole run, and files of the user's beside them, whose paths are returned."""
    run = cfg.run.dir
    begin(cfg, command)
    with open_records(run, None, None, lengths=True) as records:
        records.keep_lengths(1, [3], [4])
        records.metrics.log(1, {"loss": 0.5})
    for step in (1, 2):
        (run / f"checkpoints/step_{step:06d}/actor").mkdir(parents=True)
        (run / f"checkpoints/step_{step:06d}/actor/config.json").write_text("{}")
    os.symlink("step_000002", run / "checkpoints/latest")
    (run / "checkpoints/.step_000003.partial/actor").mkdir(parents=True)
    (run / "checkpoints/.step_000003.partial/.critic.megarlhf-partial").mkdir()
    (run / "checkpoints/.step_000003.partial/.critic.megarlhf-lock").touch()
    for export in ("step_000002", ".step_000003.partial"):
        (run / f"checkpoints/{export}/actor_adapter").mkdir()
        (run / f"checkpoints/{export}/actor_adapter/adapter_config.json").write_text("{}")
    (run / "responses.jsonl").write_text("{}\n")
    (run / "wandb_id").write_text("abc")
    left = ["resume/step_000002/MANIFEST.json", "resume/.step_000003.partial/state", "bank/a", "failures/b"]
    left += [f"profile/{name}" for name in ("step_000002_rank_00000.trace.json", ".step_000001_rank_00000.x.partial")]
    for name in left:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    mine = {"notes.txt", "plots/loss.png", "checkpoints/best/config.json", "tensorboard/mine.txt", "profile/mine.html"}
    for name in mine:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    return mine


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and link by its path: what is in it, and when it was written."""
    return {
        path.relative_to(directory).as_posix(): (path.read_bytes() if path.is_file() else b"", path.lstat().st_mtime_ns)
        for path in directory.rglob("*")
        if path.is_file() or path.is_symlink()
    }


def refused(cfg: Config, *names: str, command: str = "sft") -> str:
    """Assert that check and claim refuse with one message, which has the names, and touch nothing; the message."""
    before = content(cfg.run.dir)
    messages = []
    for action in (require_usable, claim):
        with refuses(*names) as caught:
            action(cfg, cfg.run, command)
        messages.append(str(caught.value))
    assert content(cfg.run.dir) == before
    assert messages[0] == messages[1]
    return messages[0]
