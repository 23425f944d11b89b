"""A run that has begun in its directory, and was stopped."""

from __future__ import annotations

from megarlhf.config import GenerateConfig, RLConfig, RMConfig, SFTConfig
from megarlhf.resume.claim import Claim, claim


def begin(cfg: SFTConfig | RMConfig | RLConfig | GenerateConfig, command: str) -> Claim:
    """Claim the run directory, write what a start writes, and leave it. Returns the claim, which is not held."""
    claimed = claim(cfg, cfg.run, command)
    with claimed.lock:
        claimed.start()
    return claimed
