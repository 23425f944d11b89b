"""What a run writes in its directory, and where else it may write.

Not covered: Weights & Biases' own folder, which stays. What a start does where a run has been: `resume/test_claim.py`.
"""

from megarlhf.config import GenerateConfig
from megarlhf.observe.records.run_directory import files_of_a_run, require_writable_output
from tests.refuses import refuses


def test_a_report_of_a_start_that_hung_is_no_run_by_itself(tmp_path):
    """Beside the record of a run it is part of it, and goes with it."""
    (tmp_path / "failures/watchdog/20261122T120000").mkdir(parents=True)
    assert files_of_a_run(tmp_path) == []
    (tmp_path / "config.yaml").write_text("")
    assert [path.name for path in files_of_a_run(tmp_path)] == ["watchdog", "config.yaml"]


def test_responses_replace_no_input_and_nothing_of_the_runs_own(tmp_path):
    """With `overwrite`; `run.dir/responses.jsonl` and any other file are free."""
    for name in ("model/model.safetensors", "hf/tokenizer.json", "data/train.jsonl", "old.jsonl", "run/config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "data/train.jsonl")
    (tmp_path / "model/link").symlink_to(tmp_path / "old.jsonl")
    tree = {
        "run": {"dir": tmp_path / "run", "on_existing": "overwrite"},
        "actor": {"model": {"path": tmp_path / "model", "hf": tmp_path / "hf"}},
        "data": {"train": tmp_path / "data"},
    }
    cfg = GenerateConfig.model_validate(tree)
    for name, outs in {
        "data.train": ("data/train.jsonl", "data/new.jsonl", "link.jsonl"),
        "actor.model.path": ("model/model.safetensors", "model/link"),
        "actor.model.hf": ("hf/tokenizer.json",),
        "run/config.yaml": ("run/config.yaml",),
        "run/metrics.jsonl": ("run/metrics.jsonl",),
        "run/lengths.jsonl": ("run/lengths.jsonl",),
        "run/profile": ("run/profile/a.jsonl",),
        "run/.responses.jsonl.partial": ("run/.responses.jsonl.partial",),
        "run/checkpoints": ("run/checkpoints/a.jsonl",),
        "directory": ("run",),
    }.items():
        for out in outs:
            with refuses(f"out = {tmp_path / out}", name):
                require_writable_output(cfg, cfg.run, tmp_path / out)
    for out in ("old.jsonl", "run/responses.jsonl", "new/responses.jsonl"):
        require_writable_output(cfg, cfg.run, tmp_path / out)
    with refuses("old.jsonl", "run.on_existing=overwrite"):
        require_writable_output(cfg, cfg.run.model_copy(update={"on_existing": "refuse"}), tmp_path / "old.jsonl")
