"""Processes in which rehearsals are tested."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def no_threads_of_autograd() -> None:
    """Run the process's first backward while it has no devices without numbers. Autograd starts a thread for each
    device at the first one, and no rank could be forked from then on."""
    torch.ones(1, requires_grad=True).sum().backward()
