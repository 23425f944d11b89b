"""Environments of SkyRL-Gym (package skyrl-gym), with the interface of megarlhf.

The package may stand in an environment of its own, without megarlhf. With records that have `answer`, such as GSM8K's:

    python -m venv venv_skyrl && venv_skyrl/bin/pip install skyrl-gym
    PYTHONPATH=examples megarlhf rl -c configs/demo/grpo.yaml run.dir=runs/skyrl data.template=chat \
        "environment={function: 'skyrl_gym_environment:SkyRLGym', python: venv_skyrl/bin/python, \
                      args: {env: gsm8k_multi_turn}}" \
        "rewards=[{kind: environment}]"
"""

from collections.abc import Mapping
from typing import Any

import skyrl_gym

from megarlhf import Answer, Turn


class SkyRLGym:
    """A conversation with an environment that SkyRL-Gym knows by name; `config` is its `env_config`."""

    def __init__(self, env: str = "gsm8k", **config: Any) -> None:
        self.name, self.config = env, config

    def reset(self, fields: Mapping[str, Any], seed: int) -> list[Mapping[str, Any]]:
        """Make the environment of a record: messages that it adds to the prompt."""
        extras = {"reward_spec": {"ground_truth": fields.get("answer")}, "extra_info": {"max_turns": 5}, **fields}
        self.env = skyrl_gym.make(self.name, env_config=self.config, extras=extras)
        asked = list(fields["messages"])
        return self.env.init(asked)[0][len(asked) :]

    def step(self, turn: Turn) -> Answer:
        """Answer a turn."""
        output = self.env.step(turn.text)
        return Answer(output["observations"], output["reward"], output["done"])

    def close(self) -> None:
        """End the conversation."""
        self.env.close()
