"""Make the demonstration's data and its untrained model's directory: `37+48=` -> `85`.

    python -m tools.demo.make_data --out runs/demo/data --seed 0

Most answers with a carry that fine-tuning learns from have the carry forgotten, so that SFT alone ends near one
half and preferences and rewards have something to mend. Three splits share no sum, in either order of its addends:
training, validation (for choices, such as when to stop) and test (for figures). Half of the prompts of validation and
test have a carry. The same seed and recipe give the same bytes.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

# --- the recipe: the task, its sizes and shares ---------------------------------------------------

LOWEST, HIGHEST = 10, 99
"""Both summands are in this range, its ends included."""
ALPHABET = "0123456789+="
"""One token each, in this order, after the special ones."""
SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
"""Ids 0 to 3."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and shares; each is an option of the command."""

    validation: int = 600
    """Problems of the three validation files, both orders of each sum, half of them with a carry."""
    test: int = 1200
    """Problems of the test file, in the same way."""
    sft_train: int = 20_000
    """Prompts with one response each, right or wrong; problems come up several times."""
    forgotten_share: float = 0.75
    """Share of `sft_train`'s problems with a carry whose response forgets it."""
    careless_share: float = 0.05
    """Share of all of `sft_train` with some other near miss."""
    pairs_train: int = 20_000
    """Prompts with a right and a wrong response each; problems come up several times."""
    prompts_train: int = 6_000
    """Prompts to sample responses to, each once."""


FORGOTTEN_IN_PAIRS, INVENTED_IN_PAIRS = 0.8, 0.6
"""Share of wrong responses in pairs that forget a carry there is, or invent one there is not: what the SFT model
gets wrong, and its mirror image, or the reward model would learn to like carries."""

MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.06,
    "torch_dtype": "float32",
    "vocab_size": len(SPECIAL) + len(ALPHABET),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}


@dataclass(frozen=True)
class Problem:
    """One sum."""

    a: int
    b: int

    def prompt(self) -> str:
        return f"{self.a}+{self.b}="

    def answer(self) -> str:
        return str(self.a + self.b)

    def carries(self) -> bool:
        return self.a % 10 + self.b % 10 >= 10

    def swapped(self) -> Problem:
        return Problem(self.b, self.a)


def all_problems() -> list[Problem]:
    """Every problem of the task once."""
    numbers = range(LOWEST, HIGHEST + 1)
    return [Problem(a, b) for a in numbers for b in numbers]


# --- wrong answers --------------------------------------------------------------------------------


def _swapped(answer: str) -> list[str]:
    return [
        answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :]
        for i in range(len(answer) - 1)
        if answer[i] != answer[i + 1]
    ]


def _replaced(answer: str) -> list[str]:
    return [answer[:i] + digit + answer[i + 1 :] for i in range(len(answer)) for digit in "0123456789"]


def _without_carry(problem: Problem) -> list[str]:
    """Each column added by itself, the carry forgotten."""
    a, b = (str(number)[::-1] for number in (problem.a, problem.b))
    width = max(len(a), len(b))
    columns = [int(a[i : i + 1] or 0) + int(b[i : i + 1] or 0) for i in range(width)]
    return ["".join([str(columns[-1]), *(str(column % 10) for column in columns[-2::-1])])]


NEAR_MISSES: dict[str, Callable[[Problem], list[str]]] = {
    "off by one": lambda p: [str(p.a + p.b + d) for d in (-1, 1)],
    "off by ten": lambda p: [str(p.a + p.b + d) for d in (-10, 10)],
    "off by a hundred": lambda p: [str(p.a + p.b + d) for d in (-100, 100) if p.a + p.b + d > 0],
    "digits swapped": lambda p: _swapped(p.answer()),
    "digit replaced": lambda p: _replaced(p.answer()),
    "carry forgotten": _without_carry,
    "digit dropped": lambda p: [p.answer()[:i] + p.answer()[i + 1 :] for i in range(len(p.answer()))],
    "digit added": lambda p: [t for d in "0123456789" for t in (p.answer() + d, d + p.answer())],
    "digit doubled": lambda p: [p.answer()[: i + 1] + p.answer()[i:] for i in range(len(p.answer()))],
}
"""Kinds of wrong answers; a kind may have none for a problem, or one that happens to be right."""


def near_misses(problem: Problem) -> dict[str, list[str]]:
    """The wrong answers to a problem by kind; none is right, and kinds without one are left out."""
    wrong = {
        kind: [text for text in make(problem) if text and text != problem.answer()]
        for kind, make in NEAR_MISSES.items()
    }
    return {kind: texts for kind, texts in wrong.items() if texts}


def wrong_answer(problem: Problem, rng: random.Random) -> str:
    """One near miss: first its kind, then the text."""
    wrong = near_misses(problem)
    return rng.choice(wrong[rng.choice(list(wrong))])


# --- rows -----------------------------------------------------------------------------------------

Row = dict[str, str]


def make_rows(recipe: Recipe, seed: int) -> dict[str, list[Row]]:
    """All seven files as rows, by name."""
    rng = random.Random(seed)
    train, validation, test = _split(recipe, rng)
    if not 0 < recipe.prompts_train <= len(train):
        raise ValueError(
            f"prompts_train={recipe.prompts_train}, but {len(train)} problems are left beside validation and test; "
            f"set 1 to {len(train)}, or fewer of these"
        )
    rows = {
        "sft_train": [_sft_row(p, _learnt_answer(p, recipe, rng)) for p in _draw(train, recipe.sft_train, rng)],
        "sft_validation": [_sft_row(problem, problem.answer()) for problem in validation],
        "pairs_train": [_pair_row(problem, rng) for problem in _draw(train, recipe.pairs_train, rng)],
        "pairs_validation": [_pair_row(problem, rng) for problem in validation],
        "prompts_train": [_prompt_row(problem) for problem in rng.sample(train, recipe.prompts_train)],
        "prompts_validation": [_prompt_row(problem) for problem in validation],
        "prompts_test": [_prompt_row(problem) for problem in test],
    }
    # The first so many problems (`eval.max_samples`) should be like all of them.
    order = random.Random(seed).sample(range(len(validation)), len(validation))
    return {name: [file[i] for i in order] if name.endswith("_validation") else file for name, file in rows.items()}


def _split(recipe: Recipe, rng: random.Random) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Training, validation and test problems. A sum and the one with its addends swapped are in one split.

    Of validation and test half have a carry; both orders of a sum are there.
    """
    sums = [problem for problem in all_problems() if problem.a < problem.b]
    rng.shuffle(sums)
    by_carry = [[each for each in sums if each.carries() is carries] for carries in (True, False)]
    chosen: list[list[Problem]] = []
    for name, size in (("validation", recipe.validation), ("test", recipe.test)):
        if size % 4 or size < 4:
            raise ValueError(f"{name}={size}: give a multiple of 4: two orders of sums, half of which have a carry")
        if any(len(part) <= size // 4 for part in by_carry):
            raise ValueError(f"{name}={size} does not leave training problems of {len(all_problems())}")
        picked = [part.pop() for part in by_carry for _ in range(size // 4)]
        chosen.append([order for each in picked for order in (each, each.swapped())])
    left = [order for part in by_carry for each in part for order in (each, each.swapped())]
    train = left + [problem for problem in all_problems() if problem.a == problem.b]
    rng.shuffle(train)
    return train, chosen[0], chosen[1]


def _draw(problems: Sequence[Problem], count: int, rng: random.Random) -> list[Problem]:
    """`count` problems: all of them once, in a new order, before any comes up again."""
    drawn: list[Problem] = []
    while len(drawn) < count:
        drawn += rng.sample(problems, min(len(problems), count - len(drawn)))
    return drawn


def _learnt_answer(problem: Problem, recipe: Recipe, rng: random.Random) -> str:
    """What SFT is shown: often without the carry, sometimes wrong in another way."""
    if rng.random() < recipe.careless_share:
        return wrong_answer(problem, rng)
    if problem.carries() and rng.random() < recipe.forgotten_share:
        return _without_carry(problem)[0]
    return problem.answer()


def _sft_row(problem: Problem, response: str) -> Row:
    return {"prompt": problem.prompt(), "response": response}


def _pair_row(problem: Problem, rng: random.Random) -> Row:
    if problem.carries() and rng.random() < FORGOTTEN_IN_PAIRS:
        rejected = _without_carry(problem)[0]
    elif not problem.carries() and rng.random() < INVENTED_IN_PAIRS:
        rejected = str(problem.a + problem.b + 10)
    else:
        rejected = wrong_answer(problem, rng)
    return {"prompt": problem.prompt(), "chosen": problem.answer(), "rejected": rejected}


def _prompt_row(problem: Problem) -> Row:
    return {"prompt": problem.prompt(), "answer": problem.answer()}


def check_rows(rows: dict[str, list[Row]]) -> None:
    """What training on these files relies on; an assertion that fails is a fault of this script."""
    splits = {
        split: {_either_order(row) for name, file in rows.items() if name.endswith(split) for row in file}
        for split in ("train", "validation", "test")
    }
    for (name, sums), (other, others) in itertools.combinations(splits.items(), 2):
        assert sums, f"no sums in {name}"
        assert others, f"no sums in {other}"
        assert not sums & others, f"sums of {name} in {other}: {sorted(sums & others)[:3]}"
    texts = {text for file in rows.values() for row in file for text in row.values()}
    assert set("".join(texts)) <= set(ALPHABET), f"outside {ALPHABET}: {set(''.join(texts)) - set(ALPHABET)}"
    for name in ("pairs_train", "pairs_validation"):
        assert all(row["chosen"] != row["rejected"] for row in rows[name]), f"{name}: equal responses"


def _either_order(row: Row) -> tuple[int, ...]:
    return tuple(sorted(map(int, row["prompt"].removesuffix("=").split("+"))))


# --- the model's directory ------------------------------------------------------------------------


def train_tokenizer() -> bytes:
    """A SentencePiece model of single characters, without dummy prefix or any change of the text.

    Pieces are ordered by frequency, so the corpus is the alphabet with frequencies that fall: ids and bytes
    are the same for every seed and recipe.
    """
    import sentencepiece

    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([char * (len(ALPHABET) - i) for i, char in enumerate(ALPHABET)]),
        model_writer=buffer,
        model_type="char",
        vocab_size=len(SPECIAL) + len(ALPHABET),
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=3,
        num_threads=1,
        minloglevel=2,
    )
    return buffer.getvalue()


def base_files() -> dict[str, bytes]:
    """Configuration and tokenizer of the model to be trained, as a Hugging Face directory without weights."""
    ids = {key: value for key, value in MODEL_CONFIG.items() if key.endswith("_token_id")}
    unk, bos, eos, pad = SPECIAL
    tokenizer_config = {
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": unk,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "legacy": False,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.model": train_tokenizer(),
        "config.json": _json(MODEL_CONFIG),
        "tokenizer_config.json": _json(tokenizer_config),
        "generation_config.json": _json(ids),
    }


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# --- the command ----------------------------------------------------------------------------------


def write_all(out: Path, recipe: Recipe, seed: int) -> dict[str, list[Row]]:
    """Write everything under `out`, each file under a temporary name and then renamed; returns the rows."""
    rows = make_rows(recipe, seed)
    check_rows(rows)
    files = {f"base/{name}": data for name, data in base_files().items()}
    for name, file in rows.items():
        files[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in file).encode()
    for name, data in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(data)
        temporary.replace(path)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, write the files, print a summary."""
    parser = argparse.ArgumentParser(description="Make the demonstration's data and model directory.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default)
    options = vars(parser.parse_args(argv))
    out, seed = options.pop("out"), options.pop("seed")
    recipe = Recipe(**options)
    rows = write_all(out, recipe, seed)
    for name, file in rows.items():
        print(f"{name + '.jsonl':24} {len(file):6} rows   {json.dumps(file[0])}")
    share = sum(row["response"] != str(_sum(row["prompt"])) for row in rows["sft_train"]) / len(rows["sft_train"])
    print(f"wrong responses in sft_train: {share:.1%}; vocabulary {MODEL_CONFIG['vocab_size']}; in {out}")


def _sum(prompt: str) -> int:
    return sum(map(int, prompt.removesuffix("=").split("+")))


if __name__ == "__main__":
    main()
