"""Configuration of `megarlhf eval`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import PositiveInt, model_validator

from megarlhf.config.commands import MicroBatchConfig
from megarlhf.config.data import OF_TRAINING, SFTDataConfig, describe_sources, require_no_weights
from megarlhf.config.frozen import FrozenModel
from megarlhf.config.rewards import RewardConfig
from megarlhf.config.roles import RoleConfig, require_all_ranks
from megarlhf.config.rollout import RolloutConfig
from megarlhf.config.run import RunConfig
from megarlhf.config.tracking import AccuracyConfig
from megarlhf.config.watchdog import WatchdogConfig

Task = Literal["perplexity", "pairs", "generation", "comparison"]

NEEDS: dict[Task, tuple[str, ...]] = {
    "perplexity": ("actor",),
    "pairs": ("reward_model",),
    "generation": ("actor",),
    "comparison": ("actor", "against", "rewards"),
}
"""What each task is made of, by key. `generation` needs something that scores, too: `rewards` or `eval.accuracy`."""


class EvalTasksConfig(AccuracyConfig):
    """What is evaluated."""

    tasks: tuple[Task, ...] | None = None
    """`perplexity`: of the actor on responses. `pairs`: how often the reward model ranks pairs rightly, and how far its
    scores can be trusted. `generation`: the actor's responses, scored by `rewards`. `comparison`: the same, and how
    often they have a higher reward than those of `against`. Default: what the file has the parts for: `comparison` with
    `against`; else `generation` with `rewards` or `eval.accuracy`; else `perplexity` of an actor and `pairs` of a
    reward model."""
    perplexity_of: Literal["response", "text"] = "response"
    """`response`: the tokens of each response, given its prompt, with its end token, as `sft` learns them. `text`:
    every token but the first of the field `text`, as Hugging Face's loss of `tokenizer(text)` counts them: a
    begin-of-sequence token is the first where the tokenizer writes it, and no end token is appended. A text longer than
    `data.max_prompt_tokens` + `data.max_response_tokens` is read in pieces of so many tokens, each of which begins so.
    """
    pass_at: tuple[PositiveInt, ...] = ()
    """Each k gives pass@k: the chance that one of k samples is right, by the reward or rule that is the accuracy. Needs
    `greedy: false` and `rollout.num_samples_per_prompt` of k or more; more samples make it more certain."""


class EvaluateConfig(FrozenModel):
    """`megarlhf eval`: figures of a model, each with an interval where it has one."""

    refused: ClassVar[frozenset[str]] = OF_TRAINING

    run: RunConfig
    actor: RoleConfig | None = None
    """The language model that is evaluated."""
    against: RoleConfig | None = None
    """A second language model, with which the actor's responses are compared. It may be of another family, and have
    another tokenizer."""
    reward_model: RoleConfig | None = None
    """A reward model of `megarlhf rm`: evaluated on pairs, or what a reward of kind `model` scores with."""
    data: SFTDataConfig
    forward: MicroBatchConfig = MicroBatchConfig(micro_batch_samples=16)
    """How much one forward takes, of perplexity, of the reward model, and of the engine `megatron`."""
    rollout: RolloutConfig = RolloutConfig()
    greedy: bool = True
    """Take the likeliest token; otherwise sample at `rollout.temperature`."""
    rewards: tuple[RewardConfig, ...] = ()
    """What scores a response. Each has a figure of what it says, before `weight`, `shift` and `clip`; these count in
    the weighted sum, by which models are compared."""
    eval: EvalTasksConfig = EvalTasksConfig()
    max_samples: PositiveInt | None = None
    """Use only the first so many records that can be used."""
    watchdog: WatchdogConfig = WatchdogConfig()

    def tasks(self) -> tuple[Task, ...]:
        """What is evaluated, in the order of `Task`."""
        if self.eval.tasks is not None:
            return tuple(task for task in get_args(Task) if task in self.eval.tasks)
        if self.against is not None:
            return ("comparison",)
        if self.rewards or self.eval.accuracy is not None:
            return ("generation",)
        parts: dict[Task, RoleConfig | None] = {"perplexity": self.actor, "pairs": self.reward_model}
        return tuple(task for task, role in parts.items() if role is not None)

    @property
    def generates(self) -> bool:
        """Whether responses are drawn."""
        return bool({"generation", "comparison"} & set(self.tasks()))

    @property
    def uses_reward_model(self) -> bool:
        """Whether it scores responses."""
        return self.generates and any(reward.kind == "model" for reward in self.rewards)

    @property
    def retokenizes(self) -> bool:
        """Whether the reward model reads none of the actor's token ids."""
        models = [reward for reward in self.rewards if reward.kind == "model"]
        return bool(models) and all(reward.retokenize for reward in models)

    def roles(self) -> dict[str, RoleConfig]:
        """The roles that are built, one after the other."""
        given = {"actor": self.actor, "against": self.against, "reward_model": self.reward_model}
        return {name: role for name, role in given.items() if role is not None}

    @model_validator(mode="before")
    @classmethod
    def _of_generate(cls, data: Any) -> Any:
        """A file for `generate` may be given to `eval` too, but for what only `generate` does."""
        if not isinstance(data, dict):
            return data
        if data.get("out") is not None:
            raise ValueError(
                f"out = {data['out']}: eval writes figures and no responses; leave out away, or use megarlhf generate"
            )
        unset = {"select": "all", "pairs_per_prompt": 1, "min_reward": None}
        if chosen := [f"{key} = {data[key]}" for key, value in unset.items() if data.get(key, value) != value]:
            raise ValueError(
                f"{', '.join(chosen)}: eval chooses no responses; leave {'it' if len(chosen) == 1 else 'them'} out, or "
                "use megarlhf generate"
            )
        return {key: value for key, value in data.items() if key not in ("out", *unset)}

    @model_validator(mode="after")
    def _check(self) -> EvaluateConfig:
        self._check_data()
        self._check_tasks()
        self._check_parts()
        self._check_rewards()
        self._check_samples()
        language_models = {"actor": self.actor, "against": self.against}
        require_all_ranks({name: role for name, role in language_models.items() if role is not None})
        if "pairs" in self.tasks() and self.reward_model is not None:
            require_all_ranks({"reward_model": self.reward_model})
        return self

    def _check_data(self) -> None:
        """Raises: ValueError for data that is not read, or what is of training."""
        self.data.require_train_alone("eval", "what is to be evaluated on")
        if "pairs" in self.tasks():
            self.data.require_no_cut("eval")
        require_no_weights("data.train", self.data.train)
        if any(source.kind == "megatron" for source in self.data.train):
            raise ValueError(
                f"data.train = {describe_sources(self.data.train)}: eval reads records, and kind = megatron has token "
                "ids alone; give texts (eval.perplexity_of: text)"
            )

    def _check_tasks(self) -> None:
        """Raises: ValueError where it is not said what to do, or said twice."""
        given = self.eval.tasks
        if given is not None and len(set(given)) < max(1, len(given)):
            raise ValueError(f"eval.tasks = {list(given)}; name each task once, and one at least: {', '.join(NEEDS)}")
        if not self.tasks():
            raise ValueError(
                "nothing to evaluate: give an actor (perplexity; with rewards, its responses) or a reward_model (pairs)"
            )
        if given is None and len(self.tasks()) > 1:
            raise ValueError(
                "an actor and a reward_model, and nothing that says what for: name eval.tasks. [perplexity] is of the "
                "actor, [pairs] of the reward model; with rewards: [{kind: model}] it scores the actor's responses"
            )

    def _check_parts(self) -> None:
        """Raises: ValueError for a task without what it is made of, and for a part that no task reads."""
        read = {key for task in self.tasks() for key in NEEDS[task]}
        given = {key for key in ("actor", "against", "reward_model", "rewards") if getattr(self, key)}
        for task in self.tasks():
            if missing := [key for key in NEEDS[task] if key not in given]:
                raise ValueError(f"eval.tasks: {task} needs {' and '.join(missing)}; give that, or leave {task} out")
        if "generation" in self.tasks() and not (self.rewards or self.eval.accuracy):
            raise ValueError(
                "eval.tasks: generation needs something that scores: name rewards, such as "
                "[{kind: rule, rule: exact_match}], or eval.accuracy"
            )
        read |= {"rewards"} if self.generates else set()
        read |= {"reward_model"} if self.uses_reward_model else set()
        if unread := sorted(given - read):
            uses = {key: [task for task, needs in NEEDS.items() if key in needs] for key in unread}
            uses |= {"rewards": ["generation", "comparison"]}
            whose = [f"{key} ({', '.join(uses[key])} would read it)" for key in unread]
            raise ValueError(
                f"no task reads {', '.join(whose)}: the tasks are {', '.join(self.tasks())}. Leave it out, or name the "
                "tasks that are meant in eval.tasks"
                + "; a reward of kind model scores with reward_model"
                * ("reward_model" in unread and self.generates)
            )

    def _check_rewards(self) -> None:
        """Raises: ValueError for rewards without their model, of one name, or on a scale that a run learns."""
        if any(reward.kind == "model" for reward in self.rewards) and self.reward_model is None:
            raise ValueError("rewards names the reward model: give a reward_model section")
        for n, reward in enumerate(self.rewards):
            if reward.normalise != "none":
                raise ValueError(
                    f"rewards[{n}].normalise = {reward.normalise} is a scale that follows from the samples beside it, "
                    "and figures of two evaluations could not be compared; leave it out"
                )
        labels = [reward.label for reward in self.rewards]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(
                f"rewards has {', '.join(repeated)} more than once, and figures would have one name; once will do, or "
                "give them names: rewards[].name"
            )

    def _check_samples(self) -> None:
        """Raises: ValueError for samples that are all alike, or too few."""
        samples, asked = self.rollout.num_samples_per_prompt, self.eval.pass_at
        if not self.generates:
            if asked or self.eval.accuracy is not None:
                key = f"eval.pass_at = {list(asked)}" if asked else f"eval.accuracy = {self.eval.accuracy}"
                raise ValueError(f"{key} is of responses, and the tasks are {', '.join(self.tasks())}; leave it out")
            return
        if self.greedy and self.rollout.filters:
            raise ValueError(
                f"{' and '.join(self.rollout.filters)} has no effect with greedy = true, which takes the likeliest "
                "token; set greedy to false, or leave it out"
            )
        if self.greedy and samples > 1:
            raise ValueError(
                f"rollout.num_samples_per_prompt = {samples} with greedy = true would draw {samples} equal responses "
                "to each prompt; set greedy to false, or the number to 1"
            )
        if asked and self.greedy:
            raise ValueError(
                f"eval.pass_at = {list(asked)} is of samples, and greedy = true draws none; set greedy to false"
            )
        if asked and (len(set(asked)) < len(asked) or max(asked) > samples):
            raise ValueError(
                f"eval.pass_at = {list(asked)} with rollout.num_samples_per_prompt = {samples}: name each k once, none "
                f"above the number of samples"
            )
