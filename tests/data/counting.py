"""An encoder that notes every record that it is given, and records for it, for tests that ask whether anything was
encoded."""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from megarlhf.config import DataConfig
from megarlhf.data.samples.encoders import SFTSample, Unusable
from megarlhf.data.tokenize.load import SetLoader

ROWS = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(40)]


@dataclass(frozen=True)
class Counting:
    """A token for each character of prompt and response."""

    log: Path
    """A line for each record, in whichever process."""
    option: int = 0
    stops_at: int | None = None
    """A record at which it waits to be killed."""
    seconds: float = 0.0
    """Of each record."""

    def load(self):
        return None

    def by(self, loaded):
        return self._encode

    def _encode(self, index, record):
        with self.log.open("a") as out:
            out.write(f"{os.getpid()} {index}\n")
        if index == self.stops_at:
            time.sleep(600)
        time.sleep(self.seconds)
        if not record["response"]:
            raise Unusable("empty response")
        if record["response"] == "refused":
            raise ValueError("this one is refused")
        prompt = [ord(letter) for letter in record["prompt"]]
        return SFTSample.of_response(prompt + [ord(letter) for letter in record["response"]], len(prompt))

    def key(self):
        return {"samples": "counting", "option": self.option}

    def encoded(self):
        """The records in the order in which they were encoded, by whichever process."""
        return [int(line.split()[1]) for line in self.log.read_text().splitlines()] if self.log.exists() else []


def loader(data, encoder, run_dir=None):
    return SetLoader(DataConfig.model_validate(data), encoder, SFTSample, ("prompt", "response"), run_dir)


def digest_of(data, encoder):
    return loader(data, encoder).train_and_validation("sft")[0].digest()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def entries(place):
    return [path.parent for path in Path(place["cache"]).glob("*/MANIFEST.json")]
