"""Environments with gymnasium's interface, of which tests have small fakes; the package gymnasium is not needed.

Not covered: environments of packages, which examples/ has.
"""

import asyncio

import numpy
import pytest

from megarlhf.own_code.gymnasium import reset_keywords
from megarlhf.rollout.environments.answer import Answer, answer_of, opening_of
from megarlhf.rollout.environments.checks import check_environment
from megarlhf.rollout.environments.gymnasium_adapter import adapted
from megarlhf.rollout.environments.pool import EnvironmentPool
from megarlhf.rollout.environments.user_code import CallError
from tests.refuses import refuses
from tests.rollout.environment_talk import talks, turn

MODULE = "tests.rollout.test_gymnasium_adapter"
ASKED = {"prompt": "<user>play</user>", "messages": [{"role": "user", "content": "play"}]}


class Game:
    """Counts turns; `returned` is what `step` returns in place of the usual."""

    def __init__(self, returned=None, opening=None):
        self.returned, self.opening, self.turns = returned, opening, 0

    def reset(self, *, seed=None, options=None):
        self.got = (seed, options)
        return (f"seed {seed}", {}) if self.opening is None else self.opening

    def step(self, action):
        self.turns += 1
        usual = (f"{self.turns}: {action}", 0.5, action == "won", action == "late", {})
        return usual if self.returned is None else self.returned

    def close(self):
        self.closed = True


class AsyncGame(Game):
    async def reset(self, *, seed=None, options=None):
        await asyncio.sleep(0)
        return super().reset(seed=seed, options=options)

    async def step(self, action):
        await asyncio.sleep(0)
        return super().step(action)


class NeedsPlayers(Game):
    def reset(self, players, seed=None):
        return "", {}


class NoStep:
    def reset(self, *, seed=None, options=None):
        return "", {}


def make_game(kind):
    return {"game": Game, "nothing": lambda: None}[kind]()


@pytest.fixture
def talk(tmp_path, monkeypatch):
    def pool(function, args, **options):
        return EnvironmentPool(function, args, interface="gymnasium", **options)

    monkeypatch.setattr("tests.rollout.environment_talk.EnvironmentPool", pool)
    yield from talks(tmp_path)


@pytest.mark.parametrize("name, args", [("Game", {}), ("AsyncGame", {}), ("make_game", {"kind": "game"})])
def test_a_conversation(talk, name, args):
    """Observations are messages of the user; the prompt of the record comes first."""
    made = talk(path=f"{MODULE}:{name}", args=args)
    key = made.pool.begin(ASKED, 2**32 + 7)
    assert made.says(key) == ["seed 7"]
    assert made.answer(key, "a").answer == Answer([{"role": "user", "content": "1: a"}], 0.5)
    assert made.answer(key, "won").answer == Answer([{"role": "user", "content": "2: won"}], 0.5, done=True)


def test_failures_are_in_words(talk):
    """As errors of the interface, not as exceptions of ours. The worker lives on."""
    made = talk(path=f"{MODULE}:Game", args={"returned": ["a", 1.0, False, {}]})
    key = made.pool.begin(ASKED, 1)
    made.replies(key)
    error = made.answer(key, "a").error
    assert error.startswith("returned 4 values ['a', 1.0, False, {}] from step, expected five values: observation, ")
    made = talk(path=f"{MODULE}:make_game", args={"kind": "nothing"})
    (reply,) = made.replies(made.pool.begin(ASKED, 1))
    assert reply.error.startswith("is None, which has no method reset, expected an environment with gymnasium's reset")


def test_truncated_counts_as_done():
    game = adapted(Game)
    game.reset(ASKED, 1)
    assert [game.step(turn(text)).done for text in ("a", "late", "won")] == [False, True, True]
    truths = adapted(Game, returned=("", numpy.float32(2), numpy.bool_(True), numpy.bool_(False), {}))
    truths.reset(ASKED, 1)
    assert answer_of(truths.step(turn("a"))) == Answer([{"role": "user", "content": ""}], 2.0, done=True)


def test_a_plain_prompt_is_followed_by_a_text():
    """Messages could not be written where prompts have no template."""
    game = adapted(Game)
    assert game.reset({"prompt": "play", "messages": None}, 1) == "seed 1"
    assert game.step(turn("a")).messages == "1: a"


def test_reset_gets_the_keywords_that_it_takes():
    def only_seed(seed=None):
        return f"only {seed}", {}

    def neither():
        return "neither", {}

    def both(**options):
        return str(sorted(options)), {}

    game = Game()
    adapted(lambda: game).reset({**ASKED, "answer": 4}, 2**40 + 3)
    assert game.got == (3, {**ASKED, "answer": 4})
    for reset, keywords, text in (
        (only_seed, ("seed",), "only 5"),
        (neither, (), "neither"),
        (both, ("seed", "options"), "['options', 'seed']"),
    ):
        game.reset = reset
        assert reset_keywords(reset) == keywords
        assert opening_of(adapted(lambda: game).reset(ASKED, 5)).messages == [{"role": "user", "content": text}]


def test_an_empty_observation_adds_nothing_to_the_prompt():
    assert adapted(Game, opening=("", {})).reset(ASKED, 1) is None


def test_a_prompt_of_the_environment_is_not_repeated():
    """The record's seed counts, and the observation is compared with the prompt."""
    game = Game()
    asked = {"prompt": "<user>seed 9</user>", "messages": [{"role": "user", "content": "seed 9"}]}
    assert adapted(lambda: game).reset({**asked, "environment_seed": 9}, 1) is None
    assert game.got == (9, None)
    assert adapted(Game).reset({"prompt": "seed 9", "messages": None, "environment_seed": 9}, 1) is None
    with refuses("'seed 8'", "with seed 8", "'seed 9'", "environment.args", error=CallError):
        adapted(Game).reset({**asked, "environment_seed": 8}, 1)


@pytest.mark.parametrize("returned, names", [
    (None, "returned 'won' from step|five values"),
    (("a", 1.0, False, {}), "4 values|terminated, truncated, info|the four of gym"),
    ((5, 1.0, False, False, {}), "the observation 5 from step|a text"),
    (({"text": "a"}, 1.0, False, False, {}), "the observation {'text': 'a'} from step|a text"),
    (("a", 1.0, "no", False, {}), "terminated = 'no' from step|True or False"),
    (("a", 1.0, False, None, {}), "truncated = None from step"),
])  # fmt: skip
def test_another_return_value_of_step(returned, names):
    game = adapted(Game, returned="won" if returned is None else returned)
    game.reset(ASKED, 1)
    with refuses(*names.split("|"), error=CallError):
        game.step(turn("a"))


@pytest.mark.parametrize("opening, names", [
    ("text", "'text' from reset|two values: observation, info"),
    (([1, 2], {}), "the observation [1, 2] from reset|a text"),
])  # fmt: skip
def test_another_return_value_of_reset(opening, names):
    with refuses(*names.split("|"), error=CallError):
        adapted(Game, opening=opening).reset(ASKED, 1)


@pytest.mark.parametrize("name, args, names", [
    ("NeedsPlayers", {}, "reset is called as reset(seed=...)|'players'"),
    ("NoStep", {}, "no method step(action)|gymnasium_adapter.py"),
    ("Game", {"other": 1}, "'other'|environment.args"),
    ("make_game", {}, "'kind'|environment.args"),
    ("MODULE", {}, "of type str"),
])  # fmt: skip
def test_a_class_that_does_not_fit_is_refused(name, args, names):
    with refuses(*names.split("|")):
        check_environment(f"{MODULE}:{name}", args, "gymnasium")


def test_a_class_of_the_other_interface_is_refused():
    """Each interface is named by the check of its own methods."""
    assert check_environment(f"{MODULE}:Game", {}, "gymnasium") is not None
    with refuses("its method reset is called as reset(fields, seed)"):
        check_environment(f"{MODULE}:Game", {})
    with refuses("its method reset is called as reset(seed=...)"):
        check_environment("tests.rollout.environments_for_tests:Sync", {"folder": "x"}, "gymnasium")


def test_close_is_called_where_it_is():
    game = Game()
    adapted(lambda: game).close()
    assert game.closed
    without = NoStep()
    without.step = lambda action: None
    assert adapted(lambda: without).close() is None
