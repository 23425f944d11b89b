"""A rehearsal's result on the terminal and as an HTML page."""
