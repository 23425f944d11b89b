# %% [markdown]
"""A notebook: fine-tune, look at the curve, ask the model. Editors open the cells of this file (`# %%`).

    make demo                               # makes the default model and data, once
    .venv/bin/python examples/notebook.py   # as a script, or open it in VS Code, PyCharm or Jupyter (jupytext)

Environment variables name other files: MODEL (a Hugging Face directory), DATA (lines {"prompt", "response"}), RUNS (a
folder), and WORDS (keys of the configuration, such as `actor.model.random_init=true train.num_steps=5`).
"""

import os

import plotly.graph_objects as go

import megarlhf

MODEL = os.environ.get("MODEL", "runs/demo/sft/checkpoints/latest/actor")
DATA = os.environ.get("DATA", "runs/demo/data/sft_train.jsonl")
RUNS = os.environ.get("RUNS", "runs/notebook")
WORDS = os.environ.get("WORDS", "").split()

# %% A configuration, and what it would do
config = {
    "run": {"dir": f"{RUNS}/sft", "on_existing": "overwrite"},
    "actor": {"model": {"path": MODEL}, "optim": {"lr": 1e-4}},
    "data": {"train": DATA, "max_prompt_tokens": 16, "max_response_tokens": 8, "validation_share": 0.1},
    "train": {"num_steps": 30, "mini_batch_samples": 32, "max_tokens_per_micro_batch": 1024},
    "eval": {"every": 10},
}
plan = megarlhf.check("sft", config, overrides=WORDS)
print(*plan.notes, sep="\n")

# %% Train in this process
result = megarlhf.run("sft", config, overrides=WORDS)
print(result.steps, "steps;", ", ".join(result.names))

# %% The curve, in a file that needs no display
figure = go.Figure()
for name in ("loss", "eval_loss"):
    figure.add_scatter(x=result.column("step"), y=result.column(name), name=name, connectgaps=True)
figure.update_layout(title="Fine-tuning", xaxis_title="step", yaxis_title="nats per token")
figure.write_html(f"{RUNS}/loss.html")
print("wrote", f"{RUNS}/loss.html")

# %% Ask the model
answers = megarlhf.run(
    "generate",
    {
        "run": {"dir": f"{RUNS}/generate", "on_existing": "overwrite"},
        "actor": {"model": {"path": result.exports["actor"]}},
        "data": {"train": DATA, "max_prompt_tokens": 16},
        "rollout": {"engine": "megatron", "max_response_tokens": 6},
        "greedy": True,
        "max_samples": 5,
    },
)
for row in answers.read("responses.jsonl"):
    print(row["prompt"], row["response"])
