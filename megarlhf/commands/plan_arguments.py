"""The command line of `megarlhf plan`. It is a module of its own because the planner takes seconds to import."""

from __future__ import annotations

from megarlhf.commands.arguments.parser import Once, Parser, gigabits, positive

ORDERS = ("engine", "rank")
"""Keys of `ORDERS` in `planning/weight_traffic.py`."""


def parser() -> Parser:
    """The command line."""
    root = Parser(
        prog="megarlhf plan",
        description="Bytes and time of carrying the actor's weights into the rollout engines.",
    )
    root.add_argument("-c", "--config", required=True, action=Once, metavar="FILE", help="configuration of an rl run")
    root.add_argument("overrides", nargs="*", metavar="section.key=value", help="override configured values")
    root.add_argument("--world-size", type=positive, metavar="N", help="ranks (default: run.world_size or run.nproc)")
    root.add_argument("--engine-tp", type=positive, metavar="N", help="plan as if rollout.parallel.tp were N")
    root.add_argument("--ep", type=positive, metavar="N", help="plan as if actor.parallel.ep were N")
    root.add_argument("--vpp", type=positive, metavar="N", help="plan as if actor.parallel.vpp were N")
    text = (
        "order of ranks in the trainer's mesh: permuted inside nodes for the engines, as in a run with vLLM (engine, "
        "the default), or by number (rank)"
    )
    root.add_argument("--order", choices=ORDERS, default="engine", help=text)
    root.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    text = "gigabits per second and direction between a rank and the others of its node (default: %(default)g)"
    root.add_argument("--rank-gbps", type=gigabits, default=3600.0, metavar="X", help=text)
    text = "gigabits per second and direction between a whole node and the others (default: %(default)g)"
    root.add_argument("--node-gbps", type=gigabits, default=3200.0, metavar="X", help=text)
    root.add_argument("--per-rank", action="store_true", help="a line for each rank")
    root.add_argument("--json", action="store_true", help="everything as one JSON object, in bytes and seconds")
    return root
