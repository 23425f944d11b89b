"""Where the reference is the actor's own model without its adapter: no second model is built."""

from __future__ import annotations

from megarlhf.config.roles import ModelConfig, RoleConfig


def is_base_of(actor: RoleConfig, reference: RoleConfig | None) -> bool:
    """Whether the reference of this section (None: none was given) is what the actor's adapter was put on, and on the
    same ranks in the same way."""
    return actor.lora is not None and not separate_reference_reason(actor, reference)


def separate_reference_reason(actor: RoleConfig, reference: RoleConfig | None) -> str:
    """Why the reference of an actor with an adapter is a model of its own; empty where it is the actor's base."""
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
    """As which the reference is built: where it is the actor's base, that of the actor without its adapter."""
    if is_base_of(actor, reference):
        return actor.model_copy(update={"lora": None})
    return reference or actor


def _same_model(actor: ModelConfig, reference: ModelConfig) -> bool:
    places = [(model.path.resolve(), None if model.hf is None else model.hf.resolve()) for model in (actor, reference)]
    keys = ("random_init", "dtype")
    return places[0] == places[1] and all(getattr(actor, key) == getattr(reference, key) for key in keys)
