"""Models of the Hugging Face hub by name, from a server of the test's own that plays the hub.

Not covered: the hub itself, models with conditions.
"""

import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from megarlhf.model_directory import find_hf_directory, from_hub
from tests.chat_model import write_chat_model
from tests.refuses import missing_names, refuses

COMMIT = hashlib.sha1(b"a commit").hexdigest()
NAME = "someone/tiny"


class Hub(http.server.BaseHTTPRequestHandler):
    """The parts of the hub's interface that a download needs."""

    def __init__(self, directory: Path, asked: list[str], *args) -> None:
        self.directory, self.asked = directory, asked
        super().__init__(*args)

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        files = {file.name: file.read_bytes() for file in self.directory.iterdir() if file.is_file()}
        if path in (f"/api/models/{NAME}/revision/{revision}" for revision in ("main", "v1", COMMIT)):
            siblings = [{"rfilename": name} for name in files]
            self.send(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode(), with_body)
        elif path.startswith(f"/api/models/{NAME}/tree/{COMMIT}"):
            tree = [{"type": "file", "path": name, "size": len(data), "oid": "0" * 40} for name, data in files.items()]
            self.send(json.dumps(tree).encode(), with_body)
        elif (name := path.rpartition("/")[2]) in files and path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            self.send(files[name], with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def send(self, data: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Address of the hub, and the paths that it was asked for."""
    directory, asked = write_chat_model(tmp_path_factory.mktemp("hub") / "tiny"), []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Hub, directory, asked))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def command(hub: str, home: Path, *argv: str, offline: str = "0") -> subprocess.CompletedProcess[str]:
    names = {"HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": offline, "HF_HUB_DISABLE_XET": "1"}
    argv = (sys.executable, "-m", "megarlhf", *argv)
    return subprocess.run(argv, env=os.environ | names, capture_output=True, text=True, cwd=home)


def test_a_run_takes_a_model_of_the_hub_once(hub, tmp_path):
    """A revision: a dry run, a run, and another without the network."""
    address, asked = hub
    (tmp_path / "train.jsonl").write_text(40 * (json.dumps({"prompt": "a b", "response": "c"}) + "\n"))
    config = {
        "run": {"dir": "run"},
        "actor": {"model": {"path": f"{NAME}@v1"}, "optim": {"lr": 1e-3}},
        "data": {"train": "train.jsonl"},
        "train": {"num_steps": 1, "mini_batch_samples": 4, "max_tokens_per_micro_batch": 64},
    }
    (tmp_path / "sft.json").write_text(json.dumps(config))
    checked = command(address, tmp_path, "sft", "-c", "sft.json", "--dry-run")
    assert checked.returncode == 0, checked.stderr
    done = command(address, tmp_path, "sft", "-c", "sft.json")
    assert done.returncode == 0, done.stderr
    assert f"{NAME}@v1 is no directory here" in done.stdout + done.stderr, "a mistyped path may be a name, too"
    assert sum(path.endswith(".safetensors") for path in asked) <= 2, "a question about the file, and the file"
    assert COMMIT in (tmp_path / "run/config.yaml").read_text()
    before = len(asked)
    again = command(address, tmp_path, "sft", "-c", "sft.json", "run.dir=again", offline="1")
    assert again.returncode == 0, again.stderr
    assert len(asked) == before


@pytest.mark.parametrize(("name", "offline", "words"), [
    ("someone/other", "0", ("someone/other", "does not exist", "Hugging Face hub", "HF_TOKEN", "hf download")),
    ("someone/other", "1", ("someone/other", "HF_HUB_OFFLINE is set", "hf download someone/other")),
])  # fmt: skip
def test_a_model_that_is_nowhere(hub, tmp_path, name, offline, words):
    done = command(hub[0], tmp_path, "generate", "--model", name, "--prompt", "a", offline=offline)
    assert done.returncode == 2
    assert missing_names(done.stderr, *words) == [], done.stderr


def test_what_exists_is_a_path_and_other_readers_name_the_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    assert from_hub("org/model") == Path("org/model")
    assert from_hub("/models/llama") == Path("/models/llama")
    with refuses("org/other does not exist", "hf download org/other"):
        find_hf_directory("org/other")
