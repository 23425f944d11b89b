"""Configurations that are loaded from a file, and messages of those that are refused."""

import copy

import pydantic
import pytest
import yaml

from megarlhf.config import load_config
from tests.config.examples import KINDS


@pytest.fixture
def load(tmp_path):
    """Write a command's valid file, changed by `change`, and load it with overrides."""

    def call(command, *overrides, change=lambda tree: None):
        kind, tree = KINDS[command]
        tree = copy.deepcopy(tree)
        change(tree)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(tree))
        return load_config(kind, path, overrides)

    return call


@pytest.fixture
def refusal(load):
    """The message of a configuration that is refused."""

    def call(command, *overrides, change=lambda tree: None):
        with pytest.raises(ValueError, match=r".") as raised:
            load(command, *overrides, change=change)
        assert not isinstance(raised.value, pydantic.ValidationError), "pydantic's own text reached the user"
        return str(raised.value)

    return call
