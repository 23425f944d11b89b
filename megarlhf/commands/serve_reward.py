"""`megarlhf serve-reward`: rewards for runs on other processes or machines, over HTTP."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence

from megarlhf.config import load_config
from megarlhf.config.rewards import unique_labels
from megarlhf.config.serve import ServeRewardConfig


def serve(config: str, overrides: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C. Raises: ValueError for a wrong configuration."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ValueError(f"serve-reward needs {error.name}: pip install 'megarlhf[serve]'") from None
    import torch

    from megarlhf.rollout.rewards.http import require_plain_token
    from megarlhf.rollout.rewards.score import make_source
    from megarlhf.rollout.rewards.server import make_app
    from megarlhf.runtime import first_gpu

    cfg = load_config(ServeRewardConfig, config, overrides)
    token = os.environ.get(cfg.token_env) if cfg.token_env else None
    if cfg.token_env and not token:
        raise ValueError(f"the environment variable {cfg.token_env} that token_env names is not set; export it")
    require_plain_token(cfg.token_env, token)
    device = first_gpu() if cfg.device == "gpu" else torch.device("cpu")
    listening = _socket(cfg.host, cfg.port)
    named = zip(unique_labels(cfg.rewards), cfg.rewards, strict=True)
    sources = {label: (reward, make_source(reward, device)) for label, reward in named}
    app = make_app(sources, token=token, max_samples=cfg.max_samples, max_bytes=cfg.max_body_mib << 20)
    host, port = listening.getsockname()[:2]
    listening.listen()  # before the address is printed: a client may connect at once
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))

    def end(*received: object) -> None:
        """Handle SIGTERM before uvicorn has its own handler, and when uvicorn raises the signal again at its end."""
        server.should_exit = True

    signal.signal(signal.SIGTERM, end)
    print(f"serving {', '.join(sources)} at http://{host}:{port}/get_reward", flush=True)
    try:
        server.run(sockets=[listening])
    finally:
        for _, source in sources.values():
            source.close()
    print("stopped", file=sys.stderr)
    return 0


def _socket(host: str, port: int) -> socket.socket:
    """Bind the address, before a model is loaded. Raises: ValueError if it cannot be bound."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error}; choose another port, or 0 for a free one") from None
    return listening
