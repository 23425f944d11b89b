"""User code that a configuration names by import path: built-in parts under another name, and wrong ones."""

import os
import random
import time

import torch

import megarlhf
from megarlhf.algo.kl import KL_ESTIMATORS
from megarlhf.algo.policy import RATIOS, SURROGATES
from megarlhf.data.samples.order import ShuffledBatches
from megarlhf.rollout.responses import sample_seed

gae = megarlhf.ADVANTAGES["gae"]
group_relative = megarlhf.ADVANTAGES["group_relative"]
clip, cispo = SURROGATES["clip"], SURROGATES["cispo"]
token, geometric = RATIOS["token"], RATIOS["geometric"]
k1, k3 = KL_ESTIMATORS["k1"], KL_ESTIMATORS["k3"]


def ones(logprobs_T, old_logprobs_T, advantages_T, responses):
    for tensor in (logprobs_T, old_logprobs_T, advantages_T):
        tensor.zero_()  # copies: nothing changes
    return torch.ones_like(logprobs_T)


# --- wrong advantages -----------------------------------------------------------------------------


def rank_dependent(step):
    return step.rewards_N + torch.distributed.get_rank()


def time_dependent(step):
    # fp32 has room for the last digits only: whole seconds would hide what happens between two calls.
    return step.rewards_N + time.perf_counter_ns() % 10**7


def by_chance(step):
    return step.rewards_N + random.SystemRandom().random()


def by_torch_s_chance(step):
    return torch.rand(len(step.rewards_N))


def not_a_number(step):
    return step.rewards_N / 0 * 0


def wrong_shape(step):
    return step.rewards_N[:-1]


def no_tensor(step):
    return step.rewards_N.tolist()


def raises(step):
    return step.rewards_N + {}["nothing"]


def raises_on_one_rank(step):
    if torch.distributed.get_rank():
        raise KeyError("only here")
    return step.rewards_N


def undeclared(step):
    return step["values"]


def two_columns(step):
    return {"advantages": step.rewards_N, "other": step.rewards_N}


def two_parameters(step, other):
    return step.rewards_N


async def asynchronous(step):
    return step.rewards_N


def writes_to_what_it_gets(step):
    advantages_N = step.rewards_N.clone()
    step.rewards_N.fill_(7.0)
    step.experience.rollouts.logprobs.values_T.fill_(7.0)
    random.seed(1)
    torch.manual_seed(1)
    return advantages_N


# --- wrong parts of the loss ----------------------------------------------------------------------


def detached(logprobs_T, log_ratio_T, advantages_T, bounds):
    return -(log_ratio_T.exp() * advantages_T).detach()


def log_of_negative(log_ratio_T):
    return (log_ratio_T - 100).log()


def of_rank(log_ratio_T, responses):
    return log_ratio_T * (1 + int(os.environ.get("RANK_OF_TEST", "0")))


def mean_only(logprobs_T, log_ratio_T, advantages_T, bounds):
    return (log_ratio_T.exp() * advantages_T).mean()


def three_parameters(log_ratio_T, responses, more):
    return log_ratio_T


def swapped(log_ratio_T, logprobs_T, advantages_T, bounds):
    return -log_ratio_T * advantages_T


def share_of_all(logprobs_T, old_logprobs_T, advantages_T, responses):
    return logprobs_T / logprobs_T.sum()


def nan_for_many(logprobs_T, log_ratio_T, advantages_T, bounds):
    return log_ratio_T / (len(log_ratio_T) <= 11)


def flows_for_few(logprobs_T, log_ratio_T, advantages_T, bounds):
    return log_ratio_T * 1.0 if len(log_ratio_T) <= 11 else log_ratio_T.detach() * 1.0


# --- samplers -------------------------------------------------------------------------------------


def first_ones(prompts, step, count, seed):
    return [(step * count + n) % len(prompts) for n in range(count)]


def four_and_three_others(prompts, step, count, seed):
    """As a run chooses them that has 4 prompts in a step and a surplus of 3."""
    own = ShuffledBatches(len(prompts), 4, seed).indices(step)
    others = [n for n in range(len(prompts)) if n not in own]
    return own + random.Random(sample_seed(seed, step, -1)).sample(others, 3)


def of_this_rank(prompts, step, count, seed):
    return [(torch.distributed.get_rank() + n) % len(prompts) for n in range(count)]


def twice_the_same(prompts, step, count, seed):
    return [0] * count


def beyond(prompts, step, count, seed):
    return [len(prompts) + n for n in range(count)]


def random_ones(prompts, step, count, seed):
    return random.sample(range(len(prompts)), count)


class Stateless:
    def __init__(self, prompts, seed):
        pass

    def choose(self, step, count):
        return list(range(count))


class Forgets(Stateless):
    """Its position is not in its state."""

    def __init__(self, prompts, seed):
        self.position = random.SystemRandom().randrange(10**6)

    def choose(self, step, count):
        return [(self.position + n) % 6 for n in range(count)]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class ForgetsItsPosition(Stateless):
    """The first choice of a new object is right, the second is not."""

    def __init__(self, prompts, seed):
        self.position = 0

    def choose(self, step, count):
        self.position += count
        return [(self.position - count + n) % 6 for n in range(count)]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NotJson(Forgets):
    def choose(self, step, count):
        return list(range(count))

    def state_dict(self):
        return {"seen": {1, 2}}


# --- metrics and observers ------------------------------------------------------------------------


def length_of_longest(step):
    return max(map(len, step.samples.response_tokens))


class Counter:
    """Counts steps, and writes to all that it gets."""

    def __init__(self):
        self.steps = 0

    def after_step(self, step):
        self.steps += 1
        step.metrics.clear()
        if step.samples is not None:
            for tensor in (*step.samples.per_sample.values(), *step.samples.response_tokens):
                tensor.fill_(0)
            for rows in step.samples.per_token.values():
                for row in rows:
                    row.fill_(0)
        torch.manual_seed(self.steps)
        random.seed(self.steps)
        return {"steps_seen": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def taken_name(step):
    return {"reward_mean": 1.0}


def wall_clock(step):
    return 5.0


def forgets_to_return(step):
    pass


def huge(step):
    return 10**400


class BadLater:
    """Its state is wrong from the second step on."""

    def __init__(self):
        self.steps = 0

    def after_step(self, step):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps if self.steps < 2 else float("nan")}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def no_number(step):
    return "many"


def fails_later(step):
    if step.number > 1:
        raise RuntimeError("the disk of the plots is full")


class Hardest:
    """Prompts with the lowest rewards so far, and of equal ones the first."""

    def __init__(self, prompts, seed):
        self.rewards = [0.0] * len(prompts)

    def choose(self, step, count):
        order = sorted(range(len(self.rewards)), key=lambda n: (self.rewards[n], (n + 7 * step) % 64))
        return order[:count]

    def learn(self, chosen, rewards):
        for number, reward in zip(chosen, rewards, strict=True):
            self.rewards[number] += reward

    def state_dict(self):
        return {"rewards": list(self.rewards)}

    def load_state_dict(self, state):
        self.rewards = list(state["rewards"])
