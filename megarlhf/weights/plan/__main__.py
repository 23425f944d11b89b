"""`python -m megarlhf.weights.plan`: the former name of `megarlhf plan`."""

from megarlhf.commands.plan import main

raise SystemExit(main())
