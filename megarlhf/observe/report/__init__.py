"""HTML pages about runs: the report and the comparison."""
