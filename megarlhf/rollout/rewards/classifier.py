"""A Hugging Face sequence classifier, with its own tokenizer, as a reward of this rank's share of the samples."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megarlhf.architectures.hf_config import score_of_config
from megarlhf.data.samples.retokenize import Retokenizer
from megarlhf.data.text.omissions import KINDS
from megarlhf.data.tokenizers.tokenizer import load_tokenizer
from megarlhf.own_code.failures import short
from megarlhf.provenance import find_provenance_file
from megarlhf.rollout.environments.transcript import open_answer
from megarlhf.rollout.rewards.batch import DeferredBatch, MissingColumn, RewardBatch, RewardResult

log = logging.getLogger(__name__)

InputForm = Literal["joined", "pair", "chat"]
Encoded = Mapping[str, list[int]]
"""`input_ids` of a text and, if the tokenizer makes them, `token_type_ids`."""
_ANY_LENGTH = 2**31
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Classifier:
    """Scores of one label, computed on the rank's device when their results are waited for."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        *,
        label: str | int | None = None,
        output: Literal["logit", "probability"] = "logit",
        form: InputForm = "joined",
        append_eos: bool = False,
        dtype: str = "fp32",
        batch_samples: int = 32,
    ) -> None:
        """Raises: ValueError for a directory that holds no classifier, or one without a head or without the label."""
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
        self._max_tokens = max_input_tokens(model.config, self._tokenizer)
        self._path = path
        self._retokenizer = None
        self._bos = self._tokenizer.bos_token_id
        trained_here = find_provenance_file(path) is not None
        if form != "pair" and self._tokenizer.chat_template and trained_here:  # scored at the end of a turn, as trained
            self._retokenizer = Retokenizer(load_tokenizer(path), max_tokens=_ANY_LENGTH, may_drop=KINDS)
        self._reads_segments = "token_type_ids" in inspect.signature(self._model.forward).parameters
        self._is_multi_label = getattr(model.config, "problem_type", None) == "multi_label_classification"

    def start(self, batch: RewardBatch) -> DeferredBatch:
        return DeferredBatch(self.results, batch, self._batch_samples)

    def close(self) -> None:
        pass

    def results(self, batch: RewardBatch) -> list[RewardResult]:
        """Results of part of a batch, from one forward. A text that is too long for the model is not cut: it fails."""
        rows = [self._encoded(batch, n) for n in range(len(batch))]
        sizes = [len(row["input_ids"]) for row in rows]
        fitting = [n for n, size in enumerate(sizes) if self._max_tokens is None or size <= self._max_tokens]
        results = [
            RewardResult(error=f"has {size} tokens; {self._path} takes {self._max_tokens}, and nothing is cut")
            for size in sizes
        ]
        for n, score in zip(fitting, self._scores([rows[n] for n in fitting]) if fitting else (), strict=True):
            error = "" if math.isfinite(score) else f"is scored {score}"
            results[n] = RewardResult(error=error) if error else RewardResult(value=score)
        return results

    def _encoded(self, batch: RewardBatch, n: int) -> Encoded:
        """Token ids of prompt and response, and `token_type_ids` if the tokenizer makes them."""
        prompt, response = batch.prompts[n], batch.responses[n]
        messages = None if isinstance(batch.messages, MissingColumn) else batch.messages[n]
        if self._form == "chat" or (self._form == "joined" and messages is not None and self._tokenizer.chat_template):
            question, begun = open_answer(messages or [{"role": "user", "content": prompt}])
            response = begun + response
            if self._retokenizer is not None:
                fields = batch.fields[n] if messages is not None else {}
                retokenized = self._retokenizer(prompt, question, response, finished=batch.finished[n], fields=fields)
                return {"input_ids": retokenized.tokens}
            text = self._tokenizer.apply_chat_template(
                [*question, {"role": "assistant", "content": response}], tokenize=False
            )
            encoded = self._tokenizer(text, add_special_tokens=False)
        elif self._form == "pair":
            encoded = self._tokenizer(prompt, response)
        else:
            encoded = self._tokenizer(prompt + response + self._end(batch, n, of_turn=messages is not None))
        inputs = {name: list(encoded[name]) for name in ("input_ids", "token_type_ids") if name in encoded}
        if self._bos is not None and inputs["input_ids"][:2] == [self._bos] * 2:  # the prompt's template wrote one too
            return {name: row[1:] for name, row in inputs.items()}
        return inputs

    def _end(self, batch: RewardBatch, n: int, *, of_turn: bool) -> str:
        """Text to append to a response: the token that ended its turn, if this tokenizer has it, or end-of-sequence."""
        if of_turn and batch.ends is not None and batch.ends[n] in self._tokenizer.get_vocab():
            return batch.ends[n]
        ends = (self._append_eos or of_turn) and batch.finished[n]
        return (self._tokenizer.eos_token or "") if ends else ""

    @torch.no_grad()
    def _scores(self, rows: Sequence[Encoded]) -> list[float]:
        used = {token for row in rows for token in row["input_ids"]}
        # Models take a row's last token that is no padding as its last: padding must not occur in a row.
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
        return [
            float(value)
            for value in label_scores(logits, self._label, self._output, is_multi_label=self._is_multi_label)
        ]


def _grid(rows: Sequence[Sequence[int]], padding: int) -> Tensor:
    """Rows padded on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])


def label_scores(logits_BL: Tensor, label: int, output: str, *, is_multi_label: bool = False) -> Tensor:
    """[B]: the logit of the label, or its probability, as in transformers' text-classification pipeline.

    The probability is a sigmoid for a single label or a multi-label classifier, else a softmax.
    """
    if output == "logit":
        return logits_BL[:, label]
    is_independent = is_multi_label or logits_BL.size(-1) == 1
    return (logits_BL.sigmoid() if is_independent else logits_BL.softmax(-1))[:, label]


def label_index(config: Any, label: str | int | None, path: Path) -> int:
    """Index of the label. Raises: ValueError for an unknown label, or for none given where there are several."""
    names: Mapping[int, str] = {int(index): str(name) for index, name in config.id2label.items()}
    known = ", ".join(f"{index} ({name})" for index, name in sorted(names.items()))
    if label is None:
        if len(names) == 1:
            return 0
        raise ValueError(f"{path} has {len(names)} labels: {known}; say which one is the reward: classifier_label")
    index = next((n for n, name in names.items() if name == label), label)
    if index not in names:
        raise ValueError(f"{path} has no label {short(label)}; it has {known}")
    return int(index)


def max_input_tokens(config: Any, tokenizer: Any) -> int | None:
    """Most tokens that the model takes; None: unknown."""
    limits = [getattr(config, "max_position_embeddings", None), tokenizer.model_max_length]
    known = [int(limit) for limit in limits if isinstance(limit, int) and 0 < limit < 10**9]
    return min(known, default=None)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
