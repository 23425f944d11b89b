"""A run that drops groups of equal rewards, draws others in their place, and shapes rewards by length."""

from megarlhf.observe.records.metrics import read_metrics
from tests.command import argv_of
from tests.distributed.test_rl_layouts import config

REWARD = {"kind": "rule", "rule": "tests.distributed.user_rewards:lucky", "name": "lucky"}


def test_dynamic_sampling_to_the_end_at_tp2(ranks, one_layer, data, tmp_path) -> None:
    """Fewer groups without signal than without it, at the same number of samples; the same run on one rank."""
    cfg = config({**one_layer, "other": one_layer["scorer"]}, data["prompts"], {}, advantage="group_relative")
    del cfg["critic"], cfg["reward_model"]
    cfg["run"], cfg["rewards"] = {"dir": str(tmp_path / "tp2")}, [REWARD]
    cfg["train"] |= {"num_steps": 2, "epochs_per_step": 1}
    cfg["algo"] |= {"missing_end_penalty": 0.25, "overlong": {"buffer_tokens": 3, "mask": True}}
    argv = [*argv_of("rl", cfg, tmp_path / "cfg.yaml"), "run.on_existing=overwrite"]
    dynamic = [*argv, "algo.dynamic_sampling.max_refills=2"]
    tp2 = ["actor.parallel.tp=2", "reference.parallel.tp=2"]
    ranks.run(2, "command", *dynamic, *tp2)
    ranks.run(1, "command", *dynamic, f"run.dir={tmp_path / 'single'}")
    ranks.run(1, "command", *argv, f"run.dir={tmp_path / 'without'}")
    found, single, without = (
        [row for row in read_metrics(tmp_path / name) if row["step"]] for name in ("tp2", "single", "without")
    )
    for row, alone in zip(found, single, strict=True):
        for name in ("reward_mean", "groups_drawn", "groups_dropped", "sampling_rounds", "samples_left_out", "tokens"):
            assert row[name] == alone[name], name
        assert row["groups_drawn"] == 4 + row["groups_dropped"] - row["groups_filled_up"]
        assert 0 < row["samples_left_out"] < 16, "cut responses are masked"
    assert found[0]["groups_dropped"] > found[0]["groups_filled_up"]
    assert without[0]["reward/lucky_std"] < found[0]["reward/lucky_std"]
    assert "groups_drawn" not in without[0]
