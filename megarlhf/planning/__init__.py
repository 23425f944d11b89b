"""What can be decided about a job before it runs: batch arithmetic and legality of layouts."""
