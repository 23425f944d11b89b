"""A Hugging Face sequence classifier as a reward, on this rank's share of the samples, with a tokenizer of its own."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megarlhf.architectures.hf_config import score_of_config
from megarlhf.data.samples.retokenize import Retokenizer
from megarlhf.data.text.omissions import KINDS
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.provenance import find_provenance_file
from megarlhf.rollout.rewards.batch import RewardBatch, RewardResult, Untold, short

log = logging.getLogger(__name__)

Form = Literal["joined", "pair", "chat"]
Encoded = Mapping[str, list[int]]
"""`input_ids` of a text and, where the tokenizer has them, `token_type_ids`."""
_ANY_LENGTH = 2**31
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Classifier:
    """The score of one label. It computes in the rank, on its device, when its outcomes are waited for."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        *,
        label: str | int | None = None,
        output: Literal["logit", "probability"] = "logit",
        form: Form = "joined",
        append_eos: bool = False,
        dtype: str = "fp32",
        batch_samples: int = 32,
    ) -> None:
        """Raises: ValueError for a directory that is no classifier, whose head is missing, or without the label."""
        from transformers import AutoModelForSequenceClassification

        from megarlhf.data.tokenizers.tokenizer_json import of_directory

        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json; give the directory of a Hugging Face sequence classifier")
        try:
            model, loaded = AutoModelForSequenceClassification.from_pretrained(
                str(path), dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
            )
            self._tokenizer = of_directory(path)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} cannot be read as a sequence classifier: {_first_line(error)}") from error
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(
                f"{path} lacks {', '.join(missing[:3])}: its scores would be of random weights. Give a checkpoint of a "
                "sequence classifier, with its head"
            )
        if score_of_config(model.config.to_dict(), path) != "last_token":
            raise ValueError(
                f"{path} scores by the mean over the response (`megarlhf rm` with loss = response_mean), which "
                "transformers does not compute; give it as the role reward_model, {kind: model}"
            )
        if form == "chat" and not self._tokenizer.chat_template:
            raise ValueError(f"{path} has no chat template, which form = chat needs; set form: joined or pair")
        if append_eos and self._tokenizer.eos_token is None:
            raise ValueError(f"append_eos = true, but the tokenizer of {path} has no end-of-sequence token")
        self._model = model.to(device).eval()
        self._label, self._output = label_index(model.config, label, path), output
        self._form, self._append_eos, self._batch_samples = form, append_eos, batch_samples
        self._longest = longest_input(model.config, self._tokenizer)
        self._path = path
        self._ours = None
        self._begin = self._tokenizer.bos_token_id
        trained_here = find_provenance_file(path) is not None
        if form != "pair" and self._tokenizer.chat_template and trained_here:  # scored where a turn ends, as trained
            self._ours = Retokenizer(load_tokenizer(path), max_tokens=_ANY_LENGTH, may_drop=KINDS)
        self._reads_segments = "token_type_ids" in inspect.signature(self._model.forward).parameters
        self._several = getattr(model.config, "problem_type", None) == "multi_label_classification"

    def start(self, batch: RewardBatch) -> _Later:
        """Nothing is begun before it is waited for."""
        return _Later(self, batch)

    def close(self) -> None:
        pass

    def outcomes(self, batch: RewardBatch) -> list[RewardResult]:
        """Of part of a batch, in one forward. What is too long for the model is never cut: it has no score."""
        rows = [self._encoded(batch, n) for n in range(len(batch))]
        sizes = [len(row["input_ids"]) for row in rows]
        fitting = [n for n, size in enumerate(sizes) if self._longest is None or size <= self._longest]
        found = [
            RewardResult(error=f"has {size} tokens; {self._path} takes {self._longest}, and nothing is cut")
            for size in sizes
        ]
        if fitting:
            for n, score in zip(fitting, self._scores([rows[n] for n in fitting]), strict=True):
                found[n] = (
                    RewardResult(value=score) if math.isfinite(score) else RewardResult(error=f"is scored {score}")
                )
        return found

    def _encoded(self, batch: RewardBatch, n: int) -> Encoded:
        """All that the tokenizer says of a text, such as which of two each token belongs to, as far as the model reads
        it."""
        prompt, response = batch.prompts[n], batch.responses[n]
        messages = None if isinstance(batch.messages, Untold) else batch.messages[n]
        if self._form == "chat" or (self._form == "joined" and messages is not None and self._tokenizer.chat_template):
            asked = [{"role": "user", "content": prompt}] if messages is None else list(messages)
            if self._ours is not None:
                fields = batch.fields[n] if messages is not None else {}
                made = self._ours(prompt, asked, response, finished=batch.finished[n], fields=fields)
                return {"input_ids": made.tokens}
            text = self._tokenizer.apply_chat_template(
                [*asked, {"role": "assistant", "content": response}], tokenize=False
            )
            encoded = self._tokenizer(text, add_special_tokens=False)
        elif self._form == "pair":
            encoded = self._tokenizer(prompt, response)
        else:
            encoded = self._tokenizer(prompt + response + self._end(batch, n, of_turn=messages is not None))
        found = {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}
        if self._begin is not None and found["input_ids"][:2] == [self._begin] * 2:  # the prompt's template wrote one
            return {name: row[1:] for name, row in found.items()}
        return found

    def _end(self, batch: RewardBatch, n: int, *, of_turn: bool) -> str:
        """What is written behind a text: of a turn what ended it, where this tokenizer has such a token."""
        if of_turn and batch.ends is not None and batch.ends[n] in self._tokenizer.get_vocab():
            return batch.ends[n]
        ends = (self._append_eos or of_turn) and batch.finished[n]
        return (self._tokenizer.eos_token or "") if ends else ""

    @torch.no_grad()
    def _scores(self, rows: Sequence[Encoded]) -> list[float]:
        used = {token for row in rows for token in row["input_ids"]}
        # Models find a row's last token as the last that is no padding: padding must not occur in it.
        padding = next(n for n in range(len(used) + 1) if n not in used)
        self._model.config.pad_token_id = padding
        lengths = [len(row["input_ids"]) for row in rows]
        inputs = {
            "input_ids": _grid([row["input_ids"] for row in rows], padding),
            "attention_mask": _grid([[1] * length for length in lengths], 0),
        }
        if self._reads_segments and all("token_type_ids" in row for row in rows):
            inputs["token_type_ids"] = _grid([row["token_type_ids"] for row in rows], 0)
        device = next(self._model.parameters()).device
        logits: Tensor = self._model(**{name: grid.to(device) for name, grid in inputs.items()}).logits.float()
        return [float(value) for value in chosen(logits, self._label, self._output, several=self._several)]


def _grid(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Filled up behind."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])


class _Later:
    """A batch that is scored when it is waited for."""

    def __init__(self, classifier: Classifier, batch: RewardBatch) -> None:
        self._classifier, self._batch = classifier, batch

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> list[RewardResult] | None:
        found: list[RewardResult] = []
        size = self._classifier._batch_samples
        for start in range(0, len(self._batch), size):
            if should_stop():
                return None
            found += self._classifier.outcomes(self._batch.part(range(start, min(start + size, len(self._batch)))))
        return found


def chosen(logits_BL: Tensor, label: int, output: str, *, several: bool = False) -> Tensor:
    """[B]: the logit of the label, or its probability: by a sigmoid where there is one label, or where `several` may be
    true at once; else by a softmax. As transformers' text-classification pipeline."""
    if output == "logit":
        return logits_BL[:, label]
    alone = several or logits_BL.size(-1) == 1
    return (logits_BL.sigmoid() if alone else logits_BL.softmax(-1))[:, label]


def label_index(config: Any, label: str | int | None, path: Path) -> int:
    """The number of the label. Raises: ValueError for one that there is not, or where it has to be given."""
    names: Mapping[int, str] = {int(number): str(name) for number, name in config.id2label.items()}
    known = ", ".join(f"{number} ({name})" for number, name in sorted(names.items()))
    if label is None:
        if len(names) == 1:
            return 0
        raise ValueError(f"{path} has {len(names)} labels: {known}; say which one is the reward: classifier_label")
    number = next((n for n, name in names.items() if name == label), label)
    if number not in names:
        raise ValueError(f"{path} has no label {short(label)}; it has {known}")
    return int(number)


def longest_input(config: Any, tokenizer: Any) -> int | None:
    """Tokens that the model takes; None where nothing says."""
    limits = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(limit) for limit in limits if isinstance(limit, int) and 0 < limit < 10**9]
    return min(known, default=None)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
