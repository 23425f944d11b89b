"""Reference that is the actor's own model without its adapter: then no second model is built."""

from __future__ import annotations

from megarlhf.config.roles import ModelConfig, RoleConfig


def is_base_of(actor: RoleConfig, reference: RoleConfig | None) -> bool:
    """Whether the reference (None: no section) is the base model of the actor's adapter, in the same layout."""
    return actor.lora is not None and not separate_reference_reason(actor, reference)


def separate_reference_reason(actor: RoleConfig, reference: RoleConfig | None) -> str:
    """Reason why the reference of an actor with an adapter is a separate model; empty if it is the actor's base."""
    assert actor.lora is not None
    if reference is None:
        return "" if actor.lora.path is None else "the actor starts from an adapter, which the reference keeps"
    if reference.lora is not None:
        return "it has an adapter of its own"
    if not _same_model(actor.model, reference.model):
        return "it is another model, or loaded in another way"
    if "parallel" in reference.model_fields_set and reference.parallel != actor.parallel:
        return "it is cut in another way; without reference.parallel it would be the actor's base, and take no memory"
    return ""


def reference_section(actor: RoleConfig, reference: RoleConfig | None) -> RoleConfig:
    """Section that the reference is built from: the actor's without the adapter, if it is the actor's base."""
    if is_base_of(actor, reference):
        return actor.model_copy(update={"lora": None})
    return reference or actor


def _same_model(actor: ModelConfig, reference: ModelConfig) -> bool:
    paths = [(model.path.resolve(), None if model.hf is None else model.hf.resolve()) for model in (actor, reference)]
    keys = ("random_init", "dtype")
    return paths[0] == paths[1] and all(getattr(actor, key) == getattr(reference, key) for key in keys)
