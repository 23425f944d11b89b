"""Checks of a job before it runs, such as batch arithmetic and legal layouts."""
