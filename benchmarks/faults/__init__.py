"""`make test-faults`: real runs, started as a user starts them, that are hurt and started again.

Each trial is one fault at one moment of one run: it counts only if the fault is shown to have happened. Trials are
written down as they end (`build/faults/trials.jsonl`), so that the whole can be interrupted and continued; the summary
is `benchmarks/results/faults.json`.
"""
