"""`python -m megarlhf.weights.plan`: the command stands in `planning`, where configuration is known."""

import sys

from megarlhf.planning.reshard import main

if __name__ == "__main__":
    sys.exit(main())
