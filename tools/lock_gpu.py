"""requirements/gpu.txt from requirements/gpu.in: `python -m tools.lock_gpu` (`make lock-gpu`); needs a network.

pip resolves for Linux on x86-64 with wheels only, once for each Python, whatever this machine is. Nothing is installed.
Packages that gpu.in names have the version of cpu.txt, which the tests run with.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "requirements"
PYTHONS = ("3.11", "3.12")
HEAD = """\
# requirements/gpu.in, resolved by pip for CUDA 13 and Python 3.11 and 3.12 on Linux, x86-64: `make lock-gpu`.
# `make venv-gpu` installs it. Not exercised in CI, which has no GPU.
"""


def names_of(text: str) -> set[str]:
    """Normalised names of packages in a file of requirements."""
    return {_normalised(name) for name in re.findall(r"(?m)^([\w.-]+)", text)}


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints() -> str:
    """Versions of cpu.txt for the packages of gpu.in."""
    wanted = names_of((FOLDER / "gpu.in").read_text())
    lines = [line for line in (FOLDER / "cpu.txt").read_text().splitlines() if "==" in line and line[:1] != "#"]
    return "\n".join(line for line in lines if _normalised(line.partition("==")[0]) in wanted) + "\n"


def resolve(python: str, folder: Path) -> dict[str, str]:
    """Version of each package that pip would install. Raises: SystemExit where it cannot resolve them."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, 40)]
    platforms += [f"{name}_x86_64" for name in ("manylinux1", "manylinux2010", "manylinux2014", "linux")]
    (folder / "constraints.txt").write_text(constraints())
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--target", str(folder / "nothing")]
    command += [word for name in platforms for word in ("--platform", name)]
    command += ["--report", str(folder / "report.json"), "-c", str(folder / "constraints.txt")]
    # A configured folder of wheels may hold torch's CPU build, which pip prefers.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    environment |= {"PIP_CONFIG_FILE": os.environ.get("PIP_CONFIG_FILE", os.devnull)}
    done = subprocess.run([*command, "-r", str(FOLDER / "gpu.in")], env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"lock_gpu: pip could not resolve requirements/gpu.in for Python {python}: see above")
    report = json.loads((folder / "report.json").read_text())
    packages = [package["metadata"] for package in report["install"]]
    return {_normalised(package["name"]): package["version"] for package in packages}


def lock_of(versions: dict[str, dict[str, str]]) -> str:
    """The lines of gpu.txt, of versions by Python and package."""
    lines = []
    for name in sorted({name for of_python in versions.values() for name in of_python}):
        of_pythons = {python: of_python[name] for python, of_python in versions.items() if name in of_python}
        if len(of_pythons) == len(versions) and len(set(of_pythons.values())) == 1:
            lines.append(f"{name}=={next(iter(of_pythons.values()))}")
        else:
            lines += [f'{name}=={version} ; python_version == "{python}"' for python, version in of_pythons.items()]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        versions = {python: resolve(python, Path(folder)) for python in PYTHONS}
    (FOLDER / "gpu.txt").write_text(lock_of(versions))


if __name__ == "__main__":
    main()
