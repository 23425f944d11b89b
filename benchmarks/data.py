"""What tokenized data costs: python -m benchmarks.data (`make bench-data`).

- `throughput`: a file of prompts and responses to token ids on disk, by `megarlhf.data` and by `datasets.map`
  with the fast tokenizer, with as many processes each; from the end of imports to the end, the starts of workers
  included. The ways take turns. `tokens_per_cpu_second` counts the seconds of all processes: other work on the machine
  does not change it.
- `memory`: of each of several processes that hold the same set, as proportional set size (a page that k processes
  map counts 1/k for each), beyond what the process had before: as lists, and as mapped columns of which all were read.
- `conversations`: CPU seconds of the same conversations with and without the check that each of their parts is written,
  by two chat templates, in turns in one process.
- `first_batch`: from the end of imports to the first batch of a large set that lies in the cache.

The tokenizer is one of byte pairs with 32 000 tokens, trained on this repository and its packages' sources.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, machine

PARTS = ("throughput", "conversations", "memory", "first_batch")
TEMPLATES = {
    "short": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
    "looks_for_thoughts": "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content %}{% if loop.index0 > last.user %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}",
}
WAYS = ("ours", "map_batched", "map")
LIMITS = {"max_prompt_tokens": 4096, "max_response_tokens": 4096}


def sources() -> list[str]:
    """Text of this repository and of the packages beside it."""
    import transformers

    folders = [ROOT / "megarlhf", ROOT / "docs", Path(transformers.__file__).parent / "models"]
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (".py", ".md")]
    return [file.read_text(encoding="utf-8", errors="ignore") for file in files[:1500]]


def write_tokenizer(directory: Path, texts: Sequence[str], vocabulary: int) -> None:
    """Byte pairs, as those of Llama 3 and Qwen are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    begin = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 0)]}
    tokenizer.post_processor = processors.TemplateProcessing(**begin)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))


def write_records(path: Path, texts: Sequence[str], count: int, least: int, most: int) -> None:
    """Prompts and responses, each of so many words that follow each other in the texts."""
    drawn = random.Random(0)
    pieces = [text.split(" ") for text in texts]
    pieces = [piece for piece in pieces if len(piece) > 8]

    def part() -> str:
        piece = drawn.choice(pieces)
        start = drawn.randrange(len(piece) - 4)
        return " ".join(piece[start : start + drawn.randint(least, most)]) + "."

    with path.open("w", encoding="utf-8") as out:
        for number in range(count):
            row = {"prompt": f"{number}: {part()}", "response": part()}
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- in processes of their own, after the imports ---------------------------------------------------


def loader_of(work: Path, name: str, cache: Path, workers: int | None) -> Any:
    from megarlhf.config import DataConfig
    from megarlhf.data.samples.encoders import SFTEncoder, SFTSample
    from megarlhf.data.tokenize.load import SetLoader

    data = DataConfig.model_validate(
        {"train": work / f"{name}.jsonl", "cache": str(cache), "workers": workers, **LIMITS}
    )
    return SetLoader(data, SFTEncoder(tokenizer=work / "tokenizer", **LIMITS), SFTSample)


def now() -> tuple[float, float]:
    """Seconds on the clock, and of the CPU, of this process and of those that it has waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.perf_counter(), own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def since(start: tuple[float, float]) -> dict[str, float]:
    return {name: end - begin for name, begin, end in zip(("seconds", "cpu_seconds"), start, now(), strict=True)}


def child_ours(work: Path, processes: int) -> dict[str, float]:
    from megarlhf.data.samples.dataset import lengths_of

    loader = loader_of(work, "records", Path(tempfile.mkdtemp(dir=work)), processes)
    loader.encoder.open()  # the tokenizer is imported and loaded, as that of `map` is
    start = now()
    samples, _, _ = loader.train_and_validation("sft")
    return {**since(start), "tokens": int(lengths_of(samples, "tokens").sum()), "samples": len(samples)}


def child_map(work: Path, processes: int, *, batched: bool) -> dict[str, float]:
    """What a script would write: prompt, response and end as ids, and how long the prompt is."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(work / "tokenizer"))

    def tokens_of(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return ids

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        prompts, responses = tokens_of(rows["prompt"]), tokens_of(rows["response"])
        joined = [
            [tokenizer.bos_token_id, *prompt, *response, tokenizer.eos_token_id]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        return {"tokens": joined, "prompt_length": [1 + len(prompt) for prompt in prompts]}

    def encode_one(row: dict[str, str]) -> dict[str, Any]:
        made = encode({name: [text] for name, text in row.items()})
        return {name: values[0] for name, values in made.items()}

    cache = tempfile.mkdtemp(dir=work)
    start = now()
    rows = load_dataset("json", data_files=str(work / "records.jsonl"), split="train", cache_dir=cache)
    mapped = rows.map(
        encode if batched else encode_one, batched=batched, num_proc=processes, remove_columns=rows.column_names
    )
    found = since(start)
    return {**found, "tokens": sum(map(len, mapped["tokens"])), "samples": len(mapped)}


def child_conversations(work: Path) -> dict[str, float]:
    """CPU seconds with the check over those without it, by template: the median of pairs in turns."""
    from megarlhf.data.samples.encoders import SFTEncoder
    from megarlhf.data.text.templates import ChatTemplate
    from megarlhf.data.text.written import WrittenPart

    rows = [json.loads(line) for line in (work / "records.jsonl").read_text().splitlines()][:1000]
    answers = (f"<think>\n{row['prompt'].strip()}\n</think>\n\n{row['response'].strip()}" for row in rows)
    asked = ({"role": "user", "content": row["prompt"].strip()} for row in rows)
    records = [
        {"messages": [question, {"role": "assistant", "content": answer}]}
        for question, answer in zip(asked, answers, strict=True)
    ]
    checked, ratios = ChatTemplate.written, dict[str, float]()
    for name, template in TEMPLATES.items():
        encode = SFTEncoder(tokenizer=work / "tokenizer", **LIMITS, chat_template=template, template="chat").open()
        seconds: dict[str, list[float]] = {"with": [], "without": []}
        for number in range(14):  # the first pair warms up
            way = ("with", "without")[number % 2]
            ChatTemplate.written = checked if way == "with" else lambda *_, **__: WrittenPart([], [])  # type: ignore[method-assign]
            start = now()
            for index, record in enumerate(records):
                encode(index, record)
            seconds[way].append(since(start)["cpu_seconds"])
        pairs = zip(seconds["with"][1:], seconds["without"][1:], strict=True)
        ratios[name] = statistics.median(a / b for a, b in pairs)
    ChatTemplate.written = checked  # type: ignore[method-assign]
    return ratios


def proportional_bytes() -> int:
    """Of this process; what the kernel's page cache keeps of mapped files counts where it is mapped."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def child_memory(work: Path, way: str) -> None:
    """Says that it has read all, waits for the others, and says what it holds."""
    import gc

    from megarlhf.config import SourceConfig
    from megarlhf.data.samples.dataset import lengths_of
    from megarlhf.data.samples.encoders import SFTEncoder
    from megarlhf.data.sources.find import find

    SFTEncoder(tokenizer=work / "tokenizer", **LIMITS).open()
    gc.collect()
    print(json.dumps({"before": proportional_bytes()}), flush=True)
    sys.stdin.readline()
    if way == "mapped":
        samples, _, _ = loader_of(work, "records", work / "cache", 1).train_and_validation("sft")
    else:
        chunks = find(SourceConfig(path=work / "records.jsonl")).chunks()
        records = [record for chunk in chunks for _, record in chunk.located()]
        encode = SFTEncoder(tokenizer=work / "tokenizer", **LIMITS).open()
        samples = [encode(index, record) for index, record in enumerate(records)]
        del records
    total = sum(len(sample.tokens) for sample in samples)
    assert total == int(lengths_of(samples, "tokens").sum())
    gc.collect()
    print(json.dumps({"read": len(samples)}), flush=True)
    sys.stdin.readline()
    print(json.dumps({"after": proportional_bytes(), "tokens": total}), flush=True)
    sys.stdin.readline()


def child_first_batch(work: Path) -> dict[str, Any]:
    from megarlhf.data.samples.order import batches_of

    loader = loader_of(work, "many", work / "cache", None)
    start = time.perf_counter()
    samples, _, notes = loader.train_and_validation("sft")
    mapped = time.perf_counter() - start
    longest = int(samples.lengths("tokens").max())
    batch = [samples[n] for n in batches_of(samples, 512, 0, "train.mini_batch_samples").indices(0)]
    seconds = time.perf_counter() - start
    assert len(batch) == 512
    return {"seconds": seconds, "until_mapped": mapped, "samples": len(samples), "longest": longest, "note": notes[0]}


# --- the benchmark ----------------------------------------------------------------------------------


def in_child(*arguments: object) -> Any:
    done = subprocess.run(_command(*arguments), capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.data", "--child", *map(str, arguments)]


def _environment() -> dict[str, str]:
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **quiet, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": str(ROOT)}


def throughput(work: Path, processes: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    by_cpu: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens = set()
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            result = in_child(way, work, processes)
            tokens.add((result["tokens"], result["samples"]))
            found[way].append(result["tokens"] / result["seconds"])
            by_cpu[way].append(result["tokens"] / result["cpu_seconds"])
            for folder in work.glob("tmp*"):
                shutil.rmtree(folder)
    ((count, samples),) = tokens  # the same ids, as far as their number shows
    return {
        "processes": processes,
        "tokens": count,
        "samples": samples,
        "tokens_per_second": {way: spread(values) for way, values in found.items()},
        "tokens_per_cpu_second": {way: spread(values) for way, values in by_cpu.items()},
        "ours_over_map_batched": statistics.median(
            a / b for a, b in zip(found["ours"], found["map_batched"], strict=True)
        ),
        "ours_over_map": statistics.median(a / b for a, b in zip(found["ours"], found["map"], strict=True)),
    }


def memory(work: Path, ranks: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"lists": [], "mapped": []}
    for _ in range(rounds):
        for way, values in found.items():
            values += list(_memory_of(work, way, ranks))
    return {"ranks": ranks, "mib_of_each": {way: spread(values) for way, values in found.items()}}


def _memory_of(work: Path, way: str, ranks: int) -> Iterator[float]:
    def start() -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(_command("memory", work, way), text=True, env=_environment(), **pipes)  # type: ignore[call-overload, no-any-return]

    children = [start() for _ in range(ranks)]
    try:
        told: list[list[dict[str, int]]] = []
        for _ in range(3):
            told.append([json.loads((child.stdout or sys.stdin).readline()) for child in children])
            for child in children:
                assert child.stdin is not None
                child.stdin.write("\n")
                child.stdin.flush()
        for before, after in zip(told[0], told[2], strict=True):
            yield (after["after"] - before["before"]) / 2**20
    finally:
        for child in children:
            child.kill()
            child.wait()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": len(values)}


def first_batch(work: Path, rounds: int, ask: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    made = ask(work)  # makes the entry
    # A copy is another file with the same content: it is read once, and nothing is tokenized.
    (work / "many.jsonl").rename(work / "moved.jsonl")
    shutil.copyfile(work / "moved.jsonl", work / "many.jsonl")
    time.sleep(3)
    copied = ask(work)
    starts = [ask(work) for _ in range(rounds)]
    return {
        "samples": starts[0]["samples"],
        "seconds": spread([start["seconds"] for start in starts]),
        "seconds_of_a_copied_file": copied["seconds"],
        "seconds_without_an_entry": made["seconds"],
    }


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The parts that are asked for."""
    texts = sources()[: 40 if arguments.small else None]
    write_tokenizer(work / "tokenizer", texts, 400 if arguments.small else 32000)
    write_records(work / "records.jsonl", texts, arguments.records, 4, 120)
    result: dict[str, Any] = {}
    if "throughput" in arguments.parts:
        result["throughput"] = throughput(work, arguments.processes, arguments.rounds)
    if "conversations" in arguments.parts:
        found = [in_child("conversations", work) for _ in range(arguments.rounds)]
        result["conversations"] = {
            "with_over_without": {name: spread([each[name] for each in found]) for name in TEMPLATES}
        }
    if "memory" in arguments.parts:
        in_child("ours_cached", work)
        result["memory"] = memory(work, arguments.ranks, max(1, arguments.rounds // 2))
    if "first_batch" in arguments.parts:
        write_records(work / "many.jsonl", texts, arguments.many, 1, 4)
        result["first_batch"] = first_batch(
            work,
            arguments.rounds,
            child_first_batch if arguments.small else lambda place: in_child("first_batch", place),
        )
    return result


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        way, work, *rest = sys.argv[2:]
        processes = int(rest[0]) if rest and rest[0].isdigit() else 2
        if way == "memory":
            child_memory(Path(work), rest[0])
            return
        if way == "ours_cached":
            loader_of(Path(work), "records", Path(work) / "cache", 2).train_and_validation("sft")
            print("{}")
            return
        run = {
            "ours": lambda: child_ours(Path(work), processes),
            "map_batched": lambda: child_map(Path(work), processes, batched=True),
            "map": lambda: child_map(Path(work), processes, batched=False),
            "first_batch": lambda: child_first_batch(Path(work)),
            "conversations": lambda: child_conversations(Path(work)),
        }[way]
        print(json.dumps(run()))
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--records", type=int, default=30_000)
    parser.add_argument("--many", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="a small tokenizer, the last part in this process")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/data.json")
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        result = measure(arguments, Path(folder))
    kept = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    about = machine("make bench-data")
    # A part may be of another commit, which it names, but not of another machine.
    commit = about.pop("commit")
    result = {part: {"commit": commit, **figures} for part, figures in result.items()}
    result = {**about, **(kept if about.items() <= kept.items() else {}), **result}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
