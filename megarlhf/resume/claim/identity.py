"""Digests that identify a run: of its data, of its models' weights, and of all that it has computed so far."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from megarlhf.collective_errors import from_rank
from megarlhf.data.samples.dataset import Samples
from megarlhf.data.tokenizers.tokenizer import Tokenizer
from megarlhf.models import weights
from megarlhf.models.role import Role
from megarlhf.observe.records.cost_metrics import reproducible
from megarlhf.provenance import Weights
from megarlhf.weights.checks.digest import whole_digest


def digest_of_samples(samples: Sequence[Any]) -> str:
    """SHA-256 of samples (dataclasses of token ids, texts, numbers and mappings) in their order. Of samples on disk it
    was made when they were written."""
    if isinstance(samples, Samples):
        return samples.digest()
    digest = hashlib.sha256()
    for sample in samples:
        for field in fields(sample):
            value = getattr(sample, field.name)
            if isinstance(value, list) and all(isinstance(item, int) for item in value):
                content = array("q", value).tobytes()
            else:
                content = json.dumps(value, sort_keys=True, default=str).encode()
            digest.update(f"{field.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def identity_of_weights(role: Role, *, head: bool = True) -> Weights:
    """Identity of the weights of a role that has just been built. Collective.

    head: include the scalar head
    """
    dtype = str(role.shard.dtype).removeprefix("torch.")
    return Weights(path=str(role.section.model.path.absolute()), digest=digest_of_weights(role, head=head), dtype=dtype)


def bases_of_adapters(roles: Sequence[Role]) -> dict[str, Weights]:
    """Identity of the base weights of each role with an adapter. Collective.

    A resume point does not hold base weights. The scalar head is trained and exported with the adapter, so it is not
    part of the base.
    """
    return {
        role.name: identity_of_weights(role.without_adapter(role.name), head=False)
        for role in roles
        if role.shard.arch.adapter is not None
    }


def architecture_of(role: Role) -> dict[str, Any]:
    """Everything in config.json that changes what a role computes with its weights, by key."""
    architecture: dict[str, Any] = json.loads(json.dumps(asdict(role.shard.arch)))
    balance = None if role.trainer is None else role.trainer.balance
    if balance is not None and role.section.router_aux_loss_coef == "auto":
        architecture["router_aux_loss_coef"] = balance.coefficient
    return architecture


def digest_of_vocabulary(tokenizer: Tokenizer) -> str:
    """SHA-256 of the token of each id."""
    return hashlib.sha256(json.dumps(tokenizer.tokens()).encode()).hexdigest()


def digest_of_weights(role: Role, *, head: bool = True) -> str:
    """Digest of a role's live parameters, the same at every layout. Collective.

    head: include the scalar head
    """
    return _digest(role, lambda: weights.digest_of_shard(role.shard, head=head))


def digest_of_adapter(role: Role) -> str:
    """Digest of a role's live adapter, without the scalar head. Collective."""
    return _digest(role, lambda: weights.digest_of_adapter(role.shard))


def _digest(role: Role, of_shard: Callable[[], str]) -> str:
    role.parts.to_compute()
    mesh = role.mesh
    # Of nothing: as long as any, so that a rehearsed rank hears a message of the right length.
    digest = of_shard() if mesh.is_member else whole_digest({})
    everywhere = mesh.layout.world_size == mesh.runtime.world_size
    return digest if everywhere else from_rank(digest, mesh.layout.first)


class History:
    """Digest of all metrics of the run so far.

    Two runs with the same digest have, as far as metrics show, the same weights. So one may use responses that the
    other has generated (the rollout bank)."""

    def __init__(self) -> None:
        self.digest = ""

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step, except those of time and memory."""
        text = json.dumps([self.digest, step, reproducible(metrics)], sort_keys=True)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def fingerprint(self, mathematics: Mapping[str, Any], began_with: Mapping[str, str]) -> str:
        """Digest of the weights, as far as metrics show them, and of what is computed with them.

        began_with: digests of the run's models, data and the like, by name
        """
        known = [self.digest, mathematics, began_with]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.digest = state["digest"]
