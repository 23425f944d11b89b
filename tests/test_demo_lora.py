"""The demo's task with an adapter, on two processes: `make demo-lora` in less."""

import json
import subprocess

import pytest

from tools.demo.pipeline import BY_NAME, LORA, evaluations, make_data, stage_command


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rl_with_an_adapter_improves_held_out_sums(tmp_path) -> None:
    """About half of the sums are right after SFT, seven in ten after 20 steps; a tenth of the parameters is trained."""
    subprocess.run(make_data(tmp_path, 0), check=True)
    subprocess.run(stage_command(BY_NAME["sft"], tmp_path), check=True)
    said = subprocess.run(
        stage_command(LORA, tmp_path, ["train.num_steps=20"]), check=True, capture_output=True, text=True
    ).stdout
    assert "actor: trains 49,152 of 496,512 parameters (9.9 %)" in said
    assert "reference: the actor with its adapter switched off" in said
    found = evaluations(tmp_path / LORA.name)
    assert found[0]["eval_accuracy"] < 0.6
    assert found[-1]["eval_accuracy"] > found[0]["eval_accuracy"] + 0.15
    config = json.loads((tmp_path / LORA.name / "checkpoints/latest/actor_adapter/adapter_config.json").read_text())
    assert config["r"] == 8
