"""TextArena's games for one player (package textarena) as environments and as prompts.

A game's rules are the prompt, and its hints the messages of the user; the reward comes with the last turn. The package
may stand in an environment of its own, without megarlhf:

    python -m venv venv_textarena && venv_textarena/bin/pip install textarena
    PYTHONPATH=examples megarlhf rl -c configs/demo/grpo.yaml run.dir=runs/textarena data.template=chat \
        "data.train=environment:textarena_environment:TextArena?size=500&seed=0&python=venv_textarena/bin/python" \
        "environment={function: 'textarena_environment:TextArena', interface: gymnasium, \
                      python: venv_textarena/bin/python}" \
        "rewards=[{kind: environment}]"
"""

from typing import Any

import textarena


class TextArena:
    """A game with gymnasium's interface."""

    def __init__(self, game: str = "GuessTheNumber-v0") -> None:
        self.game = textarena.make(f"{game}-raw")  # the other versions repeat the whole game in each observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Begin a game: its rules."""
        self.game.reset(num_players=1, seed=seed)
        return self.observation(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make a move. The rewards of the game are known when it is over."""
        done, info = self.game.step(action)
        reward = float(self.game.close()[0][0]) if done else 0.0
        return "" if done else self.observation(), reward, done, False, info

    def observation(self) -> str:
        """What the game has written since the last turn."""
        _, messages = self.game.get_observation()
        return "\n".join(text for sender, text, _ in messages if sender == textarena.GAME_ID)
