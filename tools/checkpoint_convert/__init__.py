"""The checkpoint converter's command line: see `megarlhf/commands/convert.py`."""
