"""A run of two ranks whose reward function does not come back."""

from pathlib import Path

from tests.command import argv_of
from tests.distributed.test_rl_layouts import config

RULES = Path(__file__).with_name("faulty_rules.py")


def line_of(text: str) -> int:
    """Of the file of rules, the first line with this text."""
    return next(n for n, line in enumerate(RULES.read_text().splitlines(), start=1) if text in line)


def hanging_run(rule: str, models: dict[str, Path], data: dict[str, Path], folder: Path) -> list[str]:
    """Arguments of `megarlhf rl` with a faulty rule in the rank itself, which is watched for a second."""
    cfg = config(models, data["prompts"], {}, advantage="group_relative")
    for role in ("critic", "reward_model"):
        del cfg[role]
    cfg["run"] = {"dir": str(folder / "run"), "nproc": 2}
    cfg["rewards"] = [{"kind": "rule", "rule": f"tests.distributed.faulty_rules:{rule}", "workers": 0, "check": "none"}]
    cfg["watchdog"] = {"reward": 1.0, "grace": 4.0}
    return argv_of("rl", cfg, folder / "cfg.yaml")
