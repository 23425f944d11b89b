"""Configuration of `megarlhf eval`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from pydantic import PositiveInt, model_validator

from megarlhf.config.commands import MicroBatchConfig
from megarlhf.config.data import OF_TRAINING, SFTDataConfig, describe_sources, require_no_weights
from megarlhf.config.environment import EnvironmentConfig, require_environment
from megarlhf.config.frozen import FrozenModel
from megarlhf.config.rewards import RewardConfig, require_distinct_labels
from megarlhf.config.roles import RoleConfig, require_all_ranks
from megarlhf.config.rollout import OF_SLICES, RolloutConfig
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
"""Keys that each task needs. `generation` also needs something that scores: `rewards` or `eval.accuracy`."""


class EvalTasksConfig(AccuracyConfig):
    """Tasks of an evaluation."""

    tasks: tuple[Task, ...] | None = None
    """`perplexity`: perplexity of the actor on responses. `pairs`: how often the reward model ranks pairs correctly,
    and how far its scores can be trusted. `generation`: the actor's responses, scored by `rewards`. `comparison`: the
    same, and how often they have a higher reward than those of `against`. Default, by the sections of the file:
    `comparison` with `against`; else `generation` with `rewards` or `eval.accuracy`; else `perplexity` of an actor and
    `pairs` of a reward model."""
    perplexity_of: Literal["response", "text"] = "response"
    """`response`: the tokens of each response, given its prompt, with its end token, as `sft` learns them. `text`:
    every token but the first of the field `text`, as Hugging Face's loss of `tokenizer(text)` counts them: the first
    token is begin-of-sequence if the tokenizer writes it, and no end token is appended. A text longer than
    `data.max_prompt_tokens` + `data.max_response_tokens` is split into pieces of that length, which begin in the same
    way."""
    pass_at: tuple[PositiveInt, ...] = ()
    """Values of k for pass@k, the chance that one of k samples is right by the accuracy's reward or rule. Needs
    `greedy: false` and `rollout.num_samples_per_prompt` of k or more; more samples make it more certain."""


class EvaluateConfig(FrozenModel):
    """`megarlhf eval`: figures of a model, each with an interval where it has one."""

    command: ClassVar[str] = "eval"
    refused: ClassVar[frozenset[str]] = OF_TRAINING | OF_SLICES

    run: RunConfig
    actor: RoleConfig | None = None
    """Language model to evaluate."""
    against: RoleConfig | None = None
    """Second language model, whose responses are compared with the actor's. It may have another architecture and
    another tokenizer."""
    reward_model: RoleConfig | None = None
    """Reward model of `megarlhf rm`, to be evaluated on pairs, or to score for a reward of kind `model`."""
    data: SFTDataConfig
    forward: MicroBatchConfig = MicroBatchConfig(micro_batch_samples=16)
    """Size of one forward for perplexity, for the reward model, and for the engine `megatron`."""
    rollout: RolloutConfig = RolloutConfig()
    environment: EnvironmentConfig | None = None
    """Answers the model's turns: a response becomes a conversation."""
    greedy: bool = True
    """Take the likeliest token; otherwise sample at `rollout.temperature`."""
    rewards: tuple[RewardConfig, ...] = ()
    """Rewards of a response. Each has a figure of its own, before `weight`, `shift` and `clip`. These apply in the
    weighted sum, by which models are compared."""
    eval: EvalTasksConfig = EvalTasksConfig()
    max_samples: PositiveInt | None = None
    """Number of usable records to read; default: all."""
    watchdog: WatchdogConfig = WatchdogConfig()

    def tasks(self) -> tuple[Task, ...]:
        """Tasks to evaluate, in the order of `Task`."""
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
        """Whether responses are generated."""
        return bool({"generation", "comparison"} & set(self.tasks()))

    @property
    def uses_reward_model(self) -> bool:
        """Whether the reward model scores responses."""
        return self.generates and any(reward.kind == "model" for reward in self.rewards)

    @property
    def retokenizes(self) -> bool:
        """Whether the reward model has its own tokenizer and reads none of the actor's token ids."""
        models = [reward for reward in self.rewards if reward.kind == "model"]
        return bool(models) and all(reward.retokenize for reward in models)

    def roles(self) -> dict[str, RoleConfig]:
        """Roles to build, one after the other."""
        roles = {"actor": self.actor, "against": self.against, "reward_model": self.reward_model}
        return {name: role for name, role in roles.items() if role is not None}

    @model_validator(mode="before")
    @classmethod
    def _accept_generate(cls, data: Any) -> Any:
        """Accept a file of `generate`, unless it sets keys that only `generate` reads."""
        if not isinstance(data, dict):
            return data
        if data.get("out") is not None:
            raise ValueError(
                f"out = {data['out']}: eval writes figures and no responses; remove the key, or use megarlhf generate"
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
        self.rollout.require_whole()
        require_environment(self.environment, self.rewards)
        language_models = {"actor": self.actor, "against": self.against}
        require_all_ranks({name: role for name, role in language_models.items() if role is not None})
        if "pairs" in self.tasks() and self.reward_model is not None:
            require_all_ranks({"reward_model": self.reward_model})
        return self

    def _check_data(self) -> None:
        """Raises: ValueError for data that is not read, and for keys of training."""
        self.data.require_train_alone("eval", "the data to evaluate on")
        if "pairs" in self.tasks():
            self.data.require_no_cut("eval")
        require_no_weights("data.train", self.data.train)
        if any(source.kind == "megatron" for source in self.data.train):
            raise ValueError(
                f"data.train = {describe_sources(self.data.train)}: eval reads records, and kind = megatron has token "
                "ids alone; give texts (eval.perplexity_of: text)"
            )

    def _check_tasks(self) -> None:
        """Raises: ValueError for no task, an ambiguous one, or one that is named twice."""
        given = self.eval.tasks
        if given is not None and len(set(given)) < max(1, len(given)):
            raise ValueError(f"eval.tasks = {list(given)}; name each task once, and one at least: {', '.join(NEEDS)}")
        if not self.tasks():
            raise ValueError(
                "nothing to evaluate: give an actor (perplexity; with rewards, its responses) or a reward_model (pairs)"
            )
        if given is None and len(self.tasks()) > 1:
            raise ValueError(
                "an actor and a reward_model, and nothing that says what for: name eval.tasks. [perplexity] evaluates "
                "the actor, [pairs] the reward model; with rewards: [{kind: model}] it scores the actor's responses"
            )

    def _check_parts(self) -> None:
        """Raises: ValueError for a task whose sections are missing, and for a section that no task reads."""
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
            readers = [f"{key} ({', '.join(uses[key])} would read it)" for key in unread]
            raise ValueError(
                f"no task reads {', '.join(readers)}: the tasks are {', '.join(self.tasks())}. Leave it out, or name "
                "its task in eval.tasks"
                + (
                    "; a reward of kind model scores with reward_model"
                    if "reward_model" in unread and self.generates
                    else ""
                )
            )

    def _check_rewards(self) -> None:
        """Raises: ValueError for a missing reward model, for rewards with one name, and for a learnt scale."""
        if any(reward.kind == "model" for reward in self.rewards) and self.reward_model is None:
            raise ValueError("rewards names the reward model: give a reward_model section")
        for n, reward in enumerate(self.rewards):
            if reward.normalise != "none":
                raise ValueError(
                    f"rewards[{n}].normalise = {reward.normalise} scales by the other samples, and figures of two "
                    "evaluations could not be compared; leave it out"
                )
        require_distinct_labels(self.rewards)

    def _check_samples(self) -> None:
        """Raises: ValueError for samples that are all equal, or too few."""
        samples, ks = self.rollout.num_samples_per_prompt, self.eval.pass_at
        if not self.generates:
            if ks or self.eval.accuracy is not None:
                key = f"eval.pass_at = {list(ks)}" if ks else f"eval.accuracy = {self.eval.accuracy}"
                raise ValueError(f"{key} needs responses; the tasks are {', '.join(self.tasks())}: leave it out")
            return
        if self.greedy:
            self.rollout.require_greedy()
        if ks and self.greedy:
            raise ValueError(
                f"eval.pass_at = {list(ks)} needs samples, and greedy = true draws none; set greedy to false"
            )
        if ks and (len(set(ks)) < len(ks) or max(ks) > samples):
            raise ValueError(
                f"eval.pass_at = {list(ks)} with rollout.num_samples_per_prompt = {samples}: name each k once, none "
                f"above the number of samples"
            )
