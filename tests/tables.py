"""Short tables of numbers, written as they stand."""

import torch

from megarlhf.columns import Ragged
from megarlhf.rollout.requests import WholeRows
from megarlhf.rollout.responses import Response, parts_of
from megarlhf.rollouts import Rollouts, VersionRuns


def ragged(*rows, dtype=torch.float32):
    return Ragged.from_rows([torch.tensor(row) for row in rows], dtype)


def make_rollouts(responses, logprobs, finished_N, version=0):
    """Rollouts of one sampled stretch each, all drawn by one version of the weights."""
    versions = VersionRuns.constant(version, responses.lengths_N)
    return Rollouts(responses=responses, logprobs=logprobs, finished_N=finished_N, versions=versions)


def make_response(tokens, logprobs, finished, version=0):
    """A response drawn by one version of the weights."""
    return Response(tokens, logprobs, finished, ((version, len(tokens)),))


def numbered_rows(sampling, count=16):
    """Rows of one request each, whose prompts are their numbers: `row_numbers` reads them."""
    prompts = [torch.tensor([n]) for n in range(count)]
    return WholeRows(prompts, [0] * count, parts_of(None, count, sampling))


def row_numbers(requests):
    return [int(request.prompt[0]) for request in requests]


class Letters:
    """A tokenizer that decodes token n to the n-th letter, 1 to a."""

    def decode(self, tokens, continuation=False):
        return "".join(chr(96 + token) for token in tokens)
