"""Python as a tool for models: code that a model wrote runs in a process of its own, with limits and without network.

`tool.py` is what a worker calls. It starts a guard (`guard.py`), a small interpreter that holds no secrets. The guard
forks a child that gives up its rights (`isolation.py`) and runs the code (`child.py`). The guard watches the child,
collects its output, ends it, and removes its folder.
"""
